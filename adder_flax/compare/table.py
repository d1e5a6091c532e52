"""The tables of a comparison, from its records alone."""

import collections
import csv
import dataclasses
import io
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from adder_flax.compare.blocks import Block, Code, Heading, Paragraph, Table
from adder_flax.compare.plan import Arm
from adder_flax.compare.records import CURVE_DIGITS, Record
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
# Of a record, as columns of runs.csv.
_FACTS = "parameters", "multiplications", "additions", "joules", "step_operations", "step_joules"
_MACHINE = "processor", "cores"
# Optimizers with bases, factors or inverses that are not made anew at every step.
_RENEWING = {"kfac", "kl_shampoo", "soap"}
TOLD = "ahead", "behind"
"""Verdicts on an arm that is told from its baseline."""
_MATCHED = {
    "steps": "All arms take the same steps.",
    "nothing": "Each arm has a schedule of its own.",
}


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
      adjusted: its p after Holm.
      told: the verdict, nothing where nothing is compared.
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
    adjusted: float
    told: str
    target: float | None
    reached: Sequence[float | None]

    def cost_to_target(self, cost: Callable[[Record], float]) -> float | None:
        """Returns the steps to the target in the median run times what one costs, None if never."""
        costs = [
            math.inf if n is None else n * cost(r)
            for n, r in zip(self.reached, self.records, strict=True)
        ]
        median = statistics.median(costs or [math.inf])
        return None if median == math.inf else median


def rows_of(comparison: Comparison) -> list[Row]:
    """Returns a row for each arm, with what is finished of it."""
    (best, largest), plan = comparison.best, comparison.plan
    finished = {}
    for arm in plan.arms.values():
        cells = map(comparison.records.get, comparison.final_cells(arm))
        finished[arm.name] = [record for record in cells if record is not None]
    # Runs of one table are of one kind of device and one version: where most of the baselines ran.
    baselines = [arm for arm in plan.arms.values() if plan.baseline_of(arm) is None]
    places = collections.Counter(place_of(r) for arm in baselines for r in finished[arm.name])
    home = places.most_common(1)[0][0] if places else None
    records, scores = {}, {}
    for name, found in finished.items():
        records[name] = [record for record in found if home in (None, place_of(record))]
        scores[name] = {
            r.seed: comparison.worst() if r.diverged else r.test[best] for r in records[name]
        }
    differences = {}
    for name, arm in plan.arms.items():
        baseline = plan.baseline_of(arm)
        own, others = scores[name], scores[baseline.name] if baseline else {}
        if both := sorted(own.keys() & others.keys()):
            pairs = ([of[seed] for seed in both] for of in (own, others))
            differences[name] = paired_difference(*pairs, largest=largest)
    p_values = [found.p_value for found in differences.values()]
    adjusted = dict(zip(differences, holm(p_values), strict=True))
    options = dict(largest=largest, confirmatory=plan.settings.confirmatory)
    told = {name: verdict(found, adjusted[name], **options) for name, found in differences.items()}
    rows = []
    for name, arm in plan.arms.items():
        target = _target(comparison, records[(plan.baseline_of(arm) or arm).name])
        reached = [
            None
            if target is None or best not in r.curve
            else first_reaching(r.curve["step"], r.curve[best], target, largest=largest)
            for r in records[name]
        ]
        tuning = comparison.tuning(arm)
        rows.append(
            Row(
                arm,
                tuning,
                comparison.trial_scores(arm, tuning),
                records[name],
                [record for record in finished[name] if record not in records[name]],
                list(scores[name].values()),
                differences.get(name),
                adjusted.get(name, math.nan),
                told.get(name, ""),
                target,
                reached,
            )
        )
    return rows


def place_of(record: Record) -> tuple[str, str]:
    """Returns what the runs of a table must have in common: kind of device and version of JAX."""
    return record.machine["device"], record.versions["jax"]


def _target(comparison: Comparison, baseline: Sequence[Record]) -> float | None:
    settings = comparison.plan.settings
    if settings.target is not None or not settings.baseline:
        return settings.target
    name, largest = comparison.best
    scores = [record.validation[name] for record in baseline if not record.diverged]
    # The worse of two in the middle: a mean of them is one that half of the runs never reach.
    middle = statistics.median_low if largest else statistics.median_high
    # As curves have it, so that a run which ends at the target has reached it.
    return round(middle(scores), CURVE_DIGITS) if scores else None


