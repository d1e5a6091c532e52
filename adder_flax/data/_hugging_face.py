"""Image sets of Hugging Face's ``datasets``: what ``save_to_disk`` wrote, or Parquet files."""

import pathlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from adder_flax.data._folder import Collection, reference_split, register_collection
from adder_flax.data._source import DataError
from adder_flax.extras import needs
from adder_flax.text import printable


def hugging_face_folder(root: pathlib.Path) -> Collection:
    """Opens a folder that ``datasets`` reads, with a column of images and one of labels."""
    with needs("datasets"):
        import datasets
    saved = any((root / f).is_file() for f in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(str(root)) if saved else datasets.load_dataset(str(root))
    except Exception as error:  # of many types
        raise DataError(
            f"Expected a folder of Hugging Face's datasets at {printable(root)}, got: "
            f"{printable(error)}. Write it by save_to_disk, or as <split>-*.parquet."
        ) from error
    sets: dict[str, Any] = {"train": found} if isinstance(found, datasets.Dataset) else dict(found)
    splits = tuple(map(str, sets))
    features = sets[reference_split(splits)].features
    of_kind = lambda kind: [name for name, feature in features.items() if isinstance(feature, kind)]
    named = lambda *names: [name for name in names if name in features]
    images = of_kind(datasets.Image) + named("image", "img")
    labels = named("label", "labels") + of_kind(datasets.ClassLabel)
    if not images or not labels:
        raise DataError(
            f"Expected a column of images and one named label in {printable(root)}, got "
            f"{', '.join(features)}. Rename them."
        )
    image, label = images[0], labels[0]
    if isinstance(features[image], datasets.Image):  # as they were encoded
        kind = datasets.Image(decode=False)
        sets = {split: rows.cast_column(image, kind) for split, rows in sets.items()}
    names = getattr(features[label], "names", None)  # of a ClassLabel, whose labels are numbers

    def read(split: str) -> tuple[partial[HuggingFaceRecords], list[Any]]:
        rows = sets[split]
        classes = rows[label][:] if names else list(map(str, rows[label][:]))
        return partial(HuggingFaceRecords, rows.select_columns(image), image), classes

    return Collection(root, splits, read, names and range(len(names)), names)


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
        labels = (self._labels[i] for i in indices)
        return list(zip(map(_encoded, images), labels, strict=True))

    def describe(self, index: int) -> str:
        """The number of the row."""
        return f"row {index}"


def _encoded(image: Any) -> bytes:
    if isinstance(image, bytes):  # a column of Parquet that nobody declared to be of images
        return image
    return image["bytes"] or pathlib.Path(image["path"]).read_bytes()


register_collection(
    "hugging_face", hugging_face_folder, "folder of datasets' save_to_disk, or of Parquet files"
)
