"""The roads from JAX to an NVIDIA GPU, on one kernel: what the machine code of each costs.

    python -m benchmarks.gpu_roads
    python -m benchmarks.gpu_roads --roads=mosaic --gpus=a100

The kernel is the L1 product of DeiT-Tiny's fc1 (64 images), in tiles of 64 x 128 outputs, 128
threads each: this project's CUDA C++; Triton as jax-triton has it compiled; Mosaic GPU through
Pallas. The last two are written in the plain way of their languages, which have no register tiles.
A road that does not lead to a GPU prints why.

It needs what `benchmarks.sass` needs, and ``pip install triton`` for Triton. The Mosaic kernel is
for JAX 0.10: functions that it calls take other arguments in 0.12.
"""

import argparse
import glob
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from adder_flax.errors import first_line
from adder_flax.ops._cuda import Kernel
from adder_flax.training import gpu_topology, topology_devices
from benchmarks import sass

ROWS, WIDTH, COLUMNS = sass.TOKENS, 192, 768
TILE_ROWS, TILE_COLUMNS, THREADS = 64, 128, 128
BLOCKS = (ROWS // TILE_ROWS, COLUMNS // TILE_COLUMNS)


def triton_ptx(gpu: str) -> str:
    """Compiles the kernel with Triton: a term of all outputs of a block at a time."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit
    def l1(x, w, y, K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr):  # noqa: N803
        rows = tl.program_id(0) * M + tl.arange(0, M)
        columns = tl.program_id(1) * T + tl.arange(0, T)
        total = tl.zeros((M, T), tl.float32)
        for k in range(K):
            x_k, w_k = tl.load(x + rows * K + k), tl.load(w + k * N + columns)
            total += tl.abs(x_k[:, None] - w_k[None, :])
        tl.store(y + rows[:, None] * N + columns[None, :], -total)

    sizes = {"K": WIDTH, "N": COLUMNS, "M": TILE_ROWS, "T": TILE_COLUMNS}
    signature = dict.fromkeys("xwy", "*fp32") | dict.fromkeys(sizes, "constexpr")
    major, minor = gpu_topology.GPUS[gpu].capability
    compiled = triton.compile(
        ASTSource(fn=l1, signature=signature, constexprs=sizes),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options={"num_warps": THREADS // 32, "num_stages": 1},
    )
    # Triton's own assembler is newer than the wheels' and takes a later PTX; the kernel needs none.
    return re.sub(r"^\.version .*$", ".version 8.8", compiled.asm["ptx"], flags=re.MULTILINE)


def mosaic_ptx(gpu: str) -> str:
    """Compiles the kernel with Mosaic GPU: operands in shared memory, the block in registers."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    block, layout = (TILE_ROWS, TILE_COLUMNS), plgpu.Layout.WGMMA

    def kernel(x_ref, w_ref, y_ref):
        def step(k, total):
            x_k = plgpu.load(x_ref, (slice(None), k), layout=layout.reduce(1), optimized=False)
            w_k = plgpu.load(w_ref, (k, slice(None)), layout=layout.reduce(0), optimized=False)
            x_k, w_k = (jax.lax.broadcast_in_dim(a, block, [n]) for n, a in enumerate((x_k, w_k)))
            return total + jnp.abs(x_k - w_k)

        zero = plgpu.layout_cast(jnp.zeros(block, jnp.float32), layout)
        y_ref[...] = -jax.lax.fori_loop(0, WIDTH, step, zero, unroll=4)

    product = pl.pallas_call(
        kernel,
        grid=BLOCKS,
        in_specs=[
            pl.BlockSpec((TILE_ROWS, WIDTH), lambda i, j: (i, 0)),
            pl.BlockSpec((WIDTH, TILE_COLUMNS), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec(block, lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
        compiler_params=plgpu.CompilerParams(),
    )
    kind = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("device",), axis_types=kind, devices=topology_devices(f"{gpu}:1"))
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, WIDTH), (WIDTH, COLUMNS))]
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": folder}
        placed = jax.jit(product, out_shardings=jax.NamedSharding(mesh, jax.P()))
        placed.lower(*like).compile()
        return Path(glob.glob(f"{folder}/*.ptx")[0]).read_text()


ROADS = {"triton": triton_ptx, "mosaic": mosaic_ptx}


def cells(road: str, gpu: str) -> str:
    """Returns what the kernel costs on a road to a GPU, or why the road does not lead there."""
    try:
        if road == "cuda":
            (row,) = sass.certify("l1 fc1", gpu)
        else:
            kernel = Kernel("l1", "", BLOCKS[0] * BLOCKS[1], THREADS, stage=0)
            assembled = sass.assemble(ROADS[road](gpu), gpu_topology.GPUS[gpu].architecture())
            row = sass.row(road, gpu, sass.CASES["l1 fc1"], kernel, assembled)
    except (ImportError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {first_line(error)} | |"
    return f"{row.instructions:.3f} | {row.registers} | {row.spilled_bytes}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", default=",".join(sass.GPU_NAMES))
    parser.add_argument("--roads", default=",".join(["cuda", *ROADS]))
    options = parser.parse_args()
    print("| road | GPU | instructions a term | registers | spilled bytes |\n|---|---|---|---|---|")
    for gpu in options.gpus.split(","):
        for road in options.roads.split(","):
            # In a process of its own: Mosaic GPU compiles for one GPU in each.
            code = f"from benchmarks.gpu_roads import cells; print(cells({road!r}, {gpu!r}))"
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                capture_output=True,
                text=True,
            )
            said = (done.stdout or done.stderr).strip().splitlines()[-1]
            print(f"| {road} | {gpu} | {said} |", flush=True)


if __name__ == "__main__":
    main()
