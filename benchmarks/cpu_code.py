"""What the machine code of the native kernels costs, for a processor that need not be at hand.

    python -m benchmarks.cpu_code
    python -m benchmarks.cpu_code --target=znver4 --mca=llvm-mca-19

The kernels are compiled for an x86 processor and disassembled, and the innermost loop of the
largest tile is counted: instructions and loads a term (of a vector of results), stores to the
stack. Where there is an `llvm-mca` it adds the cycles a term that LLVM's model of the core gives
them: as they are, and with broadcasts from memory as plain loads, since the models of Zen 3 and 4
let a broadcast take one of the four vector units, which a Zen 4 does not. The model of Zen 3 has
maxima in the units that multiply, the core in those that add (`python -m benchmarks.ops` runs
faster than either says). It needs a compiler and `objdump`.
"""

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import benchmarks
from adder_flax.ops import _cpu


class Case(NamedTuple):
    """An innermost loop, and what a term of it must not exceed."""

    symbol: str  # part of the name of the function that it is in
    marker: str  # instruction of which each term has one
    others: str  # instructions of which it has at least as many
    most_instructions: float
    most_loads: float


def _bound(symbol, marker, others, most):
    symbol = "SumInRegisters" + symbol.replace("_", "(anonymous namespace)")
    return Case(symbol, marker, others, most, 0)


CASES = {
    "forward, additions": Case("L1Forward", "vmaxps", "vaddps", 3.0, 0.7),
    "forward, multiply-adds": Case("L1Forward", "vmaxps", "vfmadd", 3.0, 0.7),
    "gradient, hardtanh": Case("L1Pullback", "vminps", "vmaxps vfmadd", 4.4, 1.5),
    "gradient, steep hardtanh": Case("SumByRule", "vpminud", "vpminsd vsubps vfmadd", 5.9, 1.0),
    "gradient, full": Case("FullPullback", "vfmadd", "", 2.1, 0.8),
    "bound, forward, additions": _bound("<5, 2, _::MaxTerm<_::Plain>", "vmaxps", "vaddps", 2.5),
    "bound, forward, multiply-adds": _bound("<5, 2, _::MaxTerm<_::One>", "vmaxps", "vfmadd", 2.5),
    "bound, gradient, hardtanh": _bound("<4, 2, _::ClampTerm", "vminps", "vmaxps vfmadd", 3.6),
}


class Instruction(NamedTuple):
    """One line of a disassembly, in AT&T's order of operands."""

    address: int
    name: str
    operands: str

    def loads(self) -> bool:  # the target is the last operand
        return "(" in self.operands and self.name[0] not in "jl" and not self.stores()  # lea

    def stores(self) -> bool:
        return self.operands.endswith(")") and self.name[0] not in "jc"  # jumps and comparisons


class Row(NamedTuple):
    """The dearest of the loops of a case; numbers are those of a term."""

    name: str
    terms: int
    instructions: float
    loads: float
    stores: int
    loop: list[Instruction]


def measure(compiler: str, target: str) -> list[Row]:
    functions = _functions(compiler, target)
    loops = [(name, loop) for name, code in functions for loop in _innermost(code)]
    return [_row(name, case, loops) for name, case in CASES.items()]


def _row(name: str, case: Case, loops) -> Row:
    found = []
    for function, loop in loops:
        if case.symbol in function:
            terms = _count(loop, case.marker)
            if terms and all(_count(loop, other) >= terms for other in case.others.split()):
                found.append((terms, loop))
    if not found:
        raise ValueError(f"expected a loop of {case.marker} in {case.symbol}, got none")
    # Tiles at the edge are smaller; a tile has a loop for each way its rows may be stored.
    most = max(terms for terms, _ in found)
    loop = max((loop for terms, loop in found if terms == most), key=len)
    loads, stores = (sum(map(reads, loop)) for reads in (Instruction.loads, Instruction.stores))
    return Row(name, most, len(loop) / most, loads / most, stores, loop)


def _count(loop: list[Instruction], name: str) -> int:
    return sum(each.name.startswith(name) for each in loop)


def _functions(compiler: str, target: str) -> Iterator[tuple[str, list[Instruction]]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        _cpu.run_compiler(compiler, target, path)
        command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for part in re.split(r"\n(?=[0-9a-f]+ <)", text):
        title, _, body = part.partition("\n")
        lines = re.findall(r"^ +([0-9a-f]+):\t(\S+) *([^#\n]*)", body, re.MULTILINE)
        yield title, [Instruction(int(at, 16), name, rest.strip()) for at, name, rest in lines]


def _innermost(code: list[Instruction]) -> Iterator[list[Instruction]]:
    """Yields what lies between a jump back and its target, if no other jump does."""
    place = {instruction.address: i for i, instruction in enumerate(code)}
    for end, instruction in enumerate(code):
        target = re.match(r"[0-9a-f]+(?= <)", instruction.operands)
        if instruction.name.startswith("j") and target:
            loop = code[place.get(int(target[0], 16), end + 1) : end + 1]
            if _count(loop, "j") == 1:
                yield loop


def cycles(loop: list[Instruction], target: str, mca: str) -> Iterator[float]:
    """Yields the cycles of an iteration by LLVM's model, and with plain loads for broadcasts."""
    whole = "\n".join(f"{each.name} {each.operands}" for each in loop[:-1])
    for code in (whole, re.sub(r"vbroadcastss (?=\S*\()", "vmovups ", whole)):
        command = [mca, f"-mcpu={target}", "-iterations=300", "-"]
        done = subprocess.run(command, input=code, capture_output=True, text=True, check=True)
        yield int(re.findall(r"Total Cycles: +(\d+)", done.stdout)[0]) / 300


def main() -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--target", default="znver3", help="as the compiler calls it")
    parser.add_argument("--mca", default="llvm-mca", help="command; newer ones have truer models")
    options = parser.parse_args()
    mca = shutil.which(options.mca)
    compiler = _cpu.find_compiler()
    print(f"{compiler} -march={options.target}; {mca or 'no llvm-mca'}")
    print(f"{'':30} terms  instructions  loads  stores  cycles  broadcasts as loads")
    for row in measure(compiler, options.target):
        line = f"{row.name:30} {row.terms:5}  {row.instructions:12.2f}  {row.loads:5.2f}"
        line += f"  {row.stores:6}"
        if mca:
            whole, loads = (each / row.terms for each in cycles(row.loop, options.target, mca))
            line += f"  {whole:6.2f}  {loads:19.2f}"
        print(line)
        kinds = Counter(each.name for each in row.loop)
        print(f"{'':32}{', '.join(f'{count} {name}' for name, count in kinds.most_common())}")


if __name__ == "__main__":
    main()
