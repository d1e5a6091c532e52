"""From an image to a row of tokens."""

import flax.nnx as nnx
import jax.numpy as jnp
from jaxtyping import Array, Float

from adder_flax.layers._linear import Linear


def image_to_patches(
    images: Float[Array, "batch height width channels"], patch_size: int
) -> Float[Array, "batch patches features"]:
    """Cuts images into squares, row by row; a patch's features are ordered (row, column, channel).

    >>> image_to_patches(jnp.ones((2, 8, 12, 3)), 4).shape
    (2, 6, 48)
    """
    batch, height, width, channels = images.shape
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"expected an image whose sides are multiples of patch_size {patch_size}, got {height} x {width}; "
            "resize the images or change patch_size."
        )
    rows, columns = height // patch_size, width // patch_size
    images = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
    return jnp.swapaxes(images, 2, 3).reshape(batch, rows * columns, patch_size * patch_size * channels)


class PatchEmbed(nnx.Module):
    """A linear layer on every non-overlapping patch: a convolution whose stride is its size, as one matrix product.

    `proj.kernel` is (patch_size · patch_size · channels, width) with features ordered (row, column, channel), so a
    convolution kernel in Flax's layout (patch_size, patch_size, channels, width) is this one reshaped.

    >>> PatchEmbed(4, 3, 16, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 8, 3))).shape
    (2, 4, 16)
    """

    def __init__(
        self,
        patch_size: int,
        channels: int,
        width: int,
        *,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.patch_size = patch_size
        self.proj = Linear(patch_size * patch_size * channels, width, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, images: Float[Array, "batch height width channels"]) -> Float[Array, "batch patches width"]:
        return self.proj(image_to_patches(images, self.patch_size))
