"""The certificate of the GPU kernels: what their machine code costs, on a machine that has no GPU.

    python -m benchmarks.sass
    python -m benchmarks.sass --gpus=h100 --kernels="l1 fc1,jvp hardtanh fc1"

Each kernel is compiled as a program has it and assembled by NVIDIA's assembler for A100 (sm_80),
H100 (sm_90a) and B200 (sm_100a), and its innermost loop is counted, with what stands around it in
the loop over stages: instructions a term, by kind; registers, spills and shared memory; how many
warps fit on a core, and how often the device is filled by them. These are facts of the code. The
share of the bound follows from them on paper: it is the time of the arithmetic that a term needs
over the time of the loop's dearest unit, where a scheduler issues one instruction a cycle. What the
loop waits for is not in it: `benchmarks/ops_device.py` measures that.

It needs Linux and ``pip install ".[gpu-compile]"``, and no driver.
"""

import functools
import itertools
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

import benchmarks
from adder_flax.extras import missing, wheel_folders
from adder_flax.ops import _nvrtc
from adder_flax.ops._arrays import GradientRule
from adder_flax.ops._cuda import CudaBackend, Kernel
from adder_flax.training import topology

GPU_NAMES = ("a100", "h100", "b200")

TERMS_OF_A_TURN = 4  # `kRun` of the kernels
HARDTANH, SIGN = GradientRule("hardtanh"), GradientRule("sign")
TOKENS = 64 * 197
X, FC1, PROJ = (1, TOKENS, 192), (1, 192, 768), (1, 192, 192)
HIDDEN, FC2 = (1, TOKENS, 768), (1, 768, 192)
HEADS, MAPS, WEIGHTS = (192, 197, 64), (192, 197, 197), (192, 64)
SCORED, LONG_HEADS = (HEADS, HEADS, WEIGHTS), (192, 256, 64)


