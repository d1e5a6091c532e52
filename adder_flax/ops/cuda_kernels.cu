// NVIDIA GPU kernels of adder_flax.ops: sums over pairs of rows and columns that no matrix unit computes.
//
// All of them have one form, out[b, i, j] = sum over c of a term of operands at b, i, j, c, and differ in the term. So
// there is one walk over the pairs, `Reduce`, and a struct for each term. A block computes a tile of one output matrix.
// Each thread owns `Tile::kRows` rows and `Tile::kColumns` columns of it, in runs of four neighbours, and keeps their
// totals in registers over the whole sum: no atomic, and the same bits on every run. The terms come in stages. While a
// block computes with one, which lies in shared memory, the next is copied there without passing through registers, so
// that nobody waits for memory: read through the L1 cache, where each thread asks for its own, the same arithmetic took
// up to 2.5 times as long on an H200.
//
// What Python appends (`_cuda.py`) names the term, the tile, the sizes and the axes of the operands, all of them known
// to the compiler, so that offsets become parts of the instructions that load:
//
//   extern "C" __global__ void __launch_bounds__(128) adder_flax_L1(
//       const float* in0, const float* in1, float* out0) {
//     Reduce<L1, Tile<8, 8, 8, 16>, Sizes<1, 12608, 768, 192, 16>>(
//         {out0}, Operand<kIC, 1>{in0}, Operand<kCJ, 1>{in1});
//   }
//
// NVRTC compiles it, which has no headers. The tests compile it for the host and say what CUDA's own names mean there;
// all loads and stores of arrays are by such names, so that the tests can hold them to the arrays.

// Terms added in one turn of the loop, and length of the runs of neighbouring rows and columns that one thread owns:
// what one 16-byte load brings.
constexpr int kRun = 4;

// Of elements of an array, which may have more than 2^31.
using Index = long long;

// The axes of an operand after the batch. Those with a c are read for each term, the others once, before the first.
enum Axes { kIC, kCI, kCJ, kC, kIJ, kI, kJ, kOne };

__device__ constexpr bool IsSummed(Axes axes) { return axes <= kC; }

// An operand: its axes, and how many nexts of the batch it has; they serve all, over and over.
template <Axes axes, int batch>
struct Operand {
  static constexpr Axes kAxes = axes;
  static constexpr int kBatch = batch;
  const float* array;
};

template <int rows, int columns, int row_threads, int column_threads>
struct Tile {
  static constexpr int kRows = rows, kColumns = columns;  // of a thread
  static constexpr int kRowThreads = row_threads, kColumnThreads = column_threads;
};

// `stage` terms are in shared memory at once.
template <int b, int i, int j, int c, int stage>
struct Sizes {
  static constexpr int kB = b, kI = i, kJ = j, kC = c, kStage = stage;
};

// ---- Instructions ----

// 1/a in one instruction; a denormal result is 0.
__device__ inline float Reciprocal(float a) {
#ifdef __CUDA_ARCH__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
#else
  return 1.0f / a;
#endif
}

// The bits of a total, with what the bytes of two words differ by added.
__device__ inline float AddDistancesOfBytes(float a, float b, float total) {
#ifdef __CUDA_ARCH__
  unsigned sum;
  asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;"
      : "=r"(sum)
      : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(__float_as_uint(total)));
  return __uint_as_float(sum);
#else
  unsigned words[3];
  memcpy(words, &a, 4), memcpy(words + 1, &b, 4), memcpy(words + 2, &total, 4);
  for (int n = 0; n < 32; n += 8) words[2] += abs(int(words[0] >> n & 255) - int(words[1] >> n & 255));
  memcpy(&total, words + 2, 4);
  return total;
#endif
}

// ---- Terms ----
//
// `Begin` gives the first totals, and what the steps hold, from the operands without a c; `Add` adds a term, or
// `kAtOnce` of them, of the operands with one. Both take operands in the order of the call.

