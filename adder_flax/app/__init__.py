"""The command ``main.py``, or ``adder-flax``: flags, what the modes do, how the process ends."""

import gc
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Runs the command of this process, and ends the process where it fails."""
    start_time = time.monotonic()
    prepare_process()
    from adder_flax.app import ends

    ends.prepare_output()
    with ends.messages():
        from adder_flax.app import flags

        flags.run(start_time)


def prepare_process() -> None:
    """Leaves cores and memory to XLA; to be called before NumPy is imported."""
    # Threads of OpenBLAS, which factorizes for JAX on CPUs, look out for more work after each call,
    # at the cost of XLA's (docs/operations.md). Cycles of unused objects among the million that
    # imports and traces make cost 0.3 s of the 8 s to the first step.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(100_000)
    use_huge_pages()


def use_huge_pages() -> None:
    """Starts the program anew with huge pages for what malloc takes, where Linux grants them."""
    # XLA's CPU client takes the temporaries of every step from malloc, and the GNU C library maps
    # blocks of more than 32 MB anew each time, page by page. It reads the wish for huge pages when
    # a process starts, so this one executes its own command line again; not beside a GPU or TPU.
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    granted = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if "glibc.malloc.hugetlb" in tunables or not granted.exists():
        return
    accelerators = [f for n in ("nvidia[0-9]*", "kfd", "accel[0-9]*") for f in Path("/dev").glob(n)]
    if "[madvise]" in granted.read_text() and not accelerators:
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:glibc.malloc.hugetlb=1".lstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
