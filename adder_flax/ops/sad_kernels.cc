// Sums of absolute differences of bytes, for the native CPU backend of adder_flax.ops: exact integers.
//
// x86 has an instruction for it since SSE2: `psadbw` sums |a - b| of eight bytes into each 64-bit lane. Rows of w are packed
// so that each lane of a vector is a column's next eight bytes, and eight bytes of a row of x are broadcast to all lanes: a
// distance and an addition for 8 (SSE2: 2 columns; AVX2: 4; AVX-512: 8) terms a lane. Then a lane is an output, and
// nothing is summed across lanes. NEON takes the distances of bytes and adds pairs of them to 16-bit lanes.
//
// A layer with its norm, and a head of attention, finish a few rows while their sums are in the cache.
//
// Compile with -O3 -march=native.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "cpu_parallel.h"
#include "xla/ffi/api/ffi.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// Vectors: kLanes columns of kStep bytes. A tile is as large as the registers hold: kRows x kVecs vectors of sums, those of
// the panel, the broadcast bytes and a distance. Vectors come in pairs, of even and of odd columns: Join puts the sums of
// two next to each other, without a shuffle (x86 often has one unit for it, that of `psadbw`) from AVX2 on. Forms that look
// alike make compilers store the sums at every step, which a test looks for.

constexpr int kStep = 8;  // bytes of a row in one lane

template <int lanes>
using Ints __attribute__((vector_size(lanes * sizeof(int32_t)))) = int32_t;

inline int64_t Read(const uint8_t* p) {
  int64_t bytes;
  std::memcpy(&bytes, p, kStep);
  return bytes;
}

#if defined(__AVX512BW__)
using Vec = __m512i;
constexpr int kLanes = 8, kRows = 4, kVecs = 6;
inline Vec Load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Vec Broadcast(const uint8_t* p) { return _mm512_set1_epi64(Read(p)); }
inline Vec AddDistances(Vec sums, Vec a, Vec b) { return _mm512_add_epi64(sums, _mm512_sad_epu8(a, b)); }
inline Vec Join(Vec even, Vec odd) { return _mm512_or_si512(even, _mm512_slli_epi64(odd, 32)); }
#elif defined(__AVX2__)
using Vec = __m256i;
constexpr int kLanes = 4, kRows = 6, kVecs = 2;
inline Vec Load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Vec Broadcast(const uint8_t* p) { return _mm256_set1_epi64x(Read(p)); }
inline Vec AddDistances(Vec sums, Vec a, Vec b) { return _mm256_add_epi64(sums, _mm256_sad_epu8(a, b)); }
inline Vec Join(Vec even, Vec odd) { return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA); }
#elif defined(__SSE2__)
using Vec = __m128i;
constexpr int kLanes = 2, kRows = 6, kVecs = 2;
inline Vec Load(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
inline Vec Broadcast(const uint8_t* p) { return _mm_set1_epi64x(Read(p)); }
inline Vec AddDistances(Vec sums, Vec a, Vec b) { return _mm_add_epi64(sums, _mm_sad_epu8(a, b)); }
inline Vec Join(Vec even, Vec odd) {
  return _mm_unpacklo_epi32(_mm_shuffle_epi32(even, 0x88), _mm_shuffle_epi32(odd, 0x88));
}
#elif defined(__aarch64__)
using Vec = uint16x8_t;  // four partial sums of each column
constexpr int kLanes = 2, kRows = 4, kVecs = 4;
inline uint8x16_t Load(const uint8_t* p) { return vld1q_u8(p); }
inline uint8x16_t Broadcast(const uint8_t* p) { return vreinterpretq_u8_s64(vdupq_n_s64(Read(p))); }
inline Vec AddDistances(Vec sums, uint8x16_t a, uint8x16_t b) { return vpadalq_u8(sums, vabdq_u8(a, b)); }
inline uint32x4_t Join(Vec even, Vec odd) {
  const uint64x2_t low = vpaddlq_u32(vpaddlq_u16(even)), high = vpaddlq_u32(vpaddlq_u16(odd));
  return vreinterpretq_u32_u64(vsliq_n_u64(low, high, 32));
}
#endif

using Pair = Ints<2 * kLanes>;

constexpr int kWidth = kVecs * kLanes;  // columns of a panel
// Longest piece of a sum: a panel stays in the first-level cache, and NEON's 16-bit lanes, to which a step adds at most
// 2 x 255, hold the 128 steps of one.
constexpr int64_t kPiece = 1024;
constexpr int64_t kChunk = 48;  // rows, a multiple of kRows

// ---- A block of one matrix ----

// Where a panel has a column: even and odd ones of 2 * kLanes are in a vector each.
constexpr int64_t Place(int64_t column) {
  const int64_t in_pair = column % (2 * kLanes);
  return column - in_pair + in_pair % 2 * kLanes + in_pair / 2;
}

// Copies `terms` of each of `columns` rows of w to panel[step][Place(column)][kStep]; what is beyond either is zero, as it
// is in x.
inline void Pack(const uint8_t* w, int64_t stride, int64_t columns, int64_t terms, uint8_t* panel) {
  const int64_t whole = terms / kStep * kStep;
  if (columns < kWidth || whole < terms) std::memset(panel, 0, (terms + kStep - 1) / kStep * kStep * kWidth);
  for (int64_t column = 0; column < columns; ++column) {
    const uint8_t* row = w + column * stride;
    uint8_t* target = panel + Place(column) * kStep;
    for (int64_t k = 0; k < whole; k += kStep) std::memcpy(target + k * kWidth, row + k, kStep);
    std::memcpy(target + whole * kWidth, row + whole, terms - whole);
  }
}

// Calls f(Int<0>) ... f(Int<count - 1>).
template <class F, int... i>
inline void Unrolled(F&& f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>()), ...);
}

