"""A folder of images: root/<split>/<class>/<image>, the layout of ImageNet on most disks."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from adder_flax.data._source import DataError

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class ImageFolder:
    """An image folder and its splits.

    Labels number the sub-folders of the *train* split by name, so every split means the same by a label.

    Args:
        root: the folder that holds the splits.

    Raises:
        DataError: no such folder, or no split or class in it.
    """

    def __init__(self, root: str | pathlib.Path):
        self.root = pathlib.Path(root)
        if not self.root.is_dir():
            raise DataError(f"Expected a folder of images as data_dir, got {str(root)!r}, which does not exist.")
        self.splits = tuple(_folders_in(self.root))
        if not self.splits:
            raise DataError(
                f"Expected {root}/<split>/<class>/<image>, got no sub-folder. Put the images into train/ and val/."
            )
        self.label_names = self._class_names("train" if "train" in self.splits else self.splits[0])

    def records(self, split: str) -> FolderRecords:
        """The images of a split, in the order of their paths.

        Raises:
            DataError: no such split, a class that train lacks, or no image.
        """
        if split not in self.splits:
            raise DataError(f"Expected a split out of {self.splits} in {self.root}, got {split!r}.")
        names = self._class_names(split)
        if unknown := sorted(set(names) - set(self.label_names)):
            raise DataError(
                f"Expected only classes of {self.root / 'train'} in {self.root / split}, got {unknown[:3]} "
                f"({len(unknown)} unknown in all). Add these folders to train, or remove them."
            )
        labels = {name: label for label, name in enumerate(self.label_names)}
        files = [(path, labels[name]) for name in names for path in _images_in(self.root / split / name)]
        if not files:
            known = " ".join(IMAGE_SUFFIXES)
            raise DataError(f"Expected images in {self.root / split}/<class>/, got none. Known suffixes: {known}.")
        return FolderRecords(files)

    def _class_names(self, split: str) -> list[str]:
        names = _folders_in(self.root / split)
        if not names:
            raise DataError(f"Expected one sub-folder per class in {self.root / split}, got none.")
        return names


class FolderRecords:
    """Image files and their labels."""

    def __init__(self, files: Sequence[tuple[pathlib.Path, int]]):
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        path, label = self._files[index]
        return path.read_bytes(), label

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        return [self[index] for index in indices]

    def describe(self, index: int) -> str:
        """The image's path."""
        return str(self._files[index][0])


def _folders_in(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images_in(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.name[0] != ".")
