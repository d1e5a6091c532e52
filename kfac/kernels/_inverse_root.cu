// L^-1 of A = L L^T by Gauss's elimination: a block of threads for each matrix, nine of its elements in the registers of
// each thread. Where A has become 0 stands what the identity beside it has become, so that nothing else need be kept.

constexpr int kRows = 96, kSide = 32, kParts = kRows / kSide;

extern "C" __global__ void __launch_bounds__(kSide* kSide)
    kfac_inverse_root(const float* matrices, float* roots) {
  // Row, column and reciprocal of a pivot, and in turn those of the next, which are written while these are read.
  __shared__ float rows[2][kRows], columns[2][kRows], reciprocals[2], scales[kRows];
  const int i = threadIdx.x / kSide, j = threadIdx.x % kSide;
  const float* matrix = matrices + blockIdx.x * kRows * kRows;
  float* root = roots + blockIdx.x * kRows * kRows;

  float mixed[kParts][kParts];
  for (int m = 0; m < kParts; ++m)
    for (int n = 0; n < kParts; ++n)
      mixed[m][n] = __ldg(matrix + (i + m * kSide) * kRows + j + n * kSide);

  // A part by itself, so that registers are indexed by constants.
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll 1
    for (int step = 0; step < kSide; ++step) {
      const int turn = step % 2;
      if (j == step) {
        for (int m = part; m < kParts; ++m) {
          const bool below = m > part || i > step;
          columns[turn][i + m * kSide] = below ? mixed[m][part] : 0.0f;
          if (below) mixed[m][part] = 0.0f;
        }
      }
      if (i == step) {
        for (int n = 0; n < kParts; ++n) rows[turn][j + n * kSide] = mixed[part][n];
        if (j == step) {
          rows[turn][j + part * kSide] = 1.0f;
          reciprocals[turn] = 1 / mixed[part][part];
          scales[i + part * kSide] = 1 / sqrtf(mixed[part][part]);
        }
      }
      __syncthreads();
      for (int m = part; m < kParts; ++m) {
        const float share = reciprocals[turn] * columns[turn][i + m * kSide];
        for (int n = 0; n < kParts; ++n) mixed[m][n] -= share * rows[turn][j + n * kSide];
      }
    }
  }
  for (int m = 0; m < kParts; ++m) {
    for (int n = 0; n < kParts; ++n) {
      const int row = i + m * kSide, column = j + n * kSide;
      const float unit = column < row ? mixed[m][n] : column == row ? 1.0f : 0.0f;
      __stwb(root + row * kRows + column, unit * scales[row]);
    }
  }
}
