"""What a transformer block is made of."""

from adder_flax.layers._block import Block, Mlp
from adder_flax.layers._linear import (
    AdderLinear,
    Identity,
    Linear,
    NormedLinear,
    adder_curvature,
    adder_layers,
    adder_rules,
    half_squared_distances,
    linear_class,
    report_adder,
)
from adder_flax.layers._patch_embed import Convolution, PatchEmbed, image_to_patches, neighbourhoods
from adder_flax.layers._tokenwise import (
    Dropout,
    DropPath,
    LayerNorm,
    LayerScale,
    drop_path_factors,
    gelu,
    is_over_last_axis,
    normalized,
)

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
    "adder_curvature",
    "adder_layers",
    "adder_rules",
    "drop_path_factors",
    "gelu",
    "half_squared_distances",
    "image_to_patches",
    "is_over_last_axis",
    "linear_class",
    "neighbourhoods",
    "normalized",
    "report_adder",
]
