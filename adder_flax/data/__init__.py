"""Data sources, the host pipeline and on-device augmentation."""

import importlib
from typing import TYPE_CHECKING, Any

from adder_flax.data._images import EVAL_CROP_RATIO, read_image, resized_side
from adder_flax.data._label_sets import LabelSetSource, with_label_sets
from adder_flax.data._load import describe, load_or_imitate, load_source
from adder_flax.data._parts import shared_records
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
    require_kind,
)
from adder_flax.data._statistics import channel_statistics

if TYPE_CHECKING:
    from adder_flax.data._augment import (
        augment,
        color_jitter,
        hue_jitter,
        mix,
        normalize,
        random_crop,
        random_erase,
        random_flip,
        random_resized_crop,
        resize_boxes,
        smooth_one_hot,
        turn_hue,
    )
    from adder_flax.data._operations import (
        OPERATIONS,
        choose_operation,
        gaussian_blur,
        grayscale,
        image_operation,
    )
    from adder_flax.data._pipeline import EvalPipeline, TrainPipeline, usable_cores
    from adder_flax.data._policies import operation_arguments, rand_augment, three_augment

# Imported when asked for: an experiment file asks what is known of a data set, and a mistake in it
# is answered without waiting for JAX and grain.
_LATER = {
    name: f"adder_flax.data.{module}"
    for module, names in {
        "_augment": "augment color_jitter hue_jitter mix normalize random_crop random_erase "
        "random_flip random_resized_crop resize_boxes smooth_one_hot turn_hue",
        "_operations": "OPERATIONS choose_operation gaussian_blur grayscale image_operation",
        "_pipeline": "EvalPipeline TrainPipeline usable_cores",
        "_policies": "operation_arguments rand_augment three_augment",
    }.items()
    for name in names.split()
}

__all__ = [
    "ArraySource",
    "CachedSource",
    "SETS",
    "DataError",
    "DataSet",
    "EVAL_CROP_RATIO",
    "EncodedSource",
    "EvalPipeline",
    "ImageSource",
    "require_kind",
    "LabelSetSource",
    "OPERATIONS",
    "SequenceSource",
    "Source",
    "TrainPipeline",
    "UnreadableRecordError",
    "augment",
    "channel_statistics",
    "choose_operation",
    "color_jitter",
    "describe",
    "gaussian_blur",
    "grayscale",
    "hue_jitter",
    "image_operation",
    "load_or_imitate",
    "load_source",
    "mix",
    "normalize",
    "operation_arguments",
    "rand_augment",
    "random_crop",
    "random_erase",
    "random_flip",
    "random_resized_crop",
    "read_image",
    "register_source",
    "resize_boxes",
    "resized_side",
    "resolve_split",
    "shared_records",
    "smooth_one_hot",
    "three_augment",
    "turn_hue",
    "usable_cores",
    "with_label_sets",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
