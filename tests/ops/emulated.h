// What the programs for processors that are emulated share: arrays as XLA hands them over, and no threads.

#include <cstdio>
#include <vector>

namespace {

// So few terms are summed on the calling thread, and the pool is never asked.
ffi::ThreadPool NoPool() {
  alignas(ffi::ThreadPool) static char nothing[sizeof(ffi::ThreadPool)];
  return *reinterpret_cast<ffi::ThreadPool*>(nothing);
}

template <class T, XLA_FFI_DataType kType>
struct Array {
  std::vector<int64_t> dims;
  std::vector<T> data;
  XLA_FFI_Buffer buffer{};

  Array(std::vector<int64_t> shape, T filling = 0) : dims(shape), data(dims[0] * dims[1] * dims[2], filling) {
    buffer.dtype = kType, buffer.data = data.data(), buffer.rank = 3, buffer.dims = dims.data();
  }
  Array(const Array&) = delete;
};

}  // namespace
