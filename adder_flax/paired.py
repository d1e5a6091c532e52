"""What paired seeds say of a difference, fewer trials find, and how soon a target is reached."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from scipy import stats

_CONFIDENCE = 0.95
_LEVEL = 0.05
LEAST_SEEDS = 10
"""With fewer no arm of an exploratory table is ahead. The smallest p of n pairs is 2 / 2ⁿ: of six
it is above 0.05 after Holm over two arms, of ten below it over 25."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of two arms, seed by seed.

    Attributes:
      mean: of the differences.
      low, high: ends of Student's 95 % interval of the mean.
      bootstrap: ends of the bootstrap's (BCa), which is too narrow for few pairs.
      p_value: of the two-sided sign-flip test that differences of either sign are as likely; exact
        up to 16 pairs.
      pairs: number of the seeds.
    """

    mean: float
    low: float
    high: float
    bootstrap: tuple[float, float]
    p_value: float
    pairs: int


def interquartile_mean(values: Sequence[float] | np.ndarray) -> float:
    """Returns the mean of the middle half of the values.

    >>> interquartile_mean([0.0, 1.0, 2.0, 99.0])
    1.5
    """
    return float(stats.trim_mean(values, 0.25))


def paired_difference(
    values: Sequence[float] | np.ndarray,
    baseline: Sequence[float] | np.ndarray,
    *,
    largest: bool = True,
) -> Difference:
    """Compares two arms on the same seeds.

    A run that diverged, whose score is infinite or NaN, is behind every one that did not and level
    with every other that did. Its difference outweighs all finite ones together, so intervals are
    the whole line and the test stays exact. One pair says nothing: its p is 1.

    Args:
      values: one for each seed.
      baseline: on the same seeds.
      largest: whether larger is better, which says where NaN ranks.

    Example:
      >>> found = paired_difference([3.0, 4.0, 6.0, 5.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0, 5.0, 5.0])
      >>> [round(number, 3) for number in (found.mean, found.low, found.high, found.p_value)]
      [2.167, 1.377, 2.957, 0.031]
    """
    if len(values) != len(baseline) or not len(values):
        raise ValueError(
            f"expected scores of the same seeds, got {len(values)} and {len(baseline)}"
        )
    worst = -np.inf if largest else np.inf
    ours, theirs = (np.where(np.isnan(row), worst, row) for row in (values, baseline))
    with np.errstate(invalid="ignore"):
        differences = np.where(ours == theirs, 0.0, ours - theirs)
    pairs, infinite = len(differences), np.isinf(differences)
    # How many more are infinite with one sign than with the other.
    net = np.sign(differences[infinite]).sum()
    mean = float(net * np.inf if net else np.where(infinite, 0.0, differences).mean())
    p_value = _sign_flip_p(_outweighing(differences)) if pairs > 1 else 1.0
    if infinite.any() or pairs == 1:
        whole = (-np.inf, np.inf)
        return Difference(mean, *whole, whole, p_value, pairs)
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, pairs - 1) * stats.sem(differences))
    ends = _bootstrap(differences)
    return Difference(mean, mean - half, mean + half, ends, p_value, pairs)


def _bootstrap(differences: Float[np.ndarray, " seed"]) -> tuple[float, float]:
    """Efron's of 1987; where that is not defined, as for equal differences, by percentiles."""
    if np.ptp(differences) == 0:
        return float(differences[0]), float(differences[0])
    for method in ("BCa", "percentile"):
        with np.errstate(all="ignore"):
            found = stats.bootstrap(
                (differences,),
                np.mean,
                n_resamples=9999,
                confidence_level=_CONFIDENCE,
                method=method,
                rng=np.random.default_rng(0),
            )
        ends = found.confidence_interval
        if np.isfinite([ends.low, ends.high]).all():
            break
    return float(ends.low), float(ends.high)


def _outweighing(differences: Float[np.ndarray, " seed"]) -> Float[np.ndarray, " seed"]:
    """Returns finite differences whose sums are ordered as those of the infinite ones."""
    infinite, signs = np.isinf(differences), np.sign(differences)
    if signs[infinite].sum():  # the sum is infinite, whatever is added to it
        return np.where(infinite, signs, 0.0)
    finite = np.where(infinite, 0.0, differences)
    return np.where(infinite, signs * (1 + 2 * np.abs(finite).sum()), differences)


