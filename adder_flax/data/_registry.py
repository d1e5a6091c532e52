"""What a data set is before anything of it is read, and how it is found by name."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from adder_flax.data._source import DataError, Source, Statistics
from adder_flax.registry import Registry

EVAL_SPLITS = ("validation", "val", "test")
"""What split ``"eval"`` stands for, in order of preference: the test split of ImageNet has no
labels."""


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set by name: how it is loaded, and what is known of it without that.

    Attributes:
        name: what ``config.data.name`` and `load_source` call it.
        load: ``load(split, *, name, data_dir, image_size, crop_scale, eval_crop_ratio,
            on_unreadable) → Source`` loads one split; what a set has no use for it takes as
            ``**_``. ``name`` is as the user gave it, TFDS's version included.
        splits: names of the splits; None where they depend on what lies on the disk.
        image_shape, num_classes: (height, width, channels) of the stored images, height and width
            None where they vary; None for sets that are no images, or known only from the disk. The
            default recipe of ``experiments`` follows from it.
        statistics: mean and standard deviation of each channel of the training split, of images in
            [0, 1]. None: those of small sets are computed; sets of large photographs get
            ImageNet's.
        kind: ``"photographs"`` may be mirrored and mixed, ``"characters"`` may not, ``"words"`` are
            no images: the default recipe asks.
    """

    name: str
    load: Callable[..., Source]
    splits: tuple[str, ...] | None = None
    image_shape: tuple[int | None, int | None, int] | None = None
    num_classes: int | None = None
    statistics: Statistics | None = None
    kind: Literal["photographs", "characters", "words"] = "photographs"


SETS: Registry[DataSet] = Registry("data set", "adder_flax.data.register_source")


def register_source(data_set: DataSet) -> DataSet:
    """Adds a data set, which `load_source` and ``config.data.name`` then find.

    >>> import numpy as np
    >>> from adder_flax import data
    >>> def load_black(split, **_):
    ...     images = np.zeros((8, 4, 4, 1), np.uint8)
    ...     return data.ArraySource("black", split, ["test"], images, [0] * 8, ["black"])
    >>> with SETS.temporary():
    ...     black = register_source(DataSet("black", load_black, ("test",), (4, 4, 1), 1))
    ...     data.load_source("black", "eval").split
    'test'

    """
    origin = (data_set.load.__module__, data_set.load.__qualname__)
    return SETS.register(data_set.name, data_set, origin=origin)


def resolve_split(split: str, splits: Sequence[str], of: str = "") -> str:
    """The split that ``"eval"`` stands for; any other stands for itself.

    >>> resolve_split("eval", ["train", "test"])
    'test'

    It is a `DataError` if there is none to evaluate on or, where the set is said that the splits
    are ``of``, another than these.
    """
    if split == "eval":
        for name in EVAL_SPLITS:
            if name in splits:
                return name
        raise DataError(
            f"Expected one of the splits {EVAL_SPLITS} to evaluate on, got {tuple(splits)}. Name "
            "the split."
        )
    if of and split not in splits:
        raise DataError(f"Expected a split out of {tuple(splits)} of {of}, got {split!r}.")
    return split
