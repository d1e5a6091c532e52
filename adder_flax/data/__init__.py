"""Data sources, the host pipeline and on-device augmentation."""

from adder_flax.data._load import load_source
from adder_flax.data._source import ArraySource, CachedSource, DataError, EncodedSource, Source
from adder_flax.data.pipeline import EvalPipeline, TrainPipeline, eval_batches

__all__ = [
    "ArraySource",
    "CachedSource",
    "DataError",
    "EncodedSource",
    "EvalPipeline",
    "Source",
    "TrainPipeline",
    "eval_batches",
    "load_source",
]
