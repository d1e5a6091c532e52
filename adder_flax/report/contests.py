"""What comparisons of optimizers say to the claim that second order ends at a higher accuracy.

*The Brownian motion in the transformer model*, section 3.3: "the second-order method is not only
for fast convergence, but is also for the high accuracy". That is a claim on runs that are over, so
it is decided by comparisons, not by the report of one model.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from adder_flax.paired import Difference, holm, paired_difference, verdict
from adder_flax.report._study import DOES_NOT_HOLD, HOLDS, NOT_DECIDED
from adder_flax.report.runs import read_runs

# What is right, of images or of phonemes, by the score that says where runs end.
_RIGHT: dict[str, Callable[[float], float]] = {
    "accuracy": lambda accuracy: accuracy,
    "phoneme_error_rate": lambda wrong: 1 - wrong,
}


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
      reached: steps in which the second-order arm was at the comparison's target, the median of its
        baseline's validation scores at the end, of each seed; None where it never was.
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
    if runs.score not in _RIGHT:
        raise ValueError(
            f"expected runs with a test score {' or '.join(_RIGHT)} in {runs.folder}, got "
            f"{runs.score}"
        )
    right, baseline, scores = _RIGHT[runs.score], runs.arms.get(first, {}), {}
    for name, arm in runs.arms.items():
        if name != first and (seeds := sorted(arm.keys() & baseline.keys())):
            ends = lambda of, seeds=seeds: [right(of[seed].score) for seed in seeds]
            scores[name] = ends(arm), ends(baseline)
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
        lines.append(
            f"| [{contest.folder.name}](../results/{contest.folder.name}/results.md) | "
            f"{contest.steps}, {found.pairs} | {contest.first}: {first:.4f} | "
            f"{contest.second}: {second:.4f} | "
            f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f}; {contest.adjusted:.3f}) | "
            f"{'not reached' if median == math.inf else f'{median:g}'} | "
            f"{contest.verdict} |"
        )
    return "\n".join(lines)
