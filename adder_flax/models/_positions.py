"""Position embeddings of another grid of patches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from adder_flax.arrays import AnyArray

Grid = tuple[int, int]
"""Rows and columns of patches."""

RESIZED_LIKE = ("timm", "torch")
"""Whose way: that of `timm.layers.resample_abs_pos_embed`, or DeiT's and Hugging Face's
`interpolate_pos_encoding`."""


def resize_grid(
    embedding: Float[AnyArray, "1 old width"], old: Grid, new: Grid, *, like: str = "timm"
) -> Float[AnyArray, "1 new width"]:
    """Returns a position embedding for another grid of patches.

    Both ways are bicubic and separable, with pixels' centres at half integers. `"timm"` widens
    Keys' kernel (a = -1/2) by the ratio of the sides where the grid gets smaller, as Pillow does
    for images, and leaves out what lies outside of the grid. `"torch"` takes four neighbours
    whatever the ratio, with a = -3/4, and repeats the border (R. Keys, "Cubic convolution
    interpolation for digital image processing", 1981, eq. 4 has a = -1/2).

    Args:
      embedding: of the patches alone, an array of NumPy (then in float64) or of JAX.
      old, new: rows and columns of patches, before and after.
      like: one of `RESIZED_LIKE`.

    >>> resize_grid(np.ones((1, 16, 2)), (2, 8), (4, 1))[0, :, 0].round(6).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if like not in RESIZED_LIKE:
        raise ValueError(
            f"expected positions to be resized as {' or '.join(RESIZED_LIKE)} does, got {like!r}; "
            "choose one"
        )
    if old == new:
        return embedding
    rows, columns = map(_antialiased if like == "timm" else _four_neighbours, old, new)
    grid: Any = embedding.reshape(*old, embedding.shape[-1])
    if isinstance(grid, np.ndarray):
        resized = np.einsum("ih,jw,hwd->ijd", rows, columns, grid.astype(np.float64))
    else:
        wide = grid.astype(jnp.promote_types(grid.dtype, jnp.float32))
        rows, columns = jnp.asarray(rows, wide.dtype), jnp.asarray(columns, wide.dtype)
        highest = jax.lax.Precision.HIGHEST
        resized = jnp.einsum("ih,jw,hwd->ijd", rows, columns, wide, precision=highest)
        resized = resized.astype(grid.dtype)
    return resized.reshape(1, -1, embedding.shape[-1])


def _antialiased(old: int, new: int) -> Float[np.ndarray, "new old"]:
    stretch = max(old / new, 1.0)
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    weights = _cubic((np.arange(old) - centres[:, None]) / stretch, -0.5)
    return weights / weights.sum(axis=1, keepdims=True)


def _four_neighbours(old: int, new: int) -> Float[np.ndarray, "new old"]:
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    matrix, rows = np.zeros((new, old)), np.arange(new)
    for offset in (-1, 0, 1, 2):
        neighbours = np.floor(centres).astype(int) + offset
        weights = _cubic(neighbours - centres, -0.75)
        np.add.at(matrix, (rows, neighbours.clip(0, old - 1)), weights)
    return matrix


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Returns the kernel of cubic convolution at distances in units of the grid."""
    x = np.abs(distance)
    inner = (a + 2) * x**3 - (a + 3) * x**2 + 1
    outer = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x < 1, inner, np.where(x < 2, outer, 0.0))
