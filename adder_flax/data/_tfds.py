"""TensorFlow Datasets without TensorFlow: sets prepared as ArrayRecord, their images decoded by Pillow."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np

from adder_flax.data._source import DataError


class TfdsSet:
    """A prepared TFDS set and its splits.

    Args:
        name: TFDS name, optionally with configuration and version: ``"cifar10"``, ``"imagenet2012:5.1.0"``.
        data_dir: folder that holds the prepared sets; None for TFDS's own default (~/tensorflow_datasets).

    Raises:
        DataError: unknown, not prepared, prepared in another format, or not an image-classification set.
    """

    def __init__(self, name: str, data_dir: str | None):
        # Importing TFDS takes about half a second, which runs on other sources need not pay.
        import tensorflow_datasets as tfds

        self._builder = _prepared_builder(tfds, name, data_dir)
        self._image_key, self._label_key = _image_and_label(tfds, name, self._builder.info)
        self._decoders = {self._image_key: tfds.decode.SkipDecoding()}
        features = self._builder.info.features
        self.splits = tuple(self._builder.info.splits)
        self.image_shape: tuple[int | None, int | None, int] = features[self._image_key].shape
        self.label_names = features[self._label_key].names

    def records(self, split: str) -> TfdsRecords:
        """Records of a split; sub-splits such as ``"train[:90%]"`` are splits too.

        Raises:
            DataError: no such split.
        """
        try:
            source = self._builder.as_data_source(split, decoders=self._decoders)
        except ValueError as error:
            name = self._builder.info.full_name
            raise DataError(f"Expected a split out of {self.splits} of {name}, got {split!r}: {error}") from error
        return TfdsRecords(source, self._image_key, self._label_key, f"{self._builder.data_dir}, split {split}")


class TfdsRecords:
    """Encoded images and labels of a TFDS data source."""

    def __init__(self, source: Any, image_key: str, label_key: str, description: str):
        self._source, self._description = source, description
        self._image_key, self._label_key = image_key, label_key

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        records = self._source.__getitems__(indices)
        return [(bytes(record[self._image_key]), int(record[self._label_key])) for record in records]

    def describe(self, index: int) -> str:
        """Folder and split: records of a TFDS set have no other name."""
        return f"{self._description}, position {index}"


def prepare_command(name: str, data_dir: str | None) -> str:
    """The command that prepares a set."""
    return f"python -m adder_flax.data.prepare {name}" + (f" --data_dir={data_dir}" if data_dir else "")


def tfds_shape(name: str, data_dir: str | None) -> tuple[tuple[int | None, int | None, int], int]:
    """Image shape and number of classes of a TFDS set, which need not be prepared.

    Raises:
        DataError: unknown, or not an image-classification set.
    """
    import tensorflow_datasets as tfds

    info = _builder(tfds, name, data_dir).info
    image_key, label_key = _image_and_label(tfds, name, info)
    return info.features[image_key].shape, info.features[label_key].num_classes


def _builder(tfds: Any, name: str, data_dir: str | None) -> Any:
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        known = ["digits", "fake", "folder", *tfds.list_builders(with_community_datasets=False)]
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise DataError(
            f"Expected digits, fake, folder or the name of a TFDS set, got {name!r}. {hint}"
            "All TFDS names: https://www.tensorflow.org/datasets/catalog/overview."
        ) from error
    except (ValueError, AssertionError) as error:
        raise DataError(f"Expected a configuration and version that TFDS has, got {name!r}: {error}") from error


def _prepared_builder(tfds: Any, name: str, data_dir: str | None) -> Any:
    builder = _builder(tfds, name, data_dir)
    if not builder.is_prepared():
        raise DataError(
            f"Expected {name} prepared as ArrayRecord in {builder.data_dir}, got nothing there. "
            f"Prepare it once: {prepare_command(name, data_dir)}"
        )
    file_format = builder.info.file_format
    if file_format is None or file_format.value != "array_record":
        found = file_format.value if file_format else "an unknown format"
        raise DataError(
            f"Expected {name} as array_record in {builder.data_dir}, got {found}, which has no random access. "
            f"Prepare it in another folder: {prepare_command(name, '<other folder>')}"
        )
    return builder


def _image_and_label(tfds: Any, name: str, info: Any) -> tuple[str, str]:
    keys = info.supervised_keys or ("image", "label")
    features = info.features
    usable = (
        len(keys) == 2
        and all(isinstance(key, str) and key in features for key in keys)
        and isinstance(features[keys[0]], tfds.features.Image)
        and features[keys[0]].np_dtype == np.uint8
        and isinstance(features[keys[1]], tfds.features.ClassLabel)
    )
    if not usable:
        raise DataError(
            f"Expected a set of one uint8 image and one class label each, got {name} with "
            f"supervised keys {info.supervised_keys} and features {sorted(features)}."
        )
    return keys
