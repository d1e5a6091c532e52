"""The tables of a comparison, from its records alone."""

import collections
import csv
import dataclasses
import io
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from adder_flax.compare.blocks import Block, Code, Heading, Paragraph, Table
from adder_flax.compare.plan import Arm
from adder_flax.compare.records import Record
from adder_flax.compare.run import Comparison
from adder_flax.compare.search import Tuning
from adder_flax.compare.trivial import read_trivial
from adder_flax.paired import (
    LEAST_SEEDS,
    Difference,
    best_of_fewer,
    first_reaching,
    holm,
    interquartile_mean,
    paired_difference,
    verdict,
)
from adder_flax.text import si

_FEWER_TRIALS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Row:
    """One arm.

    Attributes:
      arm: what it is.
      tuning: how its values were found.
      trials: what its first trials scored on the validation split.
      records: of its final runs that are finished, by seed, on the baseline's kind of device.
      elsewhere: those that ran on another, or with another version of JAX, and compare nothing.
      scores: on the test split, in that order; that of a run which diverged is the worst.
      difference: to the baseline, on the seeds that both have; None for a baseline and where there
        are none.
      target: score on the validation split that time is measured to, None where it is not known.
      reached: steps after which each run first had it, None where it never did.
    """

    arm: Arm
    tuning: Tuning
    trials: Sequence[float]
    records: Sequence[Record]
    elsewhere: Sequence[Record]
    scores: Sequence[float]
    difference: Difference | None
    target: float | None
    reached: Sequence[float | None]

    def cost_to_target(self, cost: Callable[[Record], float]) -> float | None:
        """Returns what the target costs in the median run; None if not reached.

        The median of steps, times the cost of one.
        """
        costs = [
            float("inf") if n is None else n * cost(r)
            for n, r in zip(self.reached, self.records, strict=True)
        ]
        median = statistics.median(costs) if costs else float("inf")
        return None if median == float("inf") else median

    def fact(self, name: str) -> float:
        """Returns a fact of the model, as the records have it, of which there are some."""
        return self.records[0].facts[name]


def rows_of(comparison: Comparison) -> list[Row]:
    """Returns a row for each arm, with what is finished of it."""
    arms = comparison.plan.arms.values()
    finished = {arm.name: _finals(comparison, arm) for arm in arms}
    # Runs of one table are of one kind of device and one version: where most of the baselines ran.
    baselines = [arm for arm in arms if comparison.plan.baseline_of(arm) is None]
    places = collections.Counter(place_of(r) for arm in baselines for r in finished[arm.name])
    home = places.most_common(1)[0][0] if places else None
    found = {
        name: [record for record in records if home in (None, place_of(record))]
        for name, records in finished.items()
    }
    rows = []
    for arm in arms:
        records, baseline = found[arm.name], comparison.plan.baseline_of(arm)
        scores = {record.seed: score_of(comparison, record) for record in records}
        target = _target(comparison, found[(baseline or arm).name])
        difference = None
        if baseline is not None:
            others = {record.seed: score_of(comparison, record) for record in found[baseline.name]}
            if both := sorted(scores.keys() & others.keys()):
                difference = paired_difference(
                    [scores[s] for s in both],
                    [others[s] for s in both],
                    largest=comparison.best.largest,
                )
        reached = [_reached(comparison, record, target) for record in records]
        tuning = comparison.tuning(arm)
        rows.append(
            Row(
                arm,
                tuning,
                comparison.trial_scores(arm, tuning),
                records,
                [record for record in finished[arm.name] if record not in records],
                list(scores.values()),
                difference,
                target,
                reached,
            )
        )
    return rows


def place_of(record: Record) -> tuple[str, str]:
    """Returns what the runs of a table must have in common: kind of device and version of JAX."""
    return record.machine["device"], record.versions["jax"]


def score_of(comparison: Comparison, record: Record) -> float:
    """Returns the score of a final run on the test split."""
    return comparison.worst() if record.diverged else record.test[comparison.best.name]


def _finals(comparison: Comparison, arm: Arm) -> list[Record]:
    found = map(comparison.records.get, comparison.final_cells(arm))
    return [record for record in found if record is not None]


