"""What every data source offers, and two ways to hold one: in memory, or decoded when read."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from absl import logging
from jaxtyping import Bool, Int, UInt8

from adder_flax.data import _images
from adder_flax.errors import RunError
from adder_flax.text import printable

if TYPE_CHECKING:
    import jax

MapFunction = Callable[..., Iterable[Any]]
Batch = dict[str, np.ndarray]

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel of images in [0, 1]."""

# Records that one thread reads at a time: enough that ArrayRecord reads them together (4 times
# faster than one by one), few enough that every thread has work in a small batch of large images.
_CHUNK = 16

_UNREADABLE = -1  # in place of the label of a record that was skipped


class DataError(RunError, ValueError):
    """A data set, split or record that cannot be used; the message says which and what to do."""


class NotPreparedError(DataError):
    """A data set that is known but not here."""


class UnreadableRecordError(DataError):
    """One record whose image cannot be read or decoded."""


class Source(abc.ABC):
    """A split of a data set with random access: records of arrays by name, each of one shape.

    Attributes:
        records: what they are, in words.
        name, split, splits: of the set, of the split, and of all splits of the set.
        unreadable: records that were skipped so far, index to reason.
        dealt: of a part, from where to where in the order in which records are dealt.
    """

    records: ClassVar[str] = "records of its own"
    crops_on_host: bool = False
    unreadable: Mapping[int, str] = MappingProxyType({})
    dealt: tuple[int, int] | None = None

    def __init__(self, name: str, split: str, splits: Sequence[str]):
        self.name, self.split, self.splits = name, split, tuple(splits)

    @property
    @abc.abstractmethod
    def record_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays of one record, by name."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of records."""

    @abc.abstractmethod
    def read(
        self,
        indices: Int[np.ndarray, " batch"],
        seeds: Sequence[tuple[int, ...]] | None = None,
        map_function: MapFunction = map,
    ) -> tuple[Batch, Bool[np.ndarray, " batch"]]:
        """The arrays of `record_shapes` with a batch axis in front, and which rows could be read.

        Args:
            indices: records to read.
            seeds: one per record for what is random on the host, as the crop of large images; None
                for evaluation.
            map_function: how to run over the records, for example ``ThreadPoolExecutor.map``.
        """

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Record `index` as evaluation sees it."""
        if not 0 <= index < len(self):
            raise IndexError(
                f"Expected a record of {self.name}/{self.split} in [0, {len(self)}), got {index}."
            )
        arrays, readable = self.read(np.array([index]))
        if not readable[0]:
            unread = f"Expected a readable record, got number {index} of {self.name}/{self.split}."
            raise UnreadableRecordError(self.unreadable.get(index, unread))
        return {name: values[0] for name, values in arrays.items()}

    def marks(self) -> list[float]:
        """Returns what tells these records from those of another set: their number, and the mean of
        every array of eight of them that are spread over the split, if all can be read.

        Means, of bytes over 255, since decoders of another version give slightly other pixels.

        >>> from adder_flax.data import load_source
        >>> [round(mark, 2) for mark in load_source("digits", "test").marks()][:3]  # image, label
        [360, 0.34, 2.0]
        """
        marks: list[float] = [len(self)]
        try:
            for row in np.unique(np.linspace(0, len(self) - 1, min(8, len(self))).astype(int)):
                for values in self[int(row)].values():
                    marks.append(float(np.mean(values)) / (255 if values.dtype == np.uint8 else 1))
        except UnreadableRecordError:
            return [len(self)]
        return marks

    def first(self, count: int) -> Batch:
        """The first `count` records that can be read, as evaluation sees them.

        Of images of any size some of the whole split: folders are sorted by class.
        """
        order: Iterable[int] = range(len(self))
        if self.crops_on_host and count < len(self):
            order = np.random.default_rng(0).permutation(len(self))
        found: list[Batch] = []
        for index in order:
            arrays, readable = self.read(np.array([index]))
            found += [arrays] * int(readable[0])
            if len(found) == count:
                break
        if not found:
            raise DataError(f"Expected a readable record in {self.name}/{self.split}, got none.")
        return {name: np.concatenate([arrays[name] for arrays in found]) for name in found[0]}


Kind = TypeVar("Kind", bound=Source)


def require_kind(kind: type[Kind], source: Source, purpose: str) -> Kind:
    """The source, which is of a kind such as `ImageSource`; of another it is a `DataError`."""
    if not isinstance(source, kind):
        raise DataError(
            f"Expected a data set of {kind.records} for {purpose}, got {source.name}. Set "
            "--config.data.name, or the task that is meant for it."
        )
    return source


class ImageSource(Source):
    """A split of an image-classification set.

    Records have ``"image"``, uint8 (height, width, channels), and ``"label"``, int32.

    Attributes:
        label_names: class names; their position is the label.
        image_shape: (height, width, channels) of every image that this source returns.
        crops_on_host: whether the stored images vary in size: the centre crop, or in training a
            random resized one, is then taken before the image reaches the device.
        eval_crop_ratio: side of that centre over the image's shorter side; 1 where images are seen
            whole.
        statistics: mean and standard deviation of each channel of the training split, of images in
            [0, 1]; None where the set does not carry them, see `channel_statistics`.
    """

    records: ClassVar[str] = "images with labels"
    label_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    eval_crop_ratio: float = 1.0
    statistics: Statistics | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes, len(label_names)."""
        return len(self.label_names)

    def file_names(self) -> list[str]:
        """Names of the records' files, without folders; not every set keeps them."""
        raise DataError(
            f"Expected a set that keeps the names of its images' files, got {self.name}. Choose "
            "one that does, as imagenet2012 and folders of images do."
        )

    @property
    def record_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        import jax  # here, as the rest needs none of it

        label = jax.ShapeDtypeStruct((), np.int32)
        return {"image": jax.ShapeDtypeStruct(self.image_shape, np.uint8), "label": label}