// Where sums go; they are added to what is there from a second piece on.
struct Target {
  int32_t* y;
  int64_t stride;
  bool add;
};

// Sums kRows rows and a panel, over whole steps. Not inlined, so that all registers are its own.
[[gnu::noinline]] void SumTile(const uint8_t* const (&rows)[kRows], const uint8_t* panel, int64_t steps,
                               const Target& target) {
  Vec totals[kRows][kVecs] = {};
  const uint8_t* operand[kRows];
  for (int r = 0; r < kRows; ++r) operand[r] = rows[r];
  for (int64_t step = 0; step < steps; ++step, panel += kStep * kWidth) {
    decltype(Load(panel)) columns[kVecs];
    for (int v = 0; v < kVecs; ++v) columns[v] = Load(panel + v * kLanes * kStep);
    for (int r = 0; r < kRows; ++r) {
      const auto row = Broadcast(operand[r] + step * kStep);
      for (int v = 0; v < kVecs; ++v) totals[r][v] = AddDistances(totals[r][v], row, columns[v]);
    }
  }
  // With indices that the compiler knows early: it keeps the totals in registers then.
  const auto write = [&](auto i) {
    constexpr int kRow = decltype(i)::value / (kVecs / 2), kVec = decltype(i)::value % (kVecs / 2) * 2;
    int32_t* place = target.y + kRow * target.stride + kVec * kLanes;
    Pair sums = (Pair)Join(totals[kRow][kVec], totals[kRow][kVec + 1]), before;
    if (target.add) {
      std::memcpy(&before, place, sizeof before);
      sums += before;
    }
    std::memcpy(place, &sums, sizeof sums);
  };
  Unrolled(write, std::make_integer_sequence<int, kRows * kVecs / 2>());
}

// The same where a tile has fewer rows, fewer columns, or an end within a step.
void SumEdge(const uint8_t* x, int64_t stride, int64_t rows, const uint8_t* panel, int64_t columns, int64_t terms,
             const Target& target) {
  const int64_t steps = (terms + kStep - 1) / kStep;
  const uint8_t* row[kRows];
  uint8_t filled[kRows][kPiece];
  int32_t sums[kRows][kWidth];
  for (int r = 0; r < kRows; ++r) {
    row[r] = x + std::min<int64_t>(r, rows - 1) * stride;  // the last one again, so that every tile is full
    if (terms % kStep != 0) {
      std::memcpy(filled[r], row[r], terms);
      std::memset(filled[r] + terms, 0, steps * kStep - terms);
      row[r] = filled[r];
    }
  }
  SumTile(row, panel, steps, {sums[0], kWidth, /*add=*/false});
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      int32_t& y = target.y[r * target.stride + c];
      y = sums[r][c] + (target.add ? y : 0);
    }
  }
}

