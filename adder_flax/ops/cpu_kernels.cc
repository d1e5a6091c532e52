// Native CPU kernels of adder_flax.ops: pairwise sums that no matrix unit computes, at the speed of the vector units.
//
// Three of the five kernels are one loop nest. An output matrix (rows x cols) is a sum over `depth` terms; one operand
// is read along rows, as scalars that are broadcast, the other along columns, as vectors. Columns are cut into panels a
// few vectors wide, and the column operand of a panel is packed to contiguous float32 (depth x width). Tiles of a few
// rows by one panel accumulate in registers over the whole depth, in order. So an output element is a function of its
// own row and column alone: the same bits for any batch, any tiling and any number of threads. The other two kernels,
// the joint gradients of scores, walk the same tiles and add to both operands' gradients at once.
//
// Vectors are GCC/Clang vector extensions as wide as the target's registers; the two operations that only AVX-512 has as
// one instruction are written as intrinsics beside their portable form. Compile with -O3 -march=native.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cpu_parallel.h"
#include "xla/ffi/api/ffi.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define ADDER_FLAX_AVX512 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

namespace ffi = xla::ffi;

// ---- Vectors ----

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// AVX-512 and NEON have 32 vector registers, older x86 has 16. A tile is as large as they hold, because the loads of a
// step are shared by the whole tile. Forward: rows x vectors of sums, the vectors of the panel, 1 broadcast scalar (on NEON
// GCC loads those of all rows together), 1 vector of ones, 1 maximum.
#if defined(__AVX512F__)
constexpr bool kManyRegisters = true;
constexpr int kForwardRows = 6, kForwardVecs = 4;
#elif defined(__aarch64__)
constexpr bool kManyRegisters = true;
constexpr int kForwardRows = 4, kForwardVecs = 4;
#else
constexpr bool kManyRegisters = false;
constexpr int kForwardRows = 5, kForwardVecs = 2;
#endif

// Gradients: 4 x 2 sums, 4 x 2 vectors of the row operand (which 16 registers leave in memory), 2 of the panel, 1 scalar,
// limits and intermediate values.
constexpr int kGradientRows = 4, kGradientVecs = 2;
// The pullback of `hardtanh` without AVX-512 has two vectors for each sum: the ends of an interval.
constexpr int kPullbackRows = kManyRegisters ? 4 : 2;
// Terms that need more registers, for constants or two results.
constexpr int kPairRows = kManyRegisters ? 4 : 2;

constexpr int kMostRows = std::max({kForwardRows, kGradientRows, kPairRows});

constexpr int kLanes = kVectorBytes / sizeof(float);

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t UnsignedVec __attribute__((vector_size(kVectorBytes)));

inline Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Subtracting zero keeps every value, -0 too, so it costs no instruction; adding zero would.
inline Vec Broadcast(float s) { return s - Vec{}; }

// Makes the compiler take v for changed, so that it neither hoists nor merges what is computed from it.
inline void Opaque(Vec& v) {
#if defined(__aarch64__)
  asm volatile("" : "+w"(v));
#elif defined(__x86_64__)
  asm volatile("" : "+v"(v));
#endif
}

// Makes the compiler use p itself, and not find it from another address.
inline void OpaqueAddress(const float*& p) { asm volatile("" : "+r"(p)); }

// Makes the compiler load again what it has loaded before.
inline void ForgetMemory() { asm volatile("" ::: "memory"); }

// Additions can be written as multiplications by one with an addition, which round the same and run in other units of some
// cores: AMD's add in two of their four vector units and multiply-add in the two others. Units that would wait then work.
class One {
 public:
  One() { Opaque(one_); }

#if defined(__FMA__) || defined(__aarch64__)
  Vec Plus(Vec a, Vec b) const { return a + one_ * b; }
  Vec Minus(Vec a, Vec b) const { return one_ * a - b; }
#else
  Vec Plus(Vec a, Vec b) const { return a + b; }
  Vec Minus(Vec a, Vec b) const { return a - b; }
#endif

 private:
  Vec one_ = Broadcast(1.0f);  // in a register: the compiler would drop a factor that it knows
};

// Additions as they are, where those units have other work.
struct Plain {
  Vec Plus(Vec a, Vec b) const { return a + b; }
};

inline Vec Abs(Vec v) { return (Vec)((IntVec)v & 0x7fffffff); }

// The larger one; either may come back where one is NaN.
inline Vec Max(Vec a, Vec b) {
#if defined(__aarch64__)
  return (Vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#endif
  return a > b ? a : b;
}

// Clips to [lowest, highest]. In this order of operands a NaN falls through.
inline Vec Clip(Vec v, Vec lowest, Vec highest) {
#if defined(ADDER_FLAX_AVX512)
  return (Vec)_mm512_max_ps((__m512)lowest, _mm512_min_ps((__m512)highest, (__m512)v));
#elif defined(__aarch64__)
  return (Vec)vmaxq_f32((float32x4_t)lowest, vminq_f32((float32x4_t)highest, (float32x4_t)v));
#endif
  const Vec below = highest < v ? highest : v;
  return lowest > below ? lowest : below;
}

// Clips to [-limit, limit] a v that is not NaN: floats are ordered as signed integers where either is positive, and negative
// ones in reverse as unsigned integers. Unlike minima of floats these run in any vector unit of an AMD core.
inline Vec ClipNumber(Vec v, Vec limit) {
  const IntVec upper = (IntVec)limit, bits = (IntVec)v, below = bits < upper ? bits : upper;
  const UnsignedVec lower = (UnsignedVec)-limit, magnitude = (UnsignedVec)below;
  return (Vec)(magnitude < lower ? magnitude : lower);
}

inline bool AnyNonZero(IntVec mask) {
  uint64_t words[kVectorBytes / 8], any = 0;
  std::memcpy(words, &mask, sizeof words);
  for (uint64_t word : words) any |= word;
  return any != 0;
}

inline float Sum(Vec v) {
  float lanes[kLanes];
  Store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// Returns a and b interleaved, from lane `first` on: {a[first], b[first], a[first + 1], ...}.
template <int first, int... lane>
inline Vec Interleave(Vec a, Vec b, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (first + lane / 2 + lane % 2 * kLanes)...);
#else
  return __builtin_shuffle(a, b, IntVec{(first + lane / 2 + lane % 2 * kLanes)...});
#endif
}

// Transposes a square of kLanes vectors: interleaving the first half with the second, log2(kLanes) times.
inline void Transpose(Vec (&square)[kLanes]) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
  for (int length = 1; length < kLanes; length *= 2) {
    Vec next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = Interleave<0>(square[i], square[i + kLanes / 2], Lanes());
      next[2 * i + 1] = Interleave<kLanes / 2>(square[i], square[i + kLanes / 2], Lanes());
    }
    std::memcpy(square, next, sizeof next);
  }
}

// ---- Operands and results: matrices in any leading batch axes, of which an operand's may have length one ----

inline float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct BFloat16 {
  uint16_t bits;
  explicit operator float() const { return FromBits(uint32_t{bits} << 16); }
};