def _sign_flip_p(differences: Float[np.ndarray, " seed"]) -> float:
    differences = differences / (np.abs(differences).max() or 1.0)

    def sign(chosen: np.ndarray, axis: int) -> np.ndarray:
        # Sums that are zero but for rounding are zero: flips that tie with what was seen count.
        total, size = ((chosen * d).sum(axis) for d in (differences, np.abs(differences)))
        return np.where(np.abs(total) > 1e-9 * size, np.sign(total), 0.0)

    def as_far(flipped: np.ndarray, axis: int) -> np.ndarray:
        # Of what is kept, a, and what is flipped, b: |a - b| >= |a + b| where a b <= 0. So small
        # differences are never added to a huge one that would swallow them.
        kept = flipped == differences
        return np.where(sign(kept, axis) * sign(~kept, axis) <= 0, 1.0, 0.0)

    tested = stats.permutation_test(
        (differences,),
        as_far,
        permutation_type="samples",
        vectorized=True,
        n_resamples=99_999,  # all flips, of up to 16 pairs
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return float(tested.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values of several tests, each so that all of them together err once in 1 / p.

    Source: Holm, "A simple sequentially rejective multiple test procedure", 1979.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(np.take(p_values, order) * factors)
    return np.minimum(adjusted, 1.0).tolist()


def verdict(
    found: Difference, adjusted: float, *, largest: bool, confirmatory: bool = False
) -> str:
    """Returns in words what a difference to the baseline is worth.

    Args:
      found: the difference.
      adjusted: its p after :func:`holm` over the arms of its table.
      largest: whether larger is better.
      confirmatory: whether its table was declared the one that decides before it was run. Then an
        interval that excludes zero tells; else ``adjusted`` does, with ten seeds or more.

    Example:
      >>> better = paired_difference([0.9, 0.8, 0.9, 0.8, 0.9, 0.8], [0.7] * 6)
      >>> verdict(better, 0.031, largest=True)
      'no difference that 6 seeds can tell'
      >>> verdict(better, 0.031, largest=True, confirmatory=True)
      'ahead'
    """
    told = (
        not found.low <= 0 <= found.high
        if confirmatory
        else adjusted <= _LEVEL and found.pairs >= LEAST_SEEDS
    )
    if not told:
        return f"no difference that {found.pairs} seed{'s' * (found.pairs > 1)} can tell"
    return "ahead" if (found.mean > 0) == largest else "behind"


def first_reaching(
    at: Sequence[float], scores: Sequence[float], target: float, *, largest: bool
) -> float | None:
    """Returns where along a curve a target is first reached, None where it never is.

    >>> first_reaching([10, 20, 30], [0.5, 0.8, 0.7], 0.7, largest=True)
    20
    """
    reached = (lambda score: score >= target) if largest else (lambda score: score <= target)
    return next((step for step, score in zip(at, scores, strict=True) if reached(score)), None)


def best_of_fewer(scores: Sequence[float], trials: int, *, largest: bool) -> float:
    """Returns what the best of some trials scores, in the median over all choices of that many.

    Source: Dodge et al., "Show your work", 2019, section 3, with the median in place of the mean,
    which one trial that diverged would make infinite.

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
      costs: of every instance (a seed, a data set); None where the target was not reached.
      factors: ≥ 1.

    Example:
      >>> profiles = performance_profiles({"a": [1.0, 4.0], "b": [2.0, None]}, [1, 2])
      >>> profiles["a"].tolist(), profiles["b"].tolist()
      ([1.0, 1.0], [0.0, 0.5])
    """
    share = lambda row: (row[:, None] <= np.asarray(factors)).mean(0)
    return {name: share(row) for name, row in cost_ratios(costs).items()}


def profile_scores(
    costs: Mapping[str, Sequence[float | None]], largest_factor: float = 4.0
) -> dict[str, float]:
    """Returns the mean height of each arm's performance profile from 1 to a factor.

    1 is the cheapest arm on every instance; an instance that takes ``largest_factor`` times the
    cheapest, or is never solved, adds nothing. Source: the benchmark score of AlgoPerf, whose
    factor is 4 too (Dahl et al., 2023).

    Example:
      >>> scores = profile_scores({"a": [1.0, 4.0], "b": [2.0, None], "c": [None, 2.0]})
      >>> {name: round(score, 3) for name, score in scores.items()}
      {'a': 0.833, 'b': 0.333, 'c': 0.5}
    """
    height = lambda row: np.clip((largest_factor - row) / (largest_factor - 1), 0, 1).mean()
    return {name: float(height(row)) for name, row in cost_ratios(costs).items()}


def cost_ratios(
    costs: Mapping[str, Sequence[float | None]],
) -> dict[str, Float[np.ndarray, " instance"]]:
    """Returns how many times the cheapest arm's cost each is, infinite where it is not solved.

    Where the cheapest costs nothing, what costs nothing has 1 and what costs something infinity.

    Example:
      >>> ratios = cost_ratios({"a": [1.0, 4.0], "b": [2.0, None]})
      >>> ratios["a"].tolist(), ratios["b"].tolist()
      ([1.0, 1.0], [2.0, inf])
    """
    table = np.array(list(costs.values()), float)  # where None is NaN
    table[np.isnan(table)] = np.inf
    cheapest = table.min(axis=0)
    solved = np.where(np.isfinite(cheapest), cheapest, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(table == 0, 1.0, table / solved)
    return dict(zip(costs, ratios, strict=True))