// Sums `rows` rows of x, `stride` bytes from one to the next, and a panel.
void SumRows(const uint8_t* x, int64_t stride, int64_t rows, const uint8_t* panel, int64_t columns, int64_t terms,
             Target target) {
  for (int64_t row = 0; row < rows; row += kRows, x += kRows * stride, target.y += kRows * target.stride) {
    if (row + kRows > rows || columns < kWidth || terms % kStep != 0) {
      SumEdge(x, stride, std::min<int64_t>(kRows, rows - row), panel, columns, terms, target);
      continue;
    }
    const uint8_t* tile[kRows];
    for (int r = 0; r < kRows; ++r) tile[r] = x + r * stride;
    SumTile(tile, panel, terms / kStep, target);
  }
}

inline int64_t Divide(int64_t a, int64_t b) { return (a + b - 1) / b; }  // rounded up

// Memory of this thread, for one use at a time, from the begin of a cache line. It is kept: the system clears what it hands
// out anew.
enum class Use { kPanels, kBytes, kSums, kNumbers, kExcess, kValues };

template <class T, Use use>
T* Room(int64_t count) {
  constexpr int64_t kLine = 64;
  thread_local std::vector<T> room;
  if (static_cast<int64_t>(room.size()) < count + kLine) room.resize(count + kLine);
  return reinterpret_cast<T*>(Divide(reinterpret_cast<int64_t>(room.data()), kLine) * kLine);
}

// All panels of a matrix w of (columns, terms), packed once for all rows.
class Panels {
 public:
  Panels(int64_t columns, int64_t terms)
      : columns_(columns), terms_(terms), bytes_(Divide(terms, kStep) * kStep * kWidth),
        room_(Room<uint8_t, Use::kPanels>(count() * bytes_)) {}

  int64_t count() const { return Divide(columns_, kWidth); }
  int64_t width() const { return count() * kWidth; }  // of a row of sums

  // Of rows of w, `stride` bytes from one to the next.
  void Fill(const uint8_t* w, int64_t stride) const {
    for (int64_t panel = 0; panel < count(); ++panel) {
      const int64_t column = panel * kWidth;
      Pack(w + column * stride, stride, std::min<int64_t>(kWidth, columns_ - column), terms_, &room_[panel * bytes_]);
    }
  }

  // y[m, n] = sum over k of |x[m, k] - w[n, k]|, in rows of width().
  void Sum(const uint8_t* x, int64_t rows, int32_t* y) const { Sum(x, terms_, rows, width(), {y, width(), false}); }

  // Of rows of x, `stride` bytes from one to the next, the first columns. Some rows at a time: they and what is written of
  // them stay in the first-level cache.
  void Sum(const uint8_t* x, int64_t stride, int64_t rows, int64_t columns, Target y) const {
    for (int64_t row = 0; row < rows; row += kChunk, x += kChunk * stride, y.y += kChunk * y.stride) {
      for (int64_t panel = 0; panel < count(); ++panel) {
        for (int64_t k = 0; k < terms_; k += kPiece) {
          SumRows(x + k, stride, std::min(kChunk, rows - row), &room_[panel * bytes_ + k * kWidth],
                  std::min<int64_t>(kWidth, columns - panel * kWidth), std::min(kPiece, terms_ - k),
                  {y.y + panel * kWidth, y.stride, y.add || k > 0});
        }
      }
    }
  }

 private:
  int64_t columns_, terms_, bytes_;
  uint8_t* room_;
};

// ---- What stands between sums: loops over the numbers of a row, which compilers turn into vectors ----

// Half to even, for |x| below 2^22.
inline float Nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

inline float Clamp(float x, float lowest, float highest) {
  x = x < lowest ? lowest : x;
  return x > highest ? highest : x;
}

// f(0) ... f(count - 1) joined, in lanes whose number no processor changes.
template <class Join, class F>
inline float Reduce(int64_t count, float first, Join&& join, F&& f) {
  constexpr int kParts = 32;
  float part[kParts];
  std::fill(part, part + kParts, first);
  int64_t i = 0;
  for (; i + kParts <= count; i += kParts) {
    for (int p = 0; p < kParts; ++p) part[p] = join(part[p], f(i + p));
  }
  for (; i < count; ++i) part[i % kParts] = join(part[i % kParts], f(i));
  for (int half = kParts / 2; half > 0; half /= 2) {
    for (int p = 0; p < half; ++p) part[p] = join(part[p], part[p + half]);
  }
  return part[0];
}

template <class F>
inline float Total(int64_t count, F&& f) {
  return Reduce(count, 0.0f, [](float a, float b) { return a + b; }, f);
}

