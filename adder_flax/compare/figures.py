"""The figures of a comparison: differences, curves, energy, performance profiles.

They are as narrow as a phone's screen shows them without making their letters small.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adder_flax import report
from adder_flax.compare.run import Comparison
from adder_flax.compare.table import TOLD, Row
from adder_flax.paired import performance_profiles
from adder_flax.report import Picture

TIMING = "timing.csv"
"""Seconds of a step of each arm, timed in turn, on one machine or several: columns ``arm``,
``step_seconds``, ``machine`` (processor and cores) and ``timed`` (with what and when)."""
WIDTH = 4.6
_HEIGHT = 2.9
_FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_FARTHEST = 3.0  # times the middle reach of intervals: a mean beyond would hide all others
_LETTERS = 26  # of a name, in a legend of two columns
_GREY = "#8a8a8a"
_AHEAD, _BEHIND, _OPEN = "#0072B2", "#D55E00", "#ffffff"


class Line(NamedTuple):
    """A line of a forest plot.

    Attributes:
      name: of the arm.
      mean, low, high: of its difference, None for the arm that others are compared with.
      told: whether it is called ahead or behind.
    """

    name: str
    mean: float | None = None
    low: float = 0.0
    high: float = 0.0
    told: bool = False


def forest(comparison: Comparison, rows: Sequence[Row]) -> list[Picture]:
    """Returns the differences with their intervals, nothing where none is known."""
    if not any(row.difference for row in rows):
        return []
    lines = []
    for row in rows:
        if found := row.difference:
            lines.append(Line(row.arm.name, found.mean, found.low, found.high, row.told in TOLD))
        elif row.scores and comparison.plan.baseline_of(row.arm) is None:
            lines.append(Line(row.arm.name))
    best, largest = comparison.best
    baselines = [line.name for line in lines if line.mean is None]
    means = {line.name: line.mean for line in lines if line.mean is not None}
    farthest = dict.fromkeys(end(means, key=means.__getitem__) for end in (min, max))
    ends = " to ".join(f"{means[name]:+.4f} ({name})" for name in farthest)
    figure, axes = report.new_figure(WIDTH, 0.8 + 0.27 * len(lines))
    data = draw_forest(axes[0, 0], lines, f"difference in test {_words(best)}", largest=largest)
    of = baselines[0] if len(baselines) == 1 else "the baseline of each"
    arms = f"{len(means)} arm{'s' * (len(means) > 1)}"
    alt = (
        f"Differences of {arms} from {of} in test {best}, with intervals: from {ends}. "
        "The table of scores has the numbers."
    )
    caption = (
        f"Difference of each arm from {of} in test {best}, the mean over pairs of one seed, and "
        "Student's 95 % interval. Filled: called ahead or behind. Hollow: not told apart. Arrow: "
        "beyond the axis."
    )
    return [Picture("forest", figure, caption, alt, data)]


def _words(score: str) -> str:
    return score.replace("_", " ")


def draw_forest(
    axes: Any, lines: Sequence[Line], xlabel: str, *, largest: bool
) -> dict[str, np.ndarray]:
    """Draws a line for each arm, the first one on top, and returns what is drawn as columns."""
    reach = _reach(lines)
    axes.axvline(0, color=_GREY, linewidth=0.9)
    for place, line in enumerate(lines):
        if line.mean is None:
            axes.plot(0, place, "D", color="#000000", markersize=5, zorder=3)
            continue
        better = (line.mean > 0) == largest
        if abs(line.mean) > reach:
            side = math.copysign(1, line.mean)
            axes.plot(side * reach, place, ">" if side > 0 else "<", color="#000000", markersize=6)
        else:
            ends = np.clip([line.low, line.high], -reach, reach)
            axes.plot(ends, [place, place], color="#000000", linewidth=1.4)
            face = (_AHEAD if better else _BEHIND) if line.told else _OPEN
            axes.plot(line.mean, place, "o", color=face, markeredgecolor="#000000", markersize=6)
        failed = "baseline diverged" if better else "diverged"
        text = f"{line.mean:+.3f}" if math.isfinite(line.mean) else failed
        at_the_side = dict(xycoords=("axes fraction", "data"), va="center", fontsize=8)
        axes.annotate(text, (1.01, place), **at_the_side)
    report.dress(axes, xlabel=f"{xlabel}, better →" if largest else f"← better, {xlabel}")
    axes.locator_params(axis="x", nbins=5)
    names = [line.name + (" (baseline)" if line.mean is None else "") for line in lines]
    axes.set_yticks(range(len(lines)), names, parse_math=False)
    axes.set(xlim=(-1.08 * reach, 1.08 * reach), ylim=(len(lines) - 0.4, -0.6))
    axes.grid(False, axis="y")
    columns = {"arm": np.array([line.name for line in lines])}
    numbers = {"difference": "mean", "low": "low", "high": "high"}
    return columns | {
        head: np.array([getattr(line, name) or 0.0 for line in lines])
        for head, name in numbers.items()
    }


def _reach(lines: Sequence[Line]) -> float:
    """How far from zero there is something to see: an arm that fails is shown by an arrow."""
    means = [line for line in lines if line.mean is not None and math.isfinite(line.mean)]
    found = [(line.mean or 0.0, line.low, line.high) for line in means]
    ends = [max(abs(x) for x in numbers if math.isfinite(x)) for numbers in found]
    middle = float(np.median(ends or [0.0])) or max(ends, default=0.0)
    pairs = zip(found, ends, strict=True)
    near = (end for (mean, *_), end in pairs if abs(mean) <= _FARTHEST * middle)
    return max(near, default=0.0) or 1.0


def curves(comparison: Comparison, rows: Sequence[Row]) -> list[Picture]:
    """Returns validation scores along steps, and along seconds where arms were timed in turn."""
    best, steps = comparison.best.name, dict.fromkeys((row.arm.name for row in rows), 1.0)
    caption = (
        f"Validation {best} along training: the mean over the seeds, the band from the lowest to "
        "the highest."
    )
    if any(record.diverged for row in rows for record in row.records):
        caption += " Runs that diverged are left out."
    pictures = [_curves("curves", best, rows, steps, "training step", caption)]
    for machine, timed in list(read_timing(comparison.results / TIMING).items())[:1]:
        seconds = {row["arm"]: float(row["step_seconds"]) for row in timed}
        caption = (
            f"The same against seconds: steps times what one takes, all arms timed in turn on "
            f"{machine}; {timed[0]['timed']}."
        )
        label = "seconds of training, evaluations left out"
        pictures.append(_curves("seconds", best, rows, seconds, label, caption))
    return [picture for picture in pictures if picture.data]


def _curves(
    name: str, best: str, rows: Sequence[Row], unit: Mapping[str, float], xlabel: str, caption: str
) -> Picture:
    figure, axes = report.new_figure(WIDTH, _HEIGHT + _legend_inches(rows))
    data: dict[str, np.ndarray] = {}
    for number, row in enumerate(rows):
        found = [r.curve for r in row.records if not r.diverged and r.curve.get(best)]
        if not found or row.arm.name not in unit:
            continue
        # An evaluation that was not finite is not there.
        longest = max((curve["step"] for curve in found), key=len)
        scores = np.array([curve[best] for curve in found if curve["step"] == longest])
        steps, mean = np.array(longest) * unit[row.arm.name], scores.mean(0)
        low, high = scores.min(0), scores.max(0)
        arm, look = row.arm.name, report.line(number)
        axes[0, 0].plot(steps, mean, **look, markersize=3, linewidth=1.3, label=arm)
        axes[0, 0].fill_between(steps, low, high, color=look["color"], alpha=0.12, linewidth=0)
        data |= {f"{arm}, step": steps, f"{arm}, mean": mean}
        data |= {f"{arm}, lowest": low, f"{arm}, highest": high}
    report.dress(axes[0, 0], xlabel=xlabel, ylabel=f"validation {_words(best)}")
    legend_below(axes[0, 0])
    return Picture(name, figure, caption, f"Validation {best} of {len(rows)} arms, {xlabel}", data)


def energy(comparison: Comparison, rows: Sequence[Row]) -> list[Picture]:
    """Returns the test score against the energy of an example, where arms differ in it."""
    # What optimizers of one network do not differ in is not drawn.
    if len({row.records[0].facts["joules"] for row in rows}) < 2:
        return []
    figure, axes = report.new_figure(WIDTH, _HEIGHT + _legend_inches(rows))
    label, score = "energy of one example forward, µJ", f"test {_words(comparison.best.name)}"
    columns: dict[str, list[Any]] = {"arm": [], label: [], score: []}
    for number, row in enumerate(rows):
        joules, name = [1e6 * record.facts["joules"] for record in row.records], row.arm.name
        style = report.line(number) | {"linestyle": "", "markersize": 5, "alpha": 0.75}
        axes[0, 0].plot(joules, row.scores, **style, label=name)
        columns["arm"] += [name] * len(joules)
        columns[label] += joules
        columns[score] += row.scores
    report.dress(axes[0, 0], xlabel=label, ylabel=score)
    axes[0, 0].set_xlim(left=0)
    legend_below(axes[0, 0])
    caption = f"Test {comparison.best.name} against energy: a point for each seed."
    alt = f"Points of {score} against energy for {len(rows)} arms"
    return [Picture("energy", figure, caption, alt, columns)]


def profiles(comparison: Comparison, rows: Sequence[Row]) -> list[Picture]:
    """Instances are seeds of a level of the factors that are not compared."""
    settings = comparison.plan.settings
    compared = settings.baseline or settings.factors
    by_arm: dict[str, dict[tuple[str, int], float | None]] = {}
    for row in rows:
        levels = row.arm.levels.items()
        others = ", ".join(level for factor, level in levels if factor not in compared)
        arm = ", ".join(level for factor, level in levels if factor in compared)
        costs = by_arm.setdefault(arm, {})
        for record, steps in zip(row.records, row.reached, strict=True):
            cost = None if steps is None else steps * record.facts["step_operations"]
            costs[others, record.seed] = cost
    instances = sorted({instance for costs in by_arm.values() for instance in costs})
    if len(by_arm) < 2 or not any(cost for costs in by_arm.values() for cost in costs.values()):
        return []
    table = {name: [*map(costs.get, instances)] for name, costs in by_arm.items()}
    figure, axes = report.new_figure(WIDTH, _HEIGHT + _legend_inches(rows))
    labels = "factor of the fewest operations", "share of runs at the target"
    data = draw_profiles(axes[0, 0], table, *labels)
    legend_below(axes[0, 0])
    caption = (
        f"Performance profile: the share of {len(instances)} instances (up to {settings.seeds} "
        "seeds each) whose target is reached within a factor of the fewest operations, over all "
        "arms, that reach it."
    )
    return [Picture("profile", figure, caption, f"Performance profiles of {len(table)} arms", data)]


def draw_profiles(
    axes: Any, costs: Mapping[str, Sequence[float | None]], xlabel: str, ylabel: str
) -> dict[str, np.ndarray]:
    """Draws :func:`performance_profiles` of each arm, and returns them as columns."""
    factors = np.geomspace(1, _FACTORS[-1], 200)
    found = performance_profiles(costs, factors)
    for number, (name, shares) in enumerate(found.items()):
        look = report.line(number) | {"marker": None, "linewidth": 1.4}
        axes.plot(factors, shares, **look, label=name)
    report.dress(axes, xlabel=xlabel, ylabel=ylabel)
    axes.set_xscale("log")
    axes.set_xticks(_FACTORS, [f"{factor:g}" for factor in _FACTORS])
    axes.minorticks_off()
    return {"factor": factors, **found}


def legend_below(axes: Any) -> None:
    """A legend below the axes, where it hides no line and takes no width."""
    names = axes.get_legend_handles_labels()[1]
    if names:
        place = dict(loc="upper left", bbox_to_anchor=(-0.08, -0.2), columnspacing=1.0)
        report.legend(axes, ncols=_columns(names), handlelength=2.6, **place)


def _columns(names: Sequence[str]) -> int:
    return 2 if max(map(len, names)) <= _LETTERS else 1


def _legend_inches(rows: Sequence[Row]) -> float:
    names = [row.arm.name for row in rows]
    return 0.2 * math.ceil(len(names) / _columns(names))


def read_timing(path: Path) -> dict[str, list[dict[str, str]]]:
    """Reads the rows of a ``timing.csv`` by their machine, none where there is no such file."""
    if not path.exists():
        return {}
    rows: dict[str, list[dict[str, str]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found = {name: row[name] for name in ("arm", "step_seconds", "machine", "timed")}
                float(found["step_seconds"])
                rows.setdefault(found["machine"], []).append(found)
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"expected the columns arm, step_seconds, machine and timed in {path}, got {error}; "
            "remove it, and write it anew by python -m benchmarks.compare seconds"
        ) from error
    return rows
