"""What a transformer block is made of."""

from adder_flax.layers._block import Block, check_norm_position, report_block
from adder_flax.layers._dropout import Dropout, DropPath, drop_path_factors
from adder_flax.layers._layer_scale import LayerScale, scale_features
from adder_flax.layers._linear import (
    AdderLinear,
    Identity,
    Linear,
    adder_layers,
    check_identity,
    half_squared_distances,
    linear_class,
    report_adder,
)
from adder_flax.layers._mlp import Mlp, gelu
from adder_flax.layers._norm import LayerNorm, is_over_last_axis, normalized
from adder_flax.layers._patch_embed import PatchEmbed, image_to_patches, side_behind_stem
from adder_flax.layers._stem import Convolution, neighbourhoods, strides_of

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
    "Mlp",
    "PatchEmbed",
    "adder_layers",
    "check_identity",
    "check_norm_position",
    "drop_path_factors",
    "gelu",
    "half_squared_distances",
    "image_to_patches",
    "is_over_last_axis",
    "linear_class",
    "neighbourhoods",
    "normalized",
    "report_adder",
    "report_block",
    "scale_features",
    "side_behind_stem",
    "strides_of",
]
