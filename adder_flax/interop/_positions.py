"""Position embeddings of weights, for the grid of a model."""

import numpy as np
from jaxtyping import Float

from adder_flax.models import Grid, resize_grid


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
    """Returns positions for another grid of patches, see `adder_flax.models.resize_grid`.

    Args:
      embedding: with or without entries for the tokens in front of the patches; what it has none
        for gets zeros.
      old, new, like: as there.
      prefix_tokens: how many tokens stand in front of the patches.

    Raises:
      ValueError: another name, or positions of another grid.

    >>> resize_positions(np.ones((1, 16, 2)), (2, 8), (4, 1), prefix_tokens=1, like="timm")[
    ...     0, :, 0
    ... ].round(6).tolist()
    [0.0, 1.0, 1.0, 1.0, 1.0]
    """
    first, width = entries_in_front(embedding.shape[1], old, prefix_tokens), embedding.shape[-1]
    front = embedding[:, :first] if first else np.zeros((1, prefix_tokens, width), embedding.dtype)
    return np.concatenate([front, resize_grid(embedding[:, first:], old, new, like=like)], axis=1)
