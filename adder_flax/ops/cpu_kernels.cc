// Native CPU kernels of adder_flax.ops: pairwise sums that no matrix unit computes, at the speed of the vector units.
//
// Every kernel but the additive backward pass is one loop nest. An output matrix (rows x cols) is a sum over `depth`
// terms; one operand is read along rows as scalars that are broadcast, the other along columns as vectors. Columns are
// cut into panels a few vectors wide, and a panel of the column operand is packed contiguously, (depth x width). Tiles
// of a few rows by one panel accumulate in registers over the whole depth, in order. An output element is therefore a
// function of its own row and column alone: the same bits for any batch, any tiling and any number of threads.
//
// Vectors are GCC/Clang vector extensions, as wide as the target's registers; three operations that AVX-512 has as one
// instruction are written as such. Compile with -O3 -march=native.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define ADDER_FLAX_AVX512 1
#endif

namespace {

namespace ffi = xla::ffi;

// ---------------------------------------------------------------------------------------------------------------------
// Vectors
// ---------------------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// AVX-512 and NEON have 32 vector registers, AVX2 has 16: a tile is sized to leave none in memory.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

constexpr int kLanes = kVectorBytes / sizeof(float);

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));

inline Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec Broadcast(float s) { return s - Vec{}; }  // unlike adding zero, subtracting it is free: it keeps -0

inline Vec Abs(Vec v) { return (Vec)((IntVec)v & 0x7fffffff); }

inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }

inline bool AnyNonZero(IntVec mask) {
  int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= mask[lane];
  return any != 0;
}

inline float Sum(Vec v) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += v[lane];
  return total;
}

template <int value>
using Int = std::integral_constant<int, value>;

