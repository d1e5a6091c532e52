"""Data sources, the host pipeline and on-device augmentation.

Each augmentation by itself is in `adder_flax.data.augmentation` and `adder_flax.data.operations`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from adder_flax.data._images import EVAL_CROP_RATIO, read_image, resized_side
from adder_flax.data._label_sets import LabelSetSource, with_label_sets
from adder_flax.data._load import describe, load_or_imitate, load_source, shared_records
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
    channel_statistics,
    require_kind,
)

if TYPE_CHECKING:
    from adder_flax.data._pipeline import EvalPipeline, TrainPipeline, usable_cores
    from adder_flax.data.augmentation import augment, normalize

# Imported when asked for: an experiment file asks what is known of a data set, and a mistake in it
# is answered without waiting for JAX and grain.
_LATER = {
    **dict.fromkeys(("augment", "normalize"), "adder_flax.data.augmentation"),
    **dict.fromkeys(("EvalPipeline", "TrainPipeline", "usable_cores"), "adder_flax.data._pipeline"),
}

__all__ = [
    "ArraySource",
    "CachedSource",
    "DataError",
    "DataSet",
    "EVAL_CROP_RATIO",
    "EncodedSource",
    "EvalPipeline",
    "ImageSource",
    "LabelSetSource",
    "SETS",
    "SequenceSource",
    "Source",
    "TrainPipeline",
    "UnreadableRecordError",
    "augment",
    "channel_statistics",
    "describe",
    "load_or_imitate",
    "load_source",
    "normalize",
    "read_image",
    "register_source",
    "require_kind",
    "resized_side",
    "resolve_split",
    "shared_records",
    "usable_cores",
    "with_label_sets",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