struct Float16 {
  uint16_t bits;
  explicit operator float() const {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16, exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
    // Subnormals go through an integer conversion, because the calling thread may flush subnormal floats to zero.
    const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-24f
                                          : FromBits((exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
    return sign ? -magnitude : magnitude;
  }
};

// One matrix of a batch, its strides in elements. Results are float32.
struct Matrix {
  void* data;
  ffi::DataType type;
  int64_t row_stride, col_stride;

  Matrix Transposed() const { return {data, type, col_stride, row_stride}; }

  // The part that begins at (row, col).
  Matrix From(int64_t row, int64_t col) const {
    const int64_t offset = row * row_stride + col * col_stride;
    return {static_cast<char*>(data) + offset * ffi::ByteWidth(type), type, row_stride, col_stride};
  }

  float* Row(int64_t row) const { return static_cast<float*>(data) + row * row_stride; }

  // Calls f with the data as a pointer to its type.
  template <class F>
  void Visit(F&& f) const {
    switch (type) {
      case ffi::DataType::BF16: return f(static_cast<const BFloat16*>(data));
      case ffi::DataType::F16: return f(static_cast<const Float16*>(data));
      default: return f(static_cast<const float*>(data));
    }
  }
};

// A buffer whose last two axes are the rows and columns of a matrix (swapped if `transposed`), the others a batch.
class Batch {
 public:
  explicit Batch(const ffi::AnyBuffer& buffer, bool transposed = false) : buffer_(buffer), transposed_(transposed) {}

  int64_t count() const { return std::accumulate(axes().begin(), axes().end(), int64_t{1}, std::multiplies<>()); }
  int64_t rows() const { return Axis(transposed_ ? 1 : 2); }
  int64_t cols() const { return Axis(transposed_ ? 2 : 1); }
  ffi::Span<const int64_t> axes() const { return buffer_.dimensions().first(buffer_.dimensions().size() - 2); }

  // The matrix at position `index` of a batch with these axes; an axis of this buffer may have length one instead.
  Matrix At(int64_t index, ffi::Span<const int64_t> batch_axes) const {
    int64_t stride = rows() * cols(), offset = 0;
    for (size_t axis = batch_axes.size(); axis-- > 0;) {
      const int64_t length = axes()[axis];
      if (length != 1) offset += index % batch_axes[axis] * stride;
      index /= batch_axes[axis];
      stride *= length;
    }
    char* data = static_cast<char*>(buffer_.untyped_data());
    const Matrix matrix{data + offset * ffi::ByteWidth(buffer_.element_type()), buffer_.element_type(), Axis(1), 1};
    return transposed_ ? matrix.Transposed() : matrix;
  }

 private:
  int64_t Axis(int from_end) const { return buffer_.dimensions()[buffer_.dimensions().size() - from_end]; }

  ffi::AnyBuffer buffer_;
  bool transposed_;
};

// ---- How work is cut ----

// Fewest rows worth a panel of their own, since every block packs its panels itself: that costs about as much as the sums
// of three to five rows.
constexpr int64_t kFewestRows = 96;

// Longest piece of the contracted axis that is packed at once.
constexpr int64_t kPieceDepth = 1536;

// The outputs of a kernel: `batch` matrices of rows x panels, each panel `width` columns of `cols`. Rows are dealt out in
// whole tiles of `tile_rows`.
struct Grid {
  int64_t batch, rows, cols, depth, tile_rows, width;

  int64_t panels() const { return (cols + width - 1) / width; }
};

// A part of one of these matrices.
struct Block {
  int64_t batch, row, rows, first_panel, end_panel;
};

// ---- Memory and threads ----

// Buffers that belong to the thread and outlive the call, so that a kernel neither allocates nor faults pages in again.
// One object at a time in a thread.
class Scratch {
 public:
  // Returns uninitialised memory, aligned to a cache line and valid until the next Scratch of this thread.
  float* Take(int64_t floats) {
    struct Buffer {
      std::unique_ptr<float, decltype(&std::free)> data{nullptr, &std::free};
      int64_t capacity = 0;
    };
    thread_local Buffer buffers[kMaxBuffers];
    Buffer& buffer = buffers[taken_++];
    if (floats > buffer.capacity) {
      buffer.capacity = (floats + kAlignment - 1) / kAlignment * kAlignment;
      buffer.data.reset(static_cast<float*>(std::aligned_alloc(kAlignment, buffer.capacity * sizeof(float))));
      if (buffer.data == nullptr) std::abort();
    }
    return buffer.data.get();
  }

  float* TakePanel(const Grid& grid) { return Take(std::min(grid.depth, kPieceDepth) * grid.width); }

  float* TakeRows(const Grid& grid, const Block& block) {
    return Take(std::min(grid.depth, kPieceDepth) * (block.rows + kMostRows));
  }

  // One T, made of floats, for each row of the block and of its last tile.
  template <class T>
  T* TakeForEachRow(const Block& block) {
    return reinterpret_cast<T*>(Take(sizeof(T) / sizeof(float) * (block.rows + kMostRows)));
  }

 private:
  static constexpr int kMaxBuffers = 8;
  static constexpr int64_t kAlignment = 64;

  int taken_ = 0;
};

// Cuts a grid into blocks of at least `fewest_rows` rows (fewer only at the end) and calls work(Block) in parallel.
void ForEachBlock(ffi::ThreadPool& pool, const Grid& grid, int64_t fewest_rows,
                  const std::function<void(const Block&)>& work) {
  constexpr int64_t kBlocksPerThread = 3;    // so that a thread that the system interrupts holds up only a third
  constexpr int64_t kSerialTerms = 1 << 18;  // some 10 us of work: waking another thread takes as long
  if (grid.batch * grid.rows * grid.cols == 0) return;
  const bool serial = grid.batch * grid.rows * grid.cols * grid.depth <= kSerialTerms;
  const int64_t wanted = serial ? 1 : kBlocksPerThread * std::max<int64_t>(pool.num_threads(), 1);
  auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };

  const int64_t most_chunks = std::max<int64_t>(grid.rows / fewest_rows, 1);
  const int64_t wanted_chunks = std::clamp<int64_t>(divide(wanted, grid.batch), 1, most_chunks);
  const int64_t chunk_rows = divide(divide(grid.rows, wanted_chunks), grid.tile_rows) * grid.tile_rows;
  const int64_t chunks = divide(grid.rows, chunk_rows);
  const int64_t wanted_groups = std::clamp<int64_t>(divide(wanted, grid.batch * chunks), 1, grid.panels());
  const int64_t group_panels = divide(grid.panels(), wanted_groups), groups = divide(grid.panels(), group_panels);

  auto run = [&](int64_t index) {
    const int64_t row = index % chunks * chunk_rows, panel = index / chunks % groups * group_panels;
    work({index / chunks / groups, row, std::min(chunk_rows, grid.rows - row), panel,
          std::min(panel + group_panels, grid.panels())});
  };
  const int64_t count = grid.batch * chunks * groups;
  if (serial) {
    for (int64_t index = 0; index < count; ++index) run(index);
  } else {
    ParallelFor(pool, count, run);
  }
}

// ---- Packing ----

// How far ahead to fetch rows of a matrix while copying a few columns of it: the hardware sees no pattern in that.
constexpr int64_t kPrefetchRows = 24;

// Reads `count` elements a stride apart as float32.
template <class T>
inline void Gather(const T* source, int64_t stride, int64_t count, float* target) {
  for (int64_t i = 0; i < count; ++i) target[i] = static_cast<float>(source[i * stride]);
}

inline void Gather(const float* source, int64_t stride, int64_t count, float* target) {
  int64_t i = 0;
  if (stride == 1) {
    // A call of memcpy would take longer than the few vectors of a panel.
    for (; i + kLanes <= count; i += kLanes) Store(target + i, Load(source + i));
  }
  for (; i < count; ++i) target[i] = source[i * stride];
}

// Copies the columns of a (depth x cols) matrix to panel[depth][width], zeros after the last one.
void PackPanel(const Matrix& source, int64_t depth, int64_t cols, int64_t width, float* panel) {
  const int64_t row_stride = source.row_stride, col_stride = source.col_stride;
  if (cols < width) std::memset(panel, 0, depth * width * sizeof(float));
  int64_t square_cols = 0, square_depth = 0;
  if (source.type == ffi::DataType::F32 && row_stride == 1) {
    // Stored by columns: transpose squares; what is left over on either side goes one by one.
    square_cols = cols / kLanes * kLanes, square_depth = depth / kLanes * kLanes;
    for (int64_t d = 0; d < square_depth; d += kLanes) {
      for (int64_t j = 0; j < square_cols; j += kLanes) {
        Vec square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = Load(source.Row(d) + (j + i) * col_stride);
        Transpose(square);
        for (int i = 0; i < kLanes; ++i) Store(panel + (d + i) * width + j, square[i]);
      }
    }
  }
  source.Visit([&](const auto* data) {
    for (int64_t d = 0; d < depth; ++d) {
      const int64_t begin = d < square_depth ? square_cols : 0;
      __builtin_prefetch(data + std::min(d + kPrefetchRows, depth - 1) * row_stride);
      Gather(data + d * row_stride + begin * col_stride, col_stride, cols - begin, panel + d * width + begin);
    }
  });
}

// Packs the panels of a block one after the other, from rows `depth_begin` on of the column operand, and calls
// f(Int<vectors in the panel>, first column, columns).
template <int kMaxVecs, class F>
inline void ForEachPanel(const Block& block, const Grid& grid, const Matrix& source, int64_t depth_begin, int64_t depth,
                         float* panel, F&& f) {
  auto with_width = [&](auto vecs, int64_t col, int64_t cols) {
    PackPanel(source.From(depth_begin, col), depth, cols, decltype(vecs)::value * kLanes, panel);
    f(vecs, col, cols);
  };
  for (int64_t index = block.first_panel; index < block.end_panel; ++index) {
    const int64_t col = index * grid.width, cols = std::min(grid.width, grid.cols - col);
    // Powers of two only: code for three vectors would pay for itself with few shapes.
    if (cols <= kLanes) {
      with_width(std::integral_constant<int, 1>(), col, cols);
    } else if (cols <= 2 * kLanes || kMaxVecs == 2) {
      with_width(std::integral_constant<int, 2>(), col, cols);
    } else {
      with_width(std::integral_constant<int, kMaxVecs>(), col, cols);
    }
  }
}

// Cuts the contracted axis into equal pieces, of which a panel fits into the second-level cache, and calls f(begin, depth);
// once, with nothing, if the axis is empty. A result is the sum over the pieces.
template <class F>
inline void ForEachPiece(int64_t depth, F&& f) {
  const int64_t pieces = std::max<int64_t>((depth + kPieceDepth - 1) / kPieceDepth, 1);
  for (int64_t i = 0; i < pieces; ++i) f(depth * i / pieces, depth * (i + 1) / pieces - depth * i / pieces);
}

// The scalars that a block broadcasts. Row `row + r` of the block, with `row` a multiple of the rows of a tile, begins at
// data + row * tile_stride + r * row_stride.
struct RowOperand {
  const float* data;
  int64_t rows, tile_stride, row_stride, depth_stride;