struct Plain {
  static constexpr int kTotals = 1, kHeld = 1, kAtOnce = 1;
  static constexpr bool kHasCareful = false;
  __device__ static void Begin(const float*, float* total, float*) { total[0] = 0.0f; }
  __device__ static bool IsStrange(const float*) { return false; }
  __device__ static float Finish(float total) { return total; }
};

// -|x - w| of x, w: FADD d = x, -w and FADD total = total, |d|.
struct L1 : Plain {
  template <bool>
  __device__ static void Add(const float* v, const float*, float* total) {
    total[0] += fabsf(v[0] - v[1]);
  }
  __device__ static float Finish(float total) { return -total; }
};

// |x - w| of four bytes each of x, w: words whose bits are those of a float, which nobody computes with, and so is the total.
struct Sad : Plain {
  template <bool>
  __device__ static void Add(const float* v, const float*, float* total) {
    total[0] = AddDistancesOfBytes(v[0], v[1], total[0]);
  }
};

// Where a rule stands, from 0 for -1 to 1 for +1. Half the reciprocal of the smallest normal number takes any two
// floats that differ to one end; subnormal differences count as almost equal.
template <bool kSign>
__device__ inline float Position(float difference) {
  return kSign ? __fmaf_rn(difference, 0x1p125f, 0.5f) : difference;
}

// g rule(w - x) of g, w, and x with what is told in `_cuda.py`. clip(d) is 2 sat(d/2 + 1/2) - 1, and sat, clipping to
// [0, 1], is free: hardtanh takes FADD.SAT and FFMA; sign takes the difference first, to see the smallest ones.
template <bool kSign>
struct Rule : Plain {
  __device__ static void Begin(const float* v, float* total, float* held) {
    const float x = v[0], centre = v[1], high = v[2], low = v[3], g_sum = v[4], slope = v[5];
    const float scale = kSign ? 1.0f : 0.5f * slope, offset = kSign ? 0.0f : 0.5f;
    held[0] = offset - scale * (x - centre);
    // Saturation turns NaN into 0. The extremes of w reveal one that enters the sum, from w itself or as inf - inf.
    const float highest = scale * (high - centre) + held[0], lowest = scale * (low - centre) + held[0];
    total[0] = highest != highest || lowest != lowest ? highest + lowest : -0.5f * g_sum;
  }
  template <bool>
  __device__ static void Add(const float* v, const float* held, float* total) {
    total[0] = __fmaf_rn(v[0], __saturatef(Position<kSign>(v[1] + held[0])), total[0]);
  }
  // Half of each term, and then twice all: the rule lies in [-1, 1], and what saturates in [0, 1].
  __device__ static float Finish(float total) { return 2.0f * total; }
};

// dx rule(w - x) of x, w as `Rule` has them, and dx. Where any is not finite a second loop tells NaN apart.
template <bool kSign>
struct Pushforward : Plain {
  static constexpr bool kHasCareful = true;
  __device__ static void Begin(const float* v, float* total, float* held) {
    total[0] = -0.5f * v[0];
    held[0] = v[1];
  }
  __device__ static bool IsStrange(const float* held) { return held[0] > 0.0f; }
  template <bool kCareful>
  __device__ static void Add(const float* v, const float*, float* total) {
    const float position = Position<kSign>(v[1] + v[0]);
    const float clipped = kCareful && position != position ? position : __saturatef(position);
    total[0] = __fmaf_rn(v[2], clipped, total[0]);
  }
  __device__ static float Finish(float total) { return 2.0f * total; }
};

// v tanh(q + k) of e^2q, e^2k, -2v and the sum of two v. With d = 1 + e^2(q+k), one reciprocal serves two hidden units:
// v/d + v'/d' = (v d' + v' d) / (d d'). All d are in units of 2^62: products of two then lie where their reciprocal is
// a normal number.
struct Additive : Plain {
  static constexpr int kAtOnce = 2;
  template <bool>
  __device__ static void Add(const float* v, const float*, float* total) {
    const float* const w = v + 4;  // of the other unit
    const float d = __fmaf_rn(v[0], v[1], 0x1p-62f), other = __fmaf_rn(w[0], w[1], 0x1p-62f);
    const float weighted = __fmaf_rn(v[2], other, w[2] * d);
    total[0] += __fmaf_rn(Reciprocal(d * other), weighted, v[3]);
  }
};

