"""How a process keeps its memory between training steps."""

import ctypes
import gc
import platform
from pathlib import Path

# From malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8

# Of NVIDIA and AMD GPUs, and of TPUs.
_ACCELERATORS = ("nvidia[0-9]*", "kfd", "accel[0-9]*", "vfio/[0-9]*")

_NEW_OBJECTS = 100_000


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


def keep_freed_memory() -> bool:
    """Makes malloc keep what is freed for the next allocation.

    Otherwise it is given back to the system, and page by page taken again.

    XLA's CPU client takes the temporaries of every step from malloc, and the GNU C library maps
    blocks of more than 32 MB anew each time: the system then has to clear and map them page by page
    while the step runs, which for a DeiT-Tiny of 32 images is 150,000 page faults and a tenth to a
    fifth of its time. In exchange the process holds on to the most memory that it ever used, and to
    gaps between blocks: 3.0 GiB in place of 2.1 for the adder DeiT-Tiny on digits, and its threads
    share one arena of small blocks. Hosts of accelerators, whose steps take no memory here and
    whose threads read images, are therefore left as they are.

    To be called first of all: with the first thread beside the main one the C library settles how
    many arenas there will be.

    Returns:
      Whether it was done, and in time: on Linux with the GNU C library, without an accelerator and
      in a process of one thread.

    Example::

      from adder_flax import host_memory

      host_memory.keep_freed_memory()
      import jax
    """
    if platform.libc_ver()[0] != "glibc" or any(
        True for name in _ACCELERATORS for _ in Path("/dev").glob(name)
    ):
        return False
    alone = len(list(Path("/proc/self/task").iterdir())) == 1
    mallopt = ctypes.CDLL(None).mallopt
    # Blocks of threads other than the first come from arenas that hold none so large, so there has
    # to be one arena.
    done = [mallopt(_M_ARENA_MAX, 1), mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, -1)]
    return alone and all(done)
