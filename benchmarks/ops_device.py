"""Measures the kernels on an accelerator: terms a second, their share of the bound, `torch.cdist`,
and training.

    python -m benchmarks.ops_device  # on the default device
    python -m benchmarks.ops_device --divide=64  # 64 times fewer rows, for a try elsewhere

Large square problems, as published for pairwise L1 distances on GPUs (NVIDIA cuVS), and layers of
DeiT. The bound of an NVIDIA GPU of compute capability 9 is 64 terms a clock and multiprocessor: two
instructions a term, 128 a clock. Its clock is taken from --clock_ghz, because JAX does not tell it.
"""

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from adder_flax import ops, training
from adder_flax.experiments import common
from adder_flax.training import sharding
from benchmarks.ops import HEAD_DIM, LAYERS, WIDTHS, Table, compile_with
from benchmarks.timing import measure

SQUARE = ((4096, 64), (4096, 256), (8192, 64), (8192, 256))  # rows and columns, width
IMAGES = 128  # of 197 tokens, in the layers
ROUNDS, CALLS, SECONDS_PER_CASE = 7, 10, 10.0
TERMS_PER_CLOCK_AND_CORE = 64


def bound(clock_ghz: float) -> float | None:
    """Returns the terms a second that the default device can do at most, or None where it is not an
    NVIDIA GPU."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return None
    return TERMS_PER_CLOCK_AND_CORE * device.core_count * clock_ghz * 1e9


def repeated(backend: str | None, function: Callable, *operands) -> Callable:
    """Returns a function that runs `function` several times without waiting in between,
    compiled."""
    compiled = compile_with(backend, function, *operands)

    def run():
        for _ in range(CALLS):
            result = compiled(*operands)
        return result

    return run


def torch_cdist(x: jax.Array, w: jax.Array) -> Callable | None:
    """Returns the same distances by PyTorch on its GPU, or None where it has none."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    rows, columns = (torch.from_dlpack(a) for a in (x, w.T.copy()))

    def run():
        for _ in range(CALLS):
            torch.cdist(rows, columns, p=1)
        torch.cuda.synchronize()

    return run


def products_table() -> Table:
    return Table(
        *(
            ("product", 16),
            ("M x K x N", 17),
            ("backend", 10),
            ("fwd T/s", 7),
            ("bound", 5),
            ("/GEMM", 5),
            ("torch", 5),
        ),
        *(("dx T/s", 6), ("dx bound", 8), ("sign dx T/s", 11)),
    )


def bench_product(
    table: Table, name: str, shape: tuple[int, int, int], limit: float | None
) -> None:
    """Adds one row for each backend that runs on this device."""
    m, k, n = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = (
        jax.random.normal(key, size)
        for key, size in zip(keys, ((m, k), (k, n), (m, n)), strict=True)
    )

    def pullback(rule):
        return lambda x, w, g: jax.vjp(lambda x: ops.adder_matmul(x, w, x_gradient=rule), x)[1](g)

    backends = [
        backend
        for backend in ops.available_backends()
        if backend not in ("reference", "cpu_native")
    ]
    functions = {"gemm": repeated(None, functools.partial(jnp.matmul, precision="highest"), x, w)}
    for backend in backends:
        functions[f"forward {backend}"] = repeated(backend, ops.adder_matmul, x, w)
        functions[f"hardtanh {backend}"] = repeated(backend, pullback("hardtanh"), x, w, g)
        functions[f"sign {backend}"] = repeated(backend, pullback("sign"), x, w, g)
    if (peer := torch_cdist(x, w)) is not None:
        functions["torch"] = peer
    timings = measure(functions, ROUNDS, SECONDS_PER_CASE)
    terms = m * k * n
    for backend in backends:
        forward, dx, sign = (
            timings.median(f"{kind} {backend}") / CALLS for kind in ("forward", "hardtanh", "sign")
        )
        table.add(
            name,
            f"{m}x{k}x{n}",
            backend,
            terms / forward / 1e12,
            limit and terms / forward / limit,
            timings.ratio(f"forward {backend}", "gemm"),
            timings.ratio("torch", f"forward {backend}"),
            terms / dx / 1e12,
            limit and terms / dx / limit,
            terms / sign / 1e12,
        )


def images_per_second(mechanism: str, batch_size: int, steps: int = 20) -> float:
    """Trains DeiT-Tiny on random images of 224x224 pixels, 197 tokens each."""
    config = common.deit(mechanism, "tiny", "fake")
    config.batch_size, config.data.image_size, config.model.patch_size = batch_size, 224, 16
    run = training.build_run(config)
    image = {
        "image": jnp.zeros((batch_size, 224, 224, 3), jnp.uint8),
        "label": jnp.zeros(batch_size, jnp.int32),
    }
    with jax.set_mesh(run.mesh):
        batch = jax.device_put(image, sharding.batch_sharding(run.mesh))
        state, _ = run.train_step(run.init(), batch, run.hyper)
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(steps):
            state, _ = run.train_step(state, batch, run.hyper)
        jax.block_until_ready(state)
    return steps * batch_size / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--clock_ghz",
        type=float,
        default=1.98,
        help="highest clock of the GPU; an H200's by default",
    )
    parser.add_argument(
        "--divide", type=int, default=1, help="divide the number of rows, and of images, by this"
    )
    arguments = parser.parse_args()
    divide, limit = arguments.divide, bound(arguments.clock_ghz)
    print(ops.backend_report())
    if limit is not None:
        print(f"bound, forward and hardtanh: {limit / 1e12:.1f} T terms/s")

    table = products_table()
    table.print_titles()
    for side, width in SQUARE:
        bench_product(table, "square", (side // divide, width, side // divide), limit)
    for model, width in WIDTHS.items():
        for layer, (inputs, outputs) in LAYERS.items():
            bench_product(
                table,
                f"{model} {layer}",
                (IMAGES * 197 // divide, inputs * width, outputs * width),
                limit,
            )
    bench_product(table, "scores of a head", (4096 // divide, HEAD_DIM, 4096 // divide), limit)

    print("\nDeiT-Tiny, training on 224x224 pixels, images/s")
    for mechanism in common.MECHANISMS:
        print(
            f"{mechanism:15} {images_per_second(mechanism, max(256 // divide, 2)):8.1f}", flush=True
        )


if __name__ == "__main__":
    main()
