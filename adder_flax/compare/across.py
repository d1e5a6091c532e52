"""One page over several comparisons of the same arms: ``python -m adder_flax.compare.across``.

    python -m adder_flax.compare.across results/optimizers_digits \
        results/optimizers_g2p --out=runs/both

reads ``runs.csv`` of each, and ``timing.csv`` where there is one (``python -m benchmarks.compare
seconds`` leaves it), and writes ``results.md``, a figure and its numbers: what each arm scores at
its end, what it takes to the validation target, and how it does over all of them by the formula of
AlgoPerf's score (Dahl et al., "Benchmarking Neural Network Training Algorithms", 2023).
"""

import argparse
import dataclasses
import functools
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adder_flax import report
from adder_flax.compare.blocks import Block, Heading, Paragraph, Table, as_markdown
from adder_flax.compare.figures import (
    TIMING,
    WIDTH,
    Line,
    draw_forest,
    draw_profiles,
    legend_below,
    read_timing,
)
from adder_flax.compare.records import write_text
from adder_flax.errors import RunError
from adder_flax.paired import cost_ratios, paired_difference, profile_scores
from adder_flax.report import Picture, document
from adder_flax.report.contests import Runs, read_runs
from adder_flax.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Workload:
    """A comparison among others.

    Attributes:
      largest: whether a larger score is better.
      step_seconds: machine → arm → seconds, the arms timed in turn; none where that was not done.
      timed: machine → with what and when.
    """

    runs: Runs
    largest: bool
    step_seconds: Mapping[str, Mapping[str, float]]
    timed: Mapping[str, str]

    @property
    def seeds(self) -> int:
        """Of an arm that is finished."""
        return max(map(len, self.runs.arms.values()))

    def has(self, arm: str) -> bool:
        """Returns whether all seeds of an arm are there."""
        return len(self.runs.arms.get(arm, ())) == self.seeds

    def score(self, arm: str) -> float:
        """Returns the mean over the seeds of the test scores of an arm."""
        return statistics.mean(run.score for run in self.runs.arms[arm].values())

    def steps(self, arm: str) -> float:
        """Returns the steps to the validation target in the median run, inf where it never is."""
        found = [run.to_target for run in self.runs.arms[arm].values()]
        return statistics.median(math.inf if at is None else at for at in found)

    def seconds(self, arm: str, machine: str) -> float:
        """Returns these steps times what one takes there."""
        return self.steps(arm) * self.step_seconds[machine][arm]


def read_workload(folder: str | Path) -> Workload:
    """Reads the results of a comparison from their folder."""
    runs = read_runs(folder)
    if not runs.arms:
        raise ValueError(f"expected final runs in {runs.folder}, got none; run the comparison on")
    directions = {TASKS.get(name).best.name: TASKS.get(name).best.largest for name in TASKS}
    if runs.score not in directions:
        raise ValueError(
            f"expected a score among {', '.join(sorted(directions))} in {runs.folder}, got "
            f"{runs.score}; register the task that has it"
        )
    seconds, timed, path = {}, {}, runs.folder / TIMING
    for machine, rows in read_timing(path).items():
        seconds[machine] = {row["arm"]: float(row["step_seconds"]) for row in rows}
        timed[machine] = rows[0]["timed"]
        if missing := [arm for arm in runs.arms if arm not in seconds[machine]]:
            raise ValueError(
                f"expected every arm in {path}, got no row of {', '.join(missing)} on {machine}; "
                "write it anew by python -m benchmarks.compare seconds"
            )
    return Workload(runs, directions[runs.score], seconds, timed)


