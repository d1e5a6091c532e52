// Sums of absolute differences of bytes, for the native CPU backend of adder_flax.ops: exact integers.
//
// x86 has an instruction for it since SSE2: `psadbw` sums |a - b| of eight bytes into each 64-bit lane. Rows of w are packed
// so that each lane of a vector is a column's next eight bytes, and eight bytes of a row of x are broadcast to all lanes: a
// distance and an addition for 8 (SSE2: 2 columns; AVX2: 4; AVX-512: 8) terms a lane. Then a lane is an output, and
// nothing is summed across lanes. NEON takes the distances of bytes and adds pairs of them to 16-bit lanes.
//
// Compile with -O3 -march=native.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "cpu_parallel.h"
#include "xla/ffi/api/ffi.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Vectors: kLanes columns of kStep bytes. A tile is as large as the registers hold: kRows x kVecs vectors of sums, those of
// the panel, the broadcast bytes and a distance.
// ---------------------------------------------------------------------------------------------------------------------

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
constexpr int kLanes = 8, kRows = 6, kVecs = 4;
inline Vec Load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Vec Broadcast(const uint8_t* p) { return _mm512_set1_epi64(Read(p)); }
inline Vec AddDistances(Vec sums, Vec a, Vec b) { return _mm512_add_epi64(sums, _mm512_sad_epu8(a, b)); }
inline Ints<kLanes> Narrow(Vec sums) { return (Ints<kLanes>)_mm512_cvtepi64_epi32(sums); }
#elif defined(__AVX2__)
using Vec = __m256i;
constexpr int kLanes = 4, kRows = 6, kVecs = 2;
inline Vec Load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Vec Broadcast(const uint8_t* p) { return _mm256_set1_epi64x(Read(p)); }
inline Vec AddDistances(Vec sums, Vec a, Vec b) { return _mm256_add_epi64(sums, _mm256_sad_epu8(a, b)); }
inline Ints<kLanes> Narrow(Vec sums) {
  const __m256i low_halves = _mm256_permutevar8x32_epi32(sums, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
  return (Ints<kLanes>)_mm256_castsi256_si128(low_halves);
}
#elif defined(__SSE2__)
using Vec = __m128i;
constexpr int kLanes = 2, kRows = 6, kVecs = 2;
inline Vec Load(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
inline Vec Broadcast(const uint8_t* p) { return _mm_set1_epi64x(Read(p)); }
inline Vec AddDistances(Vec sums, Vec a, Vec b) { return _mm_add_epi64(sums, _mm_sad_epu8(a, b)); }
inline Ints<kLanes> Narrow(Vec sums) { return (Ints<kLanes>)_mm_cvtsi128_si64(_mm_shuffle_epi32(sums, 0x88)); }
#elif defined(__aarch64__)
using Vec = uint16x8_t;  // four partial sums of each column
constexpr int kLanes = 2, kRows = 6, kVecs = 3;
inline uint8x16_t Load(const uint8_t* p) { return vld1q_u8(p); }
inline uint8x16_t Broadcast(const uint8_t* p) { return vreinterpretq_u8_s64(vdupq_n_s64(Read(p))); }
inline Vec AddDistances(Vec sums, uint8x16_t a, uint8x16_t b) { return vpadalq_u8(sums, vabdq_u8(a, b)); }
inline Ints<kLanes> Narrow(Vec sums) { return (Ints<kLanes>)vmovn_u64(vpaddlq_u32(vpaddlq_u16(sums))); }
#else
using Vec = int64_t;
constexpr int kLanes = 1, kRows = 4, kVecs = 2;
inline Vec Broadcast(const uint8_t* p) { return Read(p); }
inline Vec Load(const uint8_t* p) { return Read(p); }
inline Vec AddDistances(Vec sums, Vec a, Vec b) {
  for (int i = 0; i < 64; i += 8) sums += std::abs(int(a >> i & 255) - int(b >> i & 255));
  return sums;
}
inline Ints<kLanes> Narrow(Vec sums) { return Ints<kLanes>{static_cast<int32_t>(sums)}; }
#endif

constexpr int kWidth = kVecs * kLanes;  // columns of a panel
// Longest piece of a sum: a panel stays in the first-level cache, and NEON's 16-bit lanes, to which a step adds at most
// 2 x 255, hold the 128 steps of one.
constexpr int64_t kPiece = 1024;

// ---------------------------------------------------------------------------------------------------------------------
// A block of one matrix
// ---------------------------------------------------------------------------------------------------------------------

struct Sizes {
  int64_t rows, columns, terms;
};

// Copies `terms` of each of `columns` rows of w to panel[step][column][kStep]; what is beyond either is zero, as it is in x.
inline void Pack(const uint8_t* w, int64_t stride, int64_t columns, int64_t terms, uint8_t* panel) {
  const int64_t whole = terms / kStep * kStep;
  if (columns < kWidth || whole < terms) std::memset(panel, 0, (terms + kStep - 1) / kStep * kStep * kWidth);
  for (int64_t column = 0; column < columns; ++column) {
    const uint8_t* row = w + column * stride;
    uint8_t* target = panel + column * kStep;
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
    constexpr int kRow = decltype(i)::value / kVecs, kVec = decltype(i)::value % kVecs;
    int32_t* place = target.y + kRow * target.stride + kVec * kLanes;
    Ints<kLanes> sums = Narrow(totals[kRow][kVec]), before;
    if (target.add) {
      std::memcpy(&before, place, sizeof before);
      sums += before;
    }
    std::memcpy(place, &sums, sizeof sums);
  };
  Unrolled(write, std::make_integer_sequence<int, kRows * kVecs>());
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

// y[m, n] = sum over k of |x[m, k] - w[n, k]| for rows of x from first_row to end_row, and of w likewise.
void SumBlock(const uint8_t* x, const uint8_t* w, int32_t* y, const Sizes& size, int64_t first_row, int64_t end_row,
              int64_t first_column, int64_t end_column) {
  alignas(64) uint8_t panel[kPiece * kWidth];
  for (int64_t column = first_column; column < end_column; column += kWidth) {
    const int64_t columns = std::min<int64_t>(kWidth, end_column - column);
    for (int64_t k = 0; k < size.terms; k += kPiece) {
      const int64_t terms = std::min(kPiece, size.terms - k);
      Pack(w + column * size.terms + k, size.terms, columns, terms, panel);
      for (int64_t row = first_row; row < end_row; row += kRows) {
        const uint8_t* begin = x + row * size.terms + k;
        const Target target{y + row * size.columns + column, size.columns, k > 0};
        if (row + kRows > end_row || columns < kWidth || terms % kStep != 0) {
          SumEdge(begin, size.terms, std::min<int64_t>(kRows, end_row - row), panel, columns, terms, target);
          continue;
        }
        const uint8_t* rows[kRows];
        for (int r = 0; r < kRows; ++r) rows[r] = begin + r * size.terms;
        SumTile(rows, panel, terms / kStep, target);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What Python calls
// ---------------------------------------------------------------------------------------------------------------------

using Bytes = ffi::Buffer<ffi::DataType::U8>;
using Sums = ffi::ResultBuffer<ffi::DataType::S32>;

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
  constexpr int64_t kSerialTerms = 1 << 20;  // some 10 us of work: waking another thread takes as long
  constexpr int64_t kBlockBytes = 1 << 18;   // of x, half of a small second-level cache
  constexpr int64_t kBlocksPerThread = 3;    // so that a thread that the system interrupts holds up only a third
  const auto shape = y->dimensions();
  const Sizes size{shape[shape.size() - 2], shape[shape.size() - 1], x.dimensions().back()};
  const int64_t outputs = y->element_count();
  if (outputs == 0) return ffi::Error::Success();
  if (size.terms == 0) {
    std::memset(y->typed_data(), 0, y->size_bytes());
    return ffi::Error::Success();
  }
  const auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const bool serial = outputs * size.terms <= kSerialTerms;
  const int64_t batch = outputs / (size.rows * size.columns);
  // Panels are dealt out first: what is packed then is packed once.
  int64_t wanted = serial ? 1 : divide(kBlocksPerThread * std::max<int64_t>(pool.num_threads(), 1), batch);
  const int64_t panels = divide(size.columns, kWidth), group = divide(panels, std::min(wanted, panels)) * kWidth;
  const int64_t groups = divide(size.columns, group);
  wanted = divide(wanted, groups);
  // Rows of x are read again for each panel: from the second-level cache.
  const int64_t tiles = divide(size.rows, kRows), most = divide(kBlockBytes, std::min(size.terms, kPiece) * kRows);
  const int64_t chunk = std::min(divide(tiles, std::min(wanted, tiles)), most) * kRows;
  const int64_t chunks = divide(size.rows, chunk);
  const auto run = [&](int64_t item) {
    const int64_t member = item / (groups * chunks), row = item / groups % chunks * chunk, column = item % groups * group;
    SumBlock(x.typed_data() + Offset(x.dimensions(), shape, member), w.typed_data() + Offset(w.dimensions(), shape, member),
             y->typed_data() + member * size.rows * size.columns, size, row, std::min(row + chunk, size.rows), column,
             std::min(column + group, size.columns));
  };
  const int64_t count = batch * groups * chunks;
  if (serial) {
    for (int64_t item = 0; item < count; ++item) run(item);
  } else {
    ParallelFor(pool, count, run);
  }
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
    for (Vec& total : row) used = used + Narrow(total)[0];
  }
  return iterations * kRows * kWidth * kStep;
}

}  // extern "C"

XLA_FFI_DEFINE_HANDLER_SYMBOL(AdderFlaxSad, Sad,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bytes>().Arg<Bytes>().Ret<ffi::Buffer<ffi::DataType::S32>>());
