"""What may happen to a file, from a place on: a share of its length."""

import os
from pathlib import Path


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    bit = int(place * 8 * len(content.rstrip(b"\0")))  # what is padded is mostly padding
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def garble(path: Path, place: float) -> None:
    start = int(place * path.stat().st_size)
    path.write_bytes(path.read_bytes()[:start] + b"\xa5" * 16 + path.read_bytes()[start + 16 :])


DAMAGES = {
    "one bit flipped": flip,
    "overwritten from there on": garble,
    "cut": lambda path, place: os.truncate(path, int(place * path.stat().st_size)),
    "zeroed": lambda path, place: path.write_bytes(bytes(path.stat().st_size)),
    "lengthened": lambda path, place: path.write_bytes(path.read_bytes() + b"\xff" * 99),
    "gone": lambda path, place: path.unlink(),
    "a folder": lambda path, place: (path.unlink(), path.mkdir()),
}
