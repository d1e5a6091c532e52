"""From an image to a row of tokens."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from adder_flax.layers._linear import Linear
from adder_flax.layers._stem import conv_stem, strides_of


def image_to_patches(
    images: Shaped[Array | np.ndarray, "batch height width channels"], patch_size: int
) -> Shaped[Array, "batch patches features"]:
    """Cuts images into squares, row by row; a patch's features are ordered (row, column, channel).

    >>> image_to_patches(jnp.ones((2, 8, 12, 3)), 4).shape
    (2, 6, 48)
    """
    batch, height, width, channels = images.shape
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"expected an image whose sides are multiples of patch_size {patch_size}, got {height} "
            f"x {width}; resize the images or change patch_size."
        )
    rows, columns = height // patch_size, width // patch_size
    images = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
    return jnp.swapaxes(images, 2, 3).reshape(
        batch, rows * columns, patch_size * patch_size * channels
    )


class PatchEmbed(nnx.Module):
    """A linear layer on every non-overlapping patch: a convolution whose stride is its size, as one
    matrix product.

    With `stem_channels`, convolutions that may halve the image come first, and patches are cut from
    what they leave: a token stands for `patch_size` pixels of the image's side all the same.

    Args:
      patch_size: side of a patch in pixels of the image; a multiple of the product of strides.
      channels: of the images.
      width: of the tokens.
      stem_channels: of the convolutions' outputs, see `Convolution`.
      stem_strides: of the convolutions, 2 each unless given.
      stem_linear: what makes their layers, `Linear` or `AdderLinear` with its options bound.
      dtype, param_dtype: see `Linear`.
      rngs: initialisation keys.

    Without a stem `proj.kernel` is (patch_size · patch_size · channels, width) with features
    ordered (row, column, channel), so a convolution kernel in Flax's layout (patch_size,
    patch_size, channels, width) is this one reshaped.

    >>> PatchEmbed(4, 3, 16, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 8, 3))).shape
    (2, 4, 16)
    >>> PatchEmbed(4, 3, 16, stem_channels=(8, 8), rngs=nnx.Rngs(0))(jnp.ones((2, 8, 8, 3))).shape
    (2, 4, 16)
    """

    def __init__(
        self,
        patch_size: int,
        channels: int,
        width: int,
        *,
        stem_channels: Sequence[int] = (),
        stem_strides: Sequence[int] = (),
        stem_linear: Callable[..., nnx.Module] = Linear,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.patch_size = side_behind_stem(patch_size, strides_of(stem_channels, stem_strides))
        self.stem = conv_stem(channels, stem_channels, stem_strides, linear=stem_linear, **shared)
        self.proj = Linear(self.patch_size**2 * (channels, *stem_channels)[-1], width, **shared)

    def __call__(
        self, images: Float[Array | np.ndarray, "batch height width channels"]
    ) -> Float[Array, "batch patches features"]:
        for convolution in self.stem:
            images = convolution(images)
        return self.proj(image_to_patches(images, self.patch_size))


def side_behind_stem(patch_size: int, stem_strides: Sequence[int]) -> int:
    """Side of a patch in what the convolutions of a stem leave of an image.

    >>> side_behind_stem(4, (2, 1, 2))
    1
    """
    side, rest = divmod(patch_size, math.prod(stem_strides))
    if rest:
        raise ValueError(
            f"expected a patch_size that strides {', '.join(map(str, stem_strides))} divide, got "
            f"{patch_size}; change it or the stem."
        )
    return side