// y x^n + ... + a, all terms known early: compilers leave loops with others in them as they are.
inline float Polynomial(float, float y) { return y; }

template <class... Terms>
inline float Polynomial(float x, float y, float a, Terms... rest) {
  return Polynomial(x, y * x + a, rest...);
}

// An end that compilers do not know. Of a known one they make a case of its own, with a branch, and no vectors.
inline float End(float x) {
  asm("" : "+m"(x));
  return x;
}

// The rational approximation of Eigen and XLA, within some units of the last place; `most` is End(4).
inline float Erf(float x, float most) {
  x = Clamp(x, -most, most);
  const float above =
      Polynomial(x * x, -2.72614225801306e-10f, 2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f,
                 -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f);
  const float below = Polynomial(x * x, -1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f,
                                 -7.37332916720468e-03f, -1.42647390514189e-02f);
  return x * above / below;
}

// e^x of x <= 0, by Cephes' polynomial for what is left of a power of two; `least` is End(-60).
inline float Exp(float x, float least) {
  x = x < least ? least : x;
  const float n = Nearest(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
  const float left = Polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                5.0000001201e-1f, 1.0f, 1.0f);
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return left * power;
}

// The numbers lowest + step * byte, for bytes up to `levels`.
struct Grid {
  float lowest, step, levels;

  [[gnu::noinline]] void ToBytes(const float* __restrict x, int64_t count, uint8_t* __restrict bytes) const {
    const float least = lowest, inverse = 1 / step, most = levels;  // of this loop: a byte may be a part of anything
    for (int64_t i = 0; i < count; ++i) {
      bytes[i] = static_cast<uint8_t>(static_cast<int32_t>(Nearest(Clamp((x[i] - least) * inverse, 0.0f, most))));
    }
  }

  // What is lost of x beyond the ends.
  float Excess(const float* x, int64_t count) const {
    const float highest = lowest + step * levels;
    return Total(count, [&](int64_t i) { return std::abs(x[i] - Clamp(x[i], lowest, highest)); });
  }
};

// An adder layer and the LayerNorm behind it: norm(-(step * sums + excess)), and GELU of that.
struct Layer {
  int64_t outputs;
  float step;
  const float *excess, *scale, *bias;
  float epsilon;
  bool gelu;

  void Finish(const int32_t* __restrict sums, float* __restrict y) const {
    const int64_t n = outputs;
    const float by = step;
    const float *__restrict beyond = excess, *__restrict times = scale, *__restrict plus = bias;
    const float mean = Total(n, [&](int64_t c) { return y[c] = -(static_cast<float>(sums[c]) * by + beyond[c]); }) / n;
    const float variance = Total(n, [&](int64_t c) { return (y[c] - mean) * (y[c] - mean); }) / n;
    const float factor = 1 / std::sqrt(variance + epsilon);
    for (int64_t c = 0; c < n; ++c) y[c] = (y[c] - mean) * factor * times[c] + plus[c];
    if (!gelu) return;
    const float most = End(4.0f);
    for (int64_t c = 0; c < n; ++c) y[c] = 0.5f * y[c] * (1.0f + Erf(y[c] * 0.70710678f, most));
  }
};

// Vectors of floats, as wide as those of sums.
constexpr int kFloats = sizeof(Vec) / sizeof(float), kMixed = 2 * kFloats;
using Floats __attribute__((vector_size(kFloats * sizeof(float)))) = float;

inline Floats LoadFloats(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// y[r, c] = sum over j of weights[r, j] * values[j, c] for kRows rows and kMixed columns.
[[gnu::noinline]] void MixTile(const float* weights, int64_t stride, const float* values, int64_t count, float* y) {
  Floats totals[kRows][2] = {};
  for (int64_t j = 0; j < count; ++j) {
    const Floats value[2] = {LoadFloats(values + j * kMixed), LoadFloats(values + j * kMixed + kFloats)};
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < 2; ++v) totals[r][v] += weights[r * stride + j] * value[v];
    }
  }
  const auto write = [&](auto i) {
    constexpr int kRow = decltype(i)::value / 2, kVec = decltype(i)::value % 2;
    std::memcpy(y + kRow * kMixed + kVec * kFloats, &totals[kRow][kVec], sizeof(Floats));
  };
  Unrolled(write, std::make_integer_sequence<int, kRows * 2>());
}

