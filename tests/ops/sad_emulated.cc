// Sums random bytes of random shapes with the native kernel of bytes and by its formula: a program for a processor that is
// emulated, or for code that this processor can stand in for. Ends with an error after printing the first difference.

#include "sad_kernels.cc"

#include <cstdio>
#include <random>
#include <vector>

namespace {

// So few terms are summed on the calling thread, and the pool is never asked.
ffi::ThreadPool NoPool() {
  alignas(ffi::ThreadPool) static char nothing[sizeof(ffi::ThreadPool)];
  return *reinterpret_cast<ffi::ThreadPool*>(nothing);
}

template <class T>
struct Array {
  std::vector<int64_t> dims;
  std::vector<T> data;
  XLA_FFI_Buffer buffer{};

  Array(std::vector<int64_t> shape, XLA_FFI_DataType dtype, T filling) : dims(shape) {
    data.assign(dims[0] * dims[1] * dims[2], filling);
    buffer.dtype = dtype, buffer.data = data.data(), buffer.rank = 3, buffer.dims = dims.data();
  }
  Array(const Array&) = delete;
};

}  // namespace

int main(int, char** argv) {
  std::mt19937 random(7);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(random() % limit); };
  const int64_t cases = std::atoll(argv[1]);
  for (int64_t i = 0; i < cases; ++i) {
    // Edges of tiles and panels; every hundredth has several pieces, whose sums are the largest.
    const bool is_long = i % 100 == 0;
    const int64_t b = 1 + below(3), m = below(is_long ? 8 : 20), n = below(is_long ? 20 : 70);
    const int64_t k = is_long ? 1000 + below(1100) : below(40);
    Array<uint8_t> x({is_long ? 1 : b, m, k}, XLA_FFI_DataType_U8, 0), w({b, n, k}, XLA_FFI_DataType_U8, 255);
    Array<int32_t> y({b, m, n}, XLA_FFI_DataType_S32, -1);
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
