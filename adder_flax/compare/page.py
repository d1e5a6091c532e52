"""The page of a comparison: its tables and figures, as Markdown and as one HTML file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adder_flax import report
from adder_flax.compare.blocks import as_html, as_markdown
from adder_flax.compare.records import write_text
from adder_flax.compare.run import Comparison
from adder_flax.compare.table import Row, blocks_of, rows_of, runs_csv
from adder_flax.paired import performance_profiles
from adder_flax.report import Picture, document

_FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_STYLE = """
table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #d0d0d0; vertical-align: top; }
pre { overflow-x: auto; font-size: .8rem; background: #f4f4f4; padding: .6rem; }
"""  # noqa: E501 - lines of another language


def write_results(comparison: Comparison) -> list[Path]:
    """Packs the records and writes what is known so far beside them; nothing is run.

    Returns:
      The files: ``results.md``, ``runs.csv``, ``results.html``, and the figures with their numbers.
    """
    comparison.pack()
    rows, folder = rows_of(comparison), comparison.results
    folder.mkdir(parents=True, exist_ok=True)
    pictures = _pictures(comparison, [row for row in rows if row.records])
    figures = [path for picture in pictures for path in document.write_picture(picture, folder)]
    blocks = blocks_of(comparison, rows)
    drawn = [document.picture_html(picture, folder) for picture in pictures]
    texts = {
        "results.md": as_markdown([*blocks, *pictures]),
        "runs.csv": runs_csv(comparison, rows),
        "results.html": document.html_page(
            comparison.plan.settings.title, "\n".join([as_html(blocks), *drawn]), style=_STYLE
        ),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [*(folder / name for name in texts), *figures]


def _pictures(comparison: Comparison, rows: Sequence[Row]) -> list[Picture]:
    if not rows:
        return []
    best = comparison.best.name
    pictures = [_curves(best, rows)]
    # What optimizers of one network do not differ in is not drawn.
    if len({row.records[0].facts["joules"] for row in rows}) > 1:
        pictures.append(_energy(best, rows))
    return pictures + _profiles(comparison, rows)


def _curves(best: str, rows: Sequence[Row]) -> Picture:
    figure, axes = report.new_figure(8.2, 4.2)
    data: dict[str, np.ndarray] = {}
    for number, row in enumerate(rows):
        curves = [record.curve for record in row.records if not record.diverged]
        if not curves:
            continue
        # An evaluation that was not finite is not there.
        longest = max((curve["step"] for curve in curves), key=len)
        scores = np.array([curve[best] for curve in curves if curve["step"] == longest])
        steps, mean, low, high = np.array(longest), scores.mean(0), scores.min(0), scores.max(0)
        name, line = row.arm.name, report.line(number)
        axes[0, 0].plot(steps, mean, **line, markersize=3, linewidth=1.3, label=name)
        axes[0, 0].fill_between(steps, low, high, color=line["color"], alpha=0.12, linewidth=0)
        data |= {f"{name}, step": steps, f"{name}, mean": mean}
        data |= {f"{name}, lowest": low, f"{name}, highest": high}
    report.dress(axes[0, 0], xlabel="training step", ylabel=f"validation {best}")
    legend_beside(axes[0, 0])
    caption = (
        f"Validation {best} along training: the mean over the seeds, the band from the lowest to "
        "the highest."
    )
    alt = f"Curves of validation {best} of {len(rows)} arms"
    return Picture("curves", figure, caption, alt, data)


def _energy(best: str, rows: Sequence[Row]) -> Picture:
    figure, axes = report.new_figure(7.0, 4.2)
    label, score = "energy of one example forward, J", f"test {best}"
    columns: dict[str, list[Any]] = {"arm": [], label: [], score: []}
    for number, row in enumerate(rows):
        joules, name = [record.facts["joules"] for record in row.records], row.arm.name
        style = report.line(number) | {"linestyle": "", "markersize": 5, "alpha": 0.75}
        axes[0, 0].plot(joules, row.scores, **style, label=name)
        columns["arm"] += [name] * len(joules)
        columns[label] += joules
        columns[score] += row.scores
    axes[0, 0].set_xscale("log")
    report.dress(axes[0, 0], xlabel=label, ylabel=score)
    legend_beside(axes[0, 0])
    caption = f"Test {best} against energy: a point for each seed."
    alt = f"Points of {score} against energy for {len(rows)} arms"
    return Picture("energy", figure, caption, alt, columns)


def _profiles(comparison: Comparison, rows: Sequence[Row]) -> list[Picture]:
    """Instances are seeds of a level of the factors that are not compared."""
    settings = comparison.plan.settings
    by_arm: dict[str, dict[tuple[str, int], float | None]] = {}
    for row in rows:
        compared = {row.arm.levels[factor] for factor in settings.baseline} or {row.arm.name}
        others = ", ".join(level for level in row.arm.levels.values() if level not in compared)
        costs = by_arm.setdefault(", ".join(sorted(compared)), {})
        for record, steps in zip(row.records, row.reached, strict=True):
            cost = None if steps is None else steps * record.facts["step_operations"]
            costs[others, record.seed] = cost
    instances = sorted({instance for costs in by_arm.values() for instance in costs})
    if len(by_arm) < 2 or not any(cost for costs in by_arm.values() for cost in costs.values()):
        return []
    table = {name: [*map(costs.get, instances)] for name, costs in by_arm.items()}
    figure, axes = report.new_figure(7.0, 4.2)
    labels = "factor of the fewest operations", "share of runs at the target"
    data = draw_profiles(axes[0, 0], table, *labels)
    legend_beside(axes[0, 0])
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
    profiles = performance_profiles(costs, factors)
    for number, (name, shares) in enumerate(profiles.items()):
        axes.plot(
            factors, shares, **report.line(number) | {"marker": None}, linewidth=1.4, label=name
        )
    report.dress(axes, xlabel=xlabel, ylabel=ylabel)
    axes.set_xscale("log")
    axes.set_xticks(_FACTORS, [f"{factor:g}" for factor in _FACTORS])
    axes.minorticks_off()
    return {"factor": factors, **profiles}


def legend_beside(axes: Any) -> None:
    """A legend to the right of the axes, where it hides no line."""
    report.legend(axes, loc="upper left", bbox_to_anchor=(1.01, 1.0))
