"""What a transformer block is made of."""

from adder_flax.layers._block import Block
from adder_flax.layers._dropout import Dropout, DropPath, drop_path_factors
from adder_flax.layers._layer_scale import LayerScale, scale_features
from adder_flax.layers._linear import (
    AdderLinear,
    Identity,
    Linear,
    NormedLinear,
    adder_layers,
    half_squared_distances,
    linear_class,
    report_adder,
)
from adder_flax.layers._mlp import Mlp, gelu
from adder_flax.layers._norm import LayerNorm, is_over_last_axis, normalized
from adder_flax.layers._patch_embed import PatchEmbed, image_to_patches
from adder_flax.layers._stem import Convolution, neighbourhoods

__all__ = [
    "AdderLinear",
    "Block",
    "Convolution",
    "DropPath",
    "Dropout",
    "Identity",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "NormedLinear",
    "Mlp",
    "PatchEmbed",
    "adder_layers",
    "drop_path_factors",
    "gelu",
    "half_squared_distances",
    "image_to_patches",
    "is_over_last_axis",
    "linear_class",
    "neighbourhoods",
    "normalized",
    "report_adder",
    "scale_features",
]
