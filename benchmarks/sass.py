"""The certificate of the GPU kernels: what their machine code costs, on a machine that has no GPU.

    python -m benchmarks.sass
    python -m benchmarks.sass --gpus=h100 --kernels="l1 fc1,jvp hardtanh fc1"

Each kernel is compiled by XLA and NVIDIA's assembler for A100 (sm_80), H100 (sm_90a) and B200
(sm_100a) and disassembled, and its innermost loop is counted: instructions a term, by kind;
registers, spills and shared memory; how many warps fit on a core, and how often the device is
filled by them. These are facts of the code. The share of the bound follows from them on paper: it
is the time of the arithmetic that a term needs over the time of the loop's dearest unit, where a
scheduler issues one instruction a cycle.

It needs Linux and ``pip install "adder-flax[gpu-compile]"``, and no driver.
"""

import argparse
import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adder_flax.ops._pallas_gpu import PallasGpuBackend
from adder_flax.ops._rules import GradientRule
from adder_flax.training import gpu_topology, topology_devices

GPU_NAMES = ("a100", "h100", "b200")

HARDTANH, SIGN = GradientRule("hardtanh"), GradientRule("sign")
TOKENS = 64 * 197
X, FC1, PROJ = (1, TOKENS, 192), (1, 192, 768), (1, 192, 192)
HIDDEN, FC2 = (1, TOKENS, 768), (1, 768, 192)
HEADS, MAPS, WEIGHTS = (192, 197, 64), (192, 197, 197), (192, 64)
LONG_HEADS = (192, 256, 64)


class Case(NamedTuple):
    """A kernel on the shapes of DeiT-Tiny (64 images of 197 tokens), and what its code must not
    exceed.

    Attributes:
      method: of the backend.
      shapes: of its operands.
      options: its other arguments.
      marker: pattern of an instruction of which each term has one, or one half.
      terms_per_marker: terms for each of those.
      arithmetic: instructions of a term that cannot be left out, by unit: ``"lanes"`` or
        ``"special"``.
      most_instructions: a term may cost, in the innermost loop, on any of the GPUs.
      dtype: of the operands other than the cotangent.
    """

    method: str
    shapes: tuple[tuple[int, ...], ...]
    options: dict
    marker: str
    terms_per_marker: float
    arithmetic: dict[str, float]
    most_instructions: float
    dtype: str = "float32"


def _l1(shapes, most, axes="kn", **fields):
    return Case("l1", shapes, {"axes": axes}, r"FADD\S* .*\|", 1, {"lanes": 2}, most, **fields)


def _rule(method, shapes, rule, most, lanes=2, axes="kn"):
    return Case(
        method, shapes, {"rule": rule, "axes": axes}, r"(FADD|FFMA)\.SAT", 1, {"lanes": lanes}, most
    )


CASES = {
    "l1 fc1": _l1((X, FC1), 2.15),
    "l1 fc2": _l1((HIDDEN, FC2), 2.2),
    "l1 proj": _l1((X, PROJ), 2.2),
    "l1 fc1 bfloat16": _l1((X, FC1), 2.2, dtype="bfloat16"),
    "l1 scores": _l1((HEADS, HEADS), 2.4, axes="nk"),
    "dx hardtanh fc1": _rule("l1_pullback_x", (X, FC1, HIDDEN), HARDTANH, 2.2),
    "dw hardtanh fc1": _rule("l1_pullback_w", (X, FC1, HIDDEN), HARDTANH, 2.4),
    "jvp hardtanh fc1": _rule("l1_pushforward", (X, FC1, X), HARDTANH, 2.2),
    "dq sign": _rule("l1_pullback_x", (HEADS, HEADS, MAPS), SIGN, 3.4, lanes=3, axes="nk"),
    "additive": Case(
        "additive", (HEADS, HEADS, WEIGHTS), {}, "MUFU", 2, {"lanes": 3.5, "special": 0.5}, 4.6
    ),
    "additive 256": Case(
        "additive",
        (LONG_HEADS, LONG_HEADS, WEIGHTS),
        {},
        "MUFU",
        2,
        {"lanes": 3.5, "special": 0.5},
        4.5,
    ),
    "additive pullback": Case(
        "additive_pullback",
        (HEADS, HEADS, WEIGHTS, MAPS),
        {},
        "MUFU",
        1,
        {"lanes": 3, "special": 1},
        7.8,
    ),
}


