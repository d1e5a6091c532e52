"""TensorFlow Datasets without TensorFlow: prepared as ArrayRecord, images decoded by Pillow."""

import contextlib
import difflib
import math
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from adder_flax.data._registry import SETS, DataSet, register_source, resolve_split
from adder_flax.data._source import CachedSource, DataError, EncodedSource, NotPreparedError, Source
from adder_flax.extras import needs
from adder_flax.text import printable

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
"""Names of sets: they are names of folders too."""

_FILE_NAME = "file_name"  # what ImageNet's sets call it

CACHE_BYTES = 2**30
"""Sets of a fixed image size stay in memory if the decoded split is no larger (CIFAR's train split:
154 MB)."""


def load_tfds(
    split: str, *, name: str, data_dir: str | None, image_size: int | None, **options: Any
) -> Source:
    """A split of a prepared TFDS set; see `load_source`."""
    # Importing TFDS takes about half a second, which runs on other sources need not pay.
    with needs("data"):
        import tensorflow_datasets as tfds

    with _whole(name, data_dir):
        builder = _prepared_builder(tfds, name, data_dir)
        info = builder.info
        image_key, label_key = _image_and_label(tfds, name, info)
        label_names = [printable(label) for label in info.features[label_key].names]
        found, declared = len(set(label_names)), info.features[label_key].num_classes
        if found != declared:
            raise ValueError(f"{found} names of labels where features.json declares {declared}")
        for part in split.split("+"):
            if (known := part.partition("[")[0].strip()) in info.splits:
                _check_shards(info.splits[known])
    height, width, channels = info.features[image_key].shape
    stored = None if height is None or height != width else (height, height)
    size = image_size or (stored and height)
    if size is None:
        raise DataError(
            f"Expected image_size for {name}, whose images are not all square and of one size, got "
            "none."
        )
    splits = tuple(info.splits)
    split = resolve_split(split, splits)
    try:
        records = builder.as_data_source(split, decoders={image_key: tfds.decode.SkipDecoding()})
    except (KeyError, ValueError) as error:
        raise DataError(
            f"Expected a split out of {splits} of {info.full_name}, got {split!r}: "
            f"{printable(error)}"
        ) from error
    encoded = TfdsRecords(records, image_key, label_key, f"{builder.data_dir}, split {split}")
    whole = (name, split, splits, encoded, label_names, (size, size, channels))
    source = EncodedSource(*whole, crops_on_host=stored is None, stored_size=stored, **options)
    small = len(source) * math.prod(source.image_shape) <= CACHE_BYTES
    return CachedSource(source) if stored and small else source


class TfdsRecords:
    """Encoded images and labels of a TFDS data source."""

    def __init__(self, source: Any, image_key: str, label_key: str, description: str):
        self._source, self._keys, self._description = source, (image_key, label_key), description
        if _FILE_NAME in source.dataset_info.features:
            self.file_names = self._read_file_names

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        image, label = self._keys
        records = self._source.__getitems__(indices)
        return [(bytes(record[image]), int(record[label])) for record in records]

    def describe(self, index: int) -> str:
        """Folder and split: not every record of a TFDS set has another name."""
        return f"{self._description}, position {index}"

    def _read_file_names(self) -> list[str]:
        # They lie beside the images, all of which are read for them.
        rows = range(len(self))
        chunks = (rows[start : start + 1000] for start in rows[::1000])
        records = (record for chunk in chunks for record in self._source.__getitems__(chunk))
        return [os.fsdecode(record[_FILE_NAME]) for record in records]


def prepare_command(name: str, data_dir: str | None) -> str:
    """The command that prepares a set."""
    where = f" --data_dir={data_dir}" if data_dir else ""
    return f"python -m adder_flax.data.prepare {name}{where}"


def tfds_shape(name: str, data_dir: str | None) -> tuple[tuple[int | None, int | None, int], int]:
    """Image shape and number of classes of a TFDS set, which need not be prepared."""
    with needs("data"):
        import tensorflow_datasets as tfds

    with _whole(name, data_dir):
        info = _builder(tfds, name, data_dir).info
        image_key, label_key = _image_and_label(tfds, name, info)
    return info.features[image_key].shape, info.features[label_key].num_classes


@contextlib.contextmanager
def _whole(name: str, data_dir: str | None) -> Iterator[None]:
    """Tells in one message what is wrong with the files of a set, of any kind."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"Expected the set {name!r} whole, as it was prepared in {_folder(name, data_dir)}, "
            f"got {reason(error)}. Move that folder away and prepare the set again: "
            f"{prepare_command(name, data_dir)}"
        ) from error


def reason(error: Exception) -> str:
    """What a library's error says, and of what kind it is where that says more."""
    text = printable(" ".join(str(error).split()).rstrip("."), limit=400)
    kind = "" if type(error) is ValueError else type(error).__name__
    return ": ".join(filter(None, (kind, text))) or "ValueError"


