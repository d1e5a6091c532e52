"""Linen: whole networks, which are their NNX forms inside."""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax import layers, models
from adder_flax.linen._bridge import call_nnx, fields_of
from adder_flax.linen._layers import TakesKeywords
from adder_flax.settings import BlockSettings, VitSettings


class Block(TakesKeywords):
    """Linen form of `adder_flax.layers.Block`; arguments and parameters as there.

    >>> import jax
    >>> block = Block(4, score="adder", qkv_linear="adder", mlp_linear="adder")
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 10, 32)))[0].shape
    (2, 10, 32)
    """

    num_heads: int
    settings: BlockSettings = BlockSettings()
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        tokens: Float[Array, "batch length width"],
        *,
        mask: Array | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "batch length width"]:
        """Applies the block; dropout and stochastic depth draw from the `dropout` stream."""
        build = lambda rngs: layers.Block(tokens.shape[-1], **fields_of(self), rngs=rngs)
        return call_nnx(self, build, tokens, mask=mask, deterministic=deterministic)


class VisionTransformer(TakesKeywords):
    """Linen form of `adder_flax.models.VisionTransformer`; arguments and parameters as there.

    The size and channels of the images are seen at the first call, as usual in Linen.

    >>> import jax
    >>> model = VisionTransformer(
    ...     patch_size=2, num_classes=10, width=16, depth=2, num_heads=2, score="adder"
    ... )
    >>> model.init_with_output(jax.random.key(0), jnp.ones((3, 8, 8, 1)))[0].shape
    (3, 10)
    """

    settings: VitSettings = VitSettings()
    num_classes: int = 1000
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Classifies images."""
        _, height, width, channels = images.shape
        build = lambda rngs: models.VisionTransformer(
            image_size=(height, width), channels=channels, **fields_of(self), rngs=rngs
        )
        return call_nnx(self, build, images, deterministic=deterministic)
