"""Tokens on a sphere, the Gaussian kernel behind dot-product attention, and whether token updates
are Brownian.

Source: "The Brownian motion in the transformer model" (Chen, 2021), section 3. LayerNorm puts
tokens on the sphere of radius √d, on which q·k = d − ‖q − k‖²/2, so that softmax(q·k/√d) is the
row-normalised Gaussian kernel exp(−‖q − k‖²/(2√d)). The paper takes W_Q = W_K = I and no affine
part; real models have both.
"""

import dataclasses

import numpy as np
from jaxtyping import ArrayLike, Float

from adder_flax.attention import LAYER_NORM_EPSILON
from adder_flax.measures._arrays import NumPy, kurtosis, softmax, wide


def layer_norm(
    tokens: Float[ArrayLike, "*batch width"], *, epsilon: float = LAYER_NORM_EPSILON
) -> Float[np.ndarray, "*batch width"]:
    """LayerNorm without its affine part, (x − mean) / √(variance + ε), in float64.

    >>> layer_norm(np.array([1.0, 3.0]), epsilon=0.0).tolist()
    [-1.0, 1.0]
    """
    tokens = np.asarray(tokens, np.float64)
    centred = tokens - tokens.mean(-1, keepdims=True)
    return centred / np.sqrt(tokens.var(-1, keepdims=True) + epsilon)


def relative_radius(tokens: Float[ArrayLike, "*batch width"]) -> Float[NumPy, "*batch"]:
    """‖x‖ / √d: 1 on the sphere that the paper speaks of.

    >>> relative_radius(np.array([3.0, 4.0, 0.0, 0.0])).item()
    2.5
    """
    tokens = np.asarray(tokens, np.float64)
    return np.linalg.norm(tokens, axis=-1) / np.sqrt(tokens.shape[-1])


def dot_product_map(
    query: Float[ArrayLike, "*batch query dim"], key: Float[ArrayLike, "*batch key dim"]
) -> Float[np.ndarray, "*batch query key"]:
    """softmax(q·k / √d) over the keys, in float64.

    >>> dot_product_map(np.zeros((1, 4)), np.ones((2, 4))).tolist()
    [[0.5, 0.5]]
    """
    query, key = wide(query, key)
    return softmax(query @ key.mT / np.sqrt(query.shape[-1]))


def gaussian_kernel_map(
    query: Float[ArrayLike, "*batch query dim"], key: Float[ArrayLike, "*batch key dim"]
) -> Float[np.ndarray, "*batch query key"]:
    """softmax(−‖q − k‖² / (2√d)) over the keys, in float64: equation 15 of the paper.

    Equal to :func:`dot_product_map` exactly where all keys have one norm: ‖q‖² is constant in a row
    and cancels, ‖k‖² does not.

    >>> keys = np.stack([np.zeros(4), np.ones(4)])
    >>> gaussian_kernel_map(np.zeros((1, 4)), keys).round(4).tolist()
    [[0.7311, 0.2689]]
    """
    query, key = wide(query, key)
    square = lambda x: np.sum(np.square(x), -1)
    distance = square(query)[..., :, None] + square(key)[..., None, :] - 2 * query @ key.mT
    return softmax(-distance / (2 * np.sqrt(query.shape[-1])))


def total_variation(
    first: Float[ArrayLike, "*batch n"], second: Float[ArrayLike, "*batch n"]
) -> Float[NumPy, "*batch"]:
    """½ Σ |p − q| between distributions: 0 for equal ones, 1 for ones that share nothing.

    >>> total_variation(np.array([1.0, 0.0]), np.array([0.5, 0.5])).item()
    0.5
    """
    return np.abs(np.subtract(*wide(first, second))).sum(-1) / 2


@dataclasses.dataclass(frozen=True)
class BrownianTest:
    """Three properties of Brownian motion, measured on token paths X_0 … X_L through the blocks.

    Attributes:
      displacement: mean ‖X_l − X_0‖² / d for l = 1 … L.
      growth_exponent: slope of ln displacement against ln l: 1 for Brownian motion, 2 for steps in
        one direction (nan for a single block).
      increment_correlation: (L, L), mean cosine between a token's increments; 0 off the diagonal
        for Brownian motion.
      mean_correlation: mean of the cosines off the diagonal (nan for a single block).
      shared_drift: share of the increments' energy that is one vector common to all tokens and
        images of a block; 0 for Brownian motion, which has mean 0.
      excess_kurtosis: (L,) of a component's increment over tokens and images, mean over the
        components; 0 for normal ones.
    """

    displacement: Float[np.ndarray, " blocks"]
    growth_exponent: float
    increment_correlation: Float[np.ndarray, "blocks blocks"]
    mean_correlation: float
    shared_drift: float
    excess_kurtosis: Float[np.ndarray, " blocks"]


