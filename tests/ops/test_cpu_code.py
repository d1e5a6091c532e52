"""The machine code of the native kernels, for processors that need not be at hand."""

import platform
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from adder_flax.ops import _cpu
from benchmarks import cpu_code

needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64" or None in (shutil.which("g++"), shutil.which("objdump")),
    reason="needs g++, whose code the certificates are for, on x86, and objdump",
)


@pytest.fixture(scope="module")
def rows():
    return {row.name: row for row in cpu_code.measure("g++", "znver3")}


@pytest.mark.slow
@needs_x86
@pytest.mark.parametrize("name", cpu_code.CASES)
def test_an_inner_loop_costs_no_more_than_its_certificate(rows, name):
    case, row = cpu_code.CASES[name], rows[name]
    assert row.stores == 0
    assert row.instructions <= case.most_instructions
    assert row.loads <= case.most_loads


NEON_COMPILER, NEON_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(NEON_COMPILER) is None or shutil.which(NEON_EMULATOR) is None,
    reason=f"needs {NEON_COMPILER} and {NEON_EMULATOR}",
)
def test_the_code_for_neon_computes_the_formulas(tmp_path):
    program = tmp_path / "neon"
    source = Path(__file__).with_name("emulated.cc")
    includes = [f"-I{jax.ffi.include_dir()}", f"-I{Path(_cpu.__file__).parent}"]
    command = [NEON_COMPILER, "-std=gnu++17", "-O3", "-static", *includes]
    subprocess.run([*command, str(source), "-o", str(program)], check=True, capture_output=True)
    done = subprocess.run(
        [NEON_EMULATOR, str(program)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "18 results agree\n"
