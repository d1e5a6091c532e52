"""What a program asks of its host, before it imports anything that takes memory or threads."""

import contextlib
import gc
import os
import platform
import sys
from pathlib import Path

_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"

# Of NVIDIA and AMD GPUs, and of TPUs.
_ACCELERATORS = ("nvidia[0-9]*", "kfd", "accel[0-9]*", "vfio/[0-9]*")

_NEW_OBJECTS = 100_000

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def leave_cores_to_xla() -> None:
    """Gives OpenBLAS, which factorizes for JAX on CPUs, the thread that calls it and no others.

    XLA has threads for all cores. Those of OpenBLAS look out for more work for a while after each
    call, at the cost of XLA's: docs/operations.md has what that takes.

    OpenBLAS reads the variable ``OPENBLAS_NUM_THREADS`` when it is loaded, by NumPy or SciPy. A
    value that is there stays.

    Example:
      >>> leave_cores_to_xla()
      >>> int(os.environ["OPENBLAS_NUM_THREADS"]) > 0
      True
    """
    os.environ.setdefault(_BLAS_THREADS, "1")


def collect_garbage_rarely() -> None:
    """Makes Python look for cycles of unused objects once in 100,000 new ones, not in 700.

    Imports and traces make a million objects, which stay, and each look passes over many of them:
    0.3 s of the 8 s to the first step.

    Example:
      >>> collect_garbage_rarely()
      >>> gc.get_threshold()[0]
      100000
    """
    gc.set_threshold(_NEW_OBJECTS)


def use_huge_pages() -> None:
    """Starts the program of this process anew, with huge pages for what malloc takes.

    XLA's CPU client takes the temporaries of every step from malloc, and the GNU C library maps
    blocks of more than 32 MB anew each time. The system clears and maps them page by page while the
    step runs: 75,000 pages of 4 KiB for a DeiT-Tiny of 64 digits with AdamW, 140,000 with CG-FAC;
    with huge pages some hundreds of 2 MiB. The alternative, a malloc that keeps what is freed,
    costs more than it saves where a process has compiled much: its lists of free blocks grow long,
    and every block is looked for in them.

    The C library reads the wish once, when a process starts, from the variable ``GLIBC_TUNABLES``
    of its environment. So it is set there, and the process executes its own command line again,
    under its own number. To be called by programs, first of all; nothing happens where it would not
    help: the variable names huge pages already, the system grants none or gives them unasked, or
    the host has accelerators, whose steps take no memory here.

    Example::

      from adder_flax import host

      host.use_huge_pages()
      import jax
    """
    tunables = os.environ.get(_TUNABLES, "")
    if _HUGE_PAGES in tunables or not (_helps() and _has_a_command_line()):
        return
    os.environ[_TUNABLES] = ":".join(filter(None, [tunables, f"{_HUGE_PAGES}=1"]))
    sys.stdout.flush()
    # Where the system refuses, the process goes on as it is.
    with contextlib.suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _has_a_command_line() -> bool:
    """Whether the program can be started again: not what is typed or comes from a pipe."""
    return bool(sys.executable) and sys.argv[0] not in ("", "-")


def _helps() -> bool:
    """Whether huge pages are there for those who ask, with the GNU C library and no accelerator."""
    try:
        on_request = "[madvise]" in _PAGES.read_text(encoding="ascii")
    except (OSError, ValueError):
        return False
    library, version = platform.libc_ver()
    return (
        on_request
        and library == "glibc"
        and tuple(map(int, version.split(".")[:2])) >= (2, 35)
        and not any(True for name in _ACCELERATORS for _ in Path("/dev").glob(name))
    )