def brownian_test(path: Float[ArrayLike, "step *batch width"]) -> BrownianTest:
    """Measures whether tokens move through the blocks as Brownian motion would.

    The path is of tokens before the first block, between blocks and after the last: of one point it
    is a ValueError.

    >>> walk = np.cumsum(np.random.default_rng(0).standard_normal((13, 500, 64)), 0)
    >>> result = brownian_test(walk)
    >>> round(result.growth_exponent, 1), round(result.shared_drift, 2)
    (1.0, 0.0)
    """
    (path,) = wide(path)
    if len(path) < 2:
        raise ValueError(
            f"expected a path of at least 2 points, got {len(path)}; pass tokens around a block"
        )
    path = path.reshape(len(path), -1, path.shape[-1])
    steps = np.diff(path, axis=0)
    displacement = np.mean(np.sum((path[1:] - path[0]) ** 2, -1), -1) / path.shape[-1]
    energy = np.sum(steps**2, -1)
    unit = steps / np.sqrt(np.where(energy > 0, energy, 1.0))[..., None]
    correlation = np.einsum("ind,jnd->ij", unit, unit) / path.shape[1]
    blocks, slope, mean_correlation = len(steps), float("nan"), float("nan")
    if blocks > 1:
        slope = np.polyfit(np.log(np.arange(1, blocks + 1)), np.log(displacement), 1)[0]
        off_diagonal = correlation.sum() - np.trace(correlation)
        mean_correlation = off_diagonal / (blocks * (blocks - 1))
    drift = float(np.sum(steps.mean(1) ** 2) / energy.mean(-1).sum())
    numbers = float(slope), correlation, float(mean_correlation), drift
    return BrownianTest(displacement, *numbers, kurtosis(steps, 1).mean(-1) - 3.0)


def component_correlation(
    tokens: Float[ArrayLike, "*batch image token width"],
) -> tuple[float, float]:
    """Returns the mean squared correlation of two components over images, and what chance gives.

    Of n images, independent components have 1/(n − 1) on average. Each token's place is looked at
    by itself, since a mean that differs between places is no dependence.

    >>> tokens = np.random.default_rng(0).standard_normal((50, 9, 32))
    >>> found, chance = component_correlation(tokens)
    >>> bool(abs(found / chance - 1) < 0.1), chance == 1 / 49
    (True, True)
    """
    tokens = np.moveaxis(np.asarray(tokens, np.float64), -3, -2)  # (…, token, image, width)
    images, width = tokens.shape[-2:]
    centred = tokens - tokens.mean(-2, keepdims=True)
    scaled = centred / np.maximum(np.linalg.norm(centred, axis=-2, keepdims=True), 1e-30)
    squared = (scaled.mT @ scaled) ** 2
    apart = ~np.eye(width, dtype=bool)
    return float(squared[..., apart].mean()), 1 / (images - 1)


def diffusion_ratio(width: int, concentration: float) -> float:
    """Returns how fast one step of the walk mixes, over how fast diffusion of its variance does.

    On the unit sphere in ``width`` dimensions the walk with the kernel exp(κ cos θ) shrinks the
    first harmonic by I_{d/2}(κ) / I_{d/2 − 1}(κ), diffusion for the time 1/κ by
    exp(−(d − 1) / (2κ)). The ratio of the logarithms goes to 1 as κ grows and the kernel narrows.
    The paper's softmax(v·w / √d) on the sphere of radius √d has κ = √d.

    >>> round(diffusion_ratio(64, 1e4), 2), round(diffusion_ratio(64, 8.0), 2)
    (1.0, 0.53)
    """
    walk = 0.0
    # The continued fraction of the ratio, from where it is nearly 0; the functions underflow.
    for more in reversed(range(int(2 * concentration) + 100)):
        walk = 1 / ((width + 2 * more) / concentration + walk)
    return float(np.log(walk) / (-(width - 1) / (2 * concentration)))
