"""What comparisons of optimizers say to the claim that second order ends at a higher accuracy.

*The Brownian motion in the transformer model*, section 3.3: "the second-order method is not only
for fast convergence, but is also for the high accuracy". That is a claim on runs that are over, so
it is decided by comparisons, not by the report of one model.
"""

import csv
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from adder_flax import packed
from adder_flax.paired import Difference, holm, paired_difference, verdict
from adder_flax.report._study import DOES_NOT_HOLD, HOLDS, NOT_DECIDED

_TEST = "test_"


class Run(NamedTuple):
    """A final run, and its steps to the validation target; None where it never was there."""

    score: float
    steps: int
    to_target: float | None


class Runs(NamedTuple):
    """Final runs of the arms of a comparison, by seed; an arm's name is its levels, with commas.

    They are judged by a ``score`` on the test split.
    """

    folder: Path
    score: str
    arms: Mapping[str, Mapping[int, Run]]


def read_runs(folder: str | Path) -> Runs:
    """Reads the final runs of a comparison from ``runs.csv`` in the folder of its results."""
    folder = Path(folder)
    path = folder / "runs.csv"
    if not path.exists():
        raise FileNotFoundError(
            f"expected results of a comparison, {path}, found none; write it by --mode=compare "
            f"--config={folder / packed.NAME} --workers=0"
        )
    try:
        with path.open(newline="", encoding="utf-8") as file:
            columns, *rows = filter(None, csv.reader(file))  # without empty lines
        # Before them are factors, which may be called as another column is.
        first = columns.index("seed")
        (test,) = (name for name in columns[first:] if name.startswith(_TEST))
        arms: dict[str, dict[int, Run]] = {}
        for cells in rows:
            row = dict(zip(columns[first:], cells[first:], strict=True))
            reached = float(row["steps_to_target"]) if row["steps_to_target"] else None
            run = Run(float(row[test]), int(row["steps"]), reached)
            arms.setdefault(", ".join(cells[:first]), {})[int(row["seed"])] = run
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"expected numbers in the columns seed, {_TEST}…, steps and steps_to_target of {path}, "
            f"got {type(error).__name__}: {error}; write it anew by --mode=compare --workers=0"
        ) from error
    return Runs(folder, test.removeprefix(_TEST), arms)


@dataclasses.dataclass(frozen=True)
class Contest:
    """Second order and first order on one workload, seed by seed.

    Attributes:
      folder: the comparison's results.
      second, first: arms of it.
      scores: accuracies on the test split of the two, at the end of each one's schedule; of
        phonemes the share that is right.
      difference: how much higher second order ends.
      adjusted: its p after Holm over all arms that the comparison holds against the first-order
        one.
      steps: of a run.
      reached: steps of each seed to the comparison's target, the median of its baseline's
        validation scores at the end; None where second order never was there.
    """

    folder: Path
    second: str
    first: str
    scores: tuple[Sequence[float], Sequence[float]]
    difference: Difference
    adjusted: float
    steps: int
    reached: Sequence[float | None]

    @property
    def verdict(self) -> str:
        """On the claim."""
        told = verdict(self.difference, self.adjusted, largest=True)
        return {"ahead": HOLDS, "behind": DOES_NOT_HOLD}.get(told, NOT_DECIDED)


def read_contest(folder: str | Path, second: str, first: str) -> Contest:
    """Reads two arms of a comparison, of second order and of first, from its ``runs.csv``."""
    runs = read_runs(folder)
    if runs.score not in ("accuracy", "phoneme_error_rate"):
        raise ValueError(
            f"expected runs with a test score accuracy or phoneme_error_rate in {runs.folder}, got "
            f"{runs.score}"
        )
    right = lambda run: run.score if runs.score == "accuracy" else 1 - run.score
    baseline, scores = runs.arms.get(first, {}), {}
    for name, arm in runs.arms.items():
        if name != first and (seeds := sorted(arm.keys() & baseline.keys())):
            scores[name] = tuple([right(of[seed]) for seed in seeds] for of in (arm, baseline))
    if second not in scores:
        raise ValueError(
            f"expected runs of {second!r} and {first!r} on the same seeds in {runs.folder}, got "
            f"the arms {', '.join(sorted(runs.arms))}"
        )
    found = {name: paired_difference(*of_both) for name, of_both in scores.items()}
    adjusted = dict(zip(found, holm([each.p_value for each in found.values()]), strict=True))
    ours = [run for seed, run in sorted(runs.arms[second].items()) if seed in baseline]
    reached = [run.to_target for run in ours]
    judged = scores[second], found[second], adjusted[second]
    steps = max(run.steps for run in ours)  # one that diverged took fewer
    return Contest(runs.folder, second, first, *judged, steps, reached)


def contests_table(contests: Sequence[Contest]) -> str:
    """Returns a Markdown table, one row a comparison."""
    lines = [
        "| comparison | steps, seeds | first order | second order | "
        "difference (95 % interval; p after Holm) | steps to the comparison's target | "
        "higher accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for contest in contests:
        found, (second, first) = contest.difference, map(statistics.mean, contest.scores)
        median = statistics.median(math.inf if at is None else at for at in contest.reached)
        name = contest.folder.name
        cells = (
            f"[{name}](../results/{name}/results.md)",
            f"{contest.steps}, {found.pairs}",
            f"{contest.first}: {first:.4f}",
            f"{contest.second}: {second:.4f}",
            f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f}; {contest.adjusted:.3f})",
            "not reached" if median == math.inf else f"{median:g}",
            contest.verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