class Row(NamedTuple):
    """One kernel's certificate; instructions are those of a term in the innermost loop."""

    kernel: str
    gpu: str
    by_kind: dict[str, float]
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps_per_core: int
    waves: float
    share_of_bound: float

    @property
    def instructions(self) -> float:
        return sum(self.by_kind.values())

    def cells(self) -> tuple[str, ...]:
        kinds = ", ".join(
            f"{count:.2f} {kind}" for kind, count in self.by_kind.items() if count >= 0.005
        )
        return (
            *(
                self.kernel,
                self.gpu,
                f"{self.instructions:.3f}",
                kinds,
                str(self.registers),
                str(self.spilled_bytes),
            ),
            *(
                str(self.shared_bytes),
                str(self.warps_per_core),
                f"{self.waves:.2f}",
                f"{self.share_of_bound:.2f}",
            ),
        )


TITLES = (
    "kernel",
    "GPU",
    "instructions a term",
    "by kind",
    "registers",
    "spilled bytes",
    "shared bytes",
)
TITLES += ("warps a core", "waves", "of the bound")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table.

    Args:
      arguments: command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", default=",".join(GPU_NAMES))
    parser.add_argument("--kernels", default=",".join(CASES))
    options = parser.parse_args(arguments)
    print(
        f"jax {jax.__version__}, M = {TOKENS}\n\n| {' | '.join(TITLES)} |\n{'|---' * len(TITLES)}|",
        flush=True,
    )
    for gpu in options.gpus.split(","):
        for name in options.kernels.split(","):
            for row in certify(name, gpu):
                print(f"| {' | '.join(row.cells())} |", flush=True)


def certify(name: str, gpu: str) -> list[Row]:
    """Compiles a case for a GPU and reads its machine code; returns a row for each kernel that it
    consists of.

    Args:
      name: of `CASES`.
      gpu: of `gpu_topology.GPUS`.

    Raises:
      RunError: the compiler is not installed.
    """
    case, target = CASES[name], gpu_topology.GPUS[gpu]
    with tempfile.TemporaryDirectory() as folder:
        grids = _compile(case, gpu, folder)
        sources = [
            path
            for path in sorted(Path(folder).glob("*.ptx"))
            if ".entry kernel" in path.read_text()
        ]
        kernels = [
            _assemble(path, target.architecture(), grid)
            for path, grid in zip(sources, grids, strict=True)
        ]
    names = (
        [name] if len(kernels) == 1 else [f"{name} {number + 1}" for number in range(len(kernels))]
    )
    return [_row(label, gpu, case, kernel) for label, kernel in zip(names, kernels, strict=True)]


class _Kernel(NamedTuple):
    programs: int
    ptx: str
    assembler_says: str
    machine_code: str


def _compile(case: Case, gpu: str, folder: str) -> list[int]:
    """Compiles a case, leaves what XLA gives the assembler in a folder, and returns how many blocks
    kernels have."""
    devices = topology_devices(f"{gpu}:1")
    mesh = jax.make_mesh(
        (1,), ("device",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )
    function = functools.partial(getattr(PallasGpuBackend(), case.method), **case.options)
    # The cotangent is float32 whatever the operands are.
    like = [
        jax.ShapeDtypeStruct(
            shape, jnp.float32 if position == 2 and "pullback" in case.method else case.dtype
        )
        for position, shape in enumerate(case.shapes)
    ]
    with jax.set_mesh(mesh):
        placed = jax.jit(function, out_shardings=jax.NamedSharding(mesh, jax.P()))
        compiled = placed.lower(*like).compile(
            compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        )
    return [int(blocks) for blocks in re.findall(r"grid_x = (\d+)", compiled.as_text())]


def _assemble(path: Path, architecture: str, programs: int) -> _Kernel:
    binary = path.with_suffix(".cubin")
    said = subprocess.run(
        ["ptxas", "-v", f"-arch={architecture}", str(path), "-o", str(binary)],
        capture_output=True,
        text=True,
        check=True,
    )
    code = subprocess.run(
        [_disassembler(), "-c", str(binary)], capture_output=True, text=True, check=True
    )
    return _Kernel(programs, path.read_text(), said.stderr, code.stdout)


def _disassembler() -> str:
    folder = gpu_topology.compiler_folder()
    beside = [folder / "nvdisasm", *folder.parent.parent.glob("*/bin/nvdisasm")]
    return str(next((path for path in beside if path.is_file()), "nvdisasm"))


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)(.*?);")
_LABEL = re.compile(r"^(\.L_x?_?\w+):")
_KINDS = {
    "arithmetic": r"F(ADD|FMA|MUL|MNMX|SEL|SETP|SET)|MUFU",
    "load": r"LD|ULDC?",
    "address": r"U?I(ADD|MAD)|U?LEA|U?SHF|U?LOP|U?MOV|VIADD|U?PRMT|CS2R|R2UR|UIADD",
}