def write_across(folders: Sequence[str | Path], out: str | Path, title: str) -> Path:
    """Writes one page over several comparisons, from the folders of their results."""
    out, workloads = Path(out), [read_workload(folder) for folder in folders]
    arms = list(dict.fromkeys(arm for workload in workloads for arm in workload.runs.arms))
    costs = {"steps": _costs(workloads, arms, Workload.steps)}
    forests = _forests(workloads, arms)
    document.write_picture(forests, out)
    blocks: list[Block | Picture] = [
        Heading(1, title),
        Paragraph(
            f"{len(workloads)} comparisons of {len(arms)} arms, each tuned by the same budget and "
            "judged at the end of its own schedule. Their pages say what is told apart.",
            strong=True,
        ),
        forests,
        _workloads(workloads, out),
        Heading(2, "Where they end"),
        _table(arms, workloads, Workload.score, "{:.4g}", largest=True),
        Paragraph("Means over the seeds on the test split, the best of each column bold."),
        Heading(2, "Steps to the target"),
        _table(arms, workloads, Workload.steps, "{:g}"),
        Paragraph(
            "Steps after which the median run was first where the baseline ends on the validation "
            "split, among those at which runs were looked at."
        ),
    ]
    machines = list(dict.fromkeys(machine for workload in workloads for machine in workload.timed))
    processors = [machine.partition(",")[0] for machine in machines]
    for machine, processor in zip(machines, processors, strict=True):
        seconds = functools.partial(Workload.seconds, machine=machine)
        name = processor if processors.count(processor) == 1 else machine
        there = f" on {name}" if len(machines) > 1 else ""
        timed = [workload for workload in workloads if machine in workload.timed]
        dates = "; ".join(dict.fromkeys(workload.timed[machine] for workload in timed))
        costs[f"seconds{there}"] = _costs(timed, arms, seconds)
        blocks += [
            Heading(2, f"Seconds to the target{there}"),
            _table(arms, timed, seconds, "{:.3g}"),
            Paragraph(
                "These steps times what one takes, all arms of a column timed in turn "
                f"(`python -m benchmarks.compare seconds`) on {machine}; {dates}."
            ),
        ]
    picture = _profile(costs)
    document.write_picture(picture, out)
    blocks += [Heading(2, "Over all of them"), *_overall(costs, workloads), picture]
    write_text(out / "results.md", as_markdown(blocks))
    return out / "results.md"


_Cost = Callable[[Workload, str], float]


def _costs(
    workloads: Sequence[Workload], arms: Sequence[str], cost: _Cost
) -> dict[str, list[float | None]]:
    """An arm that is not finished never arrives."""
    return {
        arm: [cost(workload, arm) if workload.has(arm) else None for workload in workloads]
        for arm in arms
    }


def _workloads(workloads: Sequence[Workload], out: Path) -> Table:
    lines = []
    for name, workload in zip(_short(workloads), workloads, strict=True):
        runs, better = workload.runs, "larger" if workload.largest else "smaller"
        page = Path(os.path.relpath(runs.folder / "results.md", out)).as_posix()
        steps = sorted({run.steps for arm in runs.arms.values() for run in arm.values()})
        cells = f"[{name}]({page})", f"{runs.score}, {better} is better", ", ".join(map(str, steps))
        lines.append([*cells, str(workload.seeds)])
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
        found = {arm: value(workload, arm) for arm in arms if workload.has(arm)}
        best = (max if largest and workload.largest else min)(found.values())
        texts = {arm: "not finished" if arm in workload.runs.arms else "not run" for arm in arms}
        for arm, one in found.items():
            text = "not reached" if one == math.inf and not largest else shown.format(one)
            texts[arm] = f"**{text}**" if one == best != math.inf else text
        columns.append(list(texts.values()))
    return Table(["arm", *_short(workloads)], list(map(list, zip(arms, *columns, strict=True))))


def _short(workloads: Sequence[Workload]) -> list[str]:
    """Names without the words that all begin with."""
    folders = [workload.runs.folder for workload in workloads]
    names = [f.parent.name if f.name == "results" else f.name for f in folders]  # <workdir>/results
    shared = os.path.commonprefix(names).rpartition("_")
    return [name.removeprefix("".join(shared[:2])) for name in names]