// g (1 - tanh^2(q + k)), and g tanh(q + k) if kTotals is 2, of g, e^2q and e^2k held, or the other way round.
template <int totals>
struct AdditivePullback : Plain {
  static constexpr int kTotals = totals;
  __device__ static void Begin(const float* v, float* total, float* held) {
    for (int n = 0; n < totals; ++n) total[n] = 0.0f;
    held[0] = v[0];
  }
  template <bool>
  __device__ static void Add(const float* v, const float* held, float* total) {
    const float hidden = __fmaf_rn(Reciprocal(__fmaf_rn(v[1], held[0], 1.0f)), -2.0f, 1.0f);
    total[0] = __fmaf_rn(v[0], __fmaf_rn(-hidden, hidden, 1.0f), total[0]);
    if constexpr (totals == 2) total[1] = __fmaf_rn(v[0], hidden, total[1]);
  }
};

// ---- The walk ----

// std::conditional.
template <bool first, class A, class B>
struct Conditional {
  using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using Type = B;
};

// Four neighbouring floats of shared memory, in one load.
__device__ inline void LoadRun(const float* from, float* to, int stride = 1) {
  const float4 run = *reinterpret_cast<const float4*>(from);
  to[0] = run.x, to[stride] = run.y, to[2 * stride] = run.z, to[3 * stride] = run.w;
}

// Starts to copy `count` floats to shared memory, or zeros unless they are `there`; `from` is not read then.
template <int count>
__device__ inline void Copy(float* to, const float* from, bool there) {
#ifdef __CUDA_ARCH__
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = there ? count * sizeof(float) : 0;
  if constexpr (count == kRun) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
  }
#else
  CopyOnHost(to, from, count, there);
#endif
}

// Waits for the copies that this thread has started.
__device__ inline void WaitForCopies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#else
  WaitForCopiesOnHost();
#endif
}

// An axis of the output, of which a thread owns runs that lie a run of all `threads` apart. Runs beyond its end are
// moved back: those of columns to the last whole run, since summed operands have columns filled up to whole runs; those
// of rows so that they end with the axis, where neighbours then compute, and store, the same numbers.
template <int length, int owned, int threads, bool filled_up>
struct Axis {
  static constexpr int kRuns = owned / kRun, kBlock = owned * threads, kBlocks = (length + kBlock - 1) / kBlock;
  static constexpr int kPitch = filled_up ? (length + kRun - 1) / kRun * kRun : length;
  static constexpr bool kWholeBlocks = length % kBlock == 0;

  int begin, thread;  // of the block, and of this one's threads

  __device__ Axis(int block, int thread) : begin(block * kBlock), thread(thread) {}

  // A run of this thread's, counted in the block.
  __device__ int Own(int run) const { return thread + run * threads; }
  // The first position of a run of the block.
  __device__ int Run(int run) const {
    const int position = begin + run * kRun;
    return kWholeBlocks ? position : min(position, kPitch < kRun ? 0 : kPitch - kRun);
  }
  // The place of an element of a run beside the first; an axis shorter than a run repeats its last one.
  __device__ static constexpr int Beside(int n) { return n < kPitch ? n : kPitch - 1; }
};

// Where a thread is.
template <class Tile, class Size>
struct Place {
  using Rows = Axis<Size::kI, Tile::kRows, Tile::kRowThreads, false>;
  using Columns = Axis<Size::kJ, Tile::kColumns, Tile::kColumnThreads, true>;
  static constexpr int kBlocks = Rows::kBlocks * Columns::kBlocks;

  int block = blockIdx.x % kBlocks, thread = threadIdx.x, batch = blockIdx.x / kBlocks;
  Rows rows{block / Columns::kBlocks, thread / Tile::kColumnThreads};
  Columns columns{block % Columns::kBlocks, thread % Tile::kColumnThreads};
};

