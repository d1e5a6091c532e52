"""Linen modules with the parameter names of the NNX ones, and the same numbers.

What a Linen user puts into networks is native, over the same pure functions: linear layers,
LayerNorm, multi-head attention. What is made of these, a `Block` or a `VisionTransformer`, is the
NNX module inside, whose parameters Linen declares, draws and checks. `from_nnx` and `to_nnx` move
parameters between the two.

Of what is inside, `capture_intermediates` sees the output alone: `adder_flax.recorder.record` and
`adder_flax.attention.capture_attention` see all.
"""

from adder_flax.linen._attention import MultiHeadAttention
from adder_flax.linen._bridge import from_nnx, to_nnx
from adder_flax.linen._layers import AdderLinear, LayerNorm, Linear, NormedLinear
from adder_flax.linen._whole import (
    AdditiveAttention,
    BilinearAttention,
    Block,
    Mlp,
    PatchEmbed,
    VisionTransformer,
)

__all__ = [
    "AdderLinear",
    "AdditiveAttention",
    "BilinearAttention",
    "Block",
    "LayerNorm",
    "Linear",
    "NormedLinear",
    "Mlp",
    "MultiHeadAttention",
    "PatchEmbed",
    "VisionTransformer",
    "from_nnx",
    "to_nnx",
]