class Case(NamedTuple):
    """A kernel on the shapes of DeiT-Tiny (64 images of 197 tokens), and what its code must not
    exceed.

    A `method` of the backend, the `shapes` of its operands (of a `dtype`, but for a cotangent) and
    its other arguments; the pattern of an instruction of which each term has one, or one half; a
    term's `arithmetic` that cannot be left out, by unit (``"lanes"`` or ``"special"``); and what a
    term may cost, stages included, on any of the GPUs.
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


def _sad(shapes, most):
    # Of four bytes; whether a core starts 64 or 128 lanes of it a cycle is for a GPU to say.
    return Case("sad", shapes, {}, "VABSDIFF4", 4, {"lanes": 0.25}, most, dtype="uint8")


def _rule(method, shapes, rule, most, lanes=2, axes="kn"):
    return Case(
        method, shapes, {"rule": rule, "axes": axes}, r"(FADD|FFMA)\.SAT", 1, {"lanes": lanes}, most
    )


def _additive(method, shapes, terms, lanes, special, most):
    return Case(method, shapes, {}, "MUFU", terms, {"lanes": lanes, "special": special}, most)


CASES = {
    "l1 fc1": _l1((X, FC1), 2.17),
    "l1 fc2": _l1((HIDDEN, FC2), 2.43),
    "l1 proj": _l1((X, PROJ), 2.43),
    "l1 fc1 bfloat16": _l1((X, FC1), 2.17, dtype="bfloat16"),
    "l1 scores": _l1((HEADS, HEADS), 2.39, axes="nk"),
    "sad fc1": _sad((X, (1, 768, 192)), 0.3),
    "sad scores": _sad((HEADS, HEADS), 0.3),
    "dx hardtanh fc1": _rule("l1_pullback_x", (X, FC1, HIDDEN), HARDTANH, 2.38),
    "dw hardtanh fc1": _rule("l1_pullback_w", (X, FC1, HIDDEN), HARDTANH, 2.38),
    "jvp hardtanh fc1": _rule("l1_pushforward", (X, FC1, X), HARDTANH, 2.21),
    "dq sign": _rule("l1_pullback_x", (HEADS, HEADS, MAPS), SIGN, 3.78, lanes=3, axes="nk"),
    "additive": _additive("additive", SCORED, 2, 3.5, 0.5, 4.48),
    "additive 256": _additive("additive", (LONG_HEADS, LONG_HEADS, WEIGHTS), 2, 3.5, 0.5, 4.6),
    "additive pullback": _additive("additive_pullback", (*SCORED, MAPS), 1, 3, 1, 6.8),
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
        kinds = [f"{count:.2f} {kind}" for kind, count in self.by_kind.items() if count >= 0.005]
        whole = self.registers, self.spilled_bytes, self.shared_bytes, self.warps_per_core
        shares = f"{self.waves:.2f}", f"{self.share_of_bound:.2f}"
        first = self.kernel, self.gpu, f"{self.instructions:.3f}", ", ".join(kinds)
        return *first, *map(str, whole), *shares


TITLES = ("kernel", "GPU", "instructions a term", "by kind", "registers", "spilled bytes")
TITLES += ("shared bytes", "warps a core", "waves", "of the bound")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--gpus", default=",".join(GPU_NAMES))
    parser.add_argument("--kernels", default=",".join(CASES))
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    print(f"jax {jax.__version__}, M = {TOKENS}\n")
    benchmarks.print_titles(TITLES)
    for gpu, name in itertools.product(options.gpus.split(","), options.kernels.split(",")):
        for found in certify(name, gpu):
            benchmarks.print_row(found.cells())


def certify(name: str, gpu: str) -> list[Row]:
    """Compiles a case for a GPU and reads its machine code; returns a row for each of its kernels.

    Raises MissingExtraError without the assembler, OSError without the compiler.
    """
    case, target = CASES[name], topology.GPUS[gpu]
    kernels, rows = kernels_of(case), []
    for label, kernel in zip(labels(name, len(kernels)), kernels, strict=True):
        assembled = assemble(_nvrtc.compile_to_ptx(kernel.source), target.architecture)
        rows.append(row(label, gpu, case, kernel, assembled))
    return rows


def labels(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name} {n + 1}" for n in range(count)]


class _Noted(CudaBackend):
    """Notes the kernels of a program instead of running them."""

    def __init__(self):
        super().__init__()
        self.kernels: list[Kernel] = []

    def launch(self, kernel, arrays, results):
        self.kernels.append(kernel)
        return [jnp.zeros(result.shape, result.dtype) for result in results]


def operands_of(case: Case) -> list[jax.ShapeDtypeStruct]:
    dtypes = [case.dtype] * len(case.shapes)
    if "pullback" in case.method:  # a cotangent is float32 whatever the others are
        dtypes[2] = "float32"
    return list(map(jax.ShapeDtypeStruct, case.shapes, dtypes))


def kernels_of(case: Case) -> list[Kernel]:
    backend = _Noted()
    function = functools.partial(getattr(backend, case.method), **case.options)
    jax.jit(function).lower(*operands_of(case))
    return backend.kernels


class Assembled(NamedTuple):
    """What `ptxas -v` and `nvdisasm -c` print."""

    assembler_says: str
    machine_code: str


def assemble(ptx: str, architecture: str) -> Assembled:
    """Assembles PTX for an architecture, as ``sm_90a``, and disassembles it again."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        assemble = [_tool("ptxas"), "-v", f"-arch={architecture}", source, "-o", binary]
        said = subprocess.run(assemble, capture_output=True, text=True, check=True).stderr
        disassemble = [_tool("nvdisasm"), "-c", binary]
        code = subprocess.run(disassemble, capture_output=True, text=True, check=True).stdout
    return Assembled(said, code)


# Where NVIDIA's own installer puts its tools, if neither wheels nor the path have them.
_TOOLKIT = [*map(Path, os.environ.get("PATH", "").split(os.pathsep)), Path("/usr/local/cuda/bin")]


@functools.cache
def _tool(name: str) -> Path:
    folders = wheel_folders("nvidia.cuda_nvcc", "nvidia.cuda_nvdisasm", "nvidia.cu13")
    places = [*(folder / "bin" for folder in folders), *_TOOLKIT]
    found = next((path for place in places if (path := place / name).is_file()), None)
    if found is None:
        raise missing(f"{name} in NVIDIA's wheels", "gpu-compile")
    return found


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)(.*?);")
_LABEL = re.compile(r"^(\.L_x?_?\w+):")
_KINDS = {
    "arithmetic": r"F(ADD|FMA|MUL|MNMX|SEL|SETP|SET)|MUFU|VABSDIFF",
    "load": r"LD|ULDC?",
    "address": r"U?I(ADD|MAD)|U?LEA|U?SHF|U?LOP|U?MOV|VIADD|U?PRMT|CS2R|R2UR|UIADD",
}


