"""Attention maps as arrays: with or without the identity, seen from the class token, their entropy
and reach.

Maps are float arrays (…, queries, keys). Where the mechanism adds the identity map, H̃ = A + I, the
rows sum to 2; every function here tells by the row sums which of the two it was given, and says
what it does with the identity.
"""

import numpy as np
from jaxtyping import ArrayLike, Float

from adder_flax.measures._arrays import NumPy

_ROW_SUM_TOLERANCE = 2e-2  # bfloat16 maps of a few hundred tokens stay within it


def has_identity(maps: Float[ArrayLike, "*batch query key"]) -> bool:
    """Whether the identity map is part of the maps: rows sum to 2 rather than to 1.

    Rows that sum to neither are a ValueError.

    >>> has_identity(np.full((3, 3), 1 / 3) + np.eye(3)), has_identity(np.full((3, 3), 1 / 3))
    (True, False)
    """
    sums = np.asarray(maps, np.float64).sum(-1)
    for total, answer in ((1.0, False), (2.0, True)):
        if np.all(np.abs(sums - total) < _ROW_SUM_TOLERANCE):
            return answer
    raise ValueError(
        "expected attention maps whose rows all sum to 1, or to 2 with the identity map; got sums "
        f"from {sums.min():.4g} to {sums.max():.4g}. Pass the maps after softmax, without dropout "
        "or masked rows."
    )


def stochastic_part(
    maps: Float[ArrayLike, "*batch query key"],
) -> Float[np.ndarray, "*batch query key"]:
    """The maps without the identity, in float64 with rows that sum to 1 exactly: what softmax gave.

    >>> stochastic_part(np.full((2, 2), 0.5) + np.eye(2)).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    maps = np.asarray(maps, np.float64)
    if has_identity(maps):
        maps = np.maximum(maps - np.eye(maps.shape[-1]), 0.0)  # rounding may leave −1e−8
    return maps / maps.sum(-1, keepdims=True)


def patch_attention(
    maps: Float[ArrayLike, "*batch token token"],
    *,
    prefix_tokens: int = 1,
    class_token: bool = True,
) -> Float[np.ndarray, "*batch patch"]:
    """How a network distributes its attention over the patches.

    The row of the class token without its own column (and those of a distillation token and of
    registers), scaled to sum to 1. The identity map gives the class token nothing but itself, so it
    takes no part. Without a class token (mean pooling) it is the mean over the patches' rows.
    `VisionTransformer` says how many tokens stand in front of the patches, and whether the first of
    them is one that is read.

    >>> patch_attention(np.array([[0.5, 0.375, 0.125]] * 3)).tolist()
    [0.75, 0.25]
    """
    maps = stochastic_part(maps)
    first = slice(1) if prefix_tokens and class_token else slice(prefix_tokens, None)
    weights = maps[..., first, prefix_tokens:].mean(-2)
    return weights / weights.sum(-1, keepdims=True)


def entropy(maps: Float[ArrayLike, "*batch query key"]) -> Float[np.ndarray, "*batch query"]:
    """Shannon entropy −Σ_j A_ij ln A_ij of every row, in nats; between 0 and ln(keys).

    The identity is left out.

    >>> np.exp(entropy(np.full((3, 3), 1 / 3))).round(6).tolist()  # as spread as 3 equal weights
    [3.0, 3.0, 3.0]
    """
    return row_entropy(stochastic_part(maps))


def row_entropy(weights: Float[ArrayLike, "*batch query key"]) -> Float[np.ndarray, "*batch query"]:
    """`entropy` of weights as they are given."""
    weights = np.asarray(weights, np.float64)
    return -np.sum(weights * np.log(np.where(weights > 0, weights, 1.0)), axis=-1)


def mean_distance(
    maps: Float[ArrayLike, "*batch token token"], grid: tuple[int, int], *, prefix_tokens: int = 1
) -> Float[NumPy, "*batch"]:
    """Mean distance that attention reaches across the image, whose ``grid`` is rows and columns.

    Σ_ij A_ij |x_i − x_j| over the weights that stay among patches, mean over the queries. Source:
    Dosovitskiy et al., 2021, figure 7.

    >>> next_door = np.eye(4)[[1, 0, 3, 2]]
    >>> mean_distance(next_door, (2, 2), prefix_tokens=0).item()
    1.0
    """
    maps = stochastic_part(maps)[..., prefix_tokens:, prefix_tokens:]
    place = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1).reshape(-1, 2)
    distance = np.linalg.norm(place[:, None] - place[None], axis=-1)
    return np.mean(np.sum(maps * distance, -1) / maps.sum(-1), axis=-1)


def patch_grid(image_shape: tuple[int, ...], num_patches: int) -> tuple[int, int]:
    """Rows and columns of square patches that tile an image (height, width, …).

    It is a ValueError if no square patch gives that number.

    >>> patch_grid((32, 64, 3), 32)
    (4, 8)
    """
    height, width = image_shape[:2]
    side = int(round((height * width / num_patches) ** 0.5))
    grid = (height // max(side, 1), width // max(side, 1))
    if grid[0] * grid[1] != num_patches:
        raise ValueError(
            f"expected a number of patches that square patches of a {height}×{width} image give; "
            f"got {num_patches}. Set prefix_tokens to how many tokens the model has in front of "
            "them."
        )
    return grid
