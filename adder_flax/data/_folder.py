"""A folder of images: root/<split>/<class>/<image>, the layout of ImageNet on most disks."""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Sequence

from absl import logging

from adder_flax.data import _images
from adder_flax.data._collection import reference_split, register_collection
from adder_flax.data._source import DataError
from adder_flax.text import printable


class ImageFolder:
    """An image folder and its splits.

    Labels number the sub-folders of the *train* split by name, so every split means the same by a
    label. Folders in a class's folder belong to the class. Files and folders whose names begin with
    a dot are left alone.

    Args:
        root: the folder that holds the splits.

    Raises:
        DataError: no such folder, or no split or fewer than two classes in it.
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
            DataError: no such split, a class that train lacks or that train has no image of, an
                image outside the classes' folders, or no image.
        """
        if split not in self.splits:
            raise DataError(
                f"Expected a split out of {self.splits} in {self._shown}, got {split!r}."
            )
        shown = f"{self._shown}/{printable(split)}"
        names = self._class_names(split)
        if unknown := sorted(set(names) - set(self._classes)):
            raise DataError(
                f"Expected only classes of {self._shown}/{printable(self._reference)} in {shown}, "
                f"got {unknown[:3]} ({len(unknown)} unknown in all). Add these folders to "
                f"{printable(self._reference)}, or remove them."
            )
        if stray := self._files_in_place_of_classes(split):
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

    def _files_in_place_of_classes(self, split: str) -> list[str]:
        names = {entry.name for entry in _entries(self.root / split) if not _leads_to_folder(entry)}
        return sorted(name for name in names if _is_image(name) or name in self._classes)


class FolderRecords:
    """Image files and their labels."""

    def __init__(self, files: Sequence[tuple[str, int]]):
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        path, label = self._files[index]
        return _images.read_encoded(path), label

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        return [self[index] for index in indices]

    def path(self, index: int) -> pathlib.Path:
        """The image's path."""
        return pathlib.Path(self._files[index][0])

    def file_names(self) -> list[str]:
        """The images' paths."""
        return [path for path, _ in self._files]

    def describe(self, index: int) -> str:
        """The image's path, fit for a terminal."""
        return printable(self._files[index][0], limit=1000)


def _entries(folder: str | pathlib.Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not _is_hidden(entry.name)]
    except OSError as error:
        raise DataError(
            f"Expected a folder that can be read, got {str(folder)!r}: {error.strerror}."
        ) from error


def _leads_to_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _is_hidden(name: str) -> bool:
    return name.startswith(".") and bool(name.strip("."))


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _images.image_suffixes()


def _folders_in(folder: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if _leads_to_folder(entry))


def _images_in(folder: pathlib.Path, left_out: Counter[str]) -> list[str]:
    """Paths of the images in a folder and the folders in it; links may lead round in a circle.

    Of other files the kinds are counted.
    """
    found, waiting, seen = [], [str(folder)], set()
    while waiting:
        place = waiting.pop()
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in _entries(place):
            if _leads_to_folder(entry):
                waiting.append(entry.path)
            elif _is_image(entry.name):
                found.append(entry.path)
            else:
                ending = os.path.splitext(entry.name)[1].lower()
                left_out[printable(ending, 20) or "without an ending"] += 1
    return sorted(found, key=lambda path: path.split(os.sep))


register_collection("folder", ImageFolder, "root of the image folder")
