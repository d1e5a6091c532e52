// NVIDIA GPU kernels of adder_flax.ops: sums over pairs of rows and columns that no matrix unit computes.
//
// All of them have one form, out[b, i, j] = sum over c of a term of operands at b, i, j, c, and differ in the term. So
// there is one walk over the pairs, `Reduce`, and a struct for each term. A block computes a tile of one output matrix.
// Each thread owns `Tile::kRows` rows and `Tile::kColumns` columns of it, in runs of four neighbours, and keeps their
// totals in registers over the whole sum: no shared memory, no barrier, no atomic, and the same bits on every run.
// Operands are read in 16-byte loads through the L1 cache, which holds the few rows and columns that a multiprocessor
// works on.
//
// What Python appends (`_cuda.py`) names the term, the tile, the sizes and the axes of the operands, all of them known
// to the compiler, so that offsets become parts of the instructions that load:
//
//   extern "C" __global__ void __launch_bounds__(128) adder_flax_L1(
//       const float* in0, const float* in1, float* out0) {
//     Reduce<L1, Tile<8, 8, 8, 16>, Sizes<1, 12608, 768, 192>>(
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

template <int b, int i, int j, int c>
struct Sizes {
  static constexpr int kB = b, kI = i, kJ = j, kC = c;
};

// ---------------------------------------------------------------------------------------------------------------------
// Instructions
// ---------------------------------------------------------------------------------------------------------------------

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

// ---------------------------------------------------------------------------------------------------------------------
// Terms
// ---------------------------------------------------------------------------------------------------------------------
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

// ---------------------------------------------------------------------------------------------------------------------
// The walk
// ---------------------------------------------------------------------------------------------------------------------

// std::conditional.
template <bool first, class A, class B>
struct Conditional {
  using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using Type = B;
};

// Four neighbouring floats, in one load where they are `aligned`.
template <bool aligned>
__device__ inline void LoadRun(const float* from, float* to, int stride = 1) {
  if constexpr (aligned) {
    const float4 run = __ldg(reinterpret_cast<const float4*>(from));
    to[0] = run.x, to[stride] = run.y, to[2 * stride] = run.z, to[3 * stride] = run.w;
  } else {
#pragma unroll
    for (int n = 0; n < kRun; ++n) to[n * stride] = __ldg(from + n);
  }
}

// An axis of the output, of which a thread owns runs that lie a run of all `threads` apart. Runs beyond its end are
// moved back: those of columns to the last whole run, since summed operands have columns filled up to whole runs; those
// of rows so that they end with the axis, where neighbours then compute, and store, the same numbers.
template <int length, int owned, int threads, bool filled_up>
struct Axis {
  static constexpr int kRuns = owned / kRun, kBlock = owned * threads, kBlocks = (length + kBlock - 1) / kBlock;
  static constexpr int kPitch = filled_up ? (length + kRun - 1) / kRun * kRun : length;
  static constexpr bool kWholeBlocks = length % kBlock == 0;
  static constexpr int kBetween = threads * kRun;  // the first elements of two runs

  int first;

  __device__ Axis(int block, int thread) : first(block * kBlock + thread * kRun) {}

