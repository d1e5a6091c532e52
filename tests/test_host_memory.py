"""Freed memory serves the next allocation, in a process of its own: the setting cannot be taken
back."""

import platform
import subprocess
import sys

import pytest

from tests.processes import ROOT

_SECOND_ALLOCATION = """
import resource, sys
from pathlib import Path
from adder_flax import host_memory

Path.glob = lambda self, name: iter([name] if sys.argv[1] == "accelerator" else [])
kept = host_memory.keep_freed_memory()
bytearray(2**26)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = bytearray(2**26)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


_WITHOUT_THREADS = """
import threading
from adder_flax import host_memory, start

wait = threading.Event()
host_memory._ACCELERATORS = ()
keep, outcomes = host_memory.keep_freed_memory, []
host_memory.keep_freed_memory = lambda: outcomes.append(keep())
try:
    start.main()
except SystemExit:
    pass
threading.Thread(target=wait.wait, daemon=True).start()
print("kept", *outcomes, keep())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of the GNU C library")
@pytest.mark.parametrize("host", ["cpu", "accelerator"])
def test_blocks_over_32_mb_are_mapped_once(host):
    done = subprocess.run(
        [sys.executable, "-c", _SECOND_ALLOCATION, host],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    assert kept == str(host == "cpu")
    if kept == "True":
        assert int(faults) < 16  # of 16,384 pages, or of 32 huge ones


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of the GNU C library")
def test_the_command_asks_for_it_before_its_first_thread():
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_THREADS, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "kept True False"