def hot_loop(machine_code: str, marker: str) -> tuple[list, list]:
    """Returns the instructions of the innermost loop that adds most terms, as (name, operands).

    Of two that add as many, the shorter: the other one is for numbers that are not finite. After
    them come the instructions that stand around it in the next loop, if it is within one.
    `marker` is the pattern of what each term has one of, in what ``nvdisasm -c`` prints.

    >>> code = '''
    ... .L_x_0:
    ...         /*0010*/                   FADD R0, R1, -R2 ;
    ...         /*0020*/                   FADD R3, R3, |R0| ;
    ...         /*0030*/              @!P0 BRA `(.L_x_0) ;
    ...         /*0040*/                   EXIT ;
    ... '''
    >>> [name for name, _ in hot_loop(code, r"FADD.*\\|")[0]]
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
    inside = lambda a, b: any(a <= c and d <= b and (c, d) != (a, b) for c, d in loops)
    innermost = [(a, b) for a, b in loops if not inside(a, b)]
    if not innermost:
        return [], []
    a, b = max(innermost, key=lambda ab: (_count(marker, instructions[slice(*ab)]), ab[0] - ab[1]))
    outside = [(c, d) for c, d in loops if c <= a and b <= d and (c, d) != (a, b)]
    c, d = min(outside, key=lambda cd: cd[1] - cd[0], default=(a, b))
    return instructions[a:b], instructions[c:a] + instructions[b:d]


def _count(marker: str, body: list[tuple[str, str]]) -> int:
    return sum(bool(re.match(marker, f"{name} {operands}")) for name, operands in body)


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if re.match(pattern, name)), "other")


def row(name: str, gpu: str, case: Case, kernel: Kernel, assembled: Assembled) -> Row:
    target = topology.GPUS[gpu]
    body, around = hot_loop(assembled.machine_code, case.marker)
    turns = max(kernel.stage // TERMS_OF_A_TURN, 1)
    terms = turns * case.terms_per_marker * _count(case.marker, body)
    if not terms:
        raise ValueError(
            f"expected instructions like {case.marker} in the innermost loop of {name}, got {body}"
        )
    body = turns * body + (around if kernel.stage else [])
    kinds = Counter(_kind(op) for op, _ in body)
    said = lambda pattern: sum(map(int, re.findall(pattern, assembled.assembler_says)))
    registers = said(r"Used (\d+) registers")
    shared = said(r"(\d+) bytes smem")
    blocks = _blocks_per_core(target, registers, kernel.threads, shared)
    spilled = said(r"(\d+) bytes spill (?:stores|loads)")
    by_kind = {kind: count / terms for kind, count in kinds.most_common()}
    fitting = blocks * -(-kernel.threads // 32), kernel.blocks / (blocks * target.cores)
    share = _share(case, target, body, terms)
    return Row(name, gpu, by_kind, registers, spilled, shared, *fitting, share)


def _blocks_per_core(target: topology.Gpu, registers: int, threads: int, shared_bytes: int) -> int:
    # Registers are given to warps in units of 256, of 65,536; 64 warps fit; of shared memory each
    # block takes 1 KiB more than it asks for.
    warps = min(65536 // (-(-registers * 32 // 256) * 256), 64)
    by_memory = target.shared_bytes // (shared_bytes + 1024)
    return min(warps // -(-threads // 32), 32, by_memory)


def _share(case: Case, target: topology.Gpu, body: list[tuple[str, str]], terms: float) -> float:
    """Returns what part of the loop's time its necessary arithmetic takes, for one scheduler."""
    lane_cycles = 32 * 4 / target.lanes_per_core  # of a warp's instruction on the float32 lanes
    special_cycles = 32 * 4 / 16
    on_lanes = sum(_kind(op) == "arithmetic" and op[:4] != "MUFU" for op, _ in body)
    special = sum(op[:4] == "MUFU" for op, _ in body)
    needed = {"lanes": lane_cycles, "special": special_cycles}
    bound = max(count * needed[unit] for unit, count in case.arithmetic.items())
    return bound * terms / max(len(body), on_lanes * lane_cycles, special * special_cycles)


if __name__ == "__main__":
    main()
