"""Image sets of Hugging Face's ``datasets``: what ``save_to_disk`` wrote, or Parquet files."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from adder_flax.data._folder import classes_of, numbered, reference_split, register_collection
from adder_flax.data._source import DataError
from adder_flax.extras import needs
from adder_flax.text import printable


class HuggingFaceFolder:
    """A folder that ``datasets`` reads, with a column of images and one of labels."""

    def __init__(self, root: str | pathlib.Path):
        with needs("datasets"):
            import datasets
        saved = any(pathlib.Path(root, f).is_file() for f in ("dataset_dict.json", "state.json"))
        try:
            found = (
                datasets.load_from_disk(str(root)) if saved else datasets.load_dataset(str(root))
            )
        except Exception as error:  # of many types
            raise DataError(
                f"Expected a folder of Hugging Face's datasets at {printable(root)}, got: "
                f"{printable(error)}. Write it by save_to_disk, or as <split>-*.parquet."
            ) from error
        self._sets: dict[str, Any] = (
            {"train": found} if isinstance(found, datasets.Dataset) else dict(found)
        )
        self.splits = tuple(map(str, self._sets))
        self._reference = reference_split(self.splits)
        features = self._sets[self._reference].features
        image = [n for n, kind in features.items() if isinstance(kind, datasets.Image)]
        label = [n for n in ("label", "labels") if n in features] + [
            n for n, kind in features.items() if isinstance(kind, datasets.ClassLabel)
        ]
        image += [n for n in ("image", "img") if n in features]
        if not image or not label:
            raise DataError(
                f"Expected a column of images and one named label in {printable(root)}, got "
                f"{', '.join(features)}. Rename them."
            )
        self._image, self._label = image[0], label[0]
        if isinstance(features[self._image], datasets.Image):  # as they were encoded
            kind = datasets.Image(decode=False)
            self._sets = {n: s.cast_column(self._image, kind) for n, s in self._sets.items()}
        self._named = isinstance(features[self._label], datasets.ClassLabel)
        self.label_names = (
            features[self._label].names
            if self._named
            else classes_of(map(str, self._sets[self._reference].unique(self._label)))
        )

    def records(self, split: str) -> HuggingFaceRecords:
        """The rows of a split; a label that training lacks is a DataError."""
        rows = self._sets[split]
        labels = rows[self._label][:]
        if not self._named:
            labels = numbered(map(str, labels), self.label_names, split, self._reference)
        return HuggingFaceRecords(rows.select_columns(self._image), self._image, labels)


class HuggingFaceRecords:
    """Images of a split, as they were encoded, and their labels."""

    def __init__(self, rows: Any, column: str, labels: Sequence[int]):
        self._rows, self._column, self._labels = rows, column, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        images = self._rows[list(indices)][self._column]
        encoded = [image["bytes"] or pathlib.Path(image["path"]).read_bytes() for image in images]
        return list(zip(encoded, (self._labels[i] for i in indices), strict=True))

    def describe(self, index: int) -> str:
        """The number of the row."""
        return f"row {index}"


register_collection(
    "hugging_face", HuggingFaceFolder, "folder of datasets' save_to_disk, or of Parquet files"
)
