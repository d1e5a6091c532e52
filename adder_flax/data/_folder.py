"""Folders of encoded images of any size: <split>/<class>/<image>, or named by <split>.csv.

The first is the layout of ImageNet on most disks. What the folders of other modules share with
these two is here too.
"""

import csv
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from absl import logging

from adder_flax.data import _images
from adder_flax.data._registry import DataSet, register_source, resolve_split
from adder_flax.data._source import DataError, EncodedSource, Records
from adder_flax.text import printable


class Collection:
    """Splits of images in a folder, each with the name of its class.

    ``read`` opens a split: what makes `Records` of labels, and the class of each image. ``classes``
    are in the order of their numbers, by default those of the training split, or else of the first.
    """

    def __init__(
        self,
        root: pathlib.Path,
        splits: Iterable[str],
        read: Callable[[str], tuple[Callable[[list[int]], Records], Iterable[Any]]],
        classes: Sequence[Any] | None = None,
        label_names: Iterable[str] | None = None,
    ):
        self.root, self.splits, self._read = root, tuple(splits), read
        self._classes = classes or classes_of(read(reference_split(self.splits))[1])
        self.label_names = list(label_names or map(printable, self._classes))

    def records(self, split: str) -> Records:
        """The images of a split."""
        make, labels = self._read(split)
        numbers = {name: number for number, name in enumerate(self._classes)}
        labels = list(labels)
        if unknown := sorted(set(labels) - numbers.keys()):
            reference = printable(reference_split(self.splits))
            raise DataError(
                f"Expected only labels of the split {reference} in {printable(split)} of "
                f"{printable(self.root)}, got {unknown[:3]} ({len(unknown)} unknown in all). "
                f"Correct them, or add them to {reference}."
            )
        return make([numbers[label] for label in labels])


