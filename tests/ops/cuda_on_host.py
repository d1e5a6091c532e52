"""The CUDA kernels, compiled for the host: the same source, and what CUDA's own names mean there.

Blocks take turns, and so do the threads of one, each up to the next barrier. Loads are held to the
operands and stores to the results, both to their alignment, and every element of a result has to be
written. What is copied to shared memory arrives as late as it may, when its thread waits for it.
"""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np

from adder_flax.ops._cuda import CudaBackend, Kernel

COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)

_BEFORE = """
#include <cmath>
#include <cstdint>
#include <cstring>
#include <algorithm>
#include <vector>
#include <ucontext.h>
using std::min;
#define __shared__ static
#define __device__
#define __global__
#define __launch_bounds__(threads)
struct Index3 { int x; };
struct alignas(16) float4 { float x, y, z, w; };
static Index3 blockIdx, threadIdx;
static int faults, inputs, arrays;
static const float *begins[16], *ends[16];

template <class T> bool IsInside(const T* place, int first_array, int last_array) {
  const float* begin = reinterpret_cast<const float*>(place);
  const float* end = begin + sizeof(T) / sizeof(float);
  bool inside = false;
  for (int n = first_array; n < last_array; ++n) inside |= begins[n] <= begin && end <= ends[n];
  inside &= reinterpret_cast<std::uintptr_t>(place) % sizeof(T) == 0;
  faults += !inside;
  return inside;
}
struct PendingCopy { float* to; const float* from; int count; };
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  std::vector<PendingCopy> copies;
  bool done;
};
static std::vector<Thread> threads_of_block;
static ucontext_t turns;
static Thread& Current() { return threads_of_block[threadIdx.x]; }
void __syncthreads() { swapcontext(&Current().context, &turns); }
void CopyOnHost(float* to, const float* from, int count, bool there) {
  for (int n = 0; n < count; ++n) if (there && !IsInside(from + n, 0, inputs)) there = false;
  faults += reinterpret_cast<std::uintptr_t>(there ? from : to) % (count * sizeof(float)) != 0;
  faults += reinterpret_cast<std::uintptr_t>(to) % (count * sizeof(float)) != 0;
  for (int n = 0; n < count; ++n) to[n] = NAN;  // until it has arrived
  Current().copies.push_back({to, there ? from : nullptr, count});
}
void WaitForCopiesOnHost() {
  for (const PendingCopy& copy : Current().copies)
    for (int n = 0; n < copy.count; ++n) copy.to[n] = copy.from ? copy.from[n] : 0.0f;
  Current().copies.clear();
}
template <class T> T __ldg(const T* from) { return IsInside(from, 0, inputs) ? *from : T{}; }
template <class T> void __stwb(T* to, T value) {
  if (IsInside(to, inputs, arrays)) *to = value;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float a) { return a > 0 ? min(a, 1.0f) : 0.0f; }
"""

_AFTER = """
static float** given_to_kernel;
static void RunThread() {{
  float** given = given_to_kernel;
  {name}({arguments});
  faults += !Current().copies.empty();
  Current().done = true;
}}

extern "C" int run(int blocks, int threads, int given_inputs, int given_arrays, float** given,
                   const std::int64_t* sizes) {{
  inputs = given_inputs, arrays = given_arrays, faults = 0;
  for (int n = 0; n < arrays; ++n) begins[n] = given[n], ends[n] = given[n] + sizes[n];
  given_to_kernel = given;
  threads_of_block.resize(threads);
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {{
    for (Thread& thread : threads_of_block) {{
      thread.done = false;
      thread.stack.resize(1 << 17);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data();
      thread.context.uc_stack.ss_size = thread.stack.size();
      thread.context.uc_link = &turns;
      makecontext(&thread.context, RunThread, 0);
    }}
    for (int ended = 0; ended < threads;)
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {{
        if (Current().done) continue;
        swapcontext(&turns, &Current().context);
        ended += Current().done;
      }}
  }}
  return faults;
}}
"""
_FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-unknown-pragmas")
_UNWRITTEN = np.uint32(0x7FABCDEF)  # a NaN that no arithmetic gives


class CudaOnHost(CudaBackend):
    """Runs the kernels where they are called."""

    def launch(self, kernel, arrays, results):
        return run_on_host(kernel, arrays, results)


def run_on_host(kernel: Kernel, arrays, results):
    """Returns what a kernel computes of these arrays; results are types."""
    shapes = [result.shape for result in results]
    return jax.pure_callback(functools.partial(_run, kernel, shapes), results, *arrays)


def _run(kernel: Kernel, shapes, *arrays):
    given = [_aligned(np.asarray(array)) for array in arrays]
    results = [_aligned(np.full(shape, _UNWRITTEN)) for shape in shapes]
    arrays = [*given, *results]
    faults = _compiled(kernel, len(arrays)).run(
        kernel.blocks,
        kernel.threads,
        len(given),
        len(arrays),
        (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays]),
        (ctypes.c_int64 * len(arrays))(*[array.size for array in arrays]),
    )
    assert faults == 0, f"{kernel.name}: {faults} loads or stores outside of its arrays, or askew"
    for result in results:
        assert not (result == _UNWRITTEN).any(), f"{kernel.name} leaves elements out"
    return [result.view(np.float32) for result in results]


def _aligned(array):
    """Returns a copy whose first element has the alignment that XLA gives it."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="cuda_on_host_")


@functools.cache
def _compiled(kernel: Kernel, arrays: int) -> ctypes.CDLL:
    arguments = ", ".join(f"given[{n}]" for n in range(arrays))
    source = _BEFORE + kernel.source + _AFTER.format(name=kernel.name, arguments=arguments)
    stem = Path(_folder().name) / hashlib.sha256(source.encode()).hexdigest()[:32]
    path, library = stem.with_suffix(".cc"), stem.with_suffix(".so")
    path.write_text(source)
    command = [COMPILER, *_FLAGS, str(path), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))