// What a thread has of one operand: of a summed one for a run of terms, of another one for all of its outputs.
template <class Tile, class Size, class Op>
struct Values {
  using Where = Place<Tile, Size>;
  using Rows = typename Where::Rows;
  using Columns = typename Where::Columns;
  static constexpr Axes kAxes = Op::kAxes;
  static constexpr bool kByRow = kAxes == kIC || kAxes == kCI || kAxes == kIJ || kAxes == kI;
  static constexpr bool kByColumn = kAxes == kCJ || kAxes == kIJ || kAxes == kJ;
  static constexpr Index kMember = Index(kByRow ? Size::kI : 1) * (IsSummed(kAxes) ? Size::kC : 1) *
                                   (kAxes == kCJ ? Columns::kPitch : kByColumn ? Size::kJ : 1);
  using Own = typename Conditional<kAxes == kIC || kAxes == kCI, Rows, Columns>::Type;
  static constexpr int kRuns = kAxes == kC ? 1 : Own::kRuns;
  static constexpr int kSize = (kByRow ? Tile::kRows : 1) * (kByColumn ? Tile::kColumns : 1);

  // A stage of a summed operand in shared memory, for the whole block. Neighbours in memory are terms (c last), which
  // then are neighbours in the stage too, or else rows or columns. In the first case a stage has the first rows of all
  // runs, then the second ones, …, and what fills up each row: so that threads side by side read different banks.
  static constexpr int kStage = Size::kStage;
  static constexpr bool kByTerm = kAxes == kIC || kAxes == kC;
  static constexpr int kWidth = kAxes == kC ? 1 : Own::kBlock, kStageRuns = kWidth / kRun;
  static constexpr int kLine = kAxes == kC ? kStage : kByTerm ? kStage + kRun : kWidth;
  static constexpr int kFloats = !IsSummed(kAxes) ? 0 : (kByTerm ? kWidth : kStage) * kLine;
  // What one copy brings, and how many of those make a line of neighbours.
  static constexpr int kPiece = (kByTerm ? Size::kC : Own::kPitch) % kRun == 0 ? kRun : 1;
  static constexpr int kPieces = (kByTerm ? kStage : kWidth) / kPiece;
  static constexpr int kCopies = !IsSummed(kAxes) ? 0 : kPieces * (kByTerm ? kWidth : kStage);
  static constexpr int kThreads = Tile::kRowThreads * Tile::kColumnThreads;
  static constexpr int kCopiesPerThread = (kCopies + kThreads - 1) / kThreads;

  const float* next;  // of the next stage, what this thread's first copy brings
  int offsets[kCopiesPerThread + 1];  // of the others from that one
  const Own& own;
  float values[IsSummed(kAxes) ? kRun : 1][kSize];

  __device__ Values(Op operand, const Where& place) : own(OwnOf(place)) {
    const float* const member = operand.array + Index(place.batch % Op::kBatch) * kMember;
    if constexpr (IsSummed(kAxes)) {
      next = member + (kAxes == kC ? 0 : Index(own.begin) * (kByTerm ? Size::kC : 1)) + Offset(0);
#pragma unroll
      for (int n = 0; n < kCopiesPerThread; ++n) offsets[n] = int(Offset(n) - Offset(0));
    } else {
      LoadFixed(member, place);
    }
  }

  __device__ static const Own& OwnOf(const Where& place) {
    if constexpr (kAxes == kIC || kAxes == kCI) {
      return place.rows;
    } else {
      return place.columns;
    }
  }

  // Reads all of an operand that is not summed.
  __device__ void LoadFixed(const float* member, const Where& place) {
    if constexpr (!kByRow && !kByColumn) values[0][0] = __ldg(member);
#pragma unroll
    for (int r = 0; r < (kByRow ? Tile::kRows : 1); ++r) {
      const int row = kByRow ? place.rows.Run(place.rows.Own(r / kRun)) + Rows::Beside(r % kRun) : 0;
      if constexpr (!kByColumn) values[0][r] = __ldg(member + row);
#pragma unroll
      for (int q = 0; q < (kByColumn ? Tile::kColumns : 0); ++q) {
        const int column = min(place.columns.Run(place.columns.Own(q / kRun)) + q % kRun, Size::kJ - 1);
        values[0][r * Tile::kColumns + q] = __ldg(member + Index(row) * Size::kJ + column);
      }
    }
  }

