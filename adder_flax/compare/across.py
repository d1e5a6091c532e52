"""One page over several comparisons of the same arms: ``python -m adder_flax.compare.across``.

    python -m adder_flax.compare.across docs/results/optimizers_* --out=docs/results/optimizers

reads ``runs.csv`` of each, and ``timing.csv`` where there is one (``python -m benchmarks.compare
seconds`` leaves it), and writes ``results.md``, a figure and its numbers: what each arm scores at
its end, what it takes to the validation target, and how it does over all of them by AlgoPerf's
rules (Dahl et al., "Benchmarking Neural Network Training Algorithms", 2023).
"""

import argparse
import csv
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adder_flax import report
from adder_flax.compare.blocks import Block, Heading, Paragraph, Table, as_markdown
from adder_flax.compare.page import draw_profiles, legend_beside
from adder_flax.compare.records import write_text
from adder_flax.errors import RunError
from adder_flax.paired import profile_scores
from adder_flax.report import Picture, document
from adder_flax.report.runs import Runs, read_runs
from adder_flax.tasks import TASKS

TIMING = "timing.csv"
"""Seconds of a step of each arm, timed in turn: columns ``arm``, ``step_seconds`` and
``machine``."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A comparison among others.

    Attributes:
      runs: its final runs.
      largest: whether a larger score is better.
      step_seconds: of each arm, timed in turn; none where that was not done.
      machine: that they were timed on.
    """

    runs: Runs
    largest: bool
    step_seconds: Mapping[str, float]
    machine: str

    @property
    def name(self) -> str:
        """That of its folder."""
        return self.runs.folder.name

    def score(self, arm: str) -> float:
        """Returns the mean over the seeds of the test scores of an arm."""
        return statistics.mean(self.runs.scores(arm).values())

    def steps(self, arm: str) -> float | None:
        """Returns the steps to the validation target in the median run; None: not reached."""
        found = [
            float("inf") if at is None else at for at in self.runs.steps_to_target(arm).values()
        ]
        median = statistics.median(found)
        return None if median == float("inf") else median

    def seconds(self, arm: str) -> float | None:
        """Returns these steps times what one takes; None: not reached."""
        steps = self.steps(arm)
        return None if steps is None else steps * self.step_seconds[arm]


def read_workload(folder: str | Path) -> Workload:
    """Reads the results of a comparison.

    Raises:
      FileNotFoundError: there are none.
      ValueError: they are not as ``--mode=compare`` and ``benchmarks.compare`` write them, or no
        task has their score.
    """
    runs = read_runs(folder)
    tasks = (TASKS.get(name) for name in TASKS)
    directions = {task.best.name: task.best.largest for task in tasks}
    if runs.score not in directions:
        raise ValueError(
            f"expected a score among {', '.join(sorted(directions))} in {runs.folder}, got "
            f"{runs.score}; register the task that has it"
        )
    path = runs.folder / TIMING
    timed: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            timed = list(csv.DictReader(file))
    try:
        seconds = {row["arm"]: float(row["step_seconds"]) for row in timed}
        machine = timed[0]["machine"] if timed else ""
        if missing := [arm for arm in runs.arms if timed and arm not in seconds]:
            raise ValueError(f"no row of {', '.join(missing)}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected the columns arm, step_seconds and machine in {path}, got {error}; write it "
            "anew by python -m benchmarks.compare seconds"
        ) from error
    return Workload(runs, directions[runs.score], seconds, machine)


def write_across(folders: Sequence[str | Path], out: str | Path, title: str) -> Path:
    """Writes one page over several comparisons.

    Args:
      folders: their results.
      out: folder of ``results.md``, ``figures/`` and ``data/``.
      title: of the page.

    Returns:
      The page.

    Raises:
      FileNotFoundError: a folder has no results.
      ValueError: results that cannot be read.
      RunError: the page cannot be written.
    """
    out, workloads = Path(out), [read_workload(folder) for folder in folders]
    arms = list(dict.fromkeys(arm for workload in workloads for arm in workload.runs.arms))
    timed = [workload for workload in workloads if workload.step_seconds]
    costs = {"steps": _costs(workloads, arms, Workload.steps)}
    if timed:
        costs["seconds"] = _costs(timed, arms, Workload.seconds)
    blocks: list[Block] = [
        Heading(1, title),
        Paragraph(
            f"{len(workloads)} comparisons, each arm tuned by the same budget and judged at the "
            "end of its own schedule; their pages have intervals, tests and commands."
        ),
        _workloads(workloads, out),
        Heading(2, "Where they end"),
        _table(arms, workloads, Workload.score, "{:.4g}", largest=True),
        Paragraph("Means over the seeds on the test split, the best of each column bold."),
        Heading(2, "Steps to the target"),
        _table(arms, workloads, Workload.steps, "{:g}"),
        Paragraph(
            "Steps after which the median run was first where the baseline ends on the validation "
            "split, looked at some twelve times in a run."
        ),
    ]
    if timed:
        machines = "; ".join(dict.fromkeys(workload.machine for workload in timed))
        blocks += [
            Heading(2, "Seconds to the target"),
            _table(arms, timed, Workload.seconds, "{:.3g}"),
            Paragraph(
                "These steps times what one takes, all arms of a column timed in turn "
                f"(`python -m benchmarks.compare seconds`) on {machines}."
            ),
        ]
    blocks += [Heading(2, "Over all of them"), *_overall(costs)]
    pictures = [_profile(costs)] if any(costs.values()) else []
    for picture in pictures:
        document.write_picture(picture, out)
    drawn = "".join(f"\n![{p.alt}](figures/{p.name}.png)\n\n{p.caption}\n" for p in pictures)
    write_text(out / "results.md", as_markdown(blocks) + drawn.rstrip("\n"))
    return out / "results.md"