class ArraySource(ImageSource):
    """A split that lies in memory as one array of images and one of labels.

    >>> stripes = np.eye(2, dtype=np.uint8)[..., None, None]
    >>> source = ArraySource("stripes", "train", ["train"], stripes, [0, 1], ["row", "column"])
    >>> source.image_shape, source.num_classes, int(source[1]["label"])
    ((2, 1, 1), 2, 1)
    """

    def __init__(
        self,
        name: str,
        split: str,
        splits: Sequence[str],
        images: UInt8[np.ndarray, "records height width channel"],
        labels: Int[np.ndarray, " records"] | Sequence[int],
        label_names: Sequence[str],
    ):
        super().__init__(name, split, splits)
        self.images, self.labels = images, np.asarray(labels, np.int32)
        self.label_names = tuple(label_names)
        if images.dtype != np.uint8:
            raise DataError(
                f"Expected images of {name}/{split} in uint8, 0 to 255, got {images.dtype}. Scale "
                "them to that range and convert them."
            )
        known = range(len(self.label_names))
        ends = [int(self.labels.min()), int(self.labels.max())] if len(self.labels) else []
        if unknown := [label for label in ends if label not in known]:
            raise DataError(
                f"Expected labels of {name}/{split} in [0, {len(known)}), got {unknown[-1]}. Count "
                "classes from 0, and name them all."
            )
        height, width, channels = images.shape[1:]
        self.image_shape = (height, width, channels)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices, seeds=None, map_function=map):
        labels = self.labels[indices]
        return {"image": self.images[indices], "label": labels}, labels != _UNREADABLE