def base_name(name: str) -> str:
    """The name of a set without configuration and version: ``cifar10`` of ``cifar10:3.*.*``."""
    base = name.partition(":")[0].partition("/")[0]
    if not NAME.fullmatch(base):
        raise DataError(
            f"Expected {', '.join(SETS)} or the name of a TFDS set (letters, digits and _), got "
            f"'{printable(name)}'. All TFDS names: "
            "https://www.tensorflow.org/datasets/catalog/overview."
        )
    return base


def sets_folder(data_dir: str | None) -> pathlib.Path:
    """The folder of all sets: where TFDS looks unless it is told."""
    data_dir = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return pathlib.Path(data_dir).expanduser()


def _folder(name: str, data_dir: str | None) -> pathlib.Path:
    return sets_folder(data_dir) / base_name(name)


def _check_shards(split: Any) -> None:
    """Raises an error where a file of a split is missing or not as long as the set's index says."""
    with needs("data"):
        from array_record.python import array_record_module

    for path, length in zip(split.filepaths, split.shard_lengths, strict=True):
        reader = array_record_module.ArrayRecordReader(str(path))
        found = reader.num_records()
        reader.close()
        if found != length:
            said = f"dataset_info.json says {length}"
            raise ValueError(f"{found} records in {path.name} where {said}")


def _builder(tfds: Any, name: str, data_dir: str | None) -> Any:
    folder = _folder(name, data_dir)
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        if folder.exists():
            raise ValueError(
                "no prepared version there: the folder of the newest version must hold "
                "dataset_info.json and features.json, and its name be of the form 1.0.0"
            ) from error
        known = [*SETS, *tfds.list_builders(with_community_datasets=False)]
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise DataError(
            f"Expected {', '.join(SETS)} or the name of a TFDS set, got {name!r}. {hint}Add your "
            "own with adder_flax.data.register_source. All TFDS names: "
            "https://www.tensorflow.org/datasets/catalog/overview."
        ) from error
    except (ValueError, AssertionError) as error:
        if folder.exists():
            raise
        raise DataError(
            f"Expected a configuration and version that TFDS has, got {name!r}: "
            f"{printable(error, limit=400)}"
        ) from error


def _prepared_builder(tfds: Any, name: str, data_dir: str | None) -> Any:
    builder = _builder(tfds, name, data_dir)
    if not builder.is_prepared():
        raise NotPreparedError(
            f"Expected {name} prepared as ArrayRecord in {builder.data_dir}, got nothing there. "
            f"Prepare it once: {prepare_command(name, data_dir)}"
        )
    file_format = builder.info.file_format
    if file_format is None or file_format.value != "array_record":
        found = file_format.value if file_format else "an unknown format"
        raise DataError(
            f"Expected {name} as array_record in {builder.data_dir}, got {found}, which has no "
            "random access. Prepare it in another folder: "
            f"{prepare_command(name, '<other folder>')}"
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
        and features[keys[0]].shape[-1] in (1, 3)
        and isinstance(features[keys[1]], tfds.features.ClassLabel)
    )
    if not usable:
        raise DataError(
            f"Expected a set of one uint8 image, grey or RGB, and one class label each, got {name} "
            f"with supervised keys {info.supervised_keys} and features "
            f"{printable({key: str(feature) for key, feature in features.items()}, limit=1000)}."
        )
    return keys


# Sets that are used often, so that their facts are known without TFDS. Statistics: over all pixels
# of the train split; those of CIFAR and the two MNIST are the values in wide use.
_PHOTOS, _TEXT = "photographs", "characters"
for _name, _shape, _classes, _statistics, _kind in (
    ("cifar10", (32, 32, 3), 10, ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), _PHOTOS),
    ("cifar100", (32, 32, 3), 100, ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)), _PHOTOS),
    ("fashion_mnist", (28, 28, 1), 10, ((0.2860,), (0.3530,)), _PHOTOS),
    ("mnist", (28, 28, 1), 10, ((0.1307,), (0.3081,)), _TEXT),
    ("kmnist", (28, 28, 1), 10, None, _TEXT),
    ("svhn_cropped", (32, 32, 3), 10, None, _TEXT),
):
    _facts: Any = (_shape, _classes, _statistics, _kind)
    register_source(DataSet(_name, load_tfds, None, *_facts))