def _overall(
    costs: Mapping[str, Mapping[str, Sequence[float | None]]], workloads: Sequence[Workload]
) -> list[Block]:
    head, lines = ["arm", "finished on"], {}
    for arm in costs["steps"]:
        finished = sum(workload.has(arm) for workload in workloads)
        lines[arm] = [arm, f"{finished} of {len(workloads)}"]
    for name, table in costs.items():
        head += [f"fewest {name}", f"most to the fewest {name}", f"score in {name}"]
        scores, ratios = profile_scores(table), cost_ratios(table)
        # Where no arm arrives there is nothing to be behind.
        solved = np.isfinite(np.array([*ratios.values()])).any(0)
        for arm, row in ratios.items():
            worst = row[solved].max(initial=1)
            lines[arm] += [
                f"{(row == 1).sum()} of {len(row)}",
                f"{worst:.2f}" if np.isfinite(worst) else "not reached",
                f"{scores[arm]:.3f}",
            ]
    return [
        Table(head, sorted(lines.values(), key=lambda line: -float(line[-1]))),
        Paragraph(
            "On how many each arm has the fewest, how many times the fewest it takes at most, and "
            "the score of its performance profile, the mean height from 1 to 4 times the fewest "
            "(AlgoPerf's formula): 1 where an arm is first on every comparison, 0 where on each it "
            "takes four times as much or never arrives. Where an arm is not finished it counts as "
            "never arriving."
        ),
    ]


def _forests(workloads: Sequence[Workload], arms: Sequence[str]) -> Picture:
    """Differences to the first arm, a panel for each comparison."""
    drawn = [_lines(workload, arms) for workload in workloads]
    heights = [0.9 + len(lines) for lines in drawn]
    figure, axes = report.new_figure(
        WIDTH, 0.25 * sum(heights) + 0.6 * len(drawn), rows=len(drawn), height_ratios=heights
    )
    data: dict[str, list[Any]] = {}
    for place, workload, name, lines in zip(
        axes[:, 0], workloads, _short(workloads), drawn, strict=True
    ):
        label = f"difference in test {workload.runs.score.replace('_', ' ')}"
        columns = draw_forest(place, lines, label, largest=workload.largest)
        place.set_title(name.replace("_", " "), fontsize=9, loc="left", parse_math=False)
        for key, column in {"comparison": [name] * len(lines), **columns}.items():
            data.setdefault(key, []).extend(column)
    caption = (
        f"Difference of each arm from {arms[0]} at the end, the mean over pairs of one seed, and "
        "Student's 95 % interval; the page of each comparison says what is told apart. An arrow: "
        "beyond the axis."
    )
    alt = f"Differences of {len(arms) - 1} arms from {arms[0]}, on {len(workloads)} comparisons"
    return Picture("forest", figure, caption, alt, data)


def _lines(workload: Workload, arms: Sequence[str]) -> list[Line]:
    first = workload.runs.arms.get(arms[0], {})
    lines = [Line(arms[0])] if first else []
    for arm in arms[1:]:
        runs = workload.runs.arms.get(arm, {})
        both = sorted(first.keys() & runs.keys())
        if len(both) > 2:
            ours, theirs = ([of[seed].score for seed in both] for of in (runs, first))
            found = paired_difference(ours, theirs, largest=workload.largest)
            lines.append(Line(arm, found.mean, found.low, found.high))
    return lines


def _profile(costs: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Picture:
    figure, axes = report.new_figure(WIDTH, 2.6 * len(costs) + 1.2, rows=len(costs))
    data: dict[str, Any] = {}
    for place, (name, table) in zip(axes[:, 0], costs.items(), strict=True):
        label = f"factor of the fewest {name}"
        columns = draw_profiles(place, table, label, "share at the target")
        data |= {f"{key}, {name}": column for key, column in columns.items()}
    legend_below(axes[-1, 0])
    # Not all may be timed.
    many = dict.fromkeys(str(len(row)) for table in costs.values() for row in table.values())
    caption = (
        f"Performance profiles: the share of {' or '.join(many)} comparisons in which the median "
        f"run is at its target within a factor of the fewest {' or '.join(costs)} that any arm "
        "takes."
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