  // Rows after the last one repeat it, so that every tile is full.
  const float* Row(int64_t row, int64_t r) const {
    return data + row * tile_stride + std::min(r, rows - 1 - row) * row_stride;
  }
};

// Returns the first `rows` rows as float32: in place if they are that already and contiguous, else packed to `buffer`,
// which has room for whole tiles.
template <int kTileRows>
RowOperand PrepareRows(const Matrix& source, int64_t rows, int64_t depth, float* buffer) {
  if (source.type == ffi::DataType::F32 && source.col_stride == 1) {
    return {source.Row(0), rows, source.row_stride, source.row_stride, 1};
  }
  // Tiles become contiguous: a tile reads kTileRows scalars at a step, which in a matrix stored by columns lie far from
  // those of the next step. Some steps at a time, so that the cache lines of a matrix stored by columns serve all tiles.
  constexpr int64_t kSteps = 16;
  source.Visit([&](const auto* data) {
    for (int64_t begin = 0; begin < depth; begin += kSteps) {
      const int64_t end = std::min(begin + kSteps, depth);
      for (int64_t row = 0; row < rows; row += kTileRows) {
        if (source.row_stride == 1 && row + kTileRows <= rows) {
          for (int64_t d = begin; d < end; ++d) {
            __builtin_prefetch(data + row + std::min(d + kSteps, depth - 1) * source.col_stride);
            Gather(data + row + d * source.col_stride, 1, kTileRows, buffer + row * depth + d * kTileRows);
          }
          continue;
        }
        for (int64_t d = begin; d < end; ++d) {
          for (int r = 0; r < kTileRows; ++r) {
            const int64_t source_row = std::min(row + r, rows - 1);
            buffer[row * depth + d * kTileRows + r] =
                static_cast<float>(data[source_row * source.row_stride + d * source.col_stride]);
          }
        }
      }
    }
  });
  return {buffer, rows, depth, 1, kTileRows};
}

// Reads `cols` elements of the first row into vectors, zeros after them.
template <int kVecs>
inline void LoadRow(const Matrix& source, int64_t cols, Vec (&values)[kVecs]) {
  float lanes[kVecs * kLanes] = {};
  const float* row = lanes;
  if (source.type == ffi::DataType::F32 && source.col_stride == 1 && cols == kVecs * kLanes) {
    row = source.Row(0);
  } else {
    PackPanel(source, 1, cols, kVecs * kLanes, lanes);
  }
  for (int v = 0; v < kVecs; ++v) values[v] = Load(row + v * kLanes);
}

// Reads a tile; rows after the last one repeat it.
template <int kRows, int kVecs>
inline void LoadTile(const Matrix& source, int64_t row, int64_t rows, int64_t cols, Vec (&tile)[kRows][kVecs]) {
  for (int r = 0; r < kRows; ++r) LoadRow(source.From(std::min(row + r, rows - 1), 0), cols, tile[r]);
}

// Writes `cols` elements to a row of a result, or adds them to it.
void ScatterRow(const float* values, int64_t cols, bool add, float* target, int64_t stride) {
  for (int64_t j = 0; j < cols; ++j) target[j * stride] = add ? target[j * stride] + values[j] : values[j];
}

// The same with the first `cols` lanes of vectors.
template <int kVecs>
inline void StoreRow(const Matrix& result, int64_t row, int64_t cols, bool add, const Vec (&values)[kVecs]) {
  if (result.col_stride == 1 && cols == kVecs * kLanes && !add) {
    for (int v = 0; v < kVecs; ++v) Store(result.Row(row) + v * kLanes, values[v]);
  } else {
    ScatterRow(reinterpret_cast<const float*>(values), cols, add, result.Row(row), result.col_stride);
  }
}

// Writes or adds those rows of a tile that exist.
template <int kRows, int kVecs>
inline void StoreTile(const Matrix& result, int64_t row, int64_t rows, int64_t cols, bool add,
                      const Vec (&tile)[kRows][kVecs]) {
  for (int r = 0; r < kRows && row + r < rows; ++r) StoreRow(result, row + r, cols, add, tile[r]);
}

// ---- Sums over the contracted axis: the inner loops ----

template <int kRows, int kVecs>
using Tile = Vec[kRows][kVecs];

// Where terms take the vectors of the panel from: wherever the compiler has them; registers of their own, where it would load
// them again for every row and a core loads no more than two in a cycle; or memory, as an operand of a term's first
// instruction, for tiles that leave no register free.
enum class Columns { kAnywhere, kInRegisters, kInMemory };
template <class Term>
constexpr Columns kColumnsOf = Columns::kAnywhere;

// total[r][v] = sum over depth of term(r, v, scalars of row r, vector v of the panel), for scalars from several operands.
template <int kRows, int kVecs, class Term, class... Operands>
inline void SumTile(const Term& term, int64_t row, const float* panel, int64_t depth, Tile<kRows, kVecs>& total,
                    const Operands&... operands) {
  constexpr int kOperands = sizeof...(Operands);
  const float* rows[kOperands][kRows];
  const int64_t strides[kOperands] = {operands.depth_stride...};
  for (int r = 0; r < kRows; ++r) {
    int i = 0;
    ((rows[i++][r] = operands.Row(row, r)), ...);
  }
  // Else the compiler finds each row from the first one, in every iteration.
  for (auto& operand : rows) {
    for (const float*& start : operand) OpaqueAddress(start);
  }
  Tile<kRows, kVecs> sums{};  // a variable of its own, so that every compiler keeps it in registers
#pragma GCC unroll 2
  for (int64_t d = 0; d < depth; ++d) {
    Vec columns[kVecs];
    auto load = [&] {
      for (int v = 0; v < kVecs; ++v) columns[v] = Load(panel + (d * kVecs + v) * kLanes);
    };
    if constexpr (kColumnsOf<Term> != Columns::kInMemory) load();
    if constexpr (kColumnsOf<Term> == Columns::kInRegisters) {
      for (Vec& column : columns) Opaque(column);
    }
    for (int r = 0; r < kRows; ++r) {
      Vec scalars[kOperands];
      for (int i = 0; i < kOperands; ++i) scalars[i] = Broadcast(rows[i][r][d * strides[i]]);
      if constexpr (kColumnsOf<Term> == Columns::kInMemory) {
        ForgetMemory();
        load();
      }
      for (int v = 0; v < kVecs; ++v) term.AddTo(sums[r][v], r, v, scalars, columns[v]);
    }
  }
  std::memcpy(total, sums, sizeof sums);
}

// Adds up terms whose operands stay in registers, `iterations` for each lane of kRows x kVecs vectors, and returns how many.
// Not inlined: where a caller is run once, the compiler would keep the sums in memory.
template <int kRows, int kVecs, class Term>
__attribute__((noinline)) int64_t SumInRegisters(const Term& term, int64_t iterations) {
  Tile<kRows, kVecs> total{};
  Vec x{}, w[kVecs] = {};
  for (int64_t i = 0; i < iterations; ++i) {
    for (auto& row : total) {
      Opaque(x);
      for (Vec& column : w) Opaque(column);
      for (int v = 0; v < kVecs; ++v) term.AddTo(row[v], 0, v, &x, w[v]);
    }
  }
  for (auto& row : total) {
    for (Vec& sum : row) Opaque(sum);
  }
  return iterations * kRows * kVecs * kLanes;
}

// ---- Forward: y = -sum |x - w| ----

// sum |x - w| = 2 sum max(x, w) - sum x - sum w: two instructions a term in place of three. The subtraction cancels when
// distances are small beside the norms, and knows nothing of infinities, so an element keeps this form only if its distance
// is finite and at least kTrust of sum |x| + sum |w|; others are summed again as plain differences. For independent normal x
// and w the ratio is 0.7, so that is rare.
constexpr float kTrust = 0.125f;
// With few terms the ratio often falls below kTrust by chance, and with few columns the norms cost more than is saved.
constexpr int64_t kFewestTermsForMax = 16, kFewestColumnsForMax = 2 * kLanes;

constexpr uint32_t kLargestBits = 0x7f7fffff;  // of the largest number

// `Adder` is One or Plain.
template <class Adder>
struct MaxTerm {
  Adder adder;

  void AddTo(Vec& total, int, int, const Vec* x, Vec w) const { total = adder.Plus(total, Max(x[0], w)); }
};

// Whether sums of maxima are faster with multiply-adds than with additions, on this core: a Zen 3 and a Zen 4 take maxima in
// the units that add, others need not, and no feature tells. So both are tried once, for some hundred microseconds.
bool MaximaLeaveMultiplyAdds() {
  static const bool faster = [] {
    using Clock = std::chrono::steady_clock;
    auto shorten = [](Clock::duration& shortest, const auto& term) {
      const auto start = Clock::now();
      SumInRegisters<5, 2>(term, /*iterations=*/1000);
      shortest = std::min(shortest, Clock::now() - start);
    };
    Clock::duration multiply_adds = Clock::duration::max(), additions = Clock::duration::max();
    for (int run = 0; run < 20; ++run) {
      shorten(multiply_adds, MaxTerm<One>());
      shorten(additions, MaxTerm<Plain>());
    }
    return multiply_adds < additions;
  }();
  return faster;
}

struct DistanceTerm {
  One one;

