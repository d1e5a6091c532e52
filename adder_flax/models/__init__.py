"""Whole networks and their named sizes."""

from adder_flax.models._autoencoder import (
    Autoencoder,
    AutoencoderSettings,
    build_autoencoder,
)
from adder_flax.models._cnn import ConvNet, ConvNetSettings, build_conv_net
from adder_flax.models._decode import beam_search
from adder_flax.models._positions import Grid, resize_grid
from adder_flax.models._registry import MODELS, Builder, Example, register_model
from adder_flax.models._seq2seq import Memory, Seq2Seq, Seq2SeqSettings, build_seq2seq
from adder_flax.models._vit import (
    VisionTransformer,
    build_vit,
    deit_base,
    deit_small,
    deit_tiny,
    embed_positions,
)

__all__ = [
    "MODELS",
    "Autoencoder",
    "AutoencoderSettings",
    "Builder",
    "ConvNet",
    "ConvNetSettings",
    "Example",
    "Grid",
    "Memory",
    "Seq2Seq",
    "Seq2SeqSettings",
    "VisionTransformer",
    "beam_search",
    "build_autoencoder",
    "build_conv_net",
    "build_seq2seq",
    "build_vit",
    "deit_base",
    "deit_small",
    "deit_tiny",
    "embed_positions",
    "register_model",
    "resize_grid",
]