  // The line of a thread's copy, and the place in it.
  __device__ static int LineOf(int copy) {
    return kThreads % kPieces == 0 ? threadIdx.x / kPieces + copy * (kThreads / kPieces)
                                   : (threadIdx.x + copy * kThreads) / kPieces;
  }
  __device__ static int PlaceOf(int copy) {
    return (kThreads % kPieces == 0 ? threadIdx.x : threadIdx.x + copy * kThreads) % kPieces * kPiece;
  }

  // Where in memory a copy begins, from the block's first row or column on.
  __device__ Index Offset(int copy) const {
    if constexpr (kAxes == kC) return PlaceOf(copy);
    const int of_block = kByTerm ? LineOf(copy) : PlaceOf(copy);
    const int place = own.Run(of_block / kRun) - own.begin + Own::Beside(of_block % kRun);
    return kByTerm ? Index(place) * Size::kC + PlaceOf(copy) : Index(LineOf(copy)) * Own::kPitch + place;
  }

  // Starts to copy the next stage; `left` terms are left from its beginning on.
  __device__ void Fetch(float* stage, int left) {
#pragma unroll
    for (int n = 0; n < kCopiesPerThread; ++n) {
      if (kCopies % kThreads != 0 && threadIdx.x + n * kThreads >= kCopies) break;
      const int line = LineOf(n), term = kByTerm ? PlaceOf(n) : line;
      const int stage_line = kByTerm && kAxes != kC ? line % kRun * kStageRuns + line / kRun : line;
      Copy<kPiece>(stage + stage_line * kLine + PlaceOf(n), next + offsets[n],
                   Size::kC % kStage == 0 || term < left);
    }
    next += Index(kStage) * (kByTerm ? 1 : Own::kPitch);
#ifdef __CUDA_ARCH__
    // Otherwise the compiler, which sees how all addresses follow from each other, keeps one for each copy.
    asm("" : "+l"(next));
#endif
  }

  // Reads the terms of a run of a stage.
  __device__ void Load(const float* stage, int run) {
    if constexpr (kAxes == kC) {
      LoadRun(stage + run * kRun, &values[0][0], kSize);
    } else if constexpr (kByTerm) {
#pragma unroll
      for (int r = 0; r < kSize; ++r) {
        const int line = r % kRun * kStageRuns + own.Own(r / kRun);
        LoadRun(stage + line * kLine + run * kRun, &values[0][r], kSize);
      }
    } else if constexpr (IsSummed(kAxes)) {
#pragma unroll
      for (int n = 0; n < kRun; ++n) {
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
          LoadRun(stage + (run * kRun + n) * kLine + own.Own(r) * kRun, &values[n][r * kRun]);
        }
      }
    }
  }

  __device__ float At(int term, int row, int column) const {
    return values[term][(kByRow ? row * (kByColumn ? Tile::kColumns : 1) : 0) + (kByColumn ? column : 0)];
  }
};

// Appends what one operand gives to one output, if it is of the kind asked for.
template <bool kSummed, class Values>
__device__ inline void Append(float*& end, const Values& values, int term, int row, int column) {
  if constexpr (IsSummed(Values::kAxes) == kSummed) *end++ = values.At(term, row, column);
}

// What a thread keeps over the sum, for each of its outputs.
template <class Step, class Tile>
struct Totals {
  float totals[Tile::kRows][Tile::kColumns][Step::kTotals], held[Tile::kRows][Tile::kColumns][Step::kHeld];