  void AddTo(Vec& total, int, int, const Vec* x, Vec w) const { total = one.Plus(total, Abs(x[0] - w)); }
};

// What the forms that cost digits need of a row or column: the sum of its values, and that of their magnitudes.
template <class T>
struct Norms {
  T sum{}, magnitude{};

  void Add(T value, T abs) {
    sum += value;
    magnitude += abs;
  }
};

// Takes the vectors of a packed tile, kRows scalars side by side, to one vector for each row.
template <int kRows>
inline void UnpackTile(Vec (&tile)[kRows]) {
  float packed[kRows * kLanes], rows[kRows * kLanes];
  std::memcpy(packed, tile, sizeof packed);
  for (int r = 0; r < kRows; ++r) {
    for (int lane = 0; lane < kLanes; ++lane) rows[r * kLanes + lane] = packed[lane * kRows + r];
  }
  std::memcpy(tile, rows, sizeof rows);
}

// Norms of each row of a tile. Lane l adds elements l, l + kLanes, ... of a row, whether the rows lie one after the other
// or, packed, side by side; there it takes other vectors, since element i of a packed tile belongs to row i % kRows.
template <int kRows>
inline void TileNorms(const RowOperand& x, int64_t row, int64_t depth, Norms<float>* norms) {
  const bool packed = x.depth_stride == kRows;
  const int64_t whole = depth / kLanes * kLanes, step = packed ? kRows * kLanes : kLanes;
  Vec sums[kRows], magnitudes[kRows];
  for (int r = 0; r < kRows; ++r) {
    const float* values = packed ? x.Row(row, 0) + r * kLanes : x.Row(row, r);
    Norms<Vec> lanes;
    for (int64_t i = 0; i < whole / kLanes; ++i) lanes.Add(Load(values + i * step), Abs(Load(values + i * step)));
    sums[r] = lanes.sum, magnitudes[r] = lanes.magnitude;
  }
  if (packed) UnpackTile(sums), UnpackTile(magnitudes);
  for (int r = 0; r < kRows; ++r) {
    norms[r] = {Sum(sums[r]), Sum(magnitudes[r])};
    const float* values = x.Row(row, r);
    for (int64_t d = whole; d < depth; ++d) norms[r].Add(values[d * x.depth_stride], std::fabs(values[d * x.depth_stride]));
  }
}

// Norms of each row of an operand, and of the rows that fill its last tile.
template <int kRows>
inline void RowNorms(const RowOperand& x, int64_t depth, Norms<float>* norms) {
  for (int64_t row = 0; row < x.rows; row += kRows) TileNorms<kRows>(x, row, depth, norms + row);
}

template <int kVecs>
inline void ColumnNorms(const float* panel, int64_t depth, Norms<Vec> (&norms)[kVecs]) {
  for (int64_t d = 0; d < depth; ++d) {
    for (int v = 0; v < kVecs; ++v) {
      const Vec w = Load(panel + (d * kVecs + v) * kLanes);
      norms[v].Add(w, Abs(w));
    }
  }
}

template <int kRows, int kVecs>
__attribute__((noinline)) void SumByDistance(const RowOperand& x, int64_t row, const float* panel, int64_t depth, Tile<kRows, kVecs>& y) {
  SumTile(DistanceTerm(), row, panel, depth, y, x);
  for (auto& y_row : y) {
    for (Vec& element : y_row) element = -element;
  }
}

// Sums maxima, then once more as distances the elements that cannot be trusted. `row_norms` are those of the tile's rows.
template <int kRows, int kVecs>
inline void SumByMax(const RowOperand& x, const Norms<float>* row_norms, const Norms<Vec> (&column_norms)[kVecs],
                     int64_t row, const float* panel, int64_t depth, Tile<kRows, kVecs>& y) {
  // The bits of what the distance -y has above its threshold: as an unsigned integer more than those of the largest number
  // where that is negative, infinite or NaN.
  auto surplus = [&](int r, int v) {
    return (UnsignedVec)(-y[r][v] - kTrust * (row_norms[r].magnitude + column_norms[v].magnitude));
  };

  if (MaximaLeaveMultiplyAdds()) {
    SumTile(MaxTerm<One>(), row, panel, depth, y, x);
  } else {
    SumTile(MaxTerm<Plain>(), row, panel, depth, y, x);
  }
  UnsignedVec worst{};
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      y[r][v] = (row_norms[r].sum + column_norms[v].sum) - 2 * y[r][v];
      const UnsignedVec bits = surplus(r, v);
      worst = bits > worst ? bits : worst;
    }
  }
  if (!AnyNonZero(worst > kLargestBits)) return;

  Tile<kRows, kVecs> exact;
  SumByDistance(x, row, panel, depth, exact);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) y[r][v] = surplus(r, v) <= kLargestBits ? y[r][v] : exact[r][v];
  }
}

// y (M x N) = -sum_k |x[m, k] - w[k, n]|; `w_is_nk` says that w is stored as (N, K).
ffi::Error L1Forward(ffi::ThreadPool pool, ffi::AnyBuffer x_buffer, ffi::AnyBuffer w_buffer,
                     ffi::Result<ffi::AnyBuffer> y_buffer, bool w_is_nk) {
  const Batch x(x_buffer), w(w_buffer, w_is_nk), y(*y_buffer);
  const Grid grid{y.count(), y.rows(), y.cols(), x.cols(), kForwardRows, kForwardVecs * kLanes};
  const bool by_max = grid.depth >= kFewestTermsForMax && grid.cols > kFewestColumnsForMax;
  ForEachBlock(pool, grid, kFewestRows, [&](const Block& block) {
    Scratch scratch;
    float* panel = scratch.TakePanel(grid);
    float* row_buffer = scratch.TakeRows(grid, block);
    auto* row_norms = scratch.TakeForEachRow<Norms<float>>(block);
    const Matrix x_rows = x.At(block.batch, y.axes()).From(block.row, 0);
    const Matrix y_rows = y.At(block.batch, y.axes()).From(block.row, 0), columns = w.At(block.batch, y.axes());
    ForEachPiece(grid.depth, [&](int64_t begin, int64_t depth) {
      const RowOperand rows = PrepareRows<kForwardRows>(x_rows.From(0, begin), block.rows, depth, row_buffer);
      if (by_max) RowNorms<kForwardRows>(rows, depth, row_norms);
      ForEachPanel<kForwardVecs>(block, grid, columns, begin, depth, panel, [&](auto vecs, int64_t col, int64_t cols) {
        constexpr int kVecs = decltype(vecs)::value;
        Norms<Vec> column_norms[kVecs];
        if (by_max) ColumnNorms(panel, depth, column_norms);
        for (int64_t row = 0; row < block.rows; row += kForwardRows) {
          Tile<kForwardRows, kVecs> tile;
          if (by_max) {
            SumByMax(rows, row_norms + row, column_norms, row, panel, depth, tile);
          } else {
            SumByDistance(rows, row, panel, depth, tile);
          }
          StoreTile(y_rows.From(0, col), row, block.rows, cols, begin > 0, tile);
        }
      });
    });
  });
  return ffi::Error::Success();
}

// ---- Gradients of the L1 sums ----

// A gradient rule is a function of a vector of differences, applied as scale * rule(d) with the scale left to the end of
// the sum.

// sign(d): zero at zero, NaN at NaN.
struct Sign {
  static constexpr float scale = 1;

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

// clip(slope * d, -1, 1) = slope * clip(d, -1 / slope, 1 / slope). `kFinite` promises that no difference is NaN: the one
// instruction of AVX-512 would replace it by the limit.
template <bool kFinite>
struct Hardtanh {
  float scale;
  Vec limit = Broadcast(1 / scale);

  Vec operator()(Vec d) const {
#ifdef ADDER_FLAX_AVX512
    // Of d and the limit, the one of smaller magnitude, with the sign of d.
    if constexpr (kFinite) return (Vec)_mm512_range_ps((__m512)d, (__m512)limit, 0b0010);
#endif
    if constexpr (kFinite) return ClipNumber(d, limit);
    return Clip(d, -limit, limit);
  }
};

// Whether whole vectors, of which panels and tiles are made, hold neither NaN nor infinities.
inline bool AllFinite(const float* values, int64_t count) {
  // A product with zero is zero unless the other factor is NaN or infinite. Four sums, because one would wait for itself.
  Vec zeros[4] = {};
  for (int64_t i = 0; i < count; i += kLanes) zeros[i / kLanes % 4] += Load(values + i) * 0.0f;
  return Sum(zeros[0] + zeros[1] + zeros[2] + zeros[3]) == 0;
}

template <int kRows, int kVecs>
inline bool AllFinite(const Vec (&tile)[kRows][kVecs]) {
  Vec zero{};
  for (const auto& row : tile) {
    for (Vec element : row) zero += element * 0.0f;
  }
  return Sum(zero) == 0;
}

// A slope of zero stands for the sign rule.
template <class F>
inline void WithRule(float slope, bool finite, F&& f) {
  if (slope == 0) {
    f(Sign());
  } else if (finite) {
    f(Hardtanh<true>{slope});
  } else {
    f(Hardtanh<false>{slope});
  }
}

template <class Rule, int kRows, int kVecs>
struct PullbackTerm {
  const Rule& rule;
  const Tile<kRows, kVecs>& own;
  One one;