// One head of one image: softmax(-factor * |q - k|) v, with arrays of (length, heads, width).
class Head {
 public:
  Head(const float* key, const float* value, int64_t keys, int64_t heads, int64_t width, int64_t value_width, Grid grid)
      : keys_(keys), heads_(heads), width_(width), value_width_(value_width), grid_(grid), panels_(keys, width),
        excess_(Room<float, Use::kExcess>(keys)),
        values_(Room<float, Use::kValues>(keys * Divide(value_width, kMixed) * kMixed)) {
    uint8_t* bytes = Room<uint8_t, Use::kBytes>(keys * width);
    for (int64_t j = 0; j < keys; ++j) {
      const float* own = key + j * heads * width;
      grid.ToBytes(own, width, &bytes[j * width]);
      excess_[j] = grid.Excess(own, width);
      for (int64_t first = 0; first < value_width; first += kMixed) {
        float* target = &values_[(first * keys) + j * kMixed];
        const int64_t count = std::min<int64_t>(kMixed, value_width - first);
        std::memset(target, 0, kMixed * sizeof(float));
        std::memcpy(target, value + j * heads * value_width + first, count * sizeof(float));
      }
    }
    panels_.Fill(bytes, width);
  }

  void Mix(const float* query, int64_t rows, float factor, float* y) const {
    constexpr int64_t kTogether = kChunk / 2;  // their sums stay in the first-level cache, for some hundred keys
    const int64_t stride = panels_.width();
    uint8_t* bytes = Room<uint8_t, Use::kBytes>(kTogether * width_);
    int32_t* sums = Room<int32_t, Use::kSums>(kTogether * stride);
    float* weights = Room<float, Use::kNumbers>(kTogether * stride);
    for (int64_t row = 0; row < rows; row += kTogether) {
      const int64_t count = std::min(kTogether, rows - row);
      for (int64_t r = 0; r < count; ++r) grid_.ToBytes(query + (row + r) * heads_ * width_, width_, &bytes[r * width_]);
      panels_.Sum(bytes, count, sums);
      float total[kTogether];
      for (int64_t r = 0; r < count; ++r) total[r] = Weights(&sums[r * stride], factor, &weights[r * stride]);
      for (int64_t r = count; r % kRows != 0; ++r) std::memset(&weights[r * stride], 0, keys_ * sizeof(float));
      for (int64_t first = 0; first < value_width_; first += kMixed) {
        for (int64_t r = 0; r < count; r += kRows) {
          float mixed[kRows][kMixed];
          MixTile(&weights[r * stride], stride, &values_[first * keys_], keys_, mixed[0]);
          for (int64_t i = 0; i < std::min<int64_t>(kRows, count - r); ++i) {
            float* target = y + (row + r + i) * heads_ * value_width_ + first;
            const int64_t width = std::min<int64_t>(kMixed, value_width_ - first);
            for (int64_t c = 0; c < width; ++c) target[c] = mixed[i][c] / total[r + i];
          }
        }
      }
    }
  }

 private:
  // What a row of sums weighs, but for its total, which is returned.
  [[gnu::noinline]] float Weights(const int32_t* __restrict sums, float factor, float* __restrict weights) const {
    const float lowest = -std::numeric_limits<float>::infinity(), step = grid_.step;
    const float* __restrict beyond = excess_;
    const auto larger = [](float a, float b) { return a > b ? a : b; };
    const float largest = Reduce(keys_, lowest, larger, [&](int64_t j) {
      return weights[j] = -(static_cast<float>(sums[j]) * step + beyond[j]) * factor;
    });
    const float least = End(-60.0f);
    return Total(keys_, [&](int64_t j) { return weights[j] = Exp(weights[j] - largest, least); });
  }

  int64_t keys_, heads_, width_, value_width_;
  Grid grid_;
  Panels panels_;
  float *excess_, *values_;
};

// ---- What Python calls ----

using Bytes = ffi::Buffer<ffi::DataType::U8>;
using Numbers = ffi::Buffer<ffi::DataType::F32>;
using Sums = ffi::ResultBuffer<ffi::DataType::S32>;

// How many of `rows`, in whole tiles, a piece of work has if there are as many as `pieces` of them.
int64_t RowsOf(int64_t rows, int64_t pieces) { return Divide(Divide(rows, pieces), kRows) * kRows; }

