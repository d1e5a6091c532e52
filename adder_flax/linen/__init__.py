"""Native Linen modules over the same functions, with the same parameter names, as the NNX ones.

The pure functions of `adder_flax.attention` serve both APIs; `from_nnx` and `to_nnx` move
parameters between them.

Why native, and not `flax.nnx.bridge.ToLinen` around the NNX modules (Flax 0.12.8): the bridge gives
the same numbers, maps and dtypes, and works under `nn.remat` and with `kfac`, but it builds the
module anew in every `apply`, so that each call draws all parameters at random before it replaces
them (a traced call of a transformer of two blocks has 595 operations, 7 of them random draws, for
226 and none). A parameter that is missing therefore silently stays random, and one of another shape
is taken as it is, where Linen refuses both. The numbers of lists are integers in its parameter
tree, which `traverse_util.flatten_dict(sep="/")` does not take; random streams given to `apply` do
not reach what is called, dropout among it; `capture_intermediates` gives one output where it gives
those of 53 modules; and the sizes of images have to be known beforehand, where Linen sees them at
the first call.
"""

from adder_flax.linen._attention import AdditiveAttention, BilinearAttention, MultiHeadAttention
from adder_flax.linen._convert import from_nnx, to_nnx
from adder_flax.linen._layers import (
    AdderLinear,
    DropPath,
    LayerScale,
    Linear,
    Mlp,
    PatchEmbed,
    linear_class,
)
from adder_flax.linen._models import Block, VisionTransformer
from adder_flax.linen._norm import LayerNorm

__all__ = [
    "AdderLinear",
    "AdditiveAttention",
    "BilinearAttention",
    "Block",
    "DropPath",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "Mlp",
    "MultiHeadAttention",
    "PatchEmbed",
    "VisionTransformer",
    "from_nnx",
    "linear_class",
    "to_nnx",
]
