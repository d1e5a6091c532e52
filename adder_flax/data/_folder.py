"""Folders of encoded images of any size: <split>/<class>/<image>, or named by <split>.csv.

The first is the layout of ImageNet on most disks. What the folders of other modules share with
these two is here too.
"""

from __future__ import annotations

import csv
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import logging

from adder_flax.data import _images
from adder_flax.data._registry import DataSet, register_source, resolve_split
from adder_flax.data._source import DataError, EncodedSource
from adder_flax.text import printable


def register_collection(name: str, open_folder: Callable[[str], Any], what: str) -> None:
    """Adds a data set that is read from a folder.

    Args:
        name: what ``config.data.name`` calls it.
        open_folder: opens the folder that ``config.data.data_dir`` names: what it gives has
            ``splits``, the ``label_names`` of classes by number, and ``records(split)``.
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
    """The position of each label of ``place`` among the classes of the split ``reference``.

    Raises:
        DataError: one is none of them.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    labels = list(labels)
    if unknown := sorted(set(labels) - numbers.keys()):
        raise DataError(
            f"Expected only labels of the split {printable(reference)} in {printable(place)}, got "
            f"{unknown[:3]} ({len(unknown)} unknown in all). Correct them."
        )
    return [numbers[label] for label in labels]


class FolderRecords:
    """Image files and their labels."""

    def __init__(self, files: Sequence[tuple[str, int]]):
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        path, label = self._files[index]
        return pathlib.Path(path).read_bytes(), label

    def file_names(self) -> list[str]:
        """The images' paths."""
        return [path for path, _ in self._files]

    def describe(self, index: int) -> str:
        """The image's path, fit for a terminal."""
        return printable(self._files[index][0], limit=1000)


class ImageFolder:
    """An image folder and its splits.

    Labels number the sub-folders of the *train* split by name, so every split means the same by a
    label. Folders in a class's folder belong to the class. Files and folders whose names begin with
    a dot are left alone.

    Args:
        root: the folder that holds the splits.

    Raises:
        DataError: no split or fewer than two classes in it.
    """

    def __init__(self, root: str | pathlib.Path):
        self.root = pathlib.Path(root)
        self._shown = printable(root)
        self.splits = tuple(_folders_in(self.root))
        if not self.splits:
            raise DataError(
                f"Expected {self._shown}/<split>/<class>/<image>, got no sub-folder. Put the "
                "images into train/ and val/."
            )
        self._reference = reference_split(self.splits)
        self._classes = self._class_names(self._reference)
        if len(self._classes) < 2:
            raise DataError(
                f"Expected at least two classes in {self._shown}/{printable(self._reference)}, got "
                f"one, {self._classes[0]!r}. Put the images of each class into a folder of its own."
            )
        self.label_names = [printable(name) for name in self._classes]

    def records(self, split: str) -> FolderRecords:
        """The images of a split, in the order of their paths.

        Raises:
            DataError: a class that train lacks or that train has no image of, an image outside the
                classes' folders, or no image.
        """
        shown = f"{self._shown}/{printable(split)}"
        names = self._class_names(split)
        if unknown := sorted(set(names) - set(self._classes)):
            raise DataError(
                f"Expected only classes of {self._shown}/{printable(self._reference)} in {shown}, "
                f"got {unknown[:3]} ({len(unknown)} unknown in all). Add these folders to "
                f"{printable(self._reference)}, or remove them."
            )
        beside = (e.name for e in _entries(self.root / split) if not e.is_dir())
        if stray := sorted(filter(_is_image, beside)):
            raise DataError(
                f"Expected images in {shown}/<class>/, got the file {stray[0]!r} beside the "
                f"classes' folders ({len(stray)} such files in all). Move them into the folders of "
                "their classes."
            )
        left_out: Counter[str] = Counter()
        files = {name: _images_in(self.root / split / name, left_out) for name in names}
        if left_out:
            most = sorted(left_out.items(), key=lambda kind_and_n: (-kind_and_n[1], kind_and_n[0]))
            kinds = ", ".join(f"{n} {kind}" for kind, n in most[:10])
            logging.warning("%s: left out what is no image by its name: %s", shown, kinds)
        known = "Those of Pillow's formats are known, as .jpg and .png"
        if not any(files.values()):
            raise DataError(f"Expected names of images in {shown}/<class>/, got none. {known}.")
        if split == self._reference and (empty := [name for name in names if not files[name]]):
            raise DataError(
                f"Expected images of each class in {shown}, got none of {empty[:3]} ({len(empty)} "
                f"empty folders in all). Remove these folders, or fill them. {known}."
            )
        labels = {name: label for label, name in enumerate(self._classes)}
        return FolderRecords([(path, labels[name]) for name in names for path in files[name]])

    def _class_names(self, split: str) -> list[str]:
        names = _folders_in(self.root / split)
        if not names:
            raise DataError(
                f"Expected one sub-folder per class in {self._shown}/{printable(split)}, got none. "
                "Put the images of each class into a folder of its own."
            )
        return names


def _entries(folder: str | pathlib.Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _images.image_suffixes()


def _folders_in(folder: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if entry.is_dir())


def _images_in(folder: pathlib.Path, left_out: Counter[str]) -> list[str]:
    """Paths of the images in a folder and those in it; of other files the kinds are counted."""
    found = []
    for entry in _entries(folder):
        if entry.is_dir():
            found += _images_in(pathlib.Path(entry.path), left_out)
        elif _is_image(entry.name):
            found.append(entry.path)
        else:
            ending = os.path.splitext(entry.name)[1].lower()
            left_out[printable(ending, 20) or "without an ending"] += 1
    return sorted(found, key=lambda path: path.split(os.sep))


class ImageList:
    """The lists of a folder, <split>.csv with the columns path and label.

    Paths begin at that folder, unless they are absolute.

    Args:
        root: the folder that holds them.

    Raises:
        DataError: there are none, or they lack a column.
    """

    def __init__(self, root: str | pathlib.Path):
        self._root = pathlib.Path(root)
        self.splits = tuple(sorted(path.stem for path in self._root.glob("*.csv")))
        if not self.splits:
            raise DataError(
                f"Expected {printable(root)}/<split>.csv with the columns path and label, got no "
                "such file. Write train.csv and val.csv."
            )
        self._reference = reference_split(self.splits)
        self.label_names = classes_of(label for _, label in self._rows(self._reference))

    def records(self, split: str) -> FolderRecords:
        """The images of a split, in the order of its list.

        Raises:
            DataError: no row, or a label that training lacks.
        """
        rows = self._rows(split)
        labels = numbered(
            (label for _, label in rows), self.label_names, f"{split}.csv", self._reference
        )
        paths = (str(self._root / path) for path, _ in rows)
        return FolderRecords(list(zip(paths, labels, strict=True)))

    def _rows(self, split: str) -> list[tuple[str, str]]:
        path = self._root / f"{split}.csv"
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            if not {"path", "label"} <= set(columns):
                raise DataError(
                    f"Expected the columns path and label in {printable(path)}, got "
                    f"{list(columns)[:10]}. Name them in its first line."
                )
            rows = [(row["path"], row["label"]) for row in reader]
        if bad := next((n for n, row in enumerate(rows, 2) if not all(row)), None):
            raise DataError(
                f"Expected a path and a label in each row of {printable(path)}, got none in line "
                f"{bad}. Correct it."
            )
        if not rows:
            raise DataError(f"Expected rows in {printable(path)}, got none. Add images.")
        return rows


register_collection("folder", ImageFolder, "root of the image folder")
register_collection("image_list", ImageList, "folder of <split>.csv")
