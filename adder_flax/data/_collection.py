"""Folders of encoded images of any size, with splits and classes, by the name of their layout."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from adder_flax.data._registry import DataSet, register_source, resolve_split
from adder_flax.data._source import DataError, EncodedSource, Records
from adder_flax.text import printable


class Collection(Protocol):
    """What lies in a folder.

    Attributes:
        splits: their names.
        label_names: of the classes; their position is the label.
    """

    splits: Sequence[str]
    label_names: Sequence[str]

    def records(self, split: str) -> Records:
        """The encoded images and labels of a split."""
        ...


def register_collection(name: str, open_folder: Callable[[str], Collection], what: str) -> None:
    """Adds a data set that is read from a folder.

    Args:
        name: what ``config.data.name`` calls it.
        open_folder: opens the folder that ``config.data.data_dir`` names.
        what: the folder, in the words of a message.
    """

    def load(
        split: str,
        *,
        name: str,
        data_dir: str | None = None,
        image_size: int | None = None,
        **options: Any,
    ) -> EncodedSource:
        if data_dir is None:
            raise DataError(f"Expected data_dir=<{what}> for data set {name!r}, got none.")
        if image_size is None:
            raise DataError(
                f"Expected image_size for data set {name!r}, whose images may vary in size, got "
                "none."
            )
        if not pathlib.Path(data_dir).is_dir():
            raise DataError(f"Expected data_dir=<{what}>, got {data_dir!r}, which is no folder.")
        found = open_folder(data_dir)
        split = resolve_split(split, found.splits)
        if split not in found.splits:
            raise DataError(
                f"Expected a split out of {tuple(found.splits)} in {printable(data_dir)}, got "
                f"{split!r}."
            )
        shape = (image_size, image_size, 3)
        return EncodedSource(
            *(name, split, found.splits, found.records(split), found.label_names, shape),
            crops_on_host=True,
            **options,
        )

    load.__qualname__ = f"load_{name}"  # by which a second registration is known
    register_source(DataSet(name, load))


def reference_split(splits: Sequence[str]) -> str:
    """The split whose labels are the classes: that of training, where there is one."""
    return "train" if "train" in splits else splits[0]


def classes_of(labels: Iterable[str]) -> list[str]:
    """The classes that some labels name, in the order of their numbers or their letters.

    >>> classes_of(["10", "2", "2"]), classes_of(["dog", "10"])
    (['2', '10'], ['10', 'dog'])
    """
    found = set(labels)
    return sorted(found, key=int if all(label.isdecimal() for label in found) else None)


def numbered(
    labels: Iterable[str], classes: Sequence[str], place: str, reference: str
) -> list[int]:
    """The position of each label among the classes.

    Raises:
        DataError: one is none of them; the message says in which ``place``.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    labels = list(labels)
    if unknown := sorted(set(labels) - numbers.keys()):
        raise DataError(
            f"Expected only labels of the split {printable(reference)} in {printable(place)}, got "
            f"{unknown[:3]} ({len(unknown)} unknown in all). Correct them."
        )
    return [numbers[label] for label in labels]
