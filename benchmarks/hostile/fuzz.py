"""Files of weights with random damage: bytes, lengths, numbers and words of the header."""

import functools
import json
import re
from collections.abc import Callable, Iterator

import numpy as np

from adder_flax import interop
from benchmarks.hostile._weights import KEPT, judge_file, spread, valid
from benchmarks.hostile.case import Case, Fault, Group, Observed

_WORDS = (
    b"F32",
    b"F64",
    b"F16",
    b"BF16",
    b"BOOL",
    b"I8",
    b"F8_E4M3",
    b"F4",
    b"null",
    b"-1",
    b"1e9",
    b"[]",
    b"{}",
    b"",
)
_WORDS += (
    b"18446744073709551616",
    b"NaN",
    b'"',
    b",",
    b"\x00",
    b"\xff",
    b"\\u001b[31m",
    b"0",
    b"true",
    b'"shape"',
)


def _flip_header(rng: np.random.Generator, content: bytearray, header: int) -> None:
    for position in rng.integers(0, 8 + header, rng.integers(1, 4)):
        content[position] = rng.integers(256)


def _flip_data(rng: np.random.Generator, content: bytearray, header: int) -> None:
    for position in rng.integers(8 + header, len(content), rng.integers(1, 9)):
        content[position] = rng.integers(256)


def _cut(rng: np.random.Generator, content: bytearray, header: int) -> None:
    del content[rng.integers(0, len(content)) :]


def _lengthen(rng: np.random.Generator, content: bytearray, header: int) -> None:
    content += rng.bytes(rng.integers(1, 100))


def _cut_out(rng: np.random.Generator, content: bytearray, header: int) -> None:
    start = rng.integers(0, len(content) - 1)
    del content[start : start + rng.integers(1, 64)]


def _length(rng: np.random.Generator, content: bytearray, header: int) -> None:
    exact = header + int(rng.integers(-20, 20))
    content[:8] = (exact if rng.random() < 0.5 else int(rng.integers(2**62))).to_bytes(8, "little")


def _rewrite(rng: np.random.Generator, content: bytearray, header: int, text: bytes) -> None:
    content[: 8 + header] = len(text).to_bytes(8, "little") + text


def _change_number(rng: np.random.Generator, content: bytearray, header: int) -> None:
    text = bytes(content[8 : 8 + header])
    numbers = list(re.finditer(rb"\d+", text))
    number = numbers[rng.integers(len(numbers))]
    other = (str(int(rng.integers(-5, 300))).encode(), str(int(rng.integers(2**62)) * 4).encode())[
        rng.integers(2)
    ]
    _rewrite(rng, content, header, text[: number.start()] + other + text[number.end() :])


def _change_word(rng: np.random.Generator, content: bytearray, header: int) -> None:
    text = bytes(content[8 : 8 + header])
    words = list(re.finditer(rb'"[^"]*"|\d+|[{}\[\],:]', text))
    word = words[rng.integers(len(words))]
    _rewrite(
        rng,
        content,
        header,
        text[: word.start()] + _WORDS[rng.integers(len(_WORDS))] + text[word.end() :],
    )


def _swap(rng: np.random.Generator, content: bytearray, header: int) -> None:
    facts = json.loads(bytes(content[8 : 8 + header]))
    names = [name for name in facts if name != "__metadata__"]
    first, second = rng.choice(names, 2, replace=False)
    facts[first], facts[second] = facts[second], facts[first]
    _rewrite(rng, content, header, json.dumps(facts).encode())


_EDITS = {
    "changed bytes in the header of a file of weights": _flip_header,
    "changed bytes in the data of a file of weights": _flip_data,
    "a file of weights that ends early": _cut,
    "a file of weights with bytes after its end": _lengthen,
    "a file of weights with bytes missing inside": _cut_out,
    "a wrong length of the header of a file of weights": _length,
    "a changed number in the header of a file of weights": _change_number,
    "a changed word in the header of a file of weights": _change_word,
    "two arrays of a file of weights in each other's place": _swap,
}


def _run(edit: Callable, seed: int, edit_index: int, index: int) -> Observed:
    rng = np.random.default_rng((seed, edit_index, index))
    names = interop.FORMATS[index % len(interop.FORMATS)]
    content = bytearray(valid(names))
    edit(rng, content, int.from_bytes(content[:8], "little"))
    return judge_file(bytes(content), names)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields files with one random edit each."""
    kinds = [
        (Fault(what, KEPT), functools.partial(_run, edit, seed, place))
        for place, (what, edit) in enumerate(_EDITS.items())
    ]
    return spread(kinds, count)


GROUP = Group("fuzz", 2000, cases)
