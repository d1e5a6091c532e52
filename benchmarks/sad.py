"""Measures the adder product of bytes against float32 kernels and the bound of its instruction.

    python -m benchmarks.sad

XLA's product, the float32 adder kernel and that of bytes take turns, on shapes of DeiT-Tiny's
layers on 8 images, weights packed ahead of time; a ratio is a median over rounds. The bound is of a
loop of nothing but the instructions of a term, on registers, on all cores. `ADDER_FLAX_CPU=znver3`
and `x86-64` in the environment give the code of AVX2 and of SSE2. On a machine that does anything
else, the numbers are an indication.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from adder_flax import ops, own_cache
from adder_flax.ops import _cpu
from benchmarks import print_row, print_titles
from benchmarks.ops import Bounds, cores
from benchmarks.timing import measure

SHAPES = ((1536, 192, 768), (1576, 192, 576), (1576, 768, 192))  # M, K, N
ROUNDS, SECONDS_PER_SHAPE = 25, 10.0
TITLES = ("M x K x N", "bytes", "of the bound", "float32 adder", "float32 product")
TITLES += ("times the adder", "times the product")


def functions(m: int, k: int, n: int) -> dict[str, functools.partial]:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(m, k)).astype(np.float32), rng.normal(size=(k, n)).astype(np.float32)
    x_bytes, w_bytes = (jnp.asarray(np.clip(40 * a + 128, 0, 255), jnp.uint8) for a in (x, w))
    x, w = jnp.asarray(x), jnp.asarray(w)
    return {
        "bytes": functools.partial(jax.jit(ops.sad_matmul), x_bytes, ops.sad_pack(w_bytes)),
        "adder": functools.partial(jax.jit(ops.adder_matmul), x, w),
        "product": functools.partial(jax.jit(jnp.matmul), x, w),
    }


def main() -> None:
    bounds = Bounds(_cpu.load_library(_cpu.SAD_SOURCE), {"sad": "AdderFlaxBoundSad"})
    print(f"jax {jax.__version__}, {own_cache.processor_name()}, {cores()} cores")
    print(f"{ops.backend_report()}\n")
    print("G terms a second\n")
    print_titles(TITLES)
    for shape in SHAPES:
        bounds.measure()
        timings = measure(functions(*shape), ROUNDS, SECONDS_PER_SHAPE)
        bound, terms = bounds.rates["sad"], float(np.prod(shape))
        rate, adder, product = (terms / timings.median(name) for name in timings.seconds)
        ratios = (f"{timings.ratio(name, 'bytes'):.2f}" for name in ("adder", "product"))
        shares = f"{rate / 1e9:.1f}", f"{rate / bound:.2f} of {bound / 1e9:.1f}"
        floats = f"{adder / 1e9:.1f}", f"{product / 1e9:.1f}"
        print_row([" x ".join(map(str, shape)), *shares, *floats, *ratios])


if __name__ == "__main__":
    main()