def finding(comparison: Comparison, rows: Sequence[Row]) -> str:
    """Returns what the page shows in a sentence, of no more than its test allows."""
    plan, compared = comparison.plan, [(row, found) for row in rows if (found := row.difference)]
    if not compared:
        return "Nothing is compared here yet."
    baselines = {arm.name for row, _ in compared if (arm := plan.baseline_of(row.arm))}
    of = baselines.pop() if len(baselines) == 1 else "its baseline"
    pairs = sorted({found.pairs for _, found in compared})
    seeds = f"{_to(pairs[0], pairs[-1])} seeds"
    few = pairs[0] < LEAST_SEEDS and not plan.settings.confirmatory
    by = f"by {seeds}" + (f" (that takes {LEAST_SEEDS})" if few else "")
    names = {word: [row.arm.name for row, _ in compared if row.told == word] for word in TOLD}
    said = [f"{', '.join(names[w])} {w}{' of' * (w == 'ahead')} {of}" for w in TOLD if names[w]]
    others = [(row.arm.name, found.mean) for row, found in compared if row.told not in TOLD]
    score = f"test {comparison.best.name}"
    if said:
        rest = f"; {', '.join(name for name, _ in others)} not told from it {by}" if others else ""
        return f"In {score}: {'; '.join(said)}{rest}."
    every = [mean for _, mean in others]
    means = list(filter(math.isfinite, every)) or every
    ends = " to ".join(f"{end:+.4f}" for end in dict.fromkeys((min(means), max(means))))
    if len(others) == 1:
        return f"{others[0][0]} is not told from {of} in {score} {by}: it differs by {ends}."
    return f"None of {len(others)} arms is told from {of} in {score} {by}: they differ by {ends}."


def _to(first: Any, last: Any) -> str:
    return str(first) if first == last else f"{first} to {last}"


