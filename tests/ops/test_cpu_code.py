"""The machine code of the native kernels, for processors that need not be at hand."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from adder_flax import own_cache
from adder_flax.ops import _cpu
from benchmarks import cpu_code

SIMDE = Path("/usr/include/simde/x86/avx512.h")
TARGETS = {
    "SSE2": ["g++", "-march=x86-64"],
    "AVX2": ["g++", "-mavx2"],
    "AVX-512": ["g++", "-mavx512bw"],
    "AVX-512 by SIMDe": ["g++", "-include", str(Path(__file__).with_name("avx512_by_simde.h"))],
    "NEON": ["aarch64-linux-gnu-g++", "-static"],
}
needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64" or None in (shutil.which("g++"), shutil.which("objdump")),
    reason="needs g++, whose code the certificates are for, on x86, and objdump",
)


def _runs(target):
    """Whether what a target's compiler makes can be run here, itself or in an emulator."""
    if shutil.which(TARGETS[target][0]) is None:
        return False
    if target == "NEON":
        return shutil.which("qemu-aarch64") is not None
    needed = {"AVX2": r"\bavx2\b", "AVX-512": r"\bavx512bw\b"}.get(target, "")
    simde = target != "AVX-512 by SIMDe" or SIMDE.exists()
    return platform.machine() == "x86_64" and simde and re.search(needed, own_cache.processor())


def _compile(target, source, path, *options):
    includes = [f"-I{jax.ffi.include_dir()}", f"-I{Path(_cpu.__file__).parent}"]
    compiler, *flags = TARGETS[target]
    command = [compiler, "-std=gnu++17", "-O3", *flags, *includes, *options, "-o", str(path)]
    source = Path(__file__).with_name(source)
    subprocess.run([*command, str(source)], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "source", "printed"),
    [
        ("NEON", "emulated.cc", "18 results agree\n"),
        *((target, "sad_emulated.cc", "10000 cases agree\n") for target in TARGETS),
    ],
)
def test_the_code_of_a_processor_computes_the_formulas(target, source, printed, tmp_path):
    if not _runs(target):
        pytest.skip(f"needs a processor with {target}, or its compiler and emulator")
    _compile(target, source, tmp_path / "program")
    command = [*["qemu-aarch64"] * (target == "NEON"), tmp_path / "program", "10000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == printed


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


@pytest.mark.slow
@needs_x86
@pytest.mark.parametrize(("target", "distances"), [("SSE2", 12), ("AVX2", 12), ("AVX-512", 24)])
def test_the_inner_loop_of_bytes_holds_its_sums_in_registers(tmp_path, target, distances):
    path = tmp_path / "code.o"
    _compile(target, "sad_emulated.cc", path, "-fPIC", "-c")
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"<(\S+)>:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL)
    (lines,) = (code.splitlines() for title, code in functions if "SumTile" in title)
    of_bytes = [i for i, line in enumerate(lines) if "psadbw" in line]
    end = next(i for i in range(of_bytes[-1], len(lines)) if "\tj" in lines[i])
    loop = lines[of_bytes[0] : end]
    assert len(of_bytes) == distances
    assert sum("paddq" in line for line in loop) > 0.8 * distances
    assert not [line for line in loop if "(%rsp" in line or "call" in line]
