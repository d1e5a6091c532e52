"""What paired seeds say about a difference, fewer trials find, and how soon a target is reached.

Tests and intervals are SciPy's.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

_RESAMPLES = 9999
_CONFIDENCE = 0.95
LEAST_SEEDS = 6
"""With fewer pairs the smallest two-sided p-value, 2 / 2ⁿ, is above 0.05: no difference can be
shown."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of two arms, seed by seed.

    Attributes:
      mean: of the differences.
      low, high: ends of the 95 % interval of the mean.
      p_value: of the exact two-sided sign-flip test that differences of either sign are as likely.
    """

    mean: float
    low: float
    high: float
    p_value: float


def interquartile_mean(values: Sequence[float] | np.ndarray) -> float:
    """Returns the mean of the middle half of the values.

    >>> interquartile_mean([0.0, 1.0, 2.0, 99.0])
    1.5
    """
    return float(stats.trim_mean(values, 0.25))


def paired_difference(
    values: Sequence[float] | np.ndarray, baseline: Sequence[float] | np.ndarray
) -> Difference:
    """Compares two arms on the same seeds.

    The interval is the bias-corrected and accelerated bootstrap of the paired differences (Efron,
    1987); where that is not defined, as for differences that are all the same, the percentile
    bootstrap. Of six seeds it is too narrow, as every bootstrap of so few is; docs/compare.md says
    by how much. One pair says nothing: its interval is the whole line and its p 1.

    Args:
      values: one for each seed.
      baseline: on the same seeds.

    Raises:
      ValueError: unequal numbers of seeds, or none.

    Example:
      >>> found = paired_difference([3.0, 4.0, 6.0, 5.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0, 5.0, 5.0])
      >>> round(found.mean, 3), round(found.p_value, 3), found.low > 1
      (2.167, 0.031, True)
    """
    if len(values) != len(baseline) or not len(values):
        raise ValueError(
            f"expected scores of the same seeds, got {len(values)} and {len(baseline)}"
        )
    differences = np.subtract(values, baseline)
    if len(differences) == 1:
        return Difference(float(differences[0]), -np.inf, np.inf, 1.0)
    low, high = _interval(differences)
    tested = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        n_resamples=np.inf if len(differences) <= 14 else 99_999,
    )
    # SciPy flips the signs of one sample; the statistic of no difference at all is certain.
    p_value = 1.0 if not differences.any() else float(tested.pvalue)
    return Difference(float(differences.mean()), low, high, p_value)


def _interval(differences: Float[np.ndarray, " seed"]) -> tuple[float, float]:
    if np.ptp(differences) == 0:
        return float(differences[0]), float(differences[0])
    options: dict[str, Any] = dict(n_resamples=_RESAMPLES, confidence_level=_CONFIDENCE)
    for method in ("BCa", "percentile"):
        with np.errstate(all="ignore"):
            found = stats.bootstrap(
                (differences,), np.mean, method=method, rng=np.random.default_rng(0), **options
            )
        ends = found.confidence_interval
        if np.isfinite([ends.low, ends.high]).all():
            break
    return float(ends.low), float(ends.high)


def first_reaching(
    at: Sequence[float], scores: Sequence[float], target: float, *, largest: bool
) -> float | None:
    """Returns where along a curve a target is first reached, None where it never is.

    >>> first_reaching([10, 20, 30], [0.5, 0.8, 0.7], 0.7, largest=True)
    20
    """
    sign = 1 if largest else -1
    return next(
        (step for step, score in zip(at, scores, strict=True) if sign * score >= sign * target),
        None,
    )


def best_of_fewer(scores: Sequence[float], trials: int, *, largest: bool) -> float:
    """Returns what the best of some trials scores, in the median over all choices of that many.

    Source: Dodge et al., "Show your work", 2019, section 3, with the median in place of the mean,
    which one trial that diverged would make infinite.

    Args:
      scores: of all trials that were made.
      trials: how many of them somebody makes, from 1 to all.
      largest: whether larger is better.

    Raises:
      ValueError: fewer scores than trials, or none.

    >>> [best_of_fewer([0.1, 0.5, 0.7, 0.9], trials, largest=True) for trials in (1, 2, 4)]
    [0.5, 0.7, 0.9]
    """
    if not 0 < trials <= len(scores):
        raise ValueError(f"expected 1 to {len(scores)} trials, got {trials}")
    ranked = sorted(scores, reverse=not largest)
    half = math.comb(len(ranked), trials) / 2
    return next(s for i, s in enumerate(ranked, 1) if math.comb(i, trials) >= half)


def performance_profiles(
    costs: Mapping[str, Sequence[float | None]],
    factors: Sequence[float] | Float[np.ndarray, " factor"],
) -> dict[str, Float[np.ndarray, " factor"]]:
    """Returns each arm's share of instances solved within a factor of the cheapest arm's cost.

    Source: Dolan and Moré, "Benchmarking optimization software with performance profiles", 2002, as
    AlgoPerf scores training algorithms (Dahl et al., 2023).

    Args:
      costs: of every instance (a seed, a data set) in the same order; None where the target was not
        reached.
      factors: ≥ 1.

    Example:
      >>> profiles = performance_profiles({"a": [1.0, 4.0], "b": [2.0, None]}, [1, 2])
      >>> profiles["a"].tolist(), profiles["b"].tolist()
      ([1.0, 1.0], [0.0, 0.5])
    """
    return {
        name: (row[:, None] <= np.asarray(factors)).mean(0)
        for name, row in cost_ratios(costs).items()
    }


def profile_scores(
    costs: Mapping[str, Sequence[float | None]], largest_factor: float = 4.0
) -> dict[str, float]:
    """Returns the mean height of each arm's performance profile from 1 to a factor.

    1 is the cheapest arm on every instance; an instance that takes ``largest_factor`` times the
    cheapest, or is never solved, adds nothing. Source: the benchmark score of AlgoPerf, whose
    factor is 4 too (Dahl et al., 2023).

    Args:
      costs: see :func:`performance_profiles`.
      largest_factor: > 1.

    Example:
      >>> scores = profile_scores({"a": [1.0, 4.0], "b": [2.0, None], "c": [None, 2.0]})
      >>> {name: round(score, 3) for name, score in scores.items()}
      {'a': 0.833, 'b': 0.333, 'c': 0.5}
    """
    return {
        name: float(np.mean(np.clip((largest_factor - row) / (largest_factor - 1), 0, 1)))
        for name, row in cost_ratios(costs).items()
    }


def cost_ratios(
    costs: Mapping[str, Sequence[float | None]],
) -> dict[str, Float[np.ndarray, " instance"]]:
    """Returns how many times the cheapest arm's cost each is, infinite where it is not solved.

    Args:
      costs: see :func:`performance_profiles`.

    Example:
      >>> ratios = cost_ratios({"a": [1.0, 4.0], "b": [2.0, None]})
      >>> ratios["a"].tolist(), ratios["b"].tolist()
      ([1.0, 1.0], [2.0, inf])
    """
    table = np.array(
        [[np.inf if cost is None else cost for cost in row] for row in costs.values()], float
    )
    cheapest = table.min(axis=0)
    ratios = np.where(
        np.isfinite(table), table / np.where(np.isfinite(cheapest), cheapest, 1), np.inf
    )
    return dict(zip(costs, ratios, strict=True))
