"""The kernel by which K-FAC factorizes the smallest blocks of its factors on NVIDIA GPUs.

    python -m benchmarks.inverse_root  # what its machine code costs, on any machine
    python -m benchmarks.inverse_root --write  # after a change of kfac/kernels/_inverse_root.cu

It is assembled for A100 (sm_80), H100 (sm_90a) and B200 (sm_100a); that needs Linux and ``pip
install ".[gpu-compile]"``, and no driver. Where there is a GPU, it is also set beside the
library that XLA has for the same: the time of a batch, and the error of the inverses.
"""

import functools
import hashlib
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import benchmarks
from adder_flax.ops import _nvrtc
from adder_flax.training import topology
from benchmarks.sass import GPU_NAMES, assemble
from benchmarks.timing import busy_seconds, gpu_events
from kfac.solve import _inverses

LANES = 24


def ptx_of(source: str) -> str:
    # It needs nothing that came after the first GPUs of XLA, which the assembler checks.
    ptx = re.sub(r"^\.target .*$", ".target sm_60", _nvrtc.compile_to_ptx(source), flags=re.M)
    return f"{first_line(source)}\n{ptx.strip()}\n"


def first_line(source: str) -> str:
    return f"// Of {_inverses.SOURCE.name}, SHA-256 {hashlib.sha256(source.encode()).hexdigest()}"


def print_costs() -> None:
    for gpu in GPU_NAMES:
        architecture = topology.GPUS[gpu].architecture
        says = assemble(_inverses.PTX.read_text(), architecture).assembler_says
        numbers = [int(n) for n in re.findall(r"(\d+) (?:registers|bytes (?:spill|smem))", says)]
        print(f"{gpu}: stores and loads spilled, registers, shared bytes: {numbers}")


def print_measured(calls: int = 20) -> None:
    # As ill conditioned as factors are: half of their eigenvalues near 1e-4 of the largest.
    rng, rows = np.random.default_rng(0), _inverses.ROWS
    columns = rng.normal(size=(LANES, rows // 2, rows)) / np.sqrt(rows)
    matrices = columns.mT @ columns + 1e-4 * np.eye(rows)
    exact = np.linalg.inv(matrices)
    given = jnp.asarray(matrices, jnp.float32)
    ways = {"kernel": _inverses._root_by_kernel, "library": _inverses._root_by_cholesky}
    for name, root_of in ways.items():
        function = functools.partial(jax.jit(root_of), given)
        root = np.asarray(function(), np.float64)
        error = np.linalg.norm(root.mT @ root - exact) / np.linalg.norm(exact)
        events = gpu_events(function, calls)
        microseconds = 1e6 * busy_seconds(events) / calls
        print(f"{name}: {LANES} of {rows} rows in {microseconds:.0f} us, error {error:.1e}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--write", action="store_true", help="make the PTX anew")
    if parser.parse_args(arguments).write:
        _inverses.PTX.write_text(ptx_of(_inverses.SOURCE.read_text()))
    print_costs()
    if jax.default_backend() == "gpu":
        print_measured()


if __name__ == "__main__":
    main()