_Cost = Callable[[Workload, str], float | None]


def _costs(
    workloads: Sequence[Workload], arms: Sequence[str], cost: _Cost
) -> dict[str, list[float | None]]:
    """Costs of the arms that were run on all of the workloads."""
    return {
        arm: [cost(workload, arm) for workload in workloads]
        for arm in arms
        if all(arm in workload.runs.arms for workload in workloads)
    }


def _workloads(workloads: Sequence[Workload], out: Path) -> Table:
    lines = []
    for name, workload in zip(_short(workloads), workloads, strict=True):
        runs = workload.runs
        page = Path(os.path.relpath(runs.folder / "results.md", out)).as_posix()
        first = next(iter(runs.arms.values()))
        lines.append(
            [
                f"[{name}]({page})",
                f"{runs.score}, {'larger' if workload.largest else 'smaller'} is better",
                next(iter(first.values()))["steps"],
                str(len(first)),
            ]
        )
    return Table(["comparison", "score", "steps", "seeds"], lines)


def _table(
    arms: Sequence[str],
    workloads: Sequence[Workload],
    value: _Cost,
    shown: str,
    *,
    largest: bool = False,
) -> Table:
    """A column for each workload, its best bold: the smallest, or as its score has it."""
    columns = []
    for workload in workloads:
        found = {arm: value(workload, arm) for arm in arms if arm in workload.runs.arms}
        choose = max if largest and workload.largest else min
        best = choose((one for one in found.values() if one is not None), default=None)
        texts = dict.fromkeys(arms, "not run")
        for arm, one in found.items():
            text = "not reached" if one is None else shown.format(one)
            texts[arm] = f"**{text}**" if one is not None and one == best else text
        columns.append(list(texts.values()))
    return Table(["arm", *_short(workloads)], list(map(list, zip(arms, *columns, strict=True))))


def _short(workloads: Sequence[Workload]) -> list[str]:
    """Names without the words that all begin with."""
    names = [workload.name for workload in workloads]
    shared = os.path.commonprefix(names).rpartition("_")
    return [name.removeprefix("".join(shared[:2])) for name in names]


def _overall(costs: Mapping[str, Mapping[str, Sequence[float | None]]]) -> list[Block]:
    lines: dict[str, list[str]] = {arm: [arm] for arm in costs["steps"]}
    for table in costs.values():
        scores = profile_scores(table)
        cheapest = [
            min((cost for cost in column if cost is not None), default=None)
            for column in zip(*table.values(), strict=True)
        ]
        for arm, row in table.items():
            ratios = [
                float("inf") if cost is None else cost / least
                for cost, least in zip(row, cheapest, strict=True)
                if least is not None
            ]
            worst = max(ratios, default=float("inf"))
            lines[arm] += [
                f"{sum(ratio == 1 for ratio in ratios)} of {len(row)}",
                "not reached" if worst == float("inf") else f"{worst:.2f}",
                f"{scores[arm]:.3f}",
            ]
    head = [
        heading
        for name in costs
        for heading in (f"fewest {name}", f"most to the fewest {name}", f"score in {name}")
    ]
    ranked = sorted(lines.values(), key=lambda line: -float(line[-1]))
    return [
        Table(["arm", *head], ranked),
        Paragraph(
            "Of the arms that were run on all of them: on how many each has the fewest, how many "
            "times the fewest it takes at most, and the score of its performance profile, the mean "
            "height from 1 to 4 times the fewest (AlgoPerf's): 1 where an arm is first on every "
            "comparison, 0 where it takes four times as much, or never arrives, on each."
        ),
    ]


def _profile(costs: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Picture:
    figure, axes = report.new_figure(4.2 * len(costs) + 2.0, 4.2, columns=len(costs))
    data: dict[str, Any] = {}
    for place, (name, table) in zip(axes[0], costs.items(), strict=True):
        label = f"factor of the fewest {name}"
        columns = draw_profiles(place, table, label, "share of comparisons at the target")
        data |= {f"{key}, {name}": column for key, column in columns.items()}
    legend_beside(axes[0, -1])
    many = len(next(iter(next(iter(costs.values())).values())))
    caption = (
        f"Performance profiles: the share of {many} comparisons in which the median run is at its "
        f"target within a factor of the fewest {' or '.join(costs)} that any arm takes."
    )
    return Picture("profile", figure, caption, "Performance profiles over comparisons", data)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page for the folders on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m adder_flax.compare.across",
        description="Writes one page over several comparisons of the same arms.",
    )
    parser.add_argument("folders", nargs="+", help="results of comparisons")
    parser.add_argument("--out", required=True, help="folder of the page")
    parser.add_argument("--title", default="Several comparisons")
    options = parser.parse_args(argv)
    try:
        print(write_across(options.folders, options.out, options.title))
    except (FileNotFoundError, ValueError, RunError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
