"""Native Linen modules over the same functions, with the same parameter names, as the NNX ones.

The pure functions of `adder_flax.attention` serve both APIs; `from_nnx` and `to_nnx` move parameters between them.
"""

from adder_flax.linen._attention import AdditiveAttention, BilinearAttention, MultiHeadAttention
from adder_flax.linen._convert import from_nnx, to_nnx
from adder_flax.linen._layers import AdderLinear, DropPath, Linear, Mlp, PatchEmbed, linear_class
from adder_flax.linen._models import Block, VisionTransformer

__all__ = [
    "AdderLinear",
    "AdditiveAttention",
    "BilinearAttention",
    "Block",
    "DropPath",
    "Linear",
    "Mlp",
    "MultiHeadAttention",
    "PatchEmbed",
    "VisionTransformer",
    "from_nnx",
    "linear_class",
    "to_nnx",
]