// Pieces of work: so that a thread that the system interrupts holds up only a third.
int64_t PiecesFor(ffi::ThreadPool& pool) { return 3 * std::max<int64_t>(pool.num_threads(), 1); }

// Where the matrix at position `index` of a batch begins in a buffer, some of whose axes may have length one instead.
int64_t Offset(ffi::Span<const int64_t> shape, ffi::Span<const int64_t> batch, int64_t index) {
  int64_t stride = shape[shape.size() - 1] * shape[shape.size() - 2], offset = 0;
  for (size_t axis = batch.size() - 2; axis-- > 0; stride *= shape[axis], index /= batch[axis]) {
    if (shape[axis] != 1) offset += index % batch[axis] * stride;
  }
  return offset;
}

// y (..., M, N) of x (..., M, K) and w (..., N, K).
ffi::Error Sad(ffi::ThreadPool pool, Bytes x, Bytes w, Sums y) {
  constexpr int64_t kLongest = 16 * kPiece, kPackedBytes = 1 << 20;  // of panels, which a thread keeps
  constexpr int64_t kSerialTerms = 1 << 20;  // some 10 us of work: waking another thread takes as long
  const auto shape = y->dimensions();
  const int64_t rows = shape[shape.size() - 2], columns = shape[shape.size() - 1], terms = x.dimensions().back();
  const int64_t outputs = y->element_count();
  if (outputs == 0) return ffi::Error::Success();
  if (terms == 0) {
    std::memset(y->typed_data(), 0, y->size_bytes());
    return ffi::Error::Success();
  }
  const bool serial = outputs * terms <= kSerialTerms;
  const int64_t batch = outputs / (rows * columns);
  // Panels are dealt out first: what is packed then is packed once.
  const int64_t wanted = serial ? 1 : Divide(PiecesFor(pool), batch), panels = Divide(columns, kWidth);
  const int64_t length = std::min(terms, kLongest), most = std::max<int64_t>(kPackedBytes / (length * kWidth), 1);
  const int64_t group = std::min(Divide(panels, std::min(wanted, panels)), most) * kWidth, groups = Divide(columns, group);
  const int64_t piece = RowsOf(rows, Divide(wanted, groups)), pieces = Divide(rows, piece);
  const auto run = [&](int64_t item) {
    const int64_t member = item / (groups * pieces), row = item / groups % pieces * piece, column = item % groups * group;
    const uint8_t* own_x = x.typed_data() + Offset(x.dimensions(), shape, member) + row * terms;
    const uint8_t* own_w = w.typed_data() + Offset(w.dimensions(), shape, member) + column * terms;
    int32_t* own_y = y->typed_data() + (member * rows + row) * columns + column;
    const int64_t width = std::min(group, columns - column);
    for (int64_t k = 0; k < terms; k += length) {
      const Panels own(width, std::min(length, terms - k));
      own.Fill(own_w + k, terms);
      own.Sum(own_x + k, terms, std::min(piece, rows - row), width, {own_y, columns, k > 0});
    }
  };
  const int64_t count = batch * groups * pieces;
  if (serial) {
    for (int64_t item = 0; item < count; ++item) run(item);
  } else {
    ParallelFor(pool, count, run);
  }
  return ffi::Error::Success();
}

// y (M, N) of x (M, K), floats or bytes, w (N, K) and the table (3, N) of excess, scale and bias. `ends` are lowest and step
// of the layer's grid and of that of y, which is in bytes where it has levels.
ffi::Error SadNorm(ffi::ThreadPool pool, ffi::AnyBuffer x, Bytes w, Numbers table, Numbers ends, ffi::Result<ffi::AnyBuffer> y,
                   int32_t levels, int32_t y_levels, float epsilon, bool gelu) {
  if (y->element_count() == 0) return ffi::Error::Success();
  const int64_t columns = w.dimensions()[0], terms = w.dimensions()[1], rows = y->element_count() / columns;
  const float* end = ends.typed_data();
  const Grid grid{end[0], end[1], static_cast<float>(levels)}, next{end[2], end[3], static_cast<float>(y_levels)};
  const float* excess = table.typed_data();
  const Layer layer{columns, grid.step, excess, excess + columns, excess + 2 * columns, epsilon, gelu};
  const bool is_bytes = x.element_type() == ffi::DataType::U8;
  const Panels panels(columns, terms);
  panels.Fill(w.typed_data(), terms);
  const int64_t piece = std::min(RowsOf(rows, PiecesFor(pool)), kChunk);
  ParallelFor(pool, Divide(rows, piece), [&](int64_t item) {
    const int64_t first = item * piece, count = std::min(piece, rows - first);
    int32_t* sums = Room<int32_t, Use::kSums>(count * panels.width());
    float* normed = Room<float, Use::kNumbers>(columns);
    const uint8_t* bytes = static_cast<const uint8_t*>(x.untyped_data()) + first * terms;
    if (!is_bytes) {
      uint8_t* room = Room<uint8_t, Use::kBytes>(count * terms);
      grid.ToBytes(static_cast<const float*>(x.untyped_data()) + first * terms, count * terms, room);
      bytes = room;
    }
    panels.Sum(bytes, count, sums);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t place = (first + r) * columns;
      float* row = y_levels > 0 ? normed : static_cast<float*>(y->untyped_data()) + place;
      layer.Finish(&sums[r * panels.width()], row);
      if (y_levels > 0) next.ToBytes(row, columns, static_cast<uint8_t*>(y->untyped_data()) + place);
    }
  });
  return ffi::Error::Success();
}