  void AddTo(Vec& total, int r, int v, const Vec* g, Vec other) const {
    total += g[0] * rule(Difference(other, own[r][v], v));
  }

  // On AVX-512 every second one as a multiply-add: with the rule and the sum, three instructions for either pair of units.
  // The two instructions of ClipNumber run in any.
  Vec Difference(Vec other, Vec own, int v) const {
#ifdef ADDER_FLAX_AVX512
    if (v % 2 == 1) return one.Minus(other, own);
#endif
    return other - own;
  }
};

template <class Rule, int kRows, int kVecs>
constexpr Columns kColumnsOf<PullbackTerm<Rule, kRows, kVecs>> = kManyRegisters ? Columns::kAnywhere : Columns::kInRegisters;

// Without AVX-512 the difference and its clip take four instructions with the sum, but
// clip(other - own, -limit, limit) = clip(other, own - limit, own + limit) - own
// takes three, and own times the sum of g is subtracted at the end. That costs digits where own is far from zero beside the
// limit, and knows nothing of infinities, so an element keeps this form only if its magnitude is at most kNear limits and
// its gradient finite; rounding errors are then at most some 2 kNear of those of a sum of g times the limit. Steep rules, of
// which few elements are that near, are summed as differences.
#ifdef ADDER_FLAX_AVX512
constexpr bool kClamps = false;
#else
constexpr bool kClamps = true;
#endif
constexpr float kNear = 8, kSteepest = 2;

template <int kRows, int kVecs>
struct ClampTerm {
  Tile<kRows, kVecs> lowest, highest;

  ClampTerm(const Tile<kRows, kVecs>& own, Vec limit) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) lowest[r][v] = own[r][v] - limit, highest[r][v] = own[r][v] + limit;
    }
  }

  void AddTo(Vec& total, int r, int v, const Vec* g, Vec other) const {
    total += g[0] * Clip(other, lowest[r][v], highest[r][v]);
  }
};

template <int kRows, int kVecs>
constexpr Columns kColumnsOf<ClampTerm<kRows, kVecs>> = kManyRegisters ? Columns::kAnywhere : Columns::kInMemory;

template <class Rule>
struct PushforwardTerm {
  const Rule& rule;

  void AddTo(Vec& total, int, int, const Vec* x_dx, Vec w) const { total += x_dx[1] * rule(w - x_dx[0]); }
};

template <int kRows, int kVecs>
inline void Scale(Tile<kRows, kVecs>& tile, float scale) {
  for (auto& row : tile) {
    for (Vec& element : row) element *= scale;
  }
}

template <class Rule, int kRows, int kVecs>
__attribute__((noinline)) void SumByRule(const Rule& rule, const RowOperand& g, int64_t row, const float* panel,
                                         int64_t depth, const Tile<kRows, kVecs>& own, Tile<kRows, kVecs>& total) {
  SumTile(PullbackTerm<Rule, kRows, kVecs>{rule, own}, row, panel, depth, total, g);
  Scale(total, rule.scale);
}

// Sums by intervals, then once more by differences the elements that cannot be trusted. `row_norms` are those of g.
template <int kRows, int kVecs>
inline void SumByClamp(float slope, const RowOperand& g, const Norms<float>* row_norms, int64_t row, const float* panel,
                       int64_t depth, const Tile<kRows, kVecs>& own, Tile<kRows, kVecs>& total) {
  const Hardtanh<false> rule{slope};
  const Vec farthest = kNear * rule.limit, largest = Broadcast(std::numeric_limits<float>::max());
  SumTile(ClampTerm<kRows, kVecs>(own, rule.limit), row, panel, depth, total, g);
  auto trusted = [&](int r, int v) { return (Abs(own[r][v]) <= farthest) & (Abs(total[r][v]) <= largest); };
  IntVec all = ~IntVec{};
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      total[r][v] = slope * (total[r][v] - own[r][v] * row_norms[r].sum);
      all &= trusted(r, v);
    }
  }
  if (!AnyNonZero(~all)) return;

  Tile<kRows, kVecs> exact;
  SumByRule(rule, g, row, panel, depth, own, exact);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) total[r][v] = trusted(r, v) ? total[r][v] : exact[r][v];
  }
}

// d_own[r, j] = sum_d g[r, d] rule(other[d, j] - own[r, j]). The gradient of x has own = x and other = w; that of w has
// own = w, other = x and g transposed. Flags say which operands are stored with rows and columns exchanged; d_own is
// stored as own is.
ffi::Error L1Pullback(ffi::ThreadPool pool, ffi::AnyBuffer own_buffer, ffi::AnyBuffer other_buffer,
                      ffi::AnyBuffer g_buffer, ffi::Result<ffi::AnyBuffer> d_own_buffer, bool own_transposed,
                      bool other_transposed, bool g_transposed, float slope) {
  const Batch own(own_buffer, own_transposed), other(other_buffer, other_transposed), g(g_buffer, g_transposed);
  const Batch d_own(*d_own_buffer, own_transposed);
  const Grid grid{d_own.count(), d_own.rows(), d_own.cols(), g.cols(), kPullbackRows, kGradientVecs * kLanes};
  const bool by_clamp = kClamps && slope > 0 && slope <= kSteepest;
  ForEachBlock(pool, grid, kFewestRows, [&](const Block& block) {
    Scratch scratch;
    float* panel = scratch.TakePanel(grid);
    float* row_buffer = scratch.TakeRows(grid, block);
    auto* row_norms = scratch.TakeForEachRow<Norms<float>>(block);
    auto at = [&](const Batch& operand) { return operand.At(block.batch, d_own.axes()); };
    const Matrix g_rows = at(g).From(block.row, 0), own_rows = at(own).From(block.row, 0);
    const Matrix result = at(d_own).From(block.row, 0), columns = at(other);
    ForEachPiece(grid.depth, [&](int64_t begin, int64_t depth) {
      const RowOperand weights = PrepareRows<kPullbackRows>(g_rows.From(0, begin), block.rows, depth, row_buffer);
      if (by_clamp) RowNorms<kPullbackRows>(weights, depth, row_norms);
      ForEachPanel<kGradientVecs>(block, grid, columns, begin, depth, panel, [&](auto vecs, int64_t col, int64_t cols) {
        constexpr int kVecs = decltype(vecs)::value;
        const bool panel_is_finite = !by_clamp && AllFinite(panel, depth * kVecs * kLanes);
        for (int64_t row = 0; row < block.rows; row += kPullbackRows) {
          Tile<kPullbackRows, kVecs> own_tile, total;
          LoadTile(own_rows.From(0, col), row, block.rows, cols, own_tile);
          if (by_clamp) {
            SumByClamp(slope, weights, row_norms + row, row, panel, depth, own_tile, total);
          } else {
            WithRule(slope, panel_is_finite && AllFinite(own_tile), [&](const auto& rule) {
              SumByRule(rule, weights, row, panel, depth, own_tile, total);
            });
          }
          StoreTile(result.From(0, col), row, block.rows, cols, begin > 0, total);
        }
      });
    });
  });
  return ffi::Error::Success();
}

struct MultiplyAddTerm {
  void AddTo(Vec& total, int, int, const Vec* x, Vec w) const { total += x[0] * w; }
};

