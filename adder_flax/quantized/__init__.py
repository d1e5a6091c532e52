"""Adder layers, adder scores and whole models in few bits, for inference: functions first."""

from adder_flax.quantized._adder import (
    AdderWeights,
    Grid,
    adder_linear,
    calibrate,
    quantize,
    quantize_weights,
)
from adder_flax.quantized._linear import AdderLinear, Mlp
from adder_flax.quantized._model import empty_like, in_few_bits, quantize_model
from adder_flax.quantized._scores import byte_score, byte_scores, calibrate_scores

__all__ = [
    "AdderLinear",
    "AdderWeights",
    "Grid",
    "Mlp",
    "adder_linear",
    "byte_score",
    "byte_scores",
    "calibrate",
    "calibrate_scores",
    "empty_like",
    "in_few_bits",
    "quantize",
    "quantize_model",
    "quantize_weights",
]
