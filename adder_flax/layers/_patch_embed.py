"""From an image to a row of tokens: patches, and convolutions in front of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from adder_flax.attention import LAYER_NORM_EPSILON
from adder_flax.layers._linear import Linear
from adder_flax.layers._tokenwise import LayerNorm, gelu


def neighbourhoods(
    images: Float[Array | np.ndarray, "batch height width channels"], stride: int = 2
) -> Float[Array, "batch rows columns features"]:
    """The 3 × 3 surroundings of every pixel, or of every second one in both directions.

    Features are ordered (row, column, channel).

    Beyond its edges an image continues as it ends: for the L1 distance of an adder layer a padded
    zero would be a pixel like any other.

    >>> neighbourhoods(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, 0, 0].tolist()
    [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 4.0, 4.0, 5.0]
    >>> neighbourhoods(jnp.arange(4.0).reshape(1, 2, 2, 1), stride=1)[0, 1, 1].tolist()
    [0.0, 1.0, 1.0, 2.0, 3.0, 3.0, 2.0, 3.0, 3.0]
    """
    _, height, width, _ = images.shape
    if height % stride or width % stride:
        raise ValueError(
            f"expected an image of even sides to halve, got {height} x {width}; resize the images."
        )
    # With stride 2 the surroundings of the last row and column end within the image.
    before, after = slice(0, 1), slice(-1, None) if stride == 1 else slice(0, 0)
    padded = jnp.concatenate([images[:, before], images, images[:, after]], axis=1)
    padded = jnp.concatenate([padded[:, :, before], padded, padded[:, :, after]], axis=2)
    parts = [
        padded[:, row : row + height : stride, column : column + width : stride]
        for row in range(3)
        for column in range(3)
    ]
    return jnp.concatenate(parts, axis=-1)


class Convolution(nnx.Module):
    """gelu(LayerNorm(conv(x))) with 3 × 3 windows and stride 1 or 2, by one product with a matrix
    (9 · channels, out).

    `linear.kernel` reshaped to (3, 3, channels, out) is a convolution's kernel in Flax's layout. An
    adder layer, which has a normaliser of its own, has no second one.

    Args:
      channels, out_channels: of the image before and after.
      stride: 2 halves the image.
      linear: what makes the layer, see `linear_class`.

    >>> Convolution(3, 16, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 8, 3))).shape
    (2, 4, 4, 16)
    """

    def __init__(
        self,
        channels: int,
        out_channels: int,
        stride: int = 2,
        *,
        linear: Callable[..., nnx.Module] = Linear,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.stride = stride
        self.linear = linear(9 * channels, out_channels, **shared)
        self.norm = nnx.data(None)
        if getattr(self.linear, "norm", None) is None:
            self.norm = LayerNorm(
                out_channels, epsilon=LAYER_NORM_EPSILON, use_fast_variance=False, **shared
            )

    def __call__(
        self, images: Float[Array | np.ndarray, "batch height width channels"]
    ) -> Float[Array, "batch rows columns out_channels"]:
        outputs = self.linear(neighbourhoods(images, self.stride))
        return gelu(outputs if self.norm is None else self.norm(outputs))


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
    # In steps: where the batch is split over an explicit axis, JAX asks for them.
    images = images.reshape(batch, rows, patch_size, width, channels)
    images = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
    patches = jnp.swapaxes(images, 2, 3).reshape(
        batch, rows * columns, *(patch_size,) * 2, channels
    )
    return patches.reshape(batch, rows * columns, patch_size * patch_size * channels)


class PatchEmbed(nnx.Module):
    """A linear layer on every non-overlapping patch: a convolution whose stride is its size, as one
    matrix product.

    With `stem_channels`, convolutions that may halve the image come first (Xiao et al., 2021,
    https://arxiv.org/abs/2106.14881, with LayerNorm in place of BatchNorm: an image is processed as
    it is alone), and patches are cut from what they leave: a token stands for `patch_size` pixels
    of the image's side all the same.

    Args:
      patch_size: side of a patch in pixels of the image; a multiple of the product of strides.
      channels: of the images.
      width: of the tokens.
      stem_channels: of the convolutions' outputs, see `Convolution`.
      stem_strides: of the convolutions, 2 each unless given.
      stem_linear: what makes their layers, see `linear_class`.

    Without a stem `proj.kernel` reshaped to (patch_size, patch_size, channels, width) is a
    convolution's kernel in Flax's layout.

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
        if stem_strides and len(stem_strides) != len(stem_channels):
            raise ValueError(
                f"expected a stride for each of {len(stem_channels)} convolutions, or none, got "
                f"{len(stem_strides)}; change stem_strides or stem_channels."
            )
        strides = stem_strides or (2,) * len(stem_channels)
        self.patch_size, rest = divmod(patch_size, math.prod(strides))
        if rest:
            raise ValueError(
                f"expected a patch_size that strides {', '.join(map(str, strides))} divide, got "
                f"{patch_size}; change it or the stem."
            )
        before = (channels, *stem_channels)
        self.stem = nnx.List(
            Convolution(*sizes, linear=stem_linear, **shared)
            for sizes in zip(before, stem_channels, strides, strict=False)
        )
        self.proj = Linear(self.patch_size**2 * before[-1], width, **shared)

    def __call__(
        self, images: Float[Array | np.ndarray, "batch height width channels"]
    ) -> Float[Array, "batch patches features"]:
        for convolution in self.stem:
            images = convolution(images)
        return self.proj(image_to_patches(images, self.patch_size))