def _target(comparison: Comparison, baseline: Sequence[Record]) -> float | None:
    if comparison.plan.settings.target is not None:
        return comparison.plan.settings.target
    name, largest = comparison.best
    scores = [record.validation[name] for record in baseline if not record.diverged]
    # The worse of two in the middle: a mean of them is one that half of the runs never reach.
    middle = statistics.median_low if largest else statistics.median_high
    return middle(scores) if scores else None


def _reached(comparison: Comparison, record: Record, target: float | None) -> float | None:
    if target is None:
        return None
    name, largest = comparison.best
    return first_reaching(record.curve["step"], record.curve.get(name, []), target, largest=largest)


def blocks_of(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    """Returns the page of results: what was run, the tables, what is missing, and the commands."""
    blocks: list[Block] = [Heading(1, comparison.plan.settings.title), *_about(comparison, rows)]
    blocks += [
        Heading(2, f"Test {comparison.best.name}"),
        _scores(comparison, rows),
        *_cautions(comparison, rows),
    ]
    blocks += [Heading(2, "What it costs"), *_costs(rows)]
    if comparison.plan.searched:
        blocks += [Heading(2, "What was tuned"), *_tuned(comparison, rows)]
    return [*blocks, Heading(2, "Run a row again"), *_commands(comparison, rows)]


def _about(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    settings, records = comparison.plan.settings, [record for row in rows for record in row.records]
    percent, split = settings.validation_percent, settings.base.data.train_split
    held = (
        f"{percent} % of the split {split}, on which nothing was trained"
        if percent
        else "the split validation"
    )
    missing = [
        (row.arm.name, settings.seeds - len(row.records) - len(row.elsewhere)) for row in rows
    ]
    blocks: list[Block] = [
        Paragraph(
            f"{len(records)} of {len(rows) * settings.seeds} final runs, seeds 0 to "
            f"{settings.seeds - 1}. Of one seed, all arms see the same batches with the same "
            "augmentation and begin with the same weights wherever they have parameters of one "
            f"path, shape and distribution. {_MATCHED[settings.match]} The test split was read "
            f"once, after the last step of each final run; tuning and curves are on {held}."
        )
    ]
    if any(number for _, number in missing):
        shown = ", ".join(f"{name} {number}" for name, number in missing if number)
        blocks.append(
            Paragraph(
                f"Not finished: final runs that are missing are, by arm, {shown}.", strong=True
            )
        )
    for machine in dict.fromkeys(tuple(record.machine.items()) for record in records):
        blocks.append(
            Paragraph(
                _machine(machine, [r for r in records if tuple(r.machine.items()) == machine])
            )
        )
    return blocks


def _machine(machine: tuple[tuple[str, Any], ...], records: Sequence[Record]) -> str:
    facts, dates = dict(machine), sorted(record.date for record in records)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    versions = ", ".join(f"{name} {version}" for name, version in records[0].versions.items())
    cores = f"{facts['cores']} core{'s' if facts['cores'] > 1 else ''}"
    return (
        f"{len(records)} runs on {facts['processor']}, {cores} each ({facts['device']}), {when}: "
        f"{versions}."
    )


_MATCHED = {
    "steps": "All arms take the same steps.",
    "nothing": "Each arm has a schedule of its own.",
}


def _scores(comparison: Comparison, rows: Sequence[Row]) -> Block:
    names = [*comparison.plan.settings.factors]
    head = [
        *names,
        "runs",
        "mean",
        "interquartile mean",
        "lowest, highest",
        "difference",
        "95 % interval",
        "bootstrap",
        "p",
        "p after Holm",
        "verdict",
    ]
    adjusted = iter(holm([row.difference.p_value for row in rows if row.difference]))
    lines = []
    for row in rows:
        cells = [*row.arm.levels.values(), str(len(row.records))]
        if row.scores:
            mean, middle = statistics.mean(row.scores), interquartile_mean(row.scores)
            cells += [
                f"{mean:.4f}",
                f"{middle:.4f}",
                f"{min(row.scores):.4f}, {max(row.scores):.4f}",
            ]
        if row.difference is not None:
            found, after = row.difference, next(adjusted)
            ends = ((found.low, found.high), found.bootstrap)
            cells += [
                f"{found.mean:+.4f}",
                *(f"{low:+.4f} to {high:+.4f}" for low, high in ends),
                f"{found.p_value:.3f}",
                f"{after:.3f}",
                verdict(
                    found,
                    after,
                    largest=comparison.best.largest,
                    confirmatory=comparison.plan.settings.confirmatory,
                ),
            ]
        elif row.scores:
            cells += ["baseline" if comparison.plan.baseline_of(row.arm) is None else ""]
        lines.append(cells)
    for name, score in read_trivial(comparison.results).items():
        lines.append([name, *[""] * len(names), f"{score:.4f}"])
    return Table(head, lines)


def _cautions(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    compared = [row.difference for row in rows if row.difference is not None]
    blocks: list[Block] = []
    if compared:
        confirmatory, count = comparison.plan.settings.confirmatory, len(compared)
        fewest = min(found.pairs for found in compared)
        if fewest < LEAST_SEEDS and not confirmatory:
            text = (
                f"With {fewest} pairs of seeds no arm can be called ahead: that takes "
                f"{LEAST_SEEDS}. The smallest p after Holm is "
                f"{min(1.0, count * 2 / 2**fewest):.3g}."
            )
            blocks.append(Paragraph(text, strong=True))
        told = (
            "The experiment declares this table confirmatory: an arm is ahead or behind where "
            "Student's interval excludes zero."
            if confirmatory
            else "An arm is ahead or behind where p after Holm is at most 0.05 with "
            f"{LEAST_SEEDS} seeds or more."
        )
        blocks.append(
            Paragraph(
                "A difference is the mean over pairs of one seed, with Student's interval. The "
                "bootstrap's (BCa) beside it is too narrow for few pairs: of six it holds the "
                "truth in 86 cases of 100. p is that of the exact two-sided sign-flip test, after "
                f"Holm that of {count} such tests together. {told}"
            )
        )
    if read_trivial(comparison.results):
        blocks.append(
            Paragraph(
                "Softmax regression and the nearest neighbour see the pixels of the same training "
                "split (`adder_flax.compare.trivial`). An arm below them has not learned what the "
                "images show."
            )
        )
    for row in rows:
        if row.elsewhere:
            places = sorted(
                {f"{device} with JAX {jax}" for device, jax in map(place_of, row.elsewhere)}
            )
            text = (
                f"{row.arm.name}: {len(row.elsewhere)} runs are left out. They ran on "
                f"{' and '.join(places)}, where the baseline did not."
            )
            blocks.append(Paragraph(text, strong=True))
        if broken := [record for record in row.records if record.diverged]:
            seeds = ", ".join(str(record.seed) for record in broken)
            text = (
                f"{row.arm.name} diverged with seed {seeds}, which counts as "
                f"{comparison.worst():g}: "
            )
            blocks.append(Paragraph(f"{text}{broken[0].diverged}.", strong=True))
    return blocks


def _costs(rows: Sequence[Row]) -> list[Block]:
    head = [
        *(
            "arm",
            "parameters",
            "multiplications",
            "additions",
            "energy an example",
            "steps",
        ),
        *("validation target", "steps to it", "operations", "energy"),
    ]
    lines = []
    for row in rows:
        if not row.records:
            lines.append([row.arm.name])
            continue
        steps = statistics.median(record.steps for record in row.records)
        lines.append(
            [
                row.arm.name,
                f"{row.fact('parameters'):,.0f}",
                *(si(row.fact(name)) for name in ("multiplications", "additions")),
                si(row.fact("joules")) + "J",
                f"{steps:.0f}",
                "" if row.target is None else f"{row.target:.4f}",
                *(
                    "not reached" if cost is None else show(cost)
                    for cost, show in (
                        (row.cost_to_target(lambda record: 1), lambda n: f"{n:.0f}"),
                        (row.cost_to_target(lambda record: record.facts["step_operations"]), si),
                        (
                            row.cost_to_target(lambda record: record.facts["step_joules"]),
                            lambda n: si(n) + "J",
                        ),
                    )
                ),
            ]
        )
    notes = (
        "Multiplications, additions and energy are those of one example forward; energy is "
        "modelled, of the arithmetic alone (45 nm, Horowitz 2014). What it takes to the target are "
        "medians over the runs, all of training included. Seconds are not shown: runs were made "
        "side by side, on one machine or several. `python -m benchmarks.compare seconds` times "
        "the arms in turn."
    )
    return [Table(head, lines), Paragraph(notes)]


def _tuned(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    settings = comparison.plan.settings
    fields, seeds = comparison.plan.searched, settings.tuning_seeds
    lines, edges = [], []
    for row in rows:
        tuning = row.tuning
        if not row.arm.space:
            continue
        chosen = [
            "not tuned yet" if tuning.best is None else _shown(tuning.best.get(field, ""))
            for field in fields
        ]
        tried = str(len(tuning.points) - len(tuning.missing))
        edge = ", ".join(tuning.edges)
        lines.append(
            [row.arm.name, tried, *chosen, *(_span(tuning, field) for field in fields), edge]
        )
        if edge:
            edges.append(
                Paragraph(
                    f"Best at the edge: {edge} of {row.arm.name}; what lies beyond was not tried.",
                    strong=True,
                )
            )
    what = (
        f"{settings.trials} quasirandom trials of each arm with {seeds} "
        f"seed{'s' if seeds > 1 else ''} each, and half as many again, up to {settings.extensions} "
        "times, beyond an edge of the range on which the best one lay."
    )
    head = ["arm", "trials", *fields, *(f"{field} tried" for field in fields), "best at the edge"]
    return [Paragraph(what), Table(head, lines), *edges, *_fewer_trials(comparison, rows)]


def _fewer_trials(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    tried = [row for row in rows if len(row.trials) > 1]
    if not tried:
        return []
    most = max(len(row.trials) for row in tried)
    counts = [n for n in _FEWER_TRIALS if n < most] + [most]
    lines = []
    for row in tried:
        found = (
            best_of_fewer(row.trials, n, largest=comparison.best.largest)
            for n in counts
            if n <= len(row.trials)
        )
        lines.append([row.arm.name, *(f"{score:.4f}" for score in found)])
    what = (
        f"Validation {comparison.best.name} of the best of so many of these trials, in the median "
        "over all choices of that many; those beyond an edge are left out."
    )
    return [
        Heading(2, "What fewer trials would have found"),
        Table(["arm", *(f"{n} trial{'s' if n > 1 else ''}" for n in counts)], lines),
        Paragraph(what),
    ]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _span(tuning: Tuning, field: str) -> str:
    missing = set(tuning.missing)
    tried = [point[field] for point in tuning.points if point not in missing and field in point]
    if not tried:
        return ""
    if all(isinstance(value, float) for value in tried):
        return f"{min(tried):g} to {max(tried):g}"
    return ", ".join(map(_shown, dict.fromkeys(tried)))


def _commands(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    text = (
        "Each trains the first run of a row alone and ends with its score; runs.csv has the "
        "commands of all runs. On the same kind of machine with the same versions the score is the "
        "same to the digit."
    )
    return [
        Paragraph(text),
        Code("\n".join(command_of(comparison, row.records[0]) for row in rows if row.records)),
    ]


def command_of(comparison: Comparison, record: Record) -> str:
    """Returns the command that trains a final run alone and scores it on the test split."""
    cell = comparison.plan.cell(
        comparison.plan.arms[record.arm], record.phase, record.seed, record.values
    )
    split = comparison.plan.settings.base.data.eval_split
    path = comparison.records.address(cell)
    return (
        f"python main.py --config={path} --config.data.eval_split={split} "
        f"--workdir=runs/again/{cell.id}"
    )


def runs_csv(comparison: Comparison, rows: Sequence[Row]) -> str:
    """Returns every final run as a line of CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    factors, fields = [*comparison.plan.settings.factors], comparison.plan.searched
    facts = (
        "parameters",
        "multiplications",
        "additions",
        "joules",
        "step_operations",
        "step_joules",
    )
    writer.writerow(
        [
            *factors,
            "seed",
            *fields,
            f"test_{comparison.best.name}",
            f"validation_{comparison.best.name}",
            "diverged",
        ]
        + ["steps", "seconds", "target", "steps_to_target", *facts, "processor", "cores", "command"]
    )
    for row in rows:
        for record, score, reached in zip(row.records, row.scores, row.reached, strict=True):
            writer.writerow(
                [
                    *record.levels.values(),
                    record.seed,
                    *(record.values.get(field, "") for field in fields),
                    score,
                ]
                + [
                    record.validation.get(comparison.best.name, ""),
                    bool(record.diverged),
                    record.steps,
                ]
                + [round(record.steps * record.seconds["step"], 2), row.target, reached]
                + [
                    *(record.facts[name] for name in facts),
                    record.machine["processor"],
                    record.machine["cores"],
                ]
                + [command_of(comparison, record)]
            )
    return file.getvalue()
