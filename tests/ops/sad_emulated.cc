// Sums random bytes of random shapes with the native kernel of bytes and by its formula: a program for a processor that is
// emulated, or for code that this processor can stand in for; and layers and heads, whose numbers need only be near. Ends with
// an error after printing the first difference.

#include "sad_kernels.cc"

#include <random>

#include "emulated.h"

namespace {

bool Near(double got, double expected) { return std::abs(got - expected) < 1e-4 * (1 + std::abs(expected)); }

std::vector<float> Normal(std::mt19937& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& number : x) number = normal(random);
  return x;
}

int Byte(float x, const Grid& grid) {
  return static_cast<int>(std::min(grid.levels, std::max(0.0f, std::nearbyint((x - grid.lowest) * (1 / grid.step)))));
}

// One row of a layer with GELU, and its bytes.
bool LayerIsRight(std::mt19937& random, int64_t n) {
  const auto excess = Normal(random, n), scale = Normal(random, n), bias = Normal(random, n);
  std::vector<int32_t> sums(n);
  for (int32_t& sum : sums) sum = random() % 5000;
  const Layer layer{n, 0.01f, excess.data(), scale.data(), bias.data(), 1e-5f, /*gelu=*/true};
  const Grid grid{-0.2f, 0.01f, 255};
  std::vector<float> y(n);
  std::vector<uint8_t> bytes(n);
  layer.Finish(sums.data(), y.data());
  grid.ToBytes(y.data(), n, bytes.data());
  double mean = 0, variance = 0;
  for (int64_t c = 0; c < n; ++c) mean -= (sums[c] * 0.01f + excess[c]) / n;
  for (int64_t c = 0; c < n; ++c) variance += std::pow(-(sums[c] * 0.01f + excess[c]) - mean, 2) / n;
  for (int64_t c = 0; c < n; ++c) {
    const double x = (-(sums[c] * 0.01f + excess[c]) - mean) / std::sqrt(variance + 1e-5) * scale[c] + bias[c];
    if (!Near(y[c], x * (1 + std::erf(x / std::sqrt(2))) / 2) || bytes[c] != Byte(y[c], grid)) return false;
  }
  return true;
}

// One head of several queries, among others.
bool HeadIsRight(std::mt19937& random, int64_t queries, int64_t keys, int64_t width, int64_t value_width) {
  constexpr int64_t kHeads = 2;
  const auto query = Normal(random, queries * kHeads * width), key = Normal(random, keys * kHeads * width);
  const auto value = Normal(random, keys * kHeads * value_width);
  std::vector<float> y(queries * kHeads * value_width, 99);
  const Grid grid{-1.5f, 0.05f, 63};
  Head(key.data() + width, value.data() + value_width, keys, kHeads, width, value_width, grid)
      .Mix(query.data() + width, queries, 0.7f, y.data() + value_width);
  for (int64_t i = 0; i < queries; ++i) {
    std::vector<double> mixed(value_width, 0);
    double total = 0;
    for (int64_t j = 0; j < keys; ++j) {
      double distance = 0;
      for (int64_t c = 0; c < width; ++c) {
        const float q = query[(2 * i + 1) * width + c], k = key[(2 * j + 1) * width + c];
        distance += 0.05 * std::abs(Byte(q, grid) - Byte(k, grid)) + std::max({0.0, -1.5 - k, k - 1.65});
      }
      const double weight = std::exp(-0.7 * distance);
      total += weight;
      for (int64_t c = 0; c < value_width; ++c) mixed[c] += weight * value[(2 * j + 1) * value_width + c];
    }
    for (int64_t c = 0; c < value_width; ++c) {
      if (!Near(y[(2 * i + 1) * value_width + c], mixed[c] / total) || y[2 * i * value_width + c] != 99) return false;
    }
  }
  return true;
}

}  // namespace

int main(int, char** argv) {
  std::mt19937 random(7);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % limit); };
  const int64_t cases = std::atoll(argv[1]);
  for (int64_t i = 0; i < cases; ++i) {
    if (i % 10 == 0 && !(LayerIsRight(random, 2 + below(90)) &&
                         HeadIsRight(random, 1 + below(30), 1 + below(40), 1 + below(20), 1 + below(40)))) {
      std::printf("case %ld: a layer or a head differs\n", long(i));
      return 1;
    }
    // Edges of tiles and panels; every hundredth has several pieces, whose sums are the largest.
    const bool is_long = i % 100 == 0;
    const int64_t b = 1 + below(3), m = below(is_long ? 8 : 20), n = below(is_long ? 20 : 70);
    const int64_t k = is_long ? 1000 + below(1100) : below(40);
    Array<uint8_t, XLA_FFI_DataType_U8> x({is_long ? 1 : b, m, k}, 0), w({b, n, k}, 255);
    Array<int32_t, XLA_FFI_DataType_S32> y({b, m, n}, -1);
    if (i % 200 != 0) {  // else 0 and 255
      for (uint8_t& byte : x.data) byte = random();
      for (uint8_t& byte : w.data) byte = random();
    }
    Sad(NoPool(), Bytes(&x.buffer), Bytes(&w.buffer), Sums(ffi::Buffer<ffi::DataType::S32>(&y.buffer)));
    for (int64_t at = 0; at < b * m * n; ++at) {
      const int64_t row = at / n, member = row / m;
      int64_t sum = 0;
      for (int64_t term = 0; term < k; ++term) {
        const int64_t x_row = x.dims[0] == 1 ? row % m : row;
        sum += std::abs(int(x.data[x_row * k + term]) - int(w.data[(member * n + at % n) * k + term]));
      }
      if (y.data[at] != sum) {
        std::printf("%ld x %ld x %ld x %ld at %ld: expected %ld, got %d\n", long(b), long(m), long(k), long(n), long(at),
                    long(sum), y.data[at]);
        return 1;
      }
    }
  }
  std::printf("%ld cases agree\n", long(cases));
}
