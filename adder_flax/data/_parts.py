"""Parts of a split: ``train[:90%]``."""

import copy
import re
from typing import Any

import numpy as np

from adder_flax.data._source import DataError, Source

_PART = re.compile(r"([^\[\]]+)\[(?:(\d+)%)?:(?:(\d+)%)?\]")


def read_part(split: str) -> tuple[str, tuple[int, int] | None]:
    """The split that a name like ``train[:90%]`` is a part of, and which percent (None for all).

    >>> read_part("train[80%:]"), read_part("train")
    (('train', (80, 100)), ('train', None))
    """
    found = _PART.fullmatch(split)
    if found is None:
        return split, None
    low, high = int(found[2] or 0), int(found[3] or 100)
    if not 0 <= low < high <= 100:
        raise DataError(
            f"Expected a part like {found[1]}[:90%], percents rising from 0 to 100, got {split!r}."
        )
    return found[1], (low, high)


def part_of(source: Source, percents: tuple[int, int]) -> Source:
    """A part of the records of a source, as a source of its own that is else what the whole is.

    Records are dealt in a fixed random order, the same for every part and on every machine: what
    lies on a disk is often sorted by class.
    """
    low, high = (round(len(source) * percent / 100) for percent in percents)
    rows = np.sort(np.argsort(np.random.Philox(0).random_raw(len(source)), kind="stable")[low:high])
    if not rows.size:
        raise DataError(
            f"Expected a part of {source.name}/{source.split} with a record in it, got "
            f"{percents[0]} to {percents[1]} percent of {len(source)}. Take a larger part."
        )

    class Part(type(source)):
        def __len__(self):
            return len(rows)

        def read(self, indices, *options):
            return source.read(rows[indices], *options)

        def file_names(self):
            whole: Any = source  # of images
            return [names[row] for names in [whole.file_names()] for row in rows]

    part = copy.copy(source)
    part.__class__ = Part
    part.split = f"{source.split}[{percents[0]}%:{percents[1]}%]"
    part.dealt = (low, high)
    return part


def shared_records(one: Source, other: Source) -> int:
    """How many records two splits of one set, or parts of them, have in common.

    >>> from adder_flax.data import load_source
    >>> parts = [load_source("digits", f"train[{part}]") for part in (":50%", "40%:")]
    >>> shared_records(*parts), shared_records(parts[0], load_source("digits", "test"))
    (143, 0)
    """
    wholes = [(source.name, read_part(source.split)[0]) for source in (one, other)]
    if wholes[0] != wholes[1]:
        return 0
    if one.dealt is None or other.dealt is None:
        return min(len(one), len(other))  # one of them is the whole
    return max(0, min(one.dealt[1], other.dealt[1]) - max(one.dealt[0], other.dealt[0]))
