"""Weights from and to other projects, and whole models as programs.

Weights are in safetensors files, as of timm's and Hugging Face's vision transformers.
"""

from adder_flax.interop._c import save_c
from adder_flax.interop._files import (
    load_weights,
    read_model,
    read_statistics,
    save_weights,
    start_from,
)
from adder_flax.interop._folder import model_card, save_folder
from adder_flax.interop._integers import load_integers, save_integers
from adder_flax.interop._names import FORMATS
from adder_flax.interop._program import save_onnx, save_program
from adder_flax.interop._web import save_web

__all__ = [
    "FORMATS",
    "load_integers",
    "load_weights",
    "model_card",
    "read_model",
    "read_statistics",
    "save_c",
    "save_folder",
    "save_integers",
    "save_onnx",
    "save_program",
    "save_web",
    "save_weights",
    "start_from",
]
