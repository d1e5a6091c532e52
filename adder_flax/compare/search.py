"""How an arm is tuned: quasirandom trials, more of them beyond an edge that is best."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import qmc

from adder_flax.settings import LogUniform, OneOf, Options, Range

Values = Mapping[str, Any]
Score = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How far the tuning of an arm is.

    Attributes:
      points: values that were tried or are to be.
      missing: those of them whose score is not known yet.
      best: of all; None as long as one is missing.
      edges: fields of which the best value is the outermost that was tried.
      extensions: how often points were added beyond an edge.
      first: how many of the points were there before any was added.
    """

    points: tuple[Values, ...]
    missing: tuple[Values, ...]
    best: Values | None
    edges: tuple[str, ...] = ()
    extensions: int = 0
    first: int = 1


def unfold(
    space: Mapping[str, Range],
    trials: int,
    extensions: int,
    score: Callable[[Values], Score | None],
    allowed: Callable[[Values], bool] = lambda values: True,
) -> Tuning:
    """Returns what has been tuned and what is to be tried next, from the scores at hand alone.

    The first points are those of Halton's sequence, the same on every machine; more trials are more
    of them. Where the best point has the smallest or largest value that was tried of a number that
    is spread over a range, the range grows beyond it by half as many trials, as densely as before.

    Args:
      space: what is tried, by field.
      trials: number of points at first.
      extensions: how often it may grow.
      score: larger is better; None where it is not known yet.
      allowed: whether a point can be tried; where none beyond an edge can, that edge stays.

    Example:
      >>> space = {"rate": LogUniform(0.01, 1.0)}
      >>> tuning = unfold(space, 3, 0, lambda values: (values["rate"],))
      >>> [values["rate"] for values in tuning.points], tuning.best["rate"], tuning.edges
      ([0.1, 0.03162, 0.3162], 0.3162, ('rate',))
      >>> unfold(space, 3, 2, lambda values: (-abs(values["rate"] - 1),)).best["rate"]
      0.6812
    """
    ranges = dict(space)
    points = tuple(point for point in _first(ranges, trials) if allowed(point))
    done, first = 0, len(points)
    while True:
        scores = {point: known for point in points if (known := score(point)) is not None}
        missing = tuple(point for point in points if point not in scores)
        if missing:
            return Tuning(points, missing, None, (), done, first)
        # What is not a number is the worst.
        ranked = [[-math.inf if math.isnan(x) else x for x in scores[point]] for point in points]
        best = points[ranked.index(max(ranked))]
        edges = {path: side for path in space if (side := _edge(path, ranges[path], best, points))}
        more = _beyond(space, ranges, edges, best, trials, len(points)) if done < extensions else ()
        added = tuple(point for point in more if point not in scores and allowed(point))
        if not added:
            return Tuning(points, (), best, tuple(edges), done, first)
        points, done = points + added, done + 1


def _first(space: Mapping[str, Range], trials: int) -> Sequence[Values]:
    if not space:
        return [Options()]
    choices = [values.values for values in space.values() if isinstance(values, OneOf)]
    if len(choices) == len(space):
        grid = [Options(zip(space, values, strict=True)) for values in itertools.product(*choices)]
        if len(grid) <= trials:
            return grid
    return _halton(space, trials, 0)


def _halton(space: Mapping[str, Range], count: int, start: int) -> list[Values]:
    """Points number ``start`` and following; its very first one, a corner, is left out."""
    rows = qmc.Halton(len(space), scramble=False).random(start + 1 + count)[start + 1 :]
    points = (Options(zip(space, map(value_at, space.values(), row), strict=True)) for row in rows)
    return list(dict.fromkeys(points))


def value_at(values: Range, place: float) -> Any:
    """Returns the value at a place of a range, from 0 to 1, its end, which is left out.

    >>> value_at(LogUniform(0.01, 1.0), 0.5), value_at(OneOf(("a", "b", "c")), 0.9)
    (0.1, 'c')
    """
    if isinstance(values, OneOf):
        return values.values[int(place * len(values.values))]
    # Four digits, so that a command which repeats a run can be read.
    return float(f"{values.low * (values.high / values.low) ** place:.4g}")


def _edge(path: str, values: Range, best: Values, points: Sequence[Values]) -> str | None:
    """On which side nothing was tried beyond the best value, of values that have an order."""
    choice = isinstance(values, OneOf)
    tried = values.values if choice else [point[path] for point in points]
    if choice and (len(tried) < 3 or not all(type(number) in (int, float) for number in tried)):
        return None
    low, high = min(tried), max(tried)
    return "high" if best[path] == high else "low" if best[path] == low else None


def _beyond(
    space: Mapping[str, Range],
    ranges: dict[str, Range],
    edges: Mapping[str, str],
    best: Values,
    trials: int,
    start: int,
) -> list[Values]:
    """Returns points beyond the edges, and widens the ranges by them."""
    added, count = [], math.ceil(trials / 2)
    for path, side in edges.items():
        before, widest, value = space[path], ranges[path], best[path]
        if isinstance(before, OneOf) or isinstance(widest, OneOf):
            continue
        factor = (before.high / before.low) ** (count / trials)
        slab = LogUniform(*((value / factor, value) if side == "low" else (value, value * factor)))
        if not np.isfinite(slab.high) or slab.low < np.finfo(np.float32).tiny:
            continue
        # The beginning of the sequence again: a slab of one dimension is divided evenly.
        added += _halton(ranges | {path: slab}, count, 0 if len(space) == 1 else start)
        ranges[path] = LogUniform(min(widest.low, slab.low), max(widest.high, slab.high))
    return list(dict.fromkeys(added))