// d_own[r, j] = sum_d g[r, d] (other[d, j] - own[r, j]): the rule `full`, as a matrix product less own[r, j] times the sum of
// a row of g. A product of XLA's would give other bits with another number of threads. Operands as for L1Pullback.
ffi::Error FullPullback(ffi::ThreadPool pool, ffi::AnyBuffer own_buffer, ffi::AnyBuffer other_buffer,
                        ffi::AnyBuffer g_buffer, ffi::Result<ffi::AnyBuffer> d_own_buffer, bool own_transposed,
                        bool other_transposed, bool g_transposed) {
  const Batch own(own_buffer, own_transposed), other(other_buffer, other_transposed), g(g_buffer, g_transposed);
  const Batch d_own(*d_own_buffer, own_transposed);
  const Grid grid{d_own.count(), d_own.rows(), d_own.cols(), g.cols(), kForwardRows, kForwardVecs * kLanes};
  ForEachBlock(pool, grid, kFewestRows, [&](const Block& block) {
    Scratch scratch;
    float* panel = scratch.TakePanel(grid);
    float* row_buffer = scratch.TakeRows(grid, block);
    auto* row_norms = scratch.TakeForEachRow<Norms<float>>(block);
    auto at = [&](const Batch& operand) { return operand.At(block.batch, d_own.axes()); };
    const Matrix g_rows = at(g).From(block.row, 0), own_rows = at(own).From(block.row, 0);
    const Matrix result = at(d_own).From(block.row, 0), columns = at(other);
    ForEachPiece(grid.depth, [&](int64_t begin, int64_t depth) {
      const RowOperand weights = PrepareRows<kForwardRows>(g_rows.From(0, begin), block.rows, depth, row_buffer);
      RowNorms<kForwardRows>(weights, depth, row_norms);
      ForEachPanel<kForwardVecs>(block, grid, columns, begin, depth, panel, [&](auto vecs, int64_t col, int64_t cols) {
        constexpr int kVecs = decltype(vecs)::value;
        for (int64_t row = 0; row < block.rows; row += kForwardRows) {
          Tile<kForwardRows, kVecs> own_tile, total;
          SumTile(MultiplyAddTerm(), row, panel, depth, total, weights);
          LoadTile(own_rows.From(0, col), row, block.rows, cols, own_tile);
          for (int r = 0; r < kForwardRows; ++r) {
            for (int v = 0; v < kVecs; ++v) total[r][v] -= own_tile[r][v] * row_norms[row + r].sum;
          }
          StoreTile(result.From(0, col), row, block.rows, cols, begin > 0, total);
        }
      });
    });
  });
  return ffi::Error::Success();
}

// dy (M x N) = sum_k dx[m, k] rule(w[k, n] - x[m, k]); `w_is_nk` as in L1Forward.
ffi::Error L1Pushforward(ffi::ThreadPool pool, ffi::AnyBuffer x_buffer, ffi::AnyBuffer w_buffer,
                         ffi::AnyBuffer dx_buffer, ffi::Result<ffi::AnyBuffer> dy_buffer, bool w_is_nk, float slope) {
  const Batch x(x_buffer), w(w_buffer, w_is_nk), dx(dx_buffer), dy(*dy_buffer);
  const Grid grid{dy.count(), dy.rows(), dy.cols(), x.cols(), kGradientRows, kGradientVecs * kLanes};
  ForEachBlock(pool, grid, kFewestRows, [&](const Block& block) {
    Scratch scratch;
    float* panel = scratch.TakePanel(grid);
    float *x_buffer = scratch.TakeRows(grid, block), *dx_buffer = scratch.TakeRows(grid, block);
    auto at = [&](const Batch& operand) { return operand.At(block.batch, dy.axes()); };
    const Matrix result = at(dy).From(block.row, 0), columns = at(w);
    ForEachPiece(grid.depth, [&](int64_t begin, int64_t depth) {
      auto prepare = [&](const Batch& operand, float* buffer) {
        return PrepareRows<kGradientRows>(at(operand).From(block.row, begin), block.rows, depth, buffer);
      };
      const RowOperand x_rows = prepare(x, x_buffer), dx_rows = prepare(dx, dx_buffer);
      ForEachPanel<kGradientVecs>(block, grid, columns, begin, depth, panel, [&](auto vecs, int64_t col, int64_t cols) {
        WithRule(slope, /*finite=*/false, [&](const auto& rule) {
          const PushforwardTerm<std::decay_t<decltype(rule)>> term{rule};
          for (int64_t row = 0; row < block.rows; row += kGradientRows) {
            Tile<kGradientRows, decltype(vecs)::value> total;
            SumTile(term, row, panel, depth, total, x_rows, dx_rows);
            Scale(total, rule.scale);
            StoreTile(result.From(0, col), row, block.rows, cols, begin > 0, total);
          }
        });
      });
    });
  });
  return ffi::Error::Success();
}

// ---- Additive scores: s = sum v tanh(query + key) ----

// 1 / v for normal numbers, to float32 rounding.
inline Vec Reciprocal(Vec v) {
#ifdef ADDER_FLAX_AVX512
  // A division takes 16 cycles; an estimate of 14 bits and a Newton step take three instructions.
  const Vec estimate = (Vec)_mm512_rcp14_ps((__m512)v);
  return estimate * (2.0f - v * estimate);
#else
  return 1.0f / v;
#endif
}

// x P(x^2) / Q(x^2), of degrees 4 and 4, fitted to tanh on [0, 8.5] for least relative error (1e-8; 3e-7 with the rounding
// of float32). Beyond, tanh is 1 - 8e-8 or more.
inline Vec Tanh(Vec x) {
  x = Clip(x, Broadcast(-8.5f), Broadcast(8.5f));
  const Vec z = x * x;
  const Vec p = 1.0f + z * (0.13413246f + z * (3.5340262e-3f + z * (2.1251033e-5f + z * 1.4269216e-8f)));
  const Vec q = 1.0f + z * (0.46746570f + z * (2.6022749e-2f + z * (3.3488637e-4f + z * 8.1451179e-7f)));
  return x * p * Reciprocal(q);
}

struct AdditiveTerm {
  void AddTo(Vec& total, int, int, const Vec* query_v, Vec key) const { total += query_v[1] * Tanh(query_v[0] + key); }
};

// s (Nq x Nk) = sum_k v[k] tanh(query[i, k] + key[j, k]), with v as a (1 x K) matrix.
ffi::Error AdditiveForward(ffi::ThreadPool pool, ffi::AnyBuffer query_buffer, ffi::AnyBuffer key_buffer,
                           ffi::AnyBuffer v_buffer, ffi::Result<ffi::AnyBuffer> s_buffer) {
  const Batch query(query_buffer), key(key_buffer, /*transposed=*/true), v(v_buffer), s(*s_buffer);
  const Grid grid{s.count(), s.rows(), s.cols(), query.cols(), kPairRows, kGradientVecs * kLanes};
  ForEachBlock(pool, grid, /*fewest_rows=*/kPairRows, [&](const Block& block) {
    Scratch scratch;
    float* panel = scratch.TakePanel(grid);
    float *query_buffer = scratch.TakeRows(grid, block), *v_buffer = scratch.Take(grid.depth);
    auto at = [&](const Batch& operand) { return operand.At(block.batch, s.axes()); };
    const Matrix result = at(s).From(block.row, 0), columns = at(key);
    ForEachPiece(grid.depth, [&](int64_t begin, int64_t depth) {
      const RowOperand queries =
          PrepareRows<kPairRows>(at(query).From(block.row, begin), block.rows, depth, query_buffer);
      RowOperand weights = PrepareRows<1>(at(v).From(0, begin), 1, depth, v_buffer);
      weights.tile_stride = weights.row_stride = 0;  // one row serves all
      ForEachPanel<kGradientVecs>(block, grid, columns, begin, depth, panel, [&](auto vecs, int64_t col, int64_t cols) {
        for (int64_t row = 0; row < block.rows; row += kPairRows) {
          Tile<kPairRows, decltype(vecs)::value> total;
          SumTile(AdditiveTerm(), row, panel, depth, total, queries, weights);
          StoreTile(result.From(0, col), row, block.rows, cols, begin > 0, total);
        }
      });
    });
  });
  return ffi::Error::Success();
}

// ---- Joint gradients of scores: both operands' gradients share the rule or the tanh of a pair ----

template <class Rule>
struct L1Joint {
  const Rule& rule;

  void AddTo(Vec& d_query, Vec& d_key, Vec&, Vec g, Vec query, Vec key) const {
    const Vec slope = rule(key - query);
    d_query += g * slope;
    d_key -= g * slope;
  }
};

struct AdditiveJoint {
  void AddTo(Vec& d_query, Vec& d_key, Vec& d_v, Vec g, Vec query, Vec key) const {
    const Vec hidden = Tanh(query + key), slope = g - g * hidden * hidden;
    d_query += slope;
    d_key += slope;
    d_v += g * hidden;
  }
};

