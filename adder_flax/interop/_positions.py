"""Position embeddings of another grid of patches.

Each is resized as the project does that its weights come from.
"""

import math

import numpy as np
from jaxtyping import Float

POSITIONS = ("timm", "torch")
"""Whose way: that of `timm.layers.resample_abs_pos_embed`, or DeiT's and Hugging Face's
`interpolate_pos_encoding`."""


def can_resize(old: tuple[int, ...], new: tuple[int, ...], prefix_tokens: int) -> bool:
    """Returns whether two shapes are of position embeddings that can be resized.

    Of square grids of patches, and of one width.

    Args:
      old: of the file, with or without entries for the tokens in front of the patches.
      new: of the model, with entries for them.
      prefix_tokens: how many tokens stand in front of the patches.

    >>> (
    ...     can_resize((1, 17, 8), (1, 5, 8), 1),
    ...     can_resize((1, 16, 8), (1, 5, 8), 1),
    ...     can_resize((1, 18, 8), (1, 5, 8), 1),
    ... )
    (True, True, False)
    """
    if len(old) != 3 or (old[0], old[2]) != (new[0], new[2]):
        return False
    return _grid(old[1], prefix_tokens) is not None and _is_square(new[1] - prefix_tokens)


def resize_positions(
    embedding: Float[np.ndarray, "1 old width"], num_tokens: int, *, prefix_tokens: int, like: str
) -> Float[np.ndarray, "1 num_tokens width"]:
    """Returns a position embedding for another number of patches.

    Both ways are bicubic and separable, with pixels' centres at half integers. `"timm"` widens
    Keys' kernel (a = -1/2) by the ratio of the sides where the grid gets smaller, as Pillow does
    for images, and leaves out what lies outside of the grid. `"torch"` takes four neighbours
    whatever the ratio, with a = -3/4, and repeats the border (R. Keys, "Cubic convolution
    interpolation for digital image processing", 1981, eq. 4 has a = -1/2).

    Args:
      embedding: with or without entries for the tokens in front of the patches; what it has none
        for gets zeros.
      num_tokens: of the result, those in front included.
      prefix_tokens: how many tokens stand in front of the patches.
      like: one of `POSITIONS`.

    Raises:
      ValueError: another name, or positions that are no square.

    >>> resize_positions(np.ones((1, 16, 2)), 5, prefix_tokens=1, like="timm")[0, :, 0].round(
    ...     6
    ... ).tolist()
    [0.0, 1.0, 1.0, 1.0, 1.0]
    """
    if like not in POSITIONS:
        raise ValueError(
            f"expected positions to be resized as {' or '.join(POSITIONS)} does, got {like!r}; "
            "choose one"
        )
    if embedding.shape[1] == num_tokens:
        return embedding
    place = _grid(embedding.shape[1], prefix_tokens)
    if place is None:
        raise ValueError(
            f"expected positions of a square grid of patches, got {embedding.shape[1]}; only "
            "squares are resized"
        )
    first, old = place
    new, width = math.isqrt(num_tokens - prefix_tokens), embedding.shape[-1]
    grid = embedding[0, first:].reshape(old, old, width)
    if old != new:
        matrix = (_antialiased if like == "timm" else _four_neighbours)(old, new)
        grid = np.einsum("ih,jw,hwd->ijd", matrix, matrix, grid.astype(np.float64))
    front = embedding[:, :first] if first else np.zeros((1, prefix_tokens, width))
    return np.concatenate([front, grid.reshape(1, new * new, width)], axis=1)


def _grid(num_tokens: int, prefix_tokens: int) -> tuple[int, int] | None:
    """Returns how many entries stand before the patches, and the side of their grid.

    None if it is no square.
    """
    for first in (prefix_tokens, 0):
        if _is_square(num_tokens - first):
            return first, math.isqrt(num_tokens - first)
    return None


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def _antialiased(old: int, new: int) -> Float[np.ndarray, "new old"]:
    stretch = max(old / new, 1.0)
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    weights = _cubic((np.arange(old) - centres[:, None]) / stretch, -0.5)
    return weights / weights.sum(axis=1, keepdims=True)


def _four_neighbours(old: int, new: int) -> Float[np.ndarray, "new old"]:
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    matrix = np.zeros((new, old))
    for offset in (-1, 0, 1, 2):
        neighbours = np.floor(centres).astype(int) + offset
        np.add.at(
            matrix,
            (np.arange(new), neighbours.clip(0, old - 1)),
            _cubic(neighbours - centres, -0.75),
        )
    return matrix


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Returns the kernel of cubic convolution at distances in units of the grid."""
    x = np.abs(distance)
    inner = (a + 2) * x**3 - (a + 3) * x**2 + 1
    outer = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x < 1, inner, np.where(x < 2, outer, 0.0))
