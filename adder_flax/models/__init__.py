"""Whole networks and their named sizes."""

from adder_flax.models._build import build_vit
from adder_flax.models._registry import MODELS, Builder, Example, register_model
from adder_flax.models._vit import VisionTransformer, deit_base, deit_small, deit_tiny, embed_positions

__all__ = [
    "MODELS",
    "Builder",
    "Example",
    "VisionTransformer",
    "build_vit",
    "deit_base",
    "deit_small",
    "deit_tiny",
    "embed_positions",
    "register_model",
]
