// Runs the native kernels on small matrices and compares them with their formulas in double precision: a program for a
// processor that is emulated, where there is no Python. Ends with an error after printing the first difference.

#include "cpu_kernels.cc"

#include "emulated.h"

namespace {

constexpr int kM = 13, kK = 70, kN = 37;

struct Operand : Array<float, XLA_FFI_DataType_F32> {
  Operand(int64_t rows, int64_t cols, double seed = 0) : Array({1, rows, cols}) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(3 * std::sin(seed * (i + 1)));
  }

  operator ffi::AnyBuffer() const { return ffi::AnyBuffer(&buffer); }
  ffi::Result<ffi::AnyBuffer> Result() const { return ffi::AnyBuffer(&buffer); }
  float& At(int64_t row, int64_t col) { return data[row * dims[2] + col]; }
};

int compared = 0;

// Compares each element with `formula(row, col)`.
template <class F>
void Compare(const char* kernel, Operand& result, F&& formula) {
  for (int64_t row = 0; row < result.dims[1]; ++row) {
    for (int64_t col = 0; col < result.dims[2]; ++col) {
      const double got = result.At(row, col), expected = formula(row, col);
      if (got == expected || (std::isnan(got) && std::isnan(expected))) continue;
      if (std::fabs(got - expected) <= 2e-5 * (1 + std::fabs(expected))) continue;
      std::printf("%s at (%ld, %ld): expected %.9g, got %.9g\n", kernel, long(row), long(col), expected, got);
      std::exit(1);
    }
  }
  ++compared;
}

double Rule(double slope, double difference) {
  if (slope == 0) return difference > 0 ? 1 : (difference < 0 ? -1 : difference);
  return difference * slope > 1 ? 1 : (difference * slope < -1 ? -1 : difference * slope);
}

template <class F>
double SumOver(int count, F&& term) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += term(i);
  return sum;
}

void TestSums(bool with_nan) {
  Operand x(kM, kK, 0.7), w(kK, kN, 1.3), g(kM, kN, 0.31), y(kM, kN), dx(kM, kK), dy(kM, kN), tangent(kM, kK, 0.17);
  if (with_nan) x.At(2, 3) = NAN, x.At(4, 5) = INFINITY, w.At(6, 7) = -INFINITY;
  L1Forward(NoPool(), x, w, y.Result(), /*w_is_nk=*/false);
  Compare("forward", y, [&](int m, int n) {
    return -SumOver(kK, [&](int k) { return std::fabs(double{x.At(m, k)} - w.At(k, n)); });
  });
  for (double slope : {0.0, 1.0, 4.0}) {
    L1Pullback(NoPool(), x, w, g, dx.Result(), false, /*other_transposed=*/true, false, slope);
    Compare("pullback", dx, [&](int m, int k) {
      return SumOver(kN, [&](int n) { return g.At(m, n) * Rule(slope, double{w.At(k, n)} - x.At(m, k)); });
    });
    L1Pushforward(NoPool(), x, w, tangent, dy.Result(), /*w_is_nk=*/false, slope);
    Compare("pushforward", dy, [&](int m, int n) {
      return SumOver(kK, [&](int k) { return tangent.At(m, k) * Rule(slope, double{w.At(k, n)} - x.At(m, k)); });
    });
  }
}

void TestFull() {
  Operand x(kM, kK, 0.7), w(kK, kN, 1.3), g(kM, kN, 0.31), dx(kM, kK);
  FullPullback(NoPool(), x, w, g, dx.Result(), false, /*other_transposed=*/true, false);
  Compare("full pullback", dx, [&](int m, int k) {
    return SumOver(kN, [&](int n) { return double{g.At(m, n)} * (double{w.At(k, n)} - x.At(m, k)); });
  });
}

void TestScores() {
  Operand query(kM, kK, 0.7), key(kN, kK, 1.3), g(kM, kN, 0.31), v(1, kK, 0.11), s(kM, kN), d_query(kM, kK), d_key(kN, kK);
  AdditiveForward(NoPool(), query, key, v, s.Result());
  Compare("additive", s, [&](int i, int j) {
    return SumOver(kK, [&](int k) { return v.At(0, k) * std::tanh(double{query.At(i, k)} + key.At(j, k)); });
  });
  L1JointPullback(NoPool(), query, key, g, d_query.Result(), d_key.Result(), /*key_transposed=*/false, 1);
  auto slope = [&](int i, int j, int k) { return g.At(i, j) * Rule(1, double{key.At(j, k)} - query.At(i, k)); };
  Compare("joint, queries", d_query, [&](int i, int k) { return SumOver(kN, [&](int j) { return slope(i, j, k); }); });
  Compare("joint, keys", d_key, [&](int j, int k) { return -SumOver(kM, [&](int i) { return slope(i, j, k); }); });
}

}  // namespace

int main() {
  TestSums(/*with_nan=*/false);
  TestSums(/*with_nan=*/true);
  TestFull();
  TestScores();
  std::printf("%d results agree\n", compared);
}