def about(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    """Returns what was run, on what, and what is missing."""
    settings, records = comparison.plan.settings, [record for row in rows for record in row.records]
    steps = {record.steps for record in records if not record.diverged}
    matched = settings.match if len(steps) < 2 else "nothing"  # of several sets, say
    held = "the split validation"
    if percent := settings.validation_percent:
        split = settings.base.data.train_split
        held = f"{percent} % of the split {split}, on which nothing was trained"
    blocks: list[Block] = [
        Paragraph(
            f"{len(records)} of {len(rows) * settings.seeds} final runs, seeds 0 to "
            f"{settings.seeds - 1}. Of one seed, all arms see the same batches with the same "
            "augmentation and begin with the same weights wherever they have parameters of one "
            f"path, shape and distribution. {_MATCHED[matched]} The test split was read "
            f"once, after the last step of each final run; tuning and curves are on {held}."
        )
    ]
    missing = [settings.seeds - len(row.records) - len(row.elsewhere) for row in rows]
    found = zip(rows, missing, strict=True)
    if shown := ", ".join(f"{row.arm.name} {number}" for row, number in found if number):
        text = f"Not finished: final runs that are missing are, by arm, {shown}."
        blocks.append(Paragraph(text, strong=True))
    by_machine: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        where = *record.machine.items(), *record.versions.items()
        by_machine.setdefault(where, []).append(record)
    return [*blocks, *map(_machine, by_machine.values())]


def _machine(records: Sequence[Record]) -> Paragraph:
    facts, dates = records[0].machine, sorted({record.date for record in records})
    versions = ", ".join(f"{name} {version}" for name, version in records[0].versions.items())
    cores = f"{facts['cores']} core{'s' if facts['cores'] > 1 else ''}"
    return Paragraph(
        f"{len(records)} runs on {facts['processor']}, {cores} each ({facts['device']}), "
        f"{_to(dates[0], dates[-1])}: {versions}."
    )


def scores(comparison: Comparison, rows: Sequence[Row]) -> Block:
    """Returns the table of the test scores."""
    plan = comparison.plan
    head = (
        "runs|mean|interquartile mean|lowest, highest|difference|95 % interval|bootstrap|p|"
        "p after Holm|verdict"
    )
    lines = []
    for row in rows:
        cells, scores = [*row.arm.levels.values(), str(len(row.records))], row.scores
        if scores:
            means = statistics.mean(scores), interquartile_mean(scores)
            cells += [*(f"{n:.4f}" for n in means), f"{min(scores):.4f}, {max(scores):.4f}"]
        if found := row.difference:
            ends = (found.low, found.high), found.bootstrap
            cells += [
                f"{found.mean:+.4f}",
                *(f"{low:+.4f} to {high:+.4f}" for low, high in ends),
                *(f"{p:.3f}" for p in (found.p_value, row.adjusted)),
                row.told,
            ]
        elif scores and plan.settings.baseline and plan.baseline_of(row.arm) is None:
            cells.append("baseline")
        lines.append(cells)
    for name, score in read_trivial(comparison.results).items():
        lines.append([name, *[""] * len(plan.settings.factors), f"{score:.4f}"])
    return Table([*plan.settings.factors, *head.split("|")], lines)


def cautions(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    """Returns what the scores are worth, and what is missing or left out."""
    compared = [row.difference for row in rows if row.difference is not None]
    blocks: list[Block] = []
    if compared:
        confirmatory, pairs = comparison.plan.settings.confirmatory, [d.pairs for d in compared]
        if max(pairs) < LEAST_SEEDS and not confirmatory:
            text = (
                f"With {max(pairs)} pairs of seeds no arm can be called ahead: that takes "
                f"{LEAST_SEEDS}. The smallest p after Holm is "
                f"{min(row.adjusted for row in rows if row.difference):.3g}."
            )
            blocks.append(Paragraph(text, strong=True))
        told = (
            "The experiment declares this table confirmatory: an arm is ahead or behind where "
            "Student's interval excludes zero."
            if confirmatory
            else "An arm is ahead or behind where p after Holm is at most 0.05 with "
            f"{LEAST_SEEDS} seeds or more."
        )
        text = (
            "A difference is the mean over pairs of one seed, with Student's interval. The "
            "bootstrap's (BCa) beside it is too narrow for few pairs: of six it holds the truth in "
            "86 cases of 100. p is that of the exact two-sided sign-flip test, after Holm that of "
            f"{len(pairs)} such tests together. {told}"
        )
        blocks.append(Paragraph(text))
    if read_trivial(comparison.results):
        blocks.append(
            Paragraph(
                "Softmax regression and the nearest neighbour see the pixels of the same training "
                "split (`adder_flax.compare.trivial`). An arm below them has not learned what the "
                "images show."
            )
        )
    split = any(row.elsewhere for row in rows if comparison.plan.baseline_of(row.arm) is None)
    for row in rows:
        if row.elsewhere:
            places = sorted(
                {f"{device} with JAX {jax}" for device, jax in map(place_of, row.elsewhere)}
            )
            text = (
                f"{row.arm.name}: {len(row.elsewhere)} runs are left out. They ran on "
                f"{' and '.join(places)}, where {'most runs of ' * split}the baseline did not."
            )
            blocks.append(Paragraph(text, strong=True))
        if broken := [record for record in row.records if record.diverged]:
            seeds = ", ".join(str(record.seed) for record in broken)
            text = (
                f"{row.arm.name} diverged with seed {seeds}, which counts as "
                f"{comparison.worst():g}: {broken[0].diverged}."
            )
            blocks.append(Paragraph(text, strong=True))
    return blocks


def costs(rows: Sequence[Row]) -> list[Block]:
    """Returns the table of operations, energy and steps to the target."""
    head = (
        "arm|parameters|multiplications|additions|energy an example|steps|validation target|"
        "steps to it|operations|energy"
    )
    whole, joules = "{:.0f}".format, lambda energy: si(energy) + "J"
    costs: list[tuple[Callable[[Record], float], Callable[[float], str]]] = [
        (lambda record: 1, whole),
        (lambda record: record.facts["step_operations"], si),
        (lambda record: record.facts["step_joules"], joules),
    ]
    lines = []
    for row in rows:
        line = [row.arm.name]
        if row.records:
            facts = row.records[0].facts
            line += [
                f"{facts['parameters']:,.0f}",
                *(si(facts[name]) for name in ("multiplications", "additions")),
                joules(facts["joules"]),
                whole(statistics.median(record.steps for record in row.records)),
            ]
            if row.target is not None:
                found = ((row.cost_to_target(cost), show) for cost, show in costs)
                to_target = ("not reached" if n is None else show(n) for n, show in found)
                line += [f"{row.target:.4f}", *to_target]
        lines.append(line)
    notes = (
        "Multiplications, additions and energy are those of one example forward; energy is "
        "modelled, of the arithmetic alone (45 nm, Horowitz 2014). What it takes to the target are "
        "medians over the runs, all of training included but factorizations of matrices. Seconds "
        "are not shown: runs were made side by side, on one machine or several. `python -m "
        "benchmarks.compare seconds` times the arms in turn."
    )
    blocks: list[Block] = [Table(head.split("|"), lines), Paragraph(notes)]
    if _RENEWING & {row.records[0].config["optimizer"]["name"] for row in rows if row.records}:
        text = (
            "What kfac, kl_shampoo and soap renew at some steps alone is counted at every step: "
            "their operations and energy to the target are at most what is shown."
        )
        blocks.append(Paragraph(text))
    return blocks


def tuned(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    """Returns what was tried and chosen, and what fewer trials would have found."""
    settings, fields = comparison.plan.settings, comparison.plan.searched
    seeds, lines, edges = settings.tuning_seeds, [], []
    first = sorted({row.tuning.first for row in rows if row.arm.space} or {settings.trials})
    for row in rows:
        if not row.arm.space:
            continue
        best, edge = row.tuning.best, ", ".join(row.tuning.edges)
        missing = set(row.tuning.missing)
        tried = [point for point in row.tuning.points if point not in missing]
        chosen = [
            "not tuned yet" if best is None else _shown(best.get(field, "")) for field in fields
        ]
        spans = (_span([point[f] for point in tried if f in point]) for f in fields)
        lines.append([row.arm.name, str(len(tried)), *chosen, *spans, edge])
        if edge:
            text = f"Best at the edge: {edge} of {row.arm.name}; what lies beyond was not tried."
            edges.append(Paragraph(text, strong=True))
    what = (
        f"{_to(first[0], first[-1])} quasirandom trials of each arm with {seeds} "
        f"seed{'s' if seeds > 1 else ''} each, and half as many again, up to {settings.extensions} "
        "times, beyond an edge of the range on which the best one lay."
    )
    head = ["arm", "trials", *fields, *(f"{field} tried" for field in fields), "best at the edge"]
    return [Paragraph(what), Table(head, lines), *edges, *_fewer_trials(comparison, rows)]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _span(tried: Sequence[Any]) -> str:
    if tried and all(isinstance(value, float) for value in tried):
        return f"{min(tried):g} to {max(tried):g}"
    return ", ".join(map(_shown, dict.fromkeys(tried)))


def _fewer_trials(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    tried = {row.arm.name: row.trials for row in rows if len(row.trials) > 1}
    if not tried:
        return []
    (best, largest), most = comparison.best, max(map(len, tried.values()))
    counts = [n for n in _FEWER_TRIALS if n < most] + [most]
    lines = [
        [name, *(f"{best_of_fewer(t, n, largest=largest):.4f}" for n in counts if n <= len(t))]
        for name, t in tried.items()
    ]
    what = (
        f"Validation {best} of the best of so many of these trials, in the median over all choices "
        "of that many; those beyond an edge are left out."
    )
    return [
        Heading(2, "What fewer trials would have found"),
        Table(["arm", *(f"{n} trial{'s' if n > 1 else ''}" for n in counts)], lines),
        Paragraph(what),
    ]


def commands(comparison: Comparison, rows: Sequence[Row]) -> list[Block]:
    """Returns a command for each row."""
    text = (
        "Each trains the first run of a row alone and ends with its score; runs.csv has the "
        "commands of all runs. On the same kind of machine with the same versions the score is the "
        "same to the digit."
    )
    commands = (_command(comparison, row.records[0]) for row in rows if row.records)
    return [Paragraph(text), Code("\n".join(commands))]


def _command(comparison: Comparison, record: Record) -> str:
    """Trains a final run alone and scores it on the test split."""
    plan = comparison.plan
    cell = plan.cell(plan.arms[record.arm], record.phase, record.seed, record.values)
    return (
        f"python main.py --config={comparison.records.address(cell)} "
        f"--config.data.eval_split={plan.settings.base.data.eval_split} "
        f"--workdir=runs/again/{cell.id}"
    )


def runs_csv(comparison: Comparison, rows: Sequence[Row]) -> str:
    """Returns every final run as a line of CSV."""
    file, plan, best = io.StringIO(), comparison.plan, comparison.best.name
    writer = csv.writer(file, lineterminator="\n")
    head = [*plan.settings.factors, "seed", *plan.searched, f"test_{best}", f"validation_{best}"]
    head += ["diverged", "steps", "seconds", "target", "steps_to_target"]
    writer.writerow([*head, *_FACTS, *_MACHINE, "command"])
    for row in rows:
        for record, score, reached in zip(row.records, row.scores, row.reached, strict=True):
            seconds = round(record.steps * record.seconds["step"], 2)
            # By place: a factor may be called as another column is.
            line = [*row.arm.levels.values(), record.seed, *map(record.values.get, plan.searched)]
            line += [score, record.validation.get(best), bool(record.diverged), record.steps]
            line += [seconds, row.target, reached, *map(record.facts.get, _FACTS)]
            line += [*map(record.machine.get, _MACHINE), _command(comparison, record)]
            writer.writerow(line)
    return file.getvalue()
