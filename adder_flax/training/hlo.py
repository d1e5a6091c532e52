"""What a compiled program sends between devices, read from its HLO text."""

import dataclasses
import math
import re
from collections import defaultdict

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|called_computations|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_TRIP_COUNT = re.compile(r"known_trip_count\W+n\W+(\d+)")
_ARRAY = re.compile(r"\b(?:[a-z]+(\d+)[a-z0-9]*|pred)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in one run of a program.

    Attributes:
      count: how many there are, those of a loop once for each turn.
      bytes: size of their results on one device; for a reduce-scatter, whose result is a part, of
        its operands.
    """

    count: int = 0
    bytes: int = 0


def collectives(hlo: str) -> dict[str, Traffic]:
    """Counts the collectives of a program by kind, kinds without any left out.

    Args:
      hlo: text of the optimised module, ``compiled.as_text()``.

    Example:
      >>> collectives('''
      ... ENTRY %main (p: f32[2,8]) -> f32[2,8] {
      ...   %p = f32[2,8]{1,0} parameter(0)
      ...   ROOT %sum = f32[2,8]{1,0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
      ... }''')
      {'all-reduce': Traffic(count=1, bytes=64)}
    """
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)  # by computation: kind and bytes
    # By computation: callee and number of turns.
    calls: dict[str, list[tuple[str, int]]] = defaultdict(list)
    shapes: dict[str, int] = {}
    channels: set[str] = set()
    entry = here = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            here = header[2]
            entry = here if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            shapes[line.split(" = ")[0].split()[-1].lstrip("%")] = _array_bytes(instruction[1])
            calls[here] += _callees(line)
            kind = instruction[2].removesuffix("-start")
            if kind in KINDS and _is_first(line, channels):
                found[here].append((kind, _traffic_bytes(kind, line, instruction, shapes)))
    return _total(_scattered(found), calls, entry)


def _is_first(line: str, channels: set[str]) -> bool:
    """Whether a collective's channel is new, and adds it to the others.

    XLA:TPU writes one that goes on beside other work into each fusion that it goes on beside.
    """
    channel = _CHANNEL.search(line)
    if channel is None:
        return True
    is_first = channel[1] not in channels
    channels.add(channel[1])
    return is_first


def _array_bytes(shape: str) -> int:
    """Bytes of a shape such as ``(f32[2,8]{1,0}, bf16[4])``, tuples summed up."""
    total = 0
    for bits, dims in _ARRAY.findall(shape):
        total += math.prod(int(dim) for dim in dims.split(",") if dim) * int(bits or 8) // 8
    return total


def _traffic_bytes(kind: str, line: str, instruction: re.Match, shapes: dict[str, int]) -> int:
    operands = re.findall(r"%([\w.\-]+)", line[instruction.end() :].split(")")[0])
    operand_bytes = sum(shapes.get(name, 0) for name in operands)
    if kind == "reduce-scatter":
        return operand_bytes
    result_bytes = _array_bytes(instruction[1])
    # The start of an asynchronous collective gives its operands back beside the result.
    paired = instruction[2].endswith("-start") and kind != "all-reduce"
    return result_bytes - operand_bytes if paired else result_bytes


def _callees(line: str) -> list[tuple[str, int]]:
    trips = _TRIP_COUNT.search(line)
    return [
        (name, int(trips[1]) if trips and role in ("body", "condition") else 1)
        for role, names in _CALLED.findall(line)
        for name in re.findall(r"[\w.\-]+", names)
    ]


def _scattered(found: dict[str, list[tuple[str, int]]]) -> dict[str, list[tuple[str, int]]]:
    """Calls an all-reduce that is fused with the choice of one part by its name.

    It is XLA:TPU's form of reduce-scatter.
    """
    return {
        name: [
            ("reduce-scatter" if "all-reduce-scatter" in name else kind, size)
            for kind, size in items
        ]
        for name, items in found.items()
    }


def _total(found: dict[str, list], calls: dict[str, list], entry: str) -> dict[str, Traffic]:
    totals: dict[str, Traffic] = {}

    def visit(computation: str, turns: int) -> None:
        for kind, size in found.get(computation, ()):
            old = totals.get(kind, Traffic())
            totals[kind] = Traffic(old.count + turns, old.bytes + turns * size)
        for callee, trips in calls.get(computation, ()):
            visit(callee, turns * trips)

    visit(entry, 1)
    return {kind: totals[kind] for kind in KINDS if kind in totals}
