"""The page of a comparison: its tables and figures, as Markdown and as one HTML file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adder_flax import report
from adder_flax.compare.blocks import as_html, as_markdown
from adder_flax.compare.records import Record, write_text
from adder_flax.compare.run import Comparison
from adder_flax.compare.table import Row, blocks_of, rows_of, runs_csv
from adder_flax.paired import performance_profiles
from adder_flax.report import Picture, document

_FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_LARGEST_FACTOR = _FACTORS[-1]
_STYLE = """
table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #d0d0d0; vertical-align: top; }
pre { overflow-x: auto; font-size: .8rem; background: #f4f4f4; padding: .6rem; }
"""  # noqa: E501 - lines of another language


def write_results(comparison: Comparison) -> list[Path]:
    """Packs the records and writes what is known so far beside them; nothing is run.

    Args:
      comparison: whose records there are.

    Returns:
      The files: ``results.md``, ``runs.csv``, ``results.html``, and the figures with their numbers.
    """
    comparison.pack()
    rows, folder = rows_of(comparison), comparison.results
    folder.mkdir(parents=True, exist_ok=True)
    pictures = _pictures(comparison, [row for row in rows if row.records])
    figures = [path for picture in pictures for path in document.write_picture(picture, folder)]
    blocks = blocks_of(comparison, rows)
    drawn = "".join(f"\n![{p.alt}](figures/{p.name}.svg)\n\n{p.caption}\n" for p in pictures)
    write_text(folder / "results.md", as_markdown(blocks) + drawn.rstrip("\n"))
    write_text(folder / "runs.csv", runs_csv(comparison, rows).rstrip("\n"))
    body = "\n".join(
        [as_html(blocks), *(document.picture_html(picture, folder) for picture in pictures)]
    )
    write_text(
        folder / "results.html",
        document.html_page(comparison.plan.settings.title, body, style=_STYLE),
    )
    return [folder / "results.md", folder / "runs.csv", folder / "results.html", *figures]


def _pictures(comparison: Comparison, rows: Sequence[Row]) -> list[Picture]:
    if not rows:
        return []
    best = comparison.best.name
    return [
        _curves(best, rows),
        *_energy(best, rows),
        *_profiles(comparison, rows),
    ]


def _energy(best: str, rows: Sequence[Row]) -> list[Picture]:
    """What optimizers of one network do not differ in is not drawn."""
    joules = lambda record: record.facts["joules"]
    if len({joules(row.records[0]) for row in rows}) < 2:
        return []
    title, label = f"test {best} against energy", "energy of one example forward, J"
    return [_scatter("energy", title, label, best, rows, joules)]


def _curves(best: str, rows: Sequence[Row]) -> Picture:
    figure, axes = report.new_figure(8.2, 4.2)
    data: dict[str, np.ndarray] = {}
    for number, row in enumerate(rows):
        finished = [record for record in row.records if not record.diverged]
        if not finished:
            continue
        # An evaluation that was not finite is not there.
        longest = max((record.curve["step"] for record in finished), key=len)
        finished = [record for record in finished if record.curve["step"] == longest]
        steps = np.array(longest)
        scores = np.array([record.curve[best] for record in finished])
        line = report.line(number)
        axes[0, 0].plot(
            steps, scores.mean(0), **line, markersize=3, linewidth=1.3, label=row.arm.name
        )
        axes[0, 0].fill_between(
            steps, scores.min(0), scores.max(0), color=line["color"], alpha=0.12, linewidth=0
        )
        name = row.arm.name
        data |= {f"{name}, step": steps, f"{name}, mean": scores.mean(0)}
        data |= {f"{name}, lowest": scores.min(0), f"{name}, highest": scores.max(0)}
    report.dress(axes[0, 0], xlabel="training step", ylabel=f"validation {best}")
    legend_beside(axes[0, 0])
    caption = (
        f"Validation {best} along training: the mean over the seeds, the band from the lowest to "
        "the highest."
    )
    return Picture(
        "curves", figure, caption, f"Curves of validation {best} of {len(rows)} arms", data
    )


def _scatter(
    name: str,
    title: str,
    label: str,
    best: str,
    rows: Sequence[Row],
    cost: Callable[[Record], float],
) -> Picture:
    figure, axes = report.new_figure(7.0, 4.2)
    columns: dict[str, list[Any]] = {"arm": [], label: [], f"test {best}": []}
    for number, row in enumerate(rows):
        costs = [cost(record) for record in row.records]
        axes[0, 0].plot(
            costs,
            row.scores,
            **{**report.line(number), "linestyle": ""},
            markersize=5,
            alpha=0.75,
            label=row.arm.name,
        )
        columns["arm"] += [row.arm.name] * len(costs)
        columns[label] += costs
        columns[f"test {best}"] += row.scores
    axes[0, 0].set_xscale("log")
    report.dress(axes[0, 0], xlabel=label, ylabel=f"test {best}")
    legend_beside(axes[0, 0])
    caption = f"{title[0].upper()}{title[1:]}: a point for each seed."
    return Picture(name, figure, caption, f"Points of {title} for {len(rows)} arms", columns)


def _profiles(comparison: Comparison, rows: Sequence[Row]) -> list[Picture]:
    """The share of instances that are solved within a factor of the best arm's cost.

    Instances are seeds of a level of the other factors.
    """
    seeds = comparison.plan.settings.seeds
    by_arm: dict[str, dict[tuple[str, int], float | None]] = {}
    for row in rows:
        compared = {row.arm.levels[factor] for factor in comparison.plan.settings.baseline} or {
            row.arm.name
        }
        others = ", ".join(level for level in row.arm.levels.values() if level not in compared)
        costs = by_arm.setdefault(", ".join(sorted(compared)), {})
        for record, steps in zip(row.records, row.reached, strict=True):
            costs[others, record.seed] = (
                None if steps is None else steps * record.facts["step_operations"]
            )
    instances = sorted({instance for costs in by_arm.values() for instance in costs})
    if len(by_arm) < 2 or not any(cost for costs in by_arm.values() for cost in costs.values()):
        return []
    table = {
        name: [costs.get(instance) for instance in instances] for name, costs in by_arm.items()
    }
    figure, axes = report.new_figure(7.0, 4.2)
    data = draw_profiles(
        axes[0, 0], table, "factor of the fewest operations", "share of runs at the target"
    )
    legend_beside(axes[0, 0])
    caption = (
        f"Performance profile: the share of {len(instances)} instances (up to {seeds} seeds each) "
        "whose target is reached within a factor of the fewest operations, over all arms, that "
        "reach it."
    )
    return [Picture("profile", figure, caption, f"Performance profiles of {len(table)} arms", data)]


def draw_profiles(
    axes: Any, costs: Mapping[str, Sequence[float | None]], xlabel: str, ylabel: str
) -> dict[str, np.ndarray]:
    """Draws a performance profile for each arm, and returns them as columns.

    Args:
      axes: Matplotlib's.
      costs: see ``performance_profiles``.
      xlabel: of the factors.
      ylabel: of the shares.
    """
    factors = np.geomspace(1, _LARGEST_FACTOR, 200)
    profiles = performance_profiles(costs, factors)
    for number, (name, shares) in enumerate(profiles.items()):
        line = {**report.line(number), "marker": None}
        axes.plot(factors, shares, **line, linewidth=1.4, label=name)
    report.dress(axes, xlabel=xlabel, ylabel=ylabel)
    axes.set_xscale("log")
    axes.set_xticks(_FACTORS, [f"{factor:g}" for factor in _FACTORS])
    axes.minorticks_off()
    return {"factor": factors, **profiles}


def legend_beside(axes: Any) -> None:
    """A legend to the right of the axes, where it hides no line."""
    report.legend(axes, loc="upper left", bbox_to_anchor=(1.01, 1.0))