@runtime_checkable
class Records(Protocol):
    """Encoded images (JPEG, PNG, …) with labels: what `EncodedSource` reads.

    Where several records at once are read faster, ``__getitems__(indices)`` gives a list of them.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[bytes, int]: ...

    def describe(self, index: int) -> str: ...  # names it for a person, as by its file


class EncodedSource(ImageSource):
    """A split of encoded images, decoded when they are read.

    Args:
        crops_on_host: True for images of any size, which are cropped to `image_shape`; False for a
            set whose images all have one size: they are resized if `image_shape` is another.
        stored_size: that one size, height and width; None is not checked.
        crop_scale, eval_crop_ratio, on_unreadable: as of `load_source`.
    """

    def __init__(
        self,
        name: str,
        split: str,
        splits: Sequence[str],
        records: Records,
        label_names: Sequence[str],
        image_shape: tuple[int, int, int],
        *,
        crops_on_host: bool,
        stored_size: tuple[int, int] | None = None,
        crop_scale: tuple[float, float] | None = (0.08, 1.0),
        eval_crop_ratio: float = _images.EVAL_CROP_RATIO,
        on_unreadable: str = "raise",
    ):
        super().__init__(name, split, splits)
        self.crop_ratio = _images.ASPECT_RATIO_RANGE  # `load_source` may set another one
        self.label_names, self.image_shape = tuple(label_names), image_shape
        self.crops_on_host, self.crop_scale = crops_on_host, crop_scale
        self.eval_crop_ratio = eval_crop_ratio if crops_on_host else 1.0
        self._stored_size, self._records = stored_size, records
        self.on_unreadable = on_unreadable
        self.unreadable: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._records)

    def file_names(self):
        names = getattr(self._records, "file_names", super().file_names)()
        return [name.rpartition("/")[2] for name in names]

    def read(self, indices, seeds=None, map_function=map):
        images = np.zeros((len(indices), *self.image_shape), np.uint8)
        labels = np.full(len(indices), _UNREADABLE, np.int32)

        def fill(rows: range) -> None:
            chunk = [int(index) for index in indices[rows.start : rows.stop]]
            for row, index, record in zip(rows, chunk, self._fetch(chunk), strict=True):
                seed = None if seeds is None else seeds[row]
                try:
                    images[row], labels[row] = self._read(index, seed, record)
                except UnreadableRecordError as error:
                    if self.on_unreadable == "raise":
                        raise
                    if index not in self.unreadable:
                        logging.warning("Skipped: %s", error)
                    self.unreadable[index] = str(error)

        rows = range(len(indices))
        list(map_function(fill, [rows[start : start + _CHUNK] for start in rows[::_CHUNK]]))
        return {"image": images, "label": labels}, labels != _UNREADABLE

    def _fetch(self, indices: list[int]) -> Sequence[tuple[bytes, int] | None]:
        together = getattr(self._records, "__getitems__", None)
        with contextlib.suppress(Exception):  # one cannot be read: `_read` tries each and names it
            if together:
                return together(indices)
        return [None] * len(indices)

    def _read(
        self, index: int, seed: tuple[int, ...] | None, record: tuple[bytes, int] | None
    ) -> tuple[UInt8[np.ndarray, "h w c"], int]:
        try:
            encoded, label = record or self._records[index]
            image = self._decode(encoded, seed)
        # Pillow's decoders raise errors of many types for a broken file, all of one meaning.
        except Exception as error:
            reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise UnreadableRecordError(
                f"Expected a readable image in record {index} of {self.name}/{self.split} "
                f"({self._records.describe(index)}), got {printable(reason)}. "
                "Replace the record, or count and skip such records with on_unreadable='skip' "
                "(--config.data.on_unreadable=skip)."
            ) from error
        if not 0 <= label < self.num_classes:
            raise DataError(
                f"Expected a label in [0, {self.num_classes}) in record {index} of "
                f"{self.name}/{self.split} ({self._records.describe(index)}), got {label}. Choose "
                "a split that has labels."
            )
        return image, label

    def _decode(self, encoded: bytes, seed: tuple[int, ...] | None) -> UInt8[np.ndarray, "h w c"]:
        height, _, channels = self.image_shape
        if not self.crops_on_host:
            return _images.decode_and_resize(encoded, self.image_shape, self._stored_size)
        if seed is None or self.crop_scale is None:
            return _images.decode_and_center_crop(encoded, height, channels, self.eval_crop_ratio)
        ranges = self.crop_scale, self.crop_ratio
        return _images.decode_and_random_crop(encoded, height, channels, seed, *ranges)


class CachedSource(ArraySource):
    """Keeps the images of a small source of a fixed size once they are decoded."""

    def __init__(self, source: EncodedSource):
        # Untouched pages of np.empty take no memory, so this costs what has been read so far.
        images = np.empty((len(source), *source.image_shape), np.uint8)
        labels = np.zeros(len(source), np.int32)
        whole = (source.name, source.split, source.splits, images, labels, source.label_names)
        super().__init__(*whole)
        self.labels[:] = _UNREADABLE  # until they are read
        self._source, self._read = source, np.zeros(len(source), bool)
        self.unreadable = source.unreadable

    def file_names(self):
        return self._source.file_names()

    def read(self, indices, seeds=None, map_function=map):
        missing = indices[~self._read[indices]]
        if missing.size:
            found, _ = self._source.read(missing, None, map_function)
            self.images[missing], self.labels[missing] = found["image"], found["label"]
            self._read[missing] = True
        return super().read(indices)


_IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""What published weights expect (torchvision), and by convention what photographs get."""


def channel_statistics(source: ImageSource) -> Statistics:
    """Mean and standard deviation of each channel: the set's own, or those of its images.

    A set that carries no statistics and whose images lie in memory, or will, is measured once, on
    up to 10,000 records that are evenly spaced. Sets of large photographs get ImageNet's values, or
    their average if they are grey.

    >>> from adder_flax.data import load_source
    >>> channel_statistics(load_source("digits", "train"))
    ((0.3053,), (0.3757,))
    """
    if source.statistics is None and isinstance(source, ArraySource):
        source.statistics = _measure(source)
    mean, std = _IMAGENET if source.statistics is None else source.statistics
    channels = source.image_shape[2]
    if len(mean) != channels:
        mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
    return mean, std


def _measure(source: ImageSource) -> Statistics:
    """Sums of whole numbers, which are the same on every machine."""
    chosen = np.arange(0, len(source), -(-len(source) // 10_000))
    count = 0
    total, squares = (np.zeros(source.image_shape[2], np.int64) for _ in range(2))
    with futures.ThreadPoolExecutor() as threads:
        for start in range(0, len(chosen), 500):
            arrays, readable = source.read(chosen[start : start + 500], None, threads.map)
            pixels = arrays["image"][readable].reshape(-1, len(total)).astype(np.int64)
            count, total = count + len(pixels), total + pixels.sum(0)
            squares += (pixels**2).sum(0)
    mean = total / max(count, 1)
    std = np.sqrt(squares / max(count, 1) - mean**2)
    std = np.where(std > 0, std / 255, 1.0)  # a channel of one value has no scale
    return tuple((mean / 255).round(4).tolist()), tuple(std.round(4).clip(1e-4).tolist())
