"""Linen: what is made of layers, which is its NNX form inside."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import flax.nnx as nnx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from adder_flax import attention, layers, models
from adder_flax.linen._bridge import call_nnx
from adder_flax.linen._layers import TakesKeywords
from adder_flax.settings import AttentionSettings, BlockSettings, VitSettings


class Inside(nn.Module):
    """A Linen module whose call is that of an NNX module; widths are seen at the first call.

    Attributes:
      of: the class of the NNX module.
      sizes: its arguments that the inputs tell, in front of those that are fields here.
    """

    of: ClassVar[Callable[..., nnx.Module]]
    sizes: ClassVar[Callable[..., dict[str, Any]]]

    @nn.compact
    def __call__(self, *inputs: Array, deterministic: bool = True, **options: Any) -> Any:
        """Calls it, with the arguments of the NNX module; what is random draws from `dropout`."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("parent", "name")]
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        build = lambda rngs: self.of(**self.sizes(*inputs) | given, rngs=rngs)
        return call_nnx(self, build, *inputs, deterministic=deterministic, **options)


class Mlp(Inside):
    """Linen form of `adder_flax.layers.Mlp`: fc2(dropout(gelu(fc1(x)))), exact GELU.

    `linear` makes NNX layers, as there.

    >>> import jax
    >>> Mlp(32).init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    of = layers.Mlp
    sizes = staticmethod(lambda inputs: dict(in_features=inputs.shape[-1]))
    hidden_features: int
    linear: Callable[..., nnx.Module] = layers.Linear
    dropout_rate: float = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32


class PatchEmbed(Inside):
    """Linen form of `adder_flax.layers.PatchEmbed`: a linear layer on every non-overlapping patch.

    `stem_linear` makes NNX layers, as there.

    >>> import jax
    >>> PatchEmbed(4, 16).init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 3)))[0].shape
    (2, 4, 16)
    """

    of = layers.PatchEmbed
    sizes = staticmethod(lambda images: dict(channels=images.shape[-1]))
    patch_size: int
    width: int
    stem_channels: Sequence[int] = ()
    stem_strides: Sequence[int] = ()
    stem_linear: Callable[..., nnx.Module] = layers.Linear
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32


def _widths(query: Array, key: Array, *_: Array) -> dict[str, int]:
    return dict(query_features=query.shape[-1], key_features=key.shape[-1])


class AdditiveAttention(TakesKeywords, Inside):
    """Linen form of `adder_flax.attention.AdditiveAttention`; arguments and parameters as there.

    >>> import jax
    >>> inputs = jnp.ones((2, 5, 6)), jnp.ones((2, 7, 8))
    >>> AdditiveAttention(hidden_dim=3).init_with_output(jax.random.key(0), *inputs)[0].shape
    (2, 5, 8)
    """

    of, sizes = attention.AdditiveAttention, staticmethod(_widths)
    fixed: ClassVar[tuple[str, ...]] = ("score", "score_options")
    settings: AttentionSettings = AttentionSettings()
    param_dtype: DTypeLike = jnp.float32
    hidden_dim: int | None = None
    layer_norm: bool = False


class BilinearAttention(TakesKeywords, Inside):
    """Linen form of `adder_flax.attention.BilinearAttention`; arguments and parameters as there.

    >>> import jax
    >>> inputs = jnp.ones((2, 5, 6)), jnp.ones((2, 7, 8))
    >>> BilinearAttention().init_with_output(jax.random.key(0), *inputs)[0].shape
    (2, 5, 8)
    """

    of, sizes = attention.BilinearAttention, staticmethod(_widths)
    fixed: ClassVar[tuple[str, ...]] = ("score", "score_options")
    settings: AttentionSettings = AttentionSettings()
    param_dtype: DTypeLike = jnp.float32


class Block(TakesKeywords, Inside):
    """Linen form of `adder_flax.layers.Block`; arguments and parameters as there.

    >>> import jax
    >>> block = Block(4, score="adder", qkv_linear="adder", mlp_linear="adder")
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 10, 32)))[0].shape
    (2, 10, 32)
    """

    of = layers.Block
    sizes = staticmethod(lambda tokens: dict(width=tokens.shape[-1]))
    num_heads: int
    settings: BlockSettings = BlockSettings()
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32


class VisionTransformer(TakesKeywords, Inside):
    """Linen form of `adder_flax.models.VisionTransformer`; arguments and parameters as there.

    Without `image_size` images are squares: parameters do not tell a rectangle from its turned one.

    >>> import jax
    >>> sizes = dict(patch_size=2, num_classes=10, width=16, depth=2, num_heads=2)
    >>> model = VisionTransformer(**sizes, score="adder")
    >>> model.init_with_output(jax.random.key(0), jnp.ones((3, 8, 8, 1)))[0].shape
    (3, 10)
    """

    of = models.VisionTransformer
    settings: VitSettings = VitSettings()
    image_size: int | tuple[int, int] | None = None
    num_classes: int = 1000
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    def sizes(self, images: Array) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        height, width, channels = images.shape[1:]
        if self.image_size is None and height != width:
            raise ValueError(
                f"expected image_size of a model of rectangles, got none and images of {height} × "
                f"{width}; give image_size=({height}, {width})"
            )
        return {"image_size": (height, width), "channels": channels}
