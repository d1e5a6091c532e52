"""Convolutions in front of the patch embedding."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax.attention import LAYER_NORM_EPSILON
from adder_flax.layers._linear import Linear
from adder_flax.layers._mlp import gelu


def neighbourhoods(
    images: Float[Array | np.ndarray, "batch height width channels"],
) -> Float[Array, "batch half_height half_width features"]:
    """The 3 × 3 surroundings of every second pixel in both directions.

    Features are ordered (row, column, channel).

    Beyond its edges an image continues as it ends: for the L1 distance of an adder layer a padded
    zero would be a pixel like any other.

    >>> neighbourhoods(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, 0, 0].tolist()
    [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 4.0, 4.0, 5.0]
    """
    _, height, width, _ = images.shape
    if height % 2 or width % 2:
        raise ValueError(
            f"expected an image of even sides to halve, got {height} x {width}; resize the images."
        )
    padded = jnp.concatenate([images[:, :1], images], axis=1)
    padded = jnp.concatenate([padded[:, :, :1], padded], axis=2)
    parts = [
        padded[:, row : row + height : 2, column : column + width : 2]
        for row in range(3)
        for column in range(3)
    ]
    return jnp.concatenate(parts, axis=-1)


class Halving(nnx.Module):
    """gelu(LayerNorm(conv(x))) with 3 × 3 windows and stride 2.

    One product with a matrix (9 · channels, out).

    `linear.kernel` reshaped to (3, 3, channels, out) is a convolution's kernel in Flax's layout. An
    adder layer, which has a normaliser of its own, has no second one.

    Args:
      channels, out_channels: of the image before and after.
      linear: what makes the layer, `Linear` or `AdderLinear` with its options bound.
      dtype, param_dtype: see `Linear`.
      rngs: initialisation keys.

    >>> Halving(3, 16, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 8, 3))).shape
    (2, 4, 4, 16)
    """

    def __init__(
        self,
        channels: int,
        out_channels: int,
        *,
        linear: Callable[..., nnx.Module] = Linear,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.linear = linear(9 * channels, out_channels, **shared)
        self.norm = nnx.data(None)
        if getattr(self.linear, "norm", None) is None:
            self.norm = nnx.LayerNorm(
                out_channels, epsilon=LAYER_NORM_EPSILON, use_fast_variance=False, **shared
            )

    def __call__(
        self, images: Float[Array | np.ndarray, "batch height width channels"]
    ) -> Float[Array, "batch half_height half_width out_channels"]:
        outputs = self.linear(neighbourhoods(images))
        return gelu(outputs if self.norm is None else self.norm(outputs))


def conv_stem(
    channels: int,
    stem_channels: Sequence[int],
    *,
    linear: Callable[..., nnx.Module] = Linear,
    **options,
) -> nnx.List:
    """Convolutions in front of a patch embedding, each at half the resolution.

    Source: Xiao et al., 2021, https://arxiv.org/abs/2106.14881, with LayerNorm in place
    of BatchNorm: an image is processed as it is alone.

    Args:
      channels: of the images.
      stem_channels: behind each convolution; () for none.
      linear: what makes the layers.
      **options: `dtype`, `param_dtype` and `rngs`, see `Linear`.
    """
    before = (channels, *stem_channels)
    return nnx.List(
        Halving(i, o, linear=linear, **options) for i, o in zip(before, stem_channels, strict=False)
    )