// y (B, M, H, V) of query (B, M, H, K), key (B, N, H, K), value (B, N, H, V) and, for each head, lowest, step and the factor
// on scores.
ffi::Error SadAttention(ffi::ThreadPool pool, Numbers query, Numbers key, Numbers value, Numbers heads,
                        ffi::Result<Numbers> y, int32_t levels) {
  const auto from = query.dimensions(), to = value.dimensions();
  const int64_t rows = from[1], count = from[2], width = from[3], keys = to[1], value_width = to[3];
  if (y->element_count() == 0) return ffi::Error::Success();
  const int64_t members = from[0] * count, piece = RowsOf(rows, Divide(PiecesFor(pool), members));
  const int64_t pieces = Divide(rows, piece);
  ParallelFor(pool, members * pieces, [&](int64_t item) {
    const int64_t member = item / pieces, image = member / count, h = member % count, first = item % pieces * piece;
    const float* own = heads.typed_data() + 3 * h;
    const Grid grid{own[0], own[1], static_cast<float>(levels)};
    const Head head(key.typed_data() + (image * keys * count + h) * width,
                    value.typed_data() + (image * keys * count + h) * value_width, keys, count, width, value_width, grid);
    head.Mix(query.typed_data() + ((image * rows + first) * count + h) * width, std::min(piece, rows - first), own[2],
             y->typed_data() + ((image * rows + first) * count + h) * value_width);
  });
  return ffi::Error::Success();
}

}  // namespace

extern "C" {

// The bound that benchmarks compare with: the instructions of a term, in registers. Returns how many terms it adds, none
// for another loop than the first.
int64_t AdderFlaxBoundSad(int64_t loop, int64_t iterations) {
  if (loop != 0) return 0;
  uint8_t bytes[kWidth * kStep] = {1, 2, 3};
  auto a = Broadcast(bytes);
  const auto b = Load(bytes);
  Vec totals[kRows][kVecs] = {};
  for (int64_t i = 0; i < iterations; ++i) {
    for (auto& row : totals) {
      for (Vec& total : row) {
#if defined(__x86_64__)
        asm volatile("" : "+v"(a));  // the compiler takes it for a new one
#elif defined(__aarch64__)
        asm volatile("" : "+w"(a));
#endif
        total = AddDistances(total, a, b);
      }
    }
  }
  volatile int32_t used = 0;  // else none of them would be summed
  for (auto& row : totals) {
    for (Vec& total : row) used = used + ((Pair)Join(total, total))[0];
  }
  return iterations * kRows * kWidth * kStep;
}

}  // extern "C"

XLA_FFI_DEFINE_HANDLER_SYMBOL(AdderFlaxSad, Sad,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bytes>().Arg<Bytes>().Ret<ffi::Buffer<ffi::DataType::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AdderFlaxSadNorm, SadNorm,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<Bytes>().Arg<Numbers>()
                                  .Arg<Numbers>().Ret<ffi::AnyBuffer>().Attr<int32_t>("levels").Attr<int32_t>("y_levels")
                                  .Attr<float>("epsilon").Attr<bool>("gelu"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AdderFlaxSadAttention, SadAttention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Numbers>().Arg<Numbers>().Arg<Numbers>()
                                  .Arg<Numbers>().Ret<Numbers>().Attr<int32_t>("levels"));