// For each vector of the panel and each row of the tile, adds what term(g, query, key) gives to d_query in registers and to
// d_panel, laid out as the panel. Rows after the last one have weight zero.
template <int kRows, int kVecs, class Term>
inline void JointTile(const Term& term, const float* const (&g)[kRows], const float* panel, float* d_panel, int64_t depth,
                      const Tile<kRows, kVecs>& query, Tile<kRows, kVecs>& d_query, Vec (&d_v)[kVecs]) {
  for (auto& row : d_query) {
    for (Vec& element : row) element = Vec{};
  }
  for (int64_t d = 0; d < depth; ++d) {
    Vec key[kVecs], d_key[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      key[v] = Load(panel + (d * kVecs + v) * kLanes);
      d_key[v] = Load(d_panel + (d * kVecs + v) * kLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = Broadcast(g[r][d]);
      for (int v = 0; v < kVecs; ++v) term.AddTo(d_query[r][v], d_key[v], d_v[v], weight, query[r][v], key[v]);
    }
    for (int v = 0; v < kVecs; ++v) Store(d_panel + (d * kVecs + v) * kLanes, d_key[v]);
  }
}

// Gradients of a score s[i, j] = sum_k score(query[i, k], key[j, k]). A block has all rows and all keys of some
// components k, so that one thread adds up each gradient, in order.
struct JointGradients {
  Batch query, key, g, d_query, d_key;

  // with_term(finite, f) calls f(term); factor(batch, col, cols, vectors) gives what both gradients are multiplied with at
  // the end; store_d_v(batch, col, cols, vectors) takes the third sum of the term.
  template <class WithTerm, class Factor, class StoreDv>
  void Run(ffi::ThreadPool& pool, WithTerm&& with_term, Factor&& factor, StoreDv&& store_d_v) const {
    // Without any row the gradient of the keys is zero, but it must still be written.
    const int64_t rows = query.rows(), all_rows = std::max<int64_t>(rows, 1);
    const Grid grid{g.count(), all_rows, query.cols(), key.rows(), kPairRows, kGradientVecs * kLanes};
    ForEachBlock(pool, grid, /*fewest_rows=*/all_rows, [&](const Block& block) {
      Scratch scratch;
      float* panel = scratch.Take(grid.depth * grid.width);
      float* d_panel = scratch.Take(grid.depth * grid.width);
      float* no_weights = scratch.Take(grid.depth);
      std::fill_n(no_weights, grid.depth, 0.0f);
      auto at = [&](const Batch& operand) { return operand.At(block.batch, g.axes()); };
      const Matrix queries = at(query), weights = at(g), d_queries = at(d_query), d_keys = at(d_key);
      ForEachPanel<kGradientVecs>(block, grid, at(key), 0, grid.depth, panel, [&](auto vecs, int64_t col, int64_t cols) {
        constexpr int kVecs = decltype(vecs)::value, kWidth = kVecs * kLanes;
        const bool panel_is_finite = AllFinite(panel, grid.depth * kWidth);
        std::fill_n(d_panel, grid.depth * kWidth, 0.0f);
        Vec factors[kVecs], d_v[kVecs] = {};
        factor(block.batch, col, cols, factors);
        for (int64_t row = 0; row < rows; row += kPairRows) {
          Tile<kPairRows, kVecs> tile, d_tile;
          const float* g_rows[kPairRows];
          LoadTile(queries.From(0, col), row, rows, cols, tile);
          for (int r = 0; r < kPairRows; ++r) g_rows[r] = row + r < rows ? weights.Row(row + r) : no_weights;
          with_term(panel_is_finite && AllFinite(tile), [&](const auto& term) {
            JointTile(term, g_rows, panel, d_panel, grid.depth, tile, d_tile, d_v);
          });
          for (auto& d_row : d_tile) {
            for (int v = 0; v < kVecs; ++v) d_row[v] *= factors[v];
          }
          StoreTile(d_queries.From(0, col), row, rows, cols, /*add=*/false, d_tile);
        }
        for (int64_t d = 0; d < grid.depth; ++d) {
          Vec d_key[kVecs];
          for (int v = 0; v < kVecs; ++v) d_key[v] = factors[v] * Load(d_panel + (d * kVecs + v) * kLanes);
          StoreRow(d_keys.From(0, col), d, cols, /*add=*/false, d_key);
        }
        store_d_v(block.batch, col, cols, d_v);
      });
    });
  }
};

// Both gradients of L1 sums under one rule; `key_transposed` as for L1Pullback.
ffi::Error L1JointPullback(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer g,
                           ffi::Result<ffi::AnyBuffer> d_query, ffi::Result<ffi::AnyBuffer> d_key, bool key_transposed,
                           float slope) {
  const JointGradients gradients{Batch(query), Batch(key, key_transposed), Batch(g), Batch(*d_query),
                                 Batch(*d_key, key_transposed)};
  auto with_term = [&](bool finite, auto&& f) {
    WithRule(slope, finite, [&](const auto& rule) { f(L1Joint<std::decay_t<decltype(rule)>>{rule}); });
  };
  auto scale = [&](int64_t, int64_t, int64_t, auto& factors) {
    for (Vec& factor : factors) factor = Broadcast(slope == 0 ? 1.0f : slope);
  };
  gradients.Run(pool, with_term, scale, [](auto&&...) {});
  return ffi::Error::Success();
}

// The gradients of additive scores, with v and d_v as (1 x K) matrices.
ffi::Error AdditivePullback(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer v,
                            ffi::AnyBuffer g, ffi::Result<ffi::AnyBuffer> d_query, ffi::Result<ffi::AnyBuffer> d_key,
                            ffi::Result<ffi::AnyBuffer> d_v) {
  const JointGradients gradients{Batch(query), Batch(key), Batch(g), Batch(*d_query), Batch(*d_key)};
  const Batch v_batch(v), d_v_batch(*d_v);
  auto with_term = [](bool, auto&& f) { f(AdditiveJoint()); };
  auto load_v = [&](int64_t batch, int64_t col, int64_t cols, auto& factors) {
    LoadRow(v_batch.At(batch, gradients.g.axes()).From(0, col), cols, factors);
  };
  auto store_d_v = [&](int64_t batch, int64_t col, int64_t cols, const auto& sums) {
    StoreRow(d_v_batch.At(batch, gradients.g.axes()).From(0, col), 0, cols, /*add=*/false, sums);
  };
  gradients.Run(pool, with_term, load_v, store_d_v);
  return ffi::Error::Success();
}

// ---- LayerNorm: y = scale (x - mean) / sqrt(variance + epsilon) + bias, over the columns of each row ----

// Sums over columns of f(col, width): vectors, and single numbers behind the last whole one.
template <class... Sums, class F>
inline void SumColumns(int64_t cols, F&& f, Sums&... sums) {
  struct {
    Vec operator()(const float* p) const { return Load(p); }
  } vectors;
  struct {
    float operator()(const float* p) const { return *p; }
  } numbers;
  int64_t col = 0;
  std::tuple<decltype((void)sums, Vec{})...> totals{};
  for (; col + kLanes <= cols; col += kLanes) {
    std::apply([&](auto&... total) { f(col, vectors, total...); }, totals);
  }
  std::apply([&](const auto&... total) { ((sums = Sum(total)), ...); }, totals);
  for (; col < cols; ++col) f(col, numbers, sums...);
}

// The mean of a row and 1 / sqrt(variance + epsilon). A row is in the first cache after its first pass.
struct Moments {
  float mean, inverse_deviation;

  Moments(const float* x, int64_t cols, float epsilon) {
    float sum, squares;
    SumColumns(cols, [&](int64_t col, auto load, auto& total) { total += load(x + col); }, sum);
    mean = sum / cols;
    SumColumns(
        cols,
        [&](int64_t col, auto load, auto& total) {
          const auto difference = load(x + col) - mean;
          total += difference * difference;
        },
        squares);
    inverse_deviation = 1.0f / std::sqrt(squares / cols + epsilon);
  }
};

// Calls f(col, load, store) for all columns, a vector at a time and one by one behind the last whole one.
template <class F>
inline void ForEachColumn(int64_t cols, F&& f) {
  int64_t col = 0;
  for (; col + kLanes <= cols; col += kLanes) {
    f(col, [](const float* p) { return Load(p); }, [](float* p, Vec v) { Store(p, v); });
  }
  for (; col < cols; ++col) {
    f(col, [](const float* p) { return *p; }, [](float* p, float v) { *p = v; });
  }
}

// Deals out the rows of all matrices of a batch. Which rows go together depends on shapes alone, so that sums over them
// have the same bits on any number of threads.
struct RowChunks {
  static constexpr int64_t kChunkFloats = 1 << 14;  // some microseconds of work
  int64_t batch, rows, chunk_rows, chunks;

  RowChunks(int64_t batch, int64_t rows, int64_t cols) : batch(batch), rows(rows) {
    chunk_rows = std::max<int64_t>(kChunkFloats / std::max<int64_t>(cols, 1), 1);
    chunks = std::max<int64_t>((rows + chunk_rows - 1) / chunk_rows, 1);
  }

  // Calls work(matrix, chunk, first row, end).
  template <class F>
  void ForEach(ffi::ThreadPool& pool, F&& work) const {
    // Small matrices share a task: handing one out takes about a microsecond.
    const int64_t together = std::clamp<int64_t>(chunk_rows / std::max<int64_t>(rows, 1), 1, std::max<int64_t>(batch, 1));
    const int64_t groups = (batch + together - 1) / together;
    auto run = [&](int64_t index) {
      const int64_t chunk = index % chunks, first = index / chunks * together;
      for (int64_t matrix = first; matrix < std::min(first + together, batch); ++matrix) {
        work(matrix, chunk, chunk * chunk_rows, std::min((chunk + 1) * chunk_rows, rows));
      }
    };
    if (groups * chunks <= 2) {
      for (int64_t index = 0; index < groups * chunks; ++index) run(index);
    } else {
      ParallelFor(pool, groups * chunks, run);
    }
  }
};

// Scale and bias are (1 x columns) matrices.
ffi::Error LayerNormForward(ffi::ThreadPool pool, ffi::AnyBuffer x_buffer, ffi::AnyBuffer scale_buffer,
                            ffi::AnyBuffer bias_buffer, ffi::Result<ffi::AnyBuffer> y_buffer, float epsilon) {
  const Batch x(x_buffer), scale(scale_buffer), bias(bias_buffer), y(*y_buffer);
  const int64_t cols = y.cols();
  RowChunks(y.count(), y.rows(), cols).ForEach(pool, [&](int64_t index, int64_t, int64_t begin, int64_t end) {
    auto at = [&](const Batch& operand) { return operand.At(index, y.axes()); };
    const Matrix rows = at(x), results = at(y);
    const float *scales = at(scale).Row(0), *biases = at(bias).Row(0);
    for (int64_t row = begin; row < end; ++row) {
      const float* from = rows.Row(row);
      float* to = results.Row(row);
      const Moments of(from, cols, epsilon);
      ForEachColumn(cols, [&](int64_t col, auto load, auto store) {
        store(to + col, (load(from + col) - of.mean) * (of.inverse_deviation * load(scales + col)) + load(biases + col));
      });
    }
  });
  return ffi::Error::Success();
}

// With n = (x - mean) / deviation and h = g scale: dx = (h - mean(h) - n mean(h n)) / deviation; d_scale and d_bias, as
// (1 x columns) matrices of each member of the batch, are the sums of g n and of g over its rows.
ffi::Error LayerNormPullback(ffi::ThreadPool pool, ffi::AnyBuffer x_buffer, ffi::AnyBuffer scale_buffer,
                             ffi::AnyBuffer g_buffer, ffi::Result<ffi::AnyBuffer> dx_buffer,
                             ffi::Result<ffi::AnyBuffer> d_scale_buffer, ffi::Result<ffi::AnyBuffer> d_bias_buffer,
                             float epsilon) {
  const Batch x(x_buffer), scale(scale_buffer), g(g_buffer), dx(*dx_buffer), d_scale(*d_scale_buffer),
      d_bias(*d_bias_buffer);
  const int64_t cols = dx.cols();
  const RowChunks all(dx.count(), dx.rows(), cols);
  // Both sums of each chunk.
  const int64_t most = all.chunks > 1 ? all.batch * all.chunks * 2 * cols : 0;
  const std::unique_ptr<float[]> parts(most > 0 ? new float[most] : nullptr);
  all.ForEach(pool, [&](int64_t index, int64_t chunk, int64_t begin, int64_t end) {
    auto at = [&](const Batch& operand) { return operand.At(index, dx.axes()); };
    const Matrix rows = at(x), cotangents = at(g), results = at(dx);
    const float* scales = at(scale).Row(0);
    float* part = parts.get() + (index * all.chunks + chunk) * 2 * cols;
    float* of_scale = all.chunks > 1 ? part : at(d_scale).Row(0);
    float* of_bias = all.chunks > 1 ? part + cols : at(d_bias).Row(0);
    std::fill_n(of_scale, cols, 0.0f);
    std::fill_n(of_bias, cols, 0.0f);
    for (int64_t row = begin; row < end; ++row) {
      const float *from = rows.Row(row), *cotangent = cotangents.Row(row);
      float* to = results.Row(row);
      const Moments of(from, cols, epsilon);
      float sum, sum_of_products;
      SumColumns(
          cols,
          [&](int64_t col, auto load, auto& total, auto& total_of_products) {
            const auto h = load(cotangent + col) * load(scales + col);
            total += h;
            total_of_products += h * ((load(from + col) - of.mean) * of.inverse_deviation);
          },
          sum, sum_of_products);
      const float mean = sum / cols, mean_of_products = sum_of_products / cols;
      ForEachColumn(cols, [&](int64_t col, auto load, auto store) {
        const auto normalized = (load(from + col) - of.mean) * of.inverse_deviation, given = load(cotangent + col);
        store(to + col, (given * load(scales + col) - mean - normalized * mean_of_products) * of.inverse_deviation);
        store(of_scale + col, load(of_scale + col) + given * normalized);
        store(of_bias + col, load(of_bias + col) + given);
      });
    }
  });
  for (int64_t index = 0; most > 0 && index < all.batch; ++index) {
    float *of_scale = d_scale.At(index, dx.axes()).Row(0), *of_bias = d_bias.At(index, dx.axes()).Row(0);
    const float* part = parts.get() + index * all.chunks * 2 * cols;
    std::copy_n(part, cols, of_scale);
    std::copy_n(part + cols, cols, of_bias);
    for (int64_t chunk = 1; chunk < all.chunks; ++chunk) {
      part += 2 * cols;
      for (int64_t col = 0; col < cols; ++col) of_scale[col] += part[col], of_bias[col] += part[cols + col];
    }
  }
  return ffi::Error::Success();
}

// ---- The bound that benchmarks compare with: the instructions of a term and nothing else ----

// Runs one of several loops over these terms, which differ in how many sums there are to hide the latency of an addition
// and in the term. Returns how many terms it added up; none if there is no such loop. The fastest one is the bound.
template <class... Terms>
int64_t RunInRegisters(int64_t loop, int64_t iterations, const Terms&... terms) {
  int64_t count = 0;
  auto run_each = [&](const auto& term) {
    if (loop-- == 0) count = SumInRegisters<2, 2>(term, iterations);
    if (loop-- == 0) count = SumInRegisters<4, 2>(term, iterations);
    if (loop-- == 0) count = SumInRegisters<5, 2>(term, iterations);
    if (loop-- == 0) count = SumInRegisters<6, 2>(term, iterations);
    if (loop-- == 0) count = SumInRegisters<12, 1>(term, iterations);
  };
  (run_each(terms), ...);
  return count;
}

}  // namespace

