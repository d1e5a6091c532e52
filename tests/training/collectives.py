"""What a program without loops sends between devices, read from the text of its instructions."""

import math
import re

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(rf" = (.+?) ({'|'.join(_KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b[a-z]+(\d+)\[([\d,]*)\]")


def collectives(program: str) -> dict[str, int]:
    """Returns by kind how many bytes the results of collectives have on one device."""
    found: dict[str, int] = {}
    for shapes, kind in _INSTRUCTION.findall(program):
        sizes = (
            math.prod(map(int, filter(None, dims.split(",")))) * int(bits) // 8
            for bits, dims in _ARRAY.findall(shapes)
        )
        found[kind] = found.get(kind, 0) + sum(sizes)
    return found