def register_collection(name: str, open_folder: Callable[[pathlib.Path], Collection], what: str):
    """Adds a data set that is read from the folder ``config.data.data_dir``, which is ``what``."""

    def load(
        split: str, *, name: str, data_dir: str | None, image_size: int | None, **options: Any
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
        found = open_folder(pathlib.Path(data_dir))
        split = resolve_split(split, found.splits, printable(data_dir))
        whole = (name, split, found.splits, found.records(split), found.label_names)
        return EncodedSource(*whole, (image_size, image_size, 3), crops_on_host=True, **options)

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
    numbers = all(label.isdecimal() for label in found)
    return sorted(found, key=(lambda label: (int(label), label)) if numbers else None)


class Place(NamedTuple):
    """Where an image is: a file, or so many bytes of one from ``start`` on, under a name in it."""

    path: str
    start: int = 0
    size: int = -1
    name: str = ""


class FileRecords:
    """Images in files and their labels."""

    def __init__(self, places: Sequence[Place], labels: Sequence[int]):
        self._places, self._labels = places, labels

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        place = self._places[index]
        with open(place.path, "rb") as file:
            file.seek(place.start)
            return file.read(place.size), self._labels[index]

    def file_names(self) -> list[str]:
        """The images' paths, or their names in a file of several."""
        return [place.name or place.path for place in self._places]

    def describe(self, index: int) -> str:
        """The image's path, fit for a terminal."""
        place = self._places[index]
        return printable(": ".join(filter(None, (place.path, place.name))), limit=1000)


def image_folder(root: pathlib.Path) -> Collection:
    """Opens an image folder.

    Labels number the sub-folders of the *train* split by name, so every split means the same by a
    label. Folders in a class's folder belong to the class; names that begin with a dot are left
    alone.
    """
    splits = _folders_in(root)
    if not splits:
        raise DataError(
            f"Expected {printable(root)}/<split>/<class>/<image>, got no sub-folder. Put the "
            "images into train/ and val/."
        )
    reference = reference_split(splits)
    classes = _class_names(root / reference)
    if len(classes) < 2:
        raise DataError(
            f"Expected at least two classes in {printable(root / reference)}, got one, "
            f"{classes[0]!r}. Put the images of each class into a folder of its own."
        )
    read = lambda split: _read_split(root / split, full=split == reference)
    return Collection(root, splits, read, classes)


def _read_split(folder: pathlib.Path, *, full: bool) -> tuple[partial[FileRecords], list[str]]:
    """The images of a split in the order of their paths, and their classes."""
    shown, names = printable(folder), _class_names(folder)
    beside = (entry.name for entry in _entries(folder) if not entry.is_dir())
    if stray := sorted(name for name in beside if _ending(name) in _images.image_suffixes()):
        raise DataError(
            f"Expected images in {shown}/<class>/, got the file {stray[0]!r} beside the "
            f"classes' folders ({len(stray)} such files in all). Move them into the folders of "
            "their classes."
        )
    left_out: Counter[str] = Counter()
    files = {name: _images_in(folder / name, left_out) for name in names}
    if left_out:
        most = sorted((-count, kind) for kind, count in left_out.items())
        kinds = ", ".join(f"{-count} {kind}" for count, kind in most[:10])
        logging.warning("%s: left out what is no image by its name: %s", shown, kinds)
    empty = [name for name in names if not files[name]]
    if empty and (full or len(empty) == len(names)):
        raise DataError(
            f"Expected images of each class in {shown}, got none of {empty[:3]} ({len(empty)} "
            "empty folders in all). Remove these folders, or fill them. The endings of Pillow's "
            "formats are known, as .jpg and .png."
        )
    places = [Place(path) for name in names for path in files[name]]
    return partial(FileRecords, places), [name for name in names for _ in files[name]]


def _class_names(folder: pathlib.Path) -> list[str]:
    names = _folders_in(folder)
    if not names and (images := _images_in(folder, Counter())):
        raise DataError(
            f"Expected {printable(folder.parent)}/<split>/<class>/<image>, got {len(images)} "
            f"images in {printable(folder)}, which then is a split and no class. Set data_dir to a "
            "folder of train/ and val/, each with a folder for each class."
        )
    if not names:
        raise DataError(
            f"Expected one sub-folder per class in {printable(folder)}, got none. Put the images "
            "of each class into a folder of its own."
        )
    return names


def _entries(folder: str | pathlib.Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _folders_in(folder: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if entry.is_dir())


def _images_in(folder: str | pathlib.Path, left_out: Counter[str]) -> list[str]:
    """Paths of the images in a folder and those in it; of other files the kinds are counted."""
    found = []
    for entry in _entries(folder):
        if entry.is_dir():
            found += _images_in(entry.path, left_out)
        elif (ending := _ending(entry.name)) in _images.image_suffixes():
            found.append(entry.path)
        else:
            left_out[printable(ending, 20) or "without an ending"] += 1
    return sorted(found, key=lambda path: path.split(os.sep))


def image_list(root: pathlib.Path) -> Collection:
    """Opens the lists of a folder, <split>.csv with the columns path and label.

    Paths begin at that folder, unless they are absolute.
    """
    splits = sorted(path.stem for path in root.glob("*.csv"))
    if not splits:
        raise DataError(
            f"Expected {printable(root)}/<split>.csv with the columns path and label, got no "
            "such file. Write train.csv and val.csv."
        )
    return Collection(root, splits, lambda split: _read_list(root / f"{split}.csv"))


def _read_list(path: pathlib.Path) -> tuple[partial[FileRecords], list[str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        if not {"path", "label"} <= set(columns):
            raise DataError(
                f"Expected the columns path and label in {printable(path)}, got "
                f"{list(columns)[:10]}. Name them in its first line."
            )
        rows = [(row["path"], row["label"]) for row in reader]
    bad = next((n for n, row in enumerate(rows, 2) if not all(row)), None)
    if bad or not rows:
        raise DataError(
            f"Expected rows in {printable(path)}, each with a path and a label, got none in line "
            f"{bad or 2}. Correct it."
        )
    places = [Place(str(path.parent / file)) for file, _ in rows]
    return partial(FileRecords, places), [label for _, label in rows]


register_collection("folder", image_folder, "root of the image folder")
register_collection("image_list", image_list, "folder of <split>.csv")