  template <class... Values>
  __device__ void Begin(const Values&... values) {
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
      for (int q = 0; q < Tile::kColumns; ++q) {
        float fixed[sizeof...(Values)], *end = fixed;
        (Append<false>(end, values, 0, r, q), ...);
        Step::Begin(fixed, totals[r][q], held[r][q]);
      }
    }
  }

  // Adds a run of terms that have been read.
  template <bool kCareful, class... Values>
  __device__ void Add(const Values&... values) {
#pragma unroll
    for (int n = 0; n < kRun; n += Step::kAtOnce) {
#pragma unroll
      for (int r = 0; r < Tile::kRows; ++r) {
#pragma unroll
        for (int q = 0; q < Tile::kColumns; ++q) {
          float terms[Step::kAtOnce * sizeof...(Values)], *end = terms;
#pragma unroll
          for (int m = 0; m < Step::kAtOnce; ++m) (Append<true>(end, values, n + m, r, q), ...);
          Step::template Add<kCareful>(terms, held[r][q], totals[r][q]);
        }
      }
    }
  }
};

// Writes four neighbouring columns from `first` on, as far as there are so many.
template <int columns>
__device__ inline void StoreRun(float* row, int first, const float* run) {
  if constexpr (columns % kRun == 0) {
    __stwb(reinterpret_cast<float4*>(row + first), float4{run[0], run[1], run[2], run[3]});
  } else {
#pragma unroll
    for (int n = 0; n < kRun; ++n) {
      if (first + n < columns) __stwb(row + first + n, run[n]);
    }
  }
}

// Adds all terms of the sum, by the one or the other of a step's ways. Those of a last stage that are beyond the end
// are zero in all operands, and no step adds anything for them.
template <bool kCareful, class Size, class Step, class Tile, class... Values>
__device__ inline void AddAll(Totals<Step, Tile>& sums, float* shared, Values&... values) {
  constexpr int kStage = Size::kStage, kFloats = (Values::kFloats + ...);
  const auto fetch = [&](int first_term) {
    float* stage = shared + (first_term / kStage) % 2 * kFloats;
    ((values.Fetch(stage, Size::kC - first_term), stage += Values::kFloats), ...);
  };
  fetch(0);
#pragma unroll 1
  for (int first = 0; first < Size::kC; first += kStage) {
    WaitForCopies();
    // From here on all can read this stage, and nobody reads the one before.
    __syncthreads();
    if (first + kStage < Size::kC) fetch(first + kStage);
#pragma unroll 1
    for (int run = 0; run < kStage / kRun; ++run) {
      const float* stage = shared + (first / kStage) % 2 * kFloats;
      ((values.Load(stage, run), stage += Values::kFloats), ...);
      sums.template Add<kCareful>(values...);
    }
  }
}

template <class Step, class Tile, class Size, class... Values>
__device__ inline void ReduceTile(const Place<Tile, Size>& place, float* const (&out)[Step::kTotals],
                                  Values... values) {
  __shared__ float4 stages[2 * (Values::kFloats + ...) / kRun];
  float* const shared = &stages[0].x;
  Totals<Step, Tile> sums;
  sums.Begin(values...);
  if (Step::kHasCareful && Step::IsStrange(sums.held[0][0])) {
    AddAll<Step::kHasCareful, Size>(sums, shared, values...);
  } else {
    AddAll<false, Size>(sums, shared, values...);
  }
#pragma unroll
  for (int n = 0; n < Step::kTotals; ++n) {
    float* const member = out[n] + Index(place.batch) * Size::kI * Size::kJ;
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      const Index row = place.rows.Run(place.rows.Own(r / kRun)) + Place<Tile, Size>::Rows::Beside(r % kRun);
#pragma unroll
      for (int q = 0; q < Tile::kColumns; q += kRun) {
        float run[kRun];
#pragma unroll
        for (int m = 0; m < kRun; ++m) run[m] = Step::Finish(sums.totals[r][q + m][n]);
        StoreRun<Size::kJ>(member + row * Size::kJ, place.columns.Run(place.columns.Own(q / kRun)), run);
      }
    }
  }
}

template <class Step, class Tile, class Size, class... Operands>
__device__ inline void Reduce(float* const (&out)[Step::kTotals], Operands... operands) {
  const Place<Tile, Size> place;
  ReduceTile<Step>(place, out, Values<Tile, Size, Operands>(operands, place)...);
}
