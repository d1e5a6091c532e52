"""Pairs of symbol sequences in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Int

from adder_flax.data._source import Source

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
        self.name, self.split, self.splits = name, split, tuple(splits)
        self.arrays = {name: np.asarray(values, np.int32) for name, values in arrays.items()}
        self.symbols = {name: tuple(known) for name, known in symbols.items()}
        self.longest = longest

    @property
    def record_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        import jax  # here, as the rest needs none of it

        return {
            name: jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
            for name, values in self.arrays.items()
        }

    def __len__(self) -> int:
        return len(self.arrays["source"])

    def read(self, indices, seeds=None, map_function=map):
        del seeds, map_function
        return {name: values[indices] for name, values in self.arrays.items()}, np.ones(
            len(indices), bool
        )

    def text(self, kind: str, numbers: Iterable[int] | np.ndarray) -> tuple[str, ...]:
        """The symbols of a row, up to its end.

        Args:
            kind: ``"source"`` or ``"target"``.
            numbers: the row.
        """
        symbols = []
        for number in numbers:
            if number == PAD or (kind == "target" and number == END):
                break
            symbols.append(self.symbols[kind][number])
        return tuple(symbols)


def pad(rows: Sequence[Sequence[int]], length: int) -> Int[np.ndarray, "rows length"]:
    """Rows of different lengths as one array, filled up with `PAD`.

    >>> pad([[3, 4], [5]], 3).tolist()
    [[3, 4, 0], [5, 0, 0]]
    """
    filled = np.full((len(rows), length), PAD, np.int32)
    for row, numbers in zip(filled, rows, strict=True):
        row[: len(numbers)] = numbers
    return filled