// Calls f(Int<n>) for a run-time 1 <= n <= max, so that tiles are compiled for their exact size.
template <int max, class F>
inline void WithConstant(int64_t n, F&& f) {
  if constexpr (max == 1) {
    f(Int<1>());
  } else {
    if (n >= max) return f(Int<max>());
    WithConstant<max - 1>(n, std::forward<F>(f));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Operands: float32, bfloat16 or float16 matrices, with any leading batch axes of which some may have length one
// ---------------------------------------------------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
  explicit operator float() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

struct Float16 {
  uint16_t bits;
  explicit operator float() const {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16, exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
    // Subnormals go through an integer conversion, because the calling thread may flush float subnormals to zero.
    const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
    uint32_t wide = (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    if (exponent == 0) std::memcpy(&wide, &subnormal, sizeof wide);
    wide |= sign;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

// One matrix of a batch, in elements of `type`.
struct Matrix {
  const void* data;
  ffi::DataType type;
  int64_t row_stride, col_stride;

  // Calls f with the data as a pointer to its own type.
  template <class F>
  void Visit(F&& f) const {
    switch (type) {
      case ffi::DataType::BF16: return f(static_cast<const BFloat16*>(data));
      case ffi::DataType::F16: return f(static_cast<const Float16*>(data));
      default: return f(static_cast<const float*>(data));
    }
  }
};

// A batch of matrices (or of row vectors, where rank_of_item is 1). `transposed` swaps rows and columns.
class Batch {
 public:
  Batch(const ffi::AnyBuffer& buffer, bool transposed, int rank_of_item = 2)
      : buffer_(buffer), transposed_(transposed), rank_of_item_(rank_of_item) {}

  Matrix At(int64_t index, ffi::Span<const int64_t> batch_dims) const {
    const auto dims = buffer_.dimensions();
    const int64_t width = dims.back();
    int64_t stride = rank_of_item_ == 2 ? dims[dims.size() - 2] * width : width, offset = 0;
    for (int64_t axis = static_cast<int64_t>(batch_dims.size()) - 1; axis >= 0; --axis) {
      if (dims[axis] != 1) offset += index % batch_dims[axis] * stride;
      index /= batch_dims[axis];
      stride *= dims[axis];
    }
    const char* data = static_cast<const char*>(buffer_.untyped_data()) + offset * ffi::ByteWidth(type());
    return transposed_ ? Matrix{data, type(), 1, width} : Matrix{data, type(), width, 1};
  }

 private:
  ffi::DataType type() const { return buffer_.element_type(); }

  ffi::AnyBuffer buffer_;
  bool transposed_;
  int rank_of_item_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Scratch memory and threads
// ---------------------------------------------------------------------------------------------------------------------

// Hands out pieces of one buffer that belongs to the thread and outlives the call.
class Scratch {
 public:
  explicit Scratch(int64_t floats) {
    thread_local std::unique_ptr<float, decltype(&std::free)> buffer(nullptr, &std::free);
    thread_local int64_t capacity = 0;
    if (floats > capacity) {
      capacity = floats;
      buffer.reset(static_cast<float*>(std::aligned_alloc(kAlignment, RoundUp(floats * sizeof(float)))));
      if (buffer == nullptr) std::abort();
    }
    next_ = buffer.get();
  }

  float* Take(int64_t floats) { return std::exchange(next_, next_ + Size(floats)); }

  // Floats that Take(floats) uses up.
  static int64_t Size(int64_t floats) { return RoundUp(floats * sizeof(float)) / sizeof(float); }

 private:
  static constexpr int64_t kAlignment = 64;
  static int64_t RoundUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  float* next_;
};

// Runs work(0) ... work(count - 1) on the calling thread and on whichever threads of XLA's pool join in.
//
// The caller is a thread of that pool itself and may be its only free one, so it must never wait for a task that has
// not begun: it takes items from the same counter as the helpers do, and then waits only for items that a running
// thread holds. A helper that starts too late finds no item left; it shares ownership of the counter, not of `work`.
void ParallelFor(ffi::ThreadPool& pool, int64_t count, const std::function<void(int64_t)>& work) {
  struct State {
    explicit State(int64_t count, const std::function<void(int64_t)>& work) : count(count), work(work) {}
    const int64_t count;
    const std::function<void(int64_t)>& work;
    std::atomic<int64_t> next{0}, finished{0};
    std::mutex mutex;
    std::condition_variable all_finished;

    void Drain() {
      for (int64_t item; (item = next.fetch_add(1)) < count;) {
        work(item);
        if (finished.fetch_add(1) + 1 == count) {
          std::lock_guard<std::mutex> lock(mutex);
          all_finished.notify_all();
        }
      }
    }
  };
  auto state = std::make_shared<State>(count, work);
  const int64_t helpers = std::min(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([state] { state->Drain(); });
  state->Drain();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_finished.wait(lock, [&] { return state->finished == count; });
}

// A part of one output matrix: rows [row, row + rows) of one panel, columns [col, col + cols).
struct Block {
  int64_t batch, row, rows, col, cols;
};

// Cuts a batch of (rows x cols) outputs into blocks `width` columns wide and calls work(Block) for each, in parallel.
void ForEachBlock(ffi::ThreadPool& pool, int64_t batch, int64_t rows, int64_t cols, int64_t depth, int64_t width,
                  const std::function<void(const Block&)>& work) {
  // Every block packs its own panel, which costs about as much as four rows of sums; a block of 96 rows loses 4 %.
  constexpr int64_t kFewestRows = 96, kBlocksPerThread = 8;
  constexpr int64_t kSerialTerms = 1 << 18;  // some 10 us of work: waking another thread takes as long
  if (batch * rows * cols == 0) return;
  const bool serial = batch * rows * cols * depth <= kSerialTerms;
  const int64_t panels = (cols + width - 1) / width;
  const int64_t wanted = serial ? 1 : kBlocksPerThread * std::max<int64_t>(pool.num_threads(), 1);
  const int64_t chunks =
      std::clamp<int64_t>((wanted + batch * panels - 1) / (batch * panels), 1, (rows + kFewestRows - 1) / kFewestRows);
  const int64_t chunk_rows = (rows + chunks - 1) / chunks;
  const int64_t filled_chunks = (rows + chunk_rows - 1) / chunk_rows;
  const int64_t count = batch * panels * filled_chunks;
  auto item = [&](int64_t index) {
    const int64_t row = index % filled_chunks * chunk_rows, col = index / filled_chunks % panels * width;
    work({index / filled_chunks / panels, row, std::min(chunk_rows, rows - row), col, std::min(width, cols - col)});
  };
  if (serial) {
    for (int64_t index = 0; index < count; ++index) item(index);
  } else {
    ParallelFor(pool, count, item);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Packing
// ---------------------------------------------------------------------------------------------------------------------

// Copies columns [col, col + cols) of a (depth x any) matrix to float32 panel[depth][width], zeros after the last one.
template <int width>
void PackPanel(const Matrix& source, int64_t depth, int64_t col, int64_t cols, float* panel) {
  if (cols < width) std::memset(panel, 0, depth * width * sizeof(float));
  source.Visit([&](const auto* data) {
    data += col * source.col_stride;
    if (source.col_stride == 1) {
      for (int64_t d = 0; d < depth; ++d) {
        for (int64_t j = 0; j < cols; ++j) panel[d * width + j] = static_cast<float>(data[d * source.row_stride + j]);
      }
    } else {
      for (int64_t j = 0; j < cols; ++j) {
        for (int64_t d = 0; d < depth; ++d) {
          panel[d * width + j] = static_cast<float>(data[d * source.row_stride + j * source.col_stride]);
        }
      }
    }
  });
}

// The scalars that a block broadcasts: element (row, d) is data[row * row_stride + d * depth_stride].
struct RowOperand {
  const float* data;
  int64_t row_stride, depth_stride;

  const float* Row(int64_t row) const { return data + row * row_stride; }
};

// Returns rows [row, row + rows) as float32: in place if they are that already, else converted to `buffer`.
RowOperand PrepareRows(const Matrix& source, int64_t row, int64_t rows, int64_t depth, float* buffer) {
  RowOperand result{buffer, depth, 1};
  source.Visit([&](const auto* data) {
    data += row * source.row_stride;
    if constexpr (std::is_same_v<decltype(data), const float*>) {
      result = {data, source.row_stride, source.col_stride};
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < depth; ++d) {
          buffer[r * depth + d] = static_cast<float>(data[r * source.row_stride + d * source.col_stride]);
        }
      }
    }
  });
  return result;
}

// Writes the first `cols` lanes of a tile row to an output row.
template <int kVecs>
inline void StoreRow(float* out, int64_t col_stride, int64_t cols, const Vec (&values)[kVecs]) {
  if (cols == kVecs * kLanes && col_stride == 1) {
    for (int v = 0; v < kVecs; ++v) Store(out + v * kLanes, values[v]);
    return;
  }
  float lanes[kVecs * kLanes];
  for (int v = 0; v < kVecs; ++v) Store(lanes + v * kLanes, values[v]);
  if (col_stride == 1) {
    std::memcpy(out, lanes, cols * sizeof(float));
  } else {
    for (int64_t j = 0; j < cols; ++j) out[j * col_stride] = lanes[j];
  }
}

// Reads the first `cols` lanes of a tile row, zeros after them.
template <int kVecs>
inline void LoadRow(const Matrix& source, int64_t row, int64_t col, int64_t cols, Vec (&values)[kVecs]) {
  source.Visit([&](const auto* data) {
    data += row * source.row_stride + col * source.col_stride;
    float lanes[kVecs * kLanes] = {};
    for (int64_t j = 0; j < cols; ++j) lanes[j] = static_cast<float>(data[j * source.col_stride]);
    for (int v = 0; v < kVecs; ++v) values[v] = Load(lanes + v * kLanes);
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward: y = -sum |x - w|
// ---------------------------------------------------------------------------------------------------------------------

// sum |x - w| = 2 sum max(x, w) - sum x - sum w: two instructions a term in place of three. The subtraction cancels when
// distances are small beside the norms, and knows nothing of infinities, so an element keeps this form only if its
// distance is finite and at least kTrust of sum |x| + sum |w|; others are summed again as plain differences. For
// independent normal x and w the ratio is 0.7, so that is rare.
constexpr float kTrust = 0.125f;
// With few terms the ratio often falls below kTrust by chance, and there is little to gain.
constexpr int64_t kFewestTermsForMax = 16;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

struct MaxTerm {
  static Vec Of(Vec x, Vec w) { return Max(x, w); }
};

struct DistanceTerm {
  static Vec Of(Vec x, Vec w) { return Abs(x - w); }
};

// total[r][v] = sum over depth of Term(x[r], w[v]).
template <class Term, int kRows, int kVecs>
inline void SumTile(const RowOperand& x, int64_t row, const float* panel, int64_t depth, Vec (&total)[kRows][kVecs]) {
  const float* rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    rows[r] = x.Row(row + r);
    for (int v = 0; v < kVecs; ++v) total[r][v] = Vec{};
  }
  for (int64_t d = 0; d < depth; ++d) {
    Vec w[kVecs];
    for (int v = 0; v < kVecs; ++v) w[v] = Load(panel + (d * kVecs + v) * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec s = Broadcast(rows[r][d * x.depth_stride]);
      for (int v = 0; v < kVecs; ++v) total[r][v] += Term::Of(s, w[v]);
    }
  }
}

// Sums of values and of magnitudes.
template <class T>
struct Norms {
  T sum{}, magnitude{};

  void Add(T value, T abs) {
    sum += value;
    magnitude += abs;
  }
};

inline Norms<float> RowNorms(const RowOperand& x, int64_t row, int64_t depth) {
  Norms<Vec> lanes;
  Norms<float> total;
  const float* data = x.Row(row);
  int64_t d = 0;
  if (x.depth_stride == 1) {
    for (; d + kLanes <= depth; d += kLanes) lanes.Add(Load(data + d), Abs(Load(data + d)));
    total = {Sum(lanes.sum), Sum(lanes.magnitude)};
  }
  for (; d < depth; ++d) total.Add(data[d * x.depth_stride], std::fabs(data[d * x.depth_stride]));
  return total;
}

template <int kVecs>
struct Forward {
  const float* panel;
  RowOperand x;
  int64_t depth;
  Norms<Vec> columns[kVecs];

  void SumColumns() {
    for (int64_t d = 0; d < depth; ++d) {
      for (int v = 0; v < kVecs; ++v) {
        const Vec w = Load(panel + (d * kVecs + v) * kLanes);
        columns[v].Add(w, Abs(w));
      }
    }
  }

  // Writes y for kRows rows and the first `cols` columns of the panel.
  template <int kRows>
  void Tile(int64_t row, int64_t cols, float* out, int64_t out_stride) const {
    Vec y[kRows][kVecs];
    if (!SumByMax(row, y)) {
      Vec distance[kRows][kVecs];
      SumTile<DistanceTerm>(x, row, panel, depth, distance);
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) y[r][v] = y[r][v] == y[r][v] ? y[r][v] : -distance[r][v];
      }
    }
    for (int r = 0; r < kRows; ++r) StoreRow(out + r * out_stride, 1, cols, y[r]);
  }

 private:
  // Computes y from sums of maxima, NaN where that cannot be trusted; returns whether there is no such element.
  template <int kRows>
  bool SumByMax(int64_t row, Vec (&y)[kRows][kVecs]) const {
    if (depth < kFewestTermsForMax) {
      for (auto& y_row : y) {
        for (Vec& element : y_row) element = Broadcast(kNaN);
      }
      return false;
    }
    SumTile<MaxTerm>(x, row, panel, depth, y);
    IntVec doubtful{};
    for (int r = 0; r < kRows; ++r) {
      const Norms<float> norms = RowNorms(x, row + r, depth);
      for (int v = 0; v < kVecs; ++v) {
        const Vec distance = 2 * y[r][v] - (norms.sum + columns[v].sum);
        const IntVec trusted =
            (distance >= kTrust * (norms.magnitude + columns[v].magnitude)) & (distance <= Broadcast(kLargest));
        doubtful |= ~trusted;
        y[r][v] = trusted ? -distance : Broadcast(kNaN);
      }
    }
    return !AnyNonZero(doubtful);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Gradient rules, as functions of a vector of differences
// ---------------------------------------------------------------------------------------------------------------------

// A rule is applied as scale * rule(difference), with the scale left to the end of the sum. `kFinite` promises that no
// difference is NaN, which one instruction of AVX-512 needs.

// sign(d): zero at zero, NaN at NaN.
template <bool kFinite>
struct SignRule {
  explicit SignRule(float) {}

  float scale() const { return 1.0f; }

  Vec operator()(Vec d) const {
#ifdef ADDER_FLAX_AVX512
    // One instruction replaces each lane by what the table has for its class, from NaN (lowest digit, 0: keep it) over
    // zero (8: zero) to negative (9: -1) and positive (A: +1).
    const __m512i replacements = _mm512_set1_epi32(static_cast<int>(0xA9A9A800u));
    return (Vec)_mm512_fixupimm_ps((__m512)d, (__m512)d, replacements, 0);
#else
    const Vec one = Broadcast(1.0f);
    return d > 0 ? one : (d < 0 ? -one : d);
#endif
  }
};

// clip(slope * d, -1, 1) = slope * clip(d, -1 / slope, 1 / slope).
template <bool kFinite>
struct HardtanhRule {
  explicit HardtanhRule(float slope) : slope(slope), limit(Broadcast(1.0f / slope)) {}

  float scale() const { return slope; }

  Vec operator()(Vec d) const {
#ifdef ADDER_FLAX_AVX512
    // The operand of smaller magnitude, with the sign of d; of a NaN and a number it takes the number.
    if constexpr (kFinite) return (Vec)_mm512_range_ps((__m512)d, (__m512)limit, 0b0010);
#endif
    const Vec below = limit < d ? limit : d;
    return -limit > below ? -limit : below;
  }

  float slope;
  Vec limit;
};

inline bool AllFinite(const float* values, int64_t count) {
  Vec zeros{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) zeros += Load(values + i) * 0.0f;  // NaN from NaN and from infinities
  float zero = Sum(zeros);
  for (; i < count; ++i) zero += values[i] * 0.0f;
  return zero == 0;
}

enum class RuleId : int32_t { kSign = 0, kHardtanh = 1 };

// Calls f with the rule of that name.
template <bool kFinite, class F>
inline void WithRule(RuleId id, float slope, F&& f) {
  if (id == RuleId::kSign) {
    f(SignRule<kFinite>(slope));
  } else {
    f(HardtanhRule<kFinite>(slope));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Pullback: d_own[r, j] = sum over depth of g[r, d] rule(other[d, j] - own[r, j])
// ---------------------------------------------------------------------------------------------------------------------

// total[r][v] = scale * sum over depth of g[r] * rule(panel[v] - own[r][v]).
template <class Rule, int kRows, int kVecs>
inline void PullbackTile(const Rule& rule, const RowOperand& g, int64_t row, const float* panel, int64_t depth,
                         const Vec (&own)[kRows][kVecs], Vec (&total)[kRows][kVecs]) {
  const float* rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    rows[r] = g.Row(row + r);
    for (int v = 0; v < kVecs; ++v) total[r][v] = Vec{};
  }
  for (int64_t d = 0; d < depth; ++d) {
    Vec other[kVecs];
    for (int v = 0; v < kVecs; ++v) other[v] = Load(panel + (d * kVecs + v) * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = Broadcast(rows[r][d * g.depth_stride]);
      for (int v = 0; v < kVecs; ++v) total[r][v] += weight * rule(other[v] - own[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) total[r][v] *= rule.scale();
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Pushforward: dy[r, j] = sum over depth of dx[r, d] rule(w[d, j] - x[r, d])
// ---------------------------------------------------------------------------------------------------------------------

// total[r][v] = scale * sum over depth of dx[r] * rule(panel[v] - x[r]).
template <class Rule, int kRows, int kVecs>
inline void PushforwardTile(const Rule& rule, const RowOperand& x, const RowOperand& dx, int64_t row,
                            const float* panel, int64_t depth, Vec (&total)[kRows][kVecs]) {
  const float *x_rows[kRows], *dx_rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    x_rows[r] = x.Row(row + r);
    dx_rows[r] = dx.Row(row + r);
    for (int v = 0; v < kVecs; ++v) total[r][v] = Vec{};
  }
  for (int64_t d = 0; d < depth; ++d) {
    Vec w[kVecs];
    for (int v = 0; v < kVecs; ++v) w[v] = Load(panel + (d * kVecs + v) * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec s = Broadcast(x_rows[r][d * x.depth_stride]), weight = Broadcast(dx_rows[r][d * dx.depth_stride]);
      for (int v = 0; v < kVecs; ++v) total[r][v] += weight * rule(w[v] - s);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) total[r][v] *= rule.scale();
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Handlers
// ---------------------------------------------------------------------------------------------------------------------

using Output = ffi::Result<ffi::Buffer<ffi::DataType::F32>>;

// Rows and columns of the matrices in a buffer, and its leading axes.
struct Shape {
  explicit Shape(const ffi::Span<const int64_t> dims, bool transposed = false)
      : batch_dims(dims.begin(), dims.size() - 2), rows(dims[dims.size() - 2]), cols(dims[dims.size() - 1]) {
    for (int64_t dim : batch_dims) batch *= dim;
    if (transposed) std::swap(rows, cols);
  }

  ffi::Span<const int64_t> batch_dims;
  int64_t batch = 1, rows, cols;
};

// Register budget of a forward tile with 32 registers: 6 x 4 sums, 4 vectors of the panel, one scalar.
constexpr int kForwardRows = 6, kForwardVecs = kManyRegisters ? 4 : 2;
// Of a gradient tile: 4 x 2 sums and as many of the operand itself, 2 of the panel, limits and intermediate values.
constexpr int kGradientRows = kManyRegisters ? 4 : 2, kGradientVecs = 2;

// Cuts rows [0, rows) into groups of at most kMaxRows and calls tile(Int<group rows>, first row).
template <int kMaxRows, class F>
inline void ForEachRowGroup(int64_t rows, F&& tile) {
  for (int64_t row = 0; row < rows; row += kMaxRows) {
    WithConstant<kMaxRows>(rows - row, [&](auto group) { tile(group, row); });
  }
}

// y (batch, M, N) = -sum_k |x[m, k] - w[n, k]|, with w as (K, N) or, where `w_is_nk`, as (N, K).
ffi::Error L1Forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, Output y, bool w_is_nk) {
  const Shape out(y->dimensions());
  const int64_t depth = Shape(x.dimensions()).cols;
  const Batch x_batch(x, false), w_batch(w, w_is_nk);
  ForEachBlock(pool, out.batch, out.rows, out.cols, depth, kForwardVecs * kLanes, [&](const Block& block) {
    WithConstant<kForwardVecs>((block.cols + kLanes - 1) / kLanes, [&](auto vecs) {
      constexpr int kVecs = decltype(vecs)::value, kWidth = kVecs * kLanes;
      Scratch scratch(Scratch::Size(depth * kWidth) + Scratch::Size(block.rows * depth));
      float* panel = scratch.Take(depth * kWidth);
      PackPanel<kWidth>(w_batch.At(block.batch, out.batch_dims), depth, block.col, block.cols, panel);
      Forward<kVecs> forward{panel, PrepareRows(x_batch.At(block.batch, out.batch_dims), block.row, block.rows, depth,
                                                scratch.Take(block.rows * depth)), depth};
      forward.SumColumns();
      float* origin = y->typed_data() + (block.batch * out.rows + block.row) * out.cols + block.col;
      ForEachRowGroup<kForwardRows>(block.rows, [&](auto rows, int64_t row) {
        forward.template Tile<decltype(rows)::value>(row, block.cols, origin + row * out.cols, out.cols);
      });
    });
  });
  return ffi::Error::Success();
}

// d_own[r, j] = sum_d g[r, d] rule(other[d, j] - own[r, j]). The gradient of x has own = x and other = w; that of w has
// own = w, other = x and g transposed. Flags say which operands are stored with rows and columns exchanged; d_own is
// stored as own is.
ffi::Error L1Pullback(ffi::ThreadPool pool, ffi::AnyBuffer own, ffi::AnyBuffer other, ffi::AnyBuffer g, Output d_own,
                      bool own_transposed, bool other_transposed, bool g_transposed, int32_t rule_id, float slope) {
  const Shape out(d_own->dimensions(), own_transposed);
  const int64_t depth = Shape(g.dimensions(), g_transposed).cols;
  const Batch own_batch(own, own_transposed), other_batch(other, other_transposed), g_batch(g, g_transposed);
  ForEachBlock(pool, out.batch, out.rows, out.cols, depth, kGradientVecs * kLanes, [&](const Block& block) {
    WithConstant<kGradientVecs>((block.cols + kLanes - 1) / kLanes, [&](auto vecs) {
      constexpr int kVecs = decltype(vecs)::value, kWidth = kVecs * kLanes;
      Scratch scratch(Scratch::Size(depth * kWidth));
      float* panel = scratch.Take(depth * kWidth);
      PackPanel<kWidth>(other_batch.At(block.batch, out.batch_dims), depth, block.col, block.cols, panel);
      const bool panel_is_finite = AllFinite(panel, depth * kWidth);
      const Matrix own_matrix = own_batch.At(block.batch, out.batch_dims);
      const RowOperand weights =
          PrepareRows(g_batch.At(block.batch, out.batch_dims), block.row, block.rows, depth, nullptr);
      const int64_t row_stride = own_matrix.row_stride, col_stride = own_matrix.col_stride;
      float* origin = d_own->typed_data() + block.batch * out.rows * out.cols + block.row * row_stride +
                      block.col * col_stride;
      ForEachRowGroup<kGradientRows>(block.rows, [&](auto rows, int64_t row) {
        constexpr int kRows = decltype(rows)::value;
        Vec own_tile[kRows][kVecs], total[kRows][kVecs];
        for (int r = 0; r < kRows; ++r) {
          LoadRow(own_matrix, block.row + row + r, block.col, block.cols, own_tile[r]);
        }
        auto run = [&](const auto& rule) { PullbackTile(rule, weights, row, panel, depth, own_tile, total); };
        if (panel_is_finite && AllFinite(reinterpret_cast<const float*>(own_tile), kRows * kWidth)) {
          WithRule<true>(static_cast<RuleId>(rule_id), slope, run);
        } else {
          WithRule<false>(static_cast<RuleId>(rule_id), slope, run);
        }
        for (int r = 0; r < kRows; ++r) {
          StoreRow(origin + (row + r) * row_stride, col_stride, block.cols, total[r]);
        }
      });
    });
  });
  return ffi::Error::Success();
}

// dy (batch, M, N) = sum_k dx[m, k] rule(w[n, k] - x[m, k]), with w as in L1Forward.
ffi::Error L1Pushforward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer dx, Output dy,
                         bool w_is_nk, int32_t rule_id, float slope) {
  const Shape out(dy->dimensions());
  const int64_t depth = Shape(x.dimensions()).cols;
  const Batch x_batch(x, false), w_batch(w, w_is_nk), dx_batch(dx, false);
  ForEachBlock(pool, out.batch, out.rows, out.cols, depth, kGradientVecs * kLanes, [&](const Block& block) {
    WithConstant<kGradientVecs>((block.cols + kLanes - 1) / kLanes, [&](auto vecs) {
      constexpr int kVecs = decltype(vecs)::value, kWidth = kVecs * kLanes;
      Scratch scratch(Scratch::Size(depth * kWidth) + 2 * Scratch::Size(block.rows * depth));
      float* panel = scratch.Take(depth * kWidth);
      PackPanel<kWidth>(w_batch.At(block.batch, out.batch_dims), depth, block.col, block.cols, panel);
      const RowOperand x_rows = PrepareRows(x_batch.At(block.batch, out.batch_dims), block.row, block.rows, depth,
                                            scratch.Take(block.rows * depth));
      const RowOperand dx_rows = PrepareRows(dx_batch.At(block.batch, out.batch_dims), block.row, block.rows, depth,
                                             scratch.Take(block.rows * depth));
      float* origin = dy->typed_data() + (block.batch * out.rows + block.row) * out.cols + block.col;
      WithRule<false>(static_cast<RuleId>(rule_id), slope, [&](const auto& rule) {
        ForEachRowGroup<kGradientRows>(block.rows, [&](auto rows, int64_t row) {
          constexpr int kRows = decltype(rows)::value;
          Vec total[kRows][kVecs];
          PushforwardTile(rule, x_rows, dx_rows, row, panel, depth, total);
          for (int r = 0; r < kRows; ++r) {
            StoreRow(origin + (row + r) * out.cols, 1, block.cols, total[r]);
          }
        });
      });
    });
  });
  return ffi::Error::Success();
}

}  // namespace

// What Python registers with XLA.
XLA_FFI_DEFINE_HANDLER_SYMBOL(AdderFlaxL1Forward, L1Forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::DataType::F32>>()
                                  .Attr<bool>("w_is_nk"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(AdderFlaxL1Pullback, L1Pullback,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::DataType::F32>>()
                                  .Attr<bool>("own_transposed")
                                  .Attr<bool>("other_transposed")
                                  .Attr<bool>("g_transposed")
                                  .Attr<int32_t>("rule")
                                  .Attr<float>("slope"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(AdderFlaxL1Pushforward, L1Pushforward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::DataType::F32>>()
                                  .Attr<bool>("w_is_nk")
                                  .Attr<int32_t>("rule")
                                  .Attr<float>("slope"));