extern "C" {

int64_t AdderFlaxBoundMultiplyAdd(int64_t loop, int64_t iterations) {
  return RunInRegisters(loop, iterations, MultiplyAddTerm());
}

int64_t AdderFlaxBoundForward(int64_t loop, int64_t iterations) {
  return RunInRegisters(loop, iterations, MaxTerm<One>(), MaxTerm<Plain>());
}

int64_t AdderFlaxBoundHardtanh(int64_t loop, int64_t iterations) {
  Tile<1, 2> own{};
  for (Vec& element : own[0]) Opaque(element);
  const Hardtanh<true> rule{1};
  if (kClamps) return RunInRegisters(loop, iterations, ClampTerm<1, 2>(own, rule.limit));
  return RunInRegisters(loop, iterations, PullbackTerm<Hardtanh<true>, 1, 2>{rule, own});
}

int64_t AdderFlaxBoundAdditive(int64_t loop, int64_t iterations) {
  struct Term {
    void AddTo(Vec& total, int, int, const Vec* x, Vec w) const { total += Tanh(x[0] + w); }
  };
  return RunInRegisters(loop, iterations, Term());
}

}  // extern "C"

// ---- What Python registers with XLA ----

// How XLA calls a kernel of so many operands and results, all of them buffers whose types the kernel looks at.
template <int kOperands, int kResults, class Binding>
auto WithBuffers(Binding binding) {
  if constexpr (kOperands > 0) {
    return WithBuffers<kOperands - 1, kResults>(std::move(binding).template Arg<ffi::AnyBuffer>());
  } else if constexpr (kResults > 1) {
    return WithBuffers<0, kResults - 1>(std::move(binding).template Ret<ffi::AnyBuffer>());
  } else {
    return std::move(binding).template Ret<ffi::AnyBuffer>();
  }
}

#define ADDER_FLAX_KERNEL(name, operands, results, ...) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                        \
      AdderFlax##name, name, (WithBuffers<operands, results>(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()))__VA_ARGS__)

ADDER_FLAX_KERNEL(L1Forward, 2, 1, .Attr<bool>("w_is_nk"));
ADDER_FLAX_KERNEL(L1Pullback, 3, 1,
                  .Attr<bool>("own_transposed").Attr<bool>("other_transposed").Attr<bool>("g_transposed").Attr<float>("slope"));
ADDER_FLAX_KERNEL(FullPullback, 3, 1,
                  .Attr<bool>("own_transposed").Attr<bool>("other_transposed").Attr<bool>("g_transposed"));
ADDER_FLAX_KERNEL(L1JointPullback, 3, 2, .Attr<bool>("key_transposed").Attr<float>("slope"));
ADDER_FLAX_KERNEL(L1Pushforward, 3, 1, .Attr<bool>("w_is_nk").Attr<float>("slope"));
ADDER_FLAX_KERNEL(AdditiveForward, 3, 1);
ADDER_FLAX_KERNEL(AdditivePullback, 4, 3);
ADDER_FLAX_KERNEL(LayerNormForward, 3, 1, .Attr<float>("epsilon"));
ADDER_FLAX_KERNEL(LayerNormPullback, 3, 3, .Attr<float>("epsilon"));