def hot_loop(machine_code: str, marker: str) -> list[tuple[str, str]]:
    """Returns the instructions of the innermost loop that adds most terms, as (name, operands).

    Of two that add as many, the shorter: the other one is for numbers that are not finite.

    Args:
      machine_code: what ``nvdisasm -c`` prints.
      marker: pattern of what each term has one of.

    Example:
      >>> code = '''
      ... .L_x_0:
      ...         /*0010*/                   FADD R0, R1, -R2 ;
      ...         /*0020*/                   FADD R3, R3, |R0| ;
      ...         /*0030*/              @!P0 BRA `(.L_x_0) ;
      ...         /*0040*/                   EXIT ;
      ... '''
      >>> [name for name, _ in hot_loop(code, r"FADD.*\\|")]
      ['FADD', 'FADD', 'BRA']
    """
    instructions, labels, loops = [], {}, []
    for line in machine_code.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append((found[2], found[3].strip()))
            target = re.search(r"`\((\.L\w+)\)", found[3])
            if found[2].startswith("BRA") and target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))
    innermost = [
        (a, b)
        for a, b in loops
        if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in loops)
    ]
    bodies = [instructions[a:b] for a, b in innermost]
    return max(bodies, key=lambda body: (_count(marker, body), -len(body)), default=[])


def _count(marker: str, body: list[tuple[str, str]]) -> int:
    return sum(bool(re.match(marker, f"{name} {operands}")) for name, operands in body)


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if re.match(pattern, name)), "other")


def _row(name: str, gpu: str, case: Case, kernel: _Kernel) -> Row:
    target, body = gpu_topology.GPUS[gpu], hot_loop(kernel.machine_code, case.marker)
    terms = case.terms_per_marker * _count(case.marker, body)
    if not terms:
        raise ValueError(
            f"expected instructions like {case.marker} in the innermost loop of {name}, got {body}"
        )
    kinds = Counter(_kind(op) for op, _ in body)
    said = lambda pattern: sum(map(int, re.findall(pattern, kernel.assembler_says)))
    registers, threads = (
        said(r"Used (\d+) registers"),
        int(re.search(r"\.reqntid (\d+)", kernel.ptx)[1]),
    )
    blocks = _blocks_per_core(registers, threads)
    return Row(
        name,
        gpu,
        {kind: count / terms for kind, count in kinds.most_common()},
        registers,
        said(r"(\d+) bytes spill (?:stores|loads)"),
        said(r"(\d+) bytes smem"),
        blocks * threads // 32,
        kernel.programs / (blocks * target.cores),
        _share(case, target, body, terms),
    )


def _blocks_per_core(registers: int, threads: int) -> int:
    """Returns how many blocks fit on a core: registers are given to warps in units of 256, of
    65,536; 64 warps fit."""
    warps = min(65536 // (-(-registers * 32 // 256) * 256), 64)
    return min(warps // (threads // 32), 32)


def _share(
    case: Case, target: gpu_topology.Gpu, body: list[tuple[str, str]], terms: float
) -> float:
    """Returns what part of the loop's time its necessary arithmetic takes, for one of the four
    schedulers of a core."""
    lane_cycles = 32 * 4 / target.lanes_per_core  # of a warp's instruction on the float32 lanes
    special_cycles = 32 * 4 / 16
    on_lanes = sum(_kind(op) == "arithmetic" and op[:4] != "MUFU" for op, _ in body)
    special = sum(op[:4] == "MUFU" for op, _ in body)
    needed = {"lanes": lane_cycles, "special": special_cycles}
    bound = max(count * needed[unit] for unit, count in case.arithmetic.items())
    return bound * terms / max(len(body), on_lanes * lane_cycles, special * special_cycles)


if __name__ == "__main__":
    main()
