"""Data sources, the host pipeline and on-device augmentation."""

from adder_flax.data._augment import (
    Augment,
    augment,
    color_jitter,
    mix,
    normalize,
    random_crop,
    random_erase,
    random_flip,
    random_resized_crop,
    resize_boxes,
    smooth_one_hot,
)
from adder_flax.data._load import describe, load_or_imitate, load_source
from adder_flax.data._pipeline import EvalPipeline, TrainPipeline
from adder_flax.data._registry import SETS, DataSet, register_source, resolve_split
from adder_flax.data._sequences import SequenceSource
from adder_flax.data._source import (
    ArraySource,
    CachedSource,
    DataError,
    EncodedSource,
    ImageSource,
    Source,
    UnreadableRecordError,
)
from adder_flax.data._statistics import channel_statistics

__all__ = [
    "ArraySource",
    "Augment",
    "CachedSource",
    "SETS",
    "DataError",
    "DataSet",
    "EncodedSource",
    "EvalPipeline",
    "ImageSource",
    "SequenceSource",
    "Source",
    "TrainPipeline",
    "UnreadableRecordError",
    "augment",
    "channel_statistics",
    "color_jitter",
    "describe",
    "load_or_imitate",
    "load_source",
    "mix",
    "normalize",
    "random_crop",
    "random_erase",
    "random_flip",
    "random_resized_crop",
    "register_source",
    "resize_boxes",
    "resolve_split",
    "smooth_one_hot",
]
