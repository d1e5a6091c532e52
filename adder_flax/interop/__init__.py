"""Weights from and to other projects, in safetensors files: timm's and Hugging Face's vision transformers."""

from adder_flax.interop._files import load_weights, save_weights, start_from
from adder_flax.interop._names import FORMATS

__all__ = ["FORMATS", "load_weights", "save_weights", "start_from"]
