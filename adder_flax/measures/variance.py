"""Theorem 1 of the adder attention paper, on the variance of scores between independent unit-normal
vectors.

    Var(q·k) = d        Var(−‖q − k‖₁) = 2 d (1 − 2/π) ≈ 0.727 d        Var(−‖q − k‖²/2) = 2 d

(appendix A.2; the last for comparison: ‖q − k‖²/2 is χ² with d degrees of freedom). A score is then
divided by its standard deviation before the softmax; the paper's 1/√d leaves the adder score at
variance 0.727, the variance-matched scale 1/√(2d(1 − 2/π)) at 1.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import ArrayLike, Float

from adder_flax.measures._arrays import kurtosis, wide

ADDER_VARIANCE_PER_DIM = 2 * (1 - 2 / np.pi)

_PER_DIM = {"dot": 1.0, "adder": ADDER_VARIANCE_PER_DIM, "gaussian": 2.0}


def predicted_variance(score: str, head_dim: int) -> float:
    """Variance of a raw "dot", "adder" or "gaussian" score at width ``head_dim``.

    >>> predicted_variance("dot", 64), round(predicted_variance("adder", 64), 3)
    (64.0, 46.513)
    """
    return _PER_DIM[_known(score)] * head_dim


def pair_scores(
    query: Float[ArrayLike, "*batch query dim"], key: Float[ArrayLike, "*batch key dim"], score: str
) -> Float[np.ndarray, "*batch query key"]:
    """Raw "dot", "adder" or "gaussian" scores of all pairs, in float64.

    >>> pair_scores(np.array([[1.0, 2.0]]), np.array([[0.0, 4.0]]), "adder").item()
    -3.0
    """
    query, key = wide(query, key)
    if _known(score) == "dot":
        return query @ key.mT
    difference = query[..., :, None, :] - key[..., None, :, :]
    return -np.abs(difference).sum(-1) if score == "adder" else -np.square(difference).sum(-1) / 2


def _known(score: str) -> str:
    if score not in _PER_DIM:
        raise ValueError(
            f"expected a score without learned parameters, one of {sorted(_PER_DIM)}; got "
            f"{score!r}. The variance of the others depends on their weights."
        )
    return score


@dataclasses.dataclass(frozen=True)
class VarianceEstimate:
    """Sample variance of a score at one width, with standard error over independent repetitions."""

    head_dim: int
    variance: float
    standard_error: float


def monte_carlo_variance(
    score: str, head_dims: Sequence[int], *, samples: int = 4000, repetitions: int = 8
) -> list[VarianceEstimate]:
    """Variance of a score between independent unit-normal vectors of each width, by sampling.

    The spread of independent estimates, each of so many pairs, gives the standard error.

    >>> [estimate] = monte_carlo_variance("adder", [64])
    >>> abs(estimate.variance - predicted_variance("adder", 64)) < 4 * estimate.standard_error
    True
    """
    rng = np.random.default_rng(0)
    estimates = []
    for dim in head_dims:
        query, key = rng.standard_normal((2, repetitions, samples, 1, dim))
        variances = pair_scores(query, key, score)[..., 0, 0].var(-1, ddof=1)
        error = variances.std(ddof=1) / np.sqrt(repetitions)
        estimates.append(VarianceEstimate(int(dim), float(variances.mean()), float(error)))
    return estimates


@dataclasses.dataclass(frozen=True)
class LiveVariance:
    """Theorem 1 on the queries and keys of a model.

    Attributes:
      head_dim: d.
      measured: variance of the raw scores over all pairs of the same image and head, mean over
        images and heads.
      predicted: what the theorem says for unit-normal vectors.
      rescaled: the same for normal vectors with the measured component variances.
      query_rms: root mean square of the components of q; 1 in the theorem.
      component_correlation: between a token's own query and key components; 0 in the theorem.
      excess_kurtosis: of the components over the tokens, mean of q and k; 0 for normal ones.
    """

    head_dim: int
    measured: float
    predicted: float
    rescaled: float
    query_rms: float
    component_correlation: float
    excess_kurtosis: float


def live_variance(
    query: Float[ArrayLike, "*batch token dim"],
    key: Float[ArrayLike, "*batch token dim"],
    score: str,
) -> LiveVariance:
    """How far a block's queries and keys are from Theorem 1, in its assumption and in its result.

    >>> queries_and_keys = np.random.default_rng(0).standard_normal((2, 50, 40, 16))
    >>> live = live_variance(*queries_and_keys, "dot")
    >>> 0.9 < live.measured / live.predicted < 1.1
    True
    """
    query, key = wide(query, key)
    dim = query.shape[-1]
    measured = pair_scores(query, key, score).var((-2, -1)).mean()
    predicted = predicted_variance(score, dim)
    # Of each component: a product's variance is the product of the two, a distance's grows with
    # their sum. The square of a sum that few tokens estimate is too large by its own variance,
    # which is 2 σ⁴ / (n − 1) for a normal sample's σ².
    of_query, of_key = (x.var(-2, ddof=1) for x in (query, key))
    mean = (of_query + of_key) / 2
    spread = of_query**2 / (query.shape[-2] + 1) + of_key**2 / (key.shape[-2] + 1)
    factor = {"dot": of_query * of_key, "adder": mean, "gaussian": mean**2 - spread / 2}[score]
    # Of a token's own components, over the tokens.
    q, k = (x - x.mean(-2, keepdims=True) for x in (query, key))
    scale = np.sqrt((q**2).mean(-2) * (k**2).mean(-2))
    return LiveVariance(
        head_dim=dim,
        measured=float(measured),
        predicted=predicted,
        rescaled=predicted * float(factor.mean()),
        query_rms=float(np.sqrt(np.mean(query**2))),
        component_correlation=float(np.mean((q * k).mean(-2) / np.where(scale > 0, scale, 1.0))),
        excess_kurtosis=float(np.mean([kurtosis(x, -2).mean() - 3.0 for x in (query, key)])),
    )
