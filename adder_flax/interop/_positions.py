"""Position embeddings of another grid of patches.

Each is resized as the project does that its weights come from.
"""

import numpy as np
from jaxtyping import Float

POSITIONS = ("timm", "torch")
"""Whose way: that of `timm.layers.resample_abs_pos_embed`, or DeiT's and Hugging Face's
`interpolate_pos_encoding`."""

Grid = tuple[int, int]
"""Rows and columns of patches."""


def entries_in_front(num_entries: int, grid: Grid, prefix_tokens: int) -> int:
    """Returns how many entries of a position embedding stand before those of the patches.

    Args:
      num_entries: of the embedding.
      grid: of its patches.
      prefix_tokens: of the model; the embedding has entries for all of them, or for none (timm's
        ``no_embed_class``).

    Raises:
      ValueError: it is an embedding of another grid.

    >>> entries_in_front(17, (2, 8), 1), entries_in_front(16, (2, 8), 1)
    (1, 0)
    """
    rows, columns = grid
    first = num_entries - rows * columns
    if first not in (prefix_tokens, 0):
        raise ValueError(
            f"expected positions of {rows} × {columns} patches, as is said of these weights, with "
            f"or without {prefix_tokens} more, got {num_entries}; say in the config.json beside "
            "them what size of images they are of"
        )
    return first


def resize_positions(
    embedding: Float[np.ndarray, "1 old width"],
    old: Grid,
    new: Grid,
    *,
    prefix_tokens: int,
    like: str,
) -> Float[np.ndarray, "1 new width"]:
    """Returns a position embedding for another grid of patches.

    Both ways are bicubic and separable, with pixels' centres at half integers. `"timm"` widens
    Keys' kernel (a = -1/2) by the ratio of the sides where the grid gets smaller, as Pillow does
    for images, and leaves out what lies outside of the grid. `"torch"` takes four neighbours
    whatever the ratio, with a = -3/4, and repeats the border (R. Keys, "Cubic convolution
    interpolation for digital image processing", 1981, eq. 4 has a = -1/2).

    Args:
      embedding: with or without entries for the tokens in front of the patches; what it has none
        for gets zeros.
      old, new: rows and columns of patches, of the embedding and of the result.
      prefix_tokens: how many tokens stand in front of the patches.
      like: one of `POSITIONS`.

    Raises:
      ValueError: another name, or positions of another grid.

    >>> resize_positions(np.ones((1, 16, 2)), (2, 8), (4, 1), prefix_tokens=1, like="timm")[
    ...     0, :, 0
    ... ].round(6).tolist()
    [0.0, 1.0, 1.0, 1.0, 1.0]
    """
    if like not in POSITIONS:
        raise ValueError(
            f"expected positions to be resized as {' or '.join(POSITIONS)} does, got {like!r}; "
            "choose one"
        )
    first, width = entries_in_front(embedding.shape[1], old, prefix_tokens), embedding.shape[-1]
    front = embedding[:, :first] if first else np.zeros((1, prefix_tokens, width), embedding.dtype)
    patches = embedding[:, first:]
    if old != new:
        matrix_of = _antialiased if like == "timm" else _four_neighbours
        rows, columns = map(matrix_of, old, new)
        grid = patches.reshape(*old, width).astype(np.float64)
        patches = np.einsum("ih,jw,hwd->ijd", rows, columns, grid).reshape(1, -1, width)
    return np.concatenate([front, patches], axis=1)


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