  // The first position of a run.
  __device__ int Run(int run) const {
    const int position = first + run * kBetween;
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
  static constexpr bool kWholeTerms = Size::kC % kRun == 0;
  static constexpr Index kMember = Index(kByRow ? Size::kI : 1) * (IsSummed(kAxes) ? Size::kC : 1) *
                                   (kAxes == kCJ ? Columns::kPitch : kByColumn ? Size::kJ : 1);
  using Own = typename Conditional<kAxes == kIC || kAxes == kCI, Rows, Columns>::Type;
  static constexpr int kRuns = kAxes == kC ? 1 : Own::kRuns;
  static constexpr Index kStride = kAxes == kIC ? Size::kC : 1;  // of neighbours in a run
  // One address serves all runs if they lie where they should.
  static constexpr int kAddresses = Own::kWholeBlocks ? 1 : kRuns;
  static constexpr int kSize = (kByRow ? Tile::kRows : 1) * (kByColumn ? Tile::kColumns : 1);

  const float* next[kAddresses];  // of the next terms
  float values[IsSummed(kAxes) ? kRun : 1][kSize];

  __device__ Values(Op operand, const Where& place) {
    const float* const member = operand.array + Index(place.batch % Op::kBatch) * kMember;
#pragma unroll
    for (int run = 0; run < kAddresses; ++run) {
      const Index first = kAxes == kC ? 0 : kByRow ? place.rows.Run(run) : place.columns.Run(run);
      next[run] = member + first * kStride;
    }
    if constexpr (!IsSummed(kAxes)) LoadFixed(member, place);
  }

  // Reads all of an operand that is not summed.
  __device__ void LoadFixed(const float* member, const Where& place) {
    if constexpr (!kByRow && !kByColumn) values[0][0] = __ldg(member);
#pragma unroll
    for (int r = 0; r < (kByRow ? Tile::kRows : 1); ++r) {
      const int row = kByRow ? place.rows.Run(r / kRun) + Rows::Beside(r % kRun) : 0;
      if constexpr (!kByColumn) values[0][r] = __ldg(member + row);
#pragma unroll
      for (int q = 0; q < (kByColumn ? Tile::kColumns : 0); ++q) {
        const int column = min(place.columns.Run(q / kRun) + q % kRun, Size::kJ - 1);
        values[0][r * Tile::kColumns + q] = __ldg(member + Index(row) * Size::kJ + column);
      }
    }
  }

  __device__ const float* Next(int run) const {
    return kAddresses == 1 ? next[0] + run * Own::kBetween * kStride : next[run];
  }

  // Reads the next `count` terms of an operand that is summed.
  template <int count>
  __device__ void Load() {
    if constexpr (kAxes == kC || kAxes == kIC) {
#pragma unroll
      for (int r = 0; r < kSize; ++r) {
        const float* const from = Next(r / kRun) + Rows::Beside(r % kRun) * kStride;
        if constexpr (count == kRun) LoadRun<kWholeTerms>(from, &values[0][r], kSize);
#pragma unroll
        for (int n = 0; n < count % kRun; ++n) values[n][r] = __ldg(from + n);
      }
      Advance(count);
    } else if constexpr (kAxes == kCI || kAxes == kCJ) {
#pragma unroll
      for (int n = 0; n < count; ++n) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
          const float* const from = Next(run) + Index(n) * Own::kPitch;
          if constexpr (Own::kPitch % kRun == 0) {
            LoadRun<true>(from, &values[n][run * kRun]);
          } else {
#pragma unroll
            for (int m = 0; m < kRun; ++m) values[n][run * kRun + m] = __ldg(from + Own::Beside(m));
          }
        }
      }
      Advance(Index(count) * Own::kPitch);
    }
  }

  __device__ void Advance(Index by) {
#pragma unroll
    for (int run = 0; run < kAddresses; ++run) {
      next[run] += by;
#ifdef __CUDA_ARCH__
      // Otherwise the compiler, which sees how all addresses follow from each other, keeps one for each load.
      asm("" : "+l"(next[run]));
#endif
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

  // Adds `count` terms that have been read.
  template <bool kCareful, int count, class... Values>
  __device__ void Add(const Values&... values) {
#pragma unroll
    for (int n = 0; n < count; n += Step::kAtOnce) {
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

// Adds all terms of the sum, by the one or the other of a step's ways.
template <bool kCareful, class Size, class Step, class Tile, class... Values>
__device__ inline void AddAll(Totals<Step, Tile>& sums, Values&... values) {
  constexpr int kRest = Size::kC % kRun, kWhole = Size::kC - kRest;
#pragma unroll 1
  for (int c = 0; c < kWhole; c += kRun) {
    (values.template Load<kRun>(), ...);
    sums.template Add<kCareful, kRun>(values...);
  }
  if constexpr (kRest > 0) {
    (values.template Load<kRest>(), ...);
    sums.template Add<kCareful, kRest>(values...);
  }
}

template <class Step, class Tile, class Size, class... Values>
__device__ inline void ReduceTile(const Place<Tile, Size>& place, float* const (&out)[Step::kTotals],
                                  Values... values) {
  Totals<Step, Tile> sums;
  sums.Begin(values...);
  if (Step::kHasCareful && Step::IsStrange(sums.held[0][0])) {
    AddAll<Step::kHasCareful, Size>(sums, values...);
  } else {
    AddAll<false, Size>(sums, values...);
  }
#pragma unroll
  for (int n = 0; n < Step::kTotals; ++n) {
    float* const member = out[n] + Index(place.batch) * Size::kI * Size::kJ;
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      const Index row = place.rows.Run(r / kRun) + Place<Tile, Size>::Rows::Beside(r % kRun);
#pragma unroll
      for (int q = 0; q < Tile::kColumns; q += kRun) {
        float run[kRun];
#pragma unroll
        for (int m = 0; m < kRun; ++m) run[m] = Step::Finish(sums.totals[r][q + m][n]);
        StoreRun<Size::kJ>(member + row * Size::kJ, place.columns.Run(q / kRun), run);
      }
    }
  }
}

template <class Step, class Tile, class Size, class... Operands>
__device__ inline void Reduce(float* const (&out)[Step::kTotals], Operands... operands) {
  const Place<Tile, Size> place;
  ReduceTile<Step>(place, out, Values<Tile, Size, Operands>(operands, place)...);
}
