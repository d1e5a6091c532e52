"""Adder layers in few bits, for inference: functions first, then the module."""

from adder_flax.quantized._adder import (
    AdderWeights,
    Grid,
    adder_linear,
    calibrate,
    quantize,
    quantize_weights,
)
from adder_flax.quantized._linear import AdderLinear

__all__ = [
    "AdderLinear",
    "AdderWeights",
    "Grid",
    "adder_linear",
    "calibrate",
    "quantize",
    "quantize_weights",
]
