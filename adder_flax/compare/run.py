"""Works through the cells of a comparison: alone, or beside others on hosts that share a folder."""

import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adder_flax import data, training
from adder_flax.compare import cells, search
from adder_flax.compare.plan import FINAL, TUNING, Arm, Cell, Plan
from adder_flax.compare.records import Record, Records
from adder_flax.errors import RunError
from adder_flax.extras import needs
from adder_flax.settings import Options
from adder_flax.tasks import TASKS
from adder_flax.training.processes import InterruptWatch
from adder_flax.training.setup import load_split
from adder_flax.training.workdir import HeldError, is_held, lock_workdir

with needs("train"):
    from ml_collections import ConfigDict

_POLL_SECONDS = 1.0
_CLAIM = "claim.lock"


class Comparison:
    """A plan, where it is carried out, and what is known so far.

    Args:
      config: as an experiment file makes it, see ``CompareSettings``.
      workdir: of the runs.

    Attributes:
      plan: its arms and cells.
      workdir: ``cells/<cell>/`` are ordinary runs.
      results: folder of records, tables and figures.
      records: of finished cells.
    """

    def __init__(self, config: ConfigDict, workdir: str | Path):
        self.plan = Plan(config)
        self._config = json.loads(config.to_json())
        self.workdir = Path(workdir).absolute()
        self.results = Path(self.plan.settings.results or self.workdir / "results")
        self.records = Records(self.results)
        self.best = TASKS.get(self.plan.settings.base.task.name).best

    def cell_dir(self, cell: Cell) -> Path:
        """Returns the directory of a run."""
        return self.workdir / "cells" / cell.id

    def pack(self) -> None:
        """Puts its records, and what it is, into one file."""
        self.records.pack(self._config | {"results": ""})

    def tuning(self, arm: Arm) -> search.Tuning:
        """Returns how far the tuning of an arm is."""
        if not arm.space:
            return search.Tuning((_NOTHING,), (), _NOTHING)
        settings, score = self.plan.settings, functools.partial(self._score, arm)
        allows = functools.partial(self.plan.allows, arm)
        return search.unfold(arm.space, settings.trials, settings.extensions, score, allows)

    def tuning_cells(self, arm: Arm, values: Mapping[str, Any]) -> list[Cell]:
        """Returns the cells of one trial."""
        return [self.plan.cell(arm, TUNING, seed, values) for seed in self.plan.tuning_seeds]

    def final_cells(self, arm: Arm) -> list[Cell]:
        """Returns the cells of an arm that the tables are made of, none before it is tuned."""
        best, seeds = self.tuning(arm).best, range(self.plan.settings.seeds)
        return [] if best is None else [self.plan.cell(arm, FINAL, s, best) for s in seeds]

    def open_cells(self, arm: Arm) -> list[Cell]:
        """Returns the cells of an arm that can be run now."""
        tuning = self.tuning(arm)
        wanted = [cell for values in tuning.missing for cell in self.tuning_cells(arm, values)]
        return [cell for cell in wanted or self.final_cells(arm) if self.records.get(cell) is None]

    def cells_of(self, arm: Arm) -> tuple[list[Cell], list[Cell]]:
        """Returns the cells of an arm that are known by now: for tuning, and final ones."""
        points = self.tuning(arm).points if arm.space else ()
        tried = [cell for values in points for cell in self.tuning_cells(arm, values)]
        return tried, self.final_cells(arm)

    def check(self) -> None:
        """Refuses, by a RunError, what would stop it later or make its results worthless.

        That is what cells cannot be made of, as names that nobody knows; unreadable data; other
        data than that of finished cells; and a test split that is trained on.
        """
        test, found = self.plan.settings.base.data.eval_split, {}
        for arm in self.plan.arms.values():
            for cell in _one_of_each_name(self.open_cells(arm)):
                _check_cell(cell, test)
            known = [cell for of in self.cells_of(arm) for cell in of]
            records = list(map(self.records.get, known))
            if all(record is not None and not record.data for record in records):
                continue  # of an older version, and nothing to run
            own = known[0].config
            key = str(own.data)
            now = found[key] = found.get(key) or cells.marks_of(own, test, load_once)
            changes = (training.other_records(r.data, now) for r in records if r is not None)
            if change := next(filter(None, changes), None):
                raise RunError(
                    f"expected the data that finished cells of {arm.name!r} saw, got "
                    f"{', '.join(change)} in {own.data.data_dir or 'it'}; put it back "
                    "as it was, or set --workdir to a place of its own for other data"
                )

    def finished(self) -> Iterator[Cell]:
        """Yields the cells that have a record."""
        for arm in self.plan.arms.values():
            for cell in itertools.chain(*self.cells_of(arm)):
                if self.records.get(cell) is not None:
                    yield cell

    def trial_scores(self, arm: Arm, tuning: search.Tuning) -> list[float]:
        """Returns what an arm scored in its first trials, before any beyond an edge.

        None of them before all are made. A trial is its mean over the tuning seeds; where one of
        them diverged, the worst.
        """
        first = tuning.points[: tuning.first] if arm.space else ()
        scores = [score[0] for values in first if (score := self._score(arm, values))]
        if len(scores) < len(first):
            return []
        sign = 1 if self.best.largest else -1
        return [sign * score if math.isfinite(score) else self.worst() for score in scores]

    def worst(self) -> float:
        """Returns the score that a run which is no longer finite is given."""
        return 0.0 if self.best.largest else math.inf

    def _score(self, arm: Arm, values: Mapping[str, Any]) -> search.Score | None:
        cells = self.tuning_cells(arm, values)
        found = [record for cell in cells if (record := self.records.get(cell)) is not None]
        if len(found) < len(cells):
            return None
        if any(record.diverged for record in found):
            return -math.inf, statistics.mean(record.steps for record in found)
        sign = 1 if self.best.largest else -1
        mean = statistics.mean(sign * record.validation[self.best.name] for record in found)
        return mean, -statistics.mean(record.validation.get("loss", math.inf) for record in found)


_NOTHING = Options()


def _one_of_each_name(open_cells: Sequence[Cell]) -> Iterable[Cell]:
    """Returns cells that differ in a name that is searched; one where none is."""
    return {
        tuple(v for v in c.values.values() if isinstance(v, str)): c for c in open_cells
    }.values()


def _check_cell(cell: Cell, test_split: str) -> None:
    try:
        run = training.build_run(cell.config, load=load_once, teach=False)
        with training.user_errors():
            test = load_split(load_once, run.settings, run.settings.data.name, test_split)
    except RunError as error:
        raise RunError(f"{cell.arm.name}: {error}") from error
    for source, used in ((run.train_source, "trained"), (run.eval_source, "tuned")):
        if shared := data.shared_records(source, test):
            raise RunError(
                "expected config.base.data.eval_split to name records to test on, got "
                f"{test_split!r}, of which {shared} are {used} on; choose another split"
            )


# For cells in turn: what the last ones read is not read again.
load_once = functools.lru_cache(maxsize=6)(data.load_source)


def work(comparison: Comparison) -> Iterator[Record]:
    """Runs cells until none is left, and yields the record of each that this process ran.

    A cell is claimed by a lock in its directory, which the kernel lets go of when its process ends
    in whatever way. What others run is waited for, since what is to be run next may depend on it.

    Raises:
      StoppedError: a signal stopped a cell.
      RunError: what the user must mend, with the name of the cell.
    """
    arms = list(comparison.plan.arms.values())
    while any(map(comparison.open_cells, arms)):
        if (ran := _run_next(comparison, arms)) is None:
            time.sleep(_POLL_SECONDS)
            continue
        arm, record = ran
        # What is known now may open other cells of the same arm, whose program is compiled.
        arms = [arm, *(other for other in arms if other is not arm)]
        yield record


def _run_next(comparison: Comparison, arms: Sequence[Arm]) -> tuple[Arm, Record] | None:
    # Where there is one, of an arm that no other process is at: each compiles another program.
    for beside_others in (False, True):
        for arm in arms:
            for cell in comparison.open_cells(arm):
                if (record := _run_claimed(comparison, cell)) is not None:
                    return arm, record
                if not beside_others:
                    break
    return None


def _run_claimed(comparison: Comparison, cell: Cell) -> Record | None:
    """Runs a cell unless another process does; None then, or where it was finished meanwhile."""
    workdir, split = comparison.cell_dir(cell), comparison.plan.settings.base.data.eval_split
    with contextlib.suppress(HeldError), lock_workdir(workdir, _CLAIM):
        if comparison.records.get(cell) is not None:
            return None
        try:
            record = cells.run_cell(cell, workdir, split, load_once)
        except RunError as error:
            raise RunError(f"{cell.id}: {error}") from error
        comparison.records.put(cell, record)
        if cell.phase == TUNING:  # of which no model is wanted
            shutil.rmtree(workdir / "checkpoints", ignore_errors=True)
        return record
    return None


def supervise(workers: int, workdir: Path, poll: Callable[[], None]) -> None:
    """Starts this command with one worker several times, polls every second, and waits for all.

    Cores and GPUs are dealt out among them; what they print goes to ``workers/<number>.txt``.

    Raises:
      RunError: a worker ended with an error, or was killed.
      SystemExit: after SIGINT, SIGTERM or SIGHUP, which the workers get too, with exit code 128 +
        signal.
    """
    outputs = [workdir / "workers" / f"{number}.txt" for number in range(workers)]
    outputs[0].parent.mkdir(parents=True, exist_ok=True)
    children = [_start(number, workers, output) for number, output in enumerate(outputs)]
    with InterruptWatch() as watch:
        while any(child.poll() is None for child in children):
            time.sleep(_POLL_SECONDS)
            poll()
            if watch.signal is not None:
                for child in children:
                    child.send_signal(watch.signal)
                for child in children:
                    child.wait()
                poll()
                sys.exit(128 + watch.signal)
    poll()
    for number, (child, output) in enumerate(zip(children, outputs, strict=True)):
        if child.returncode:
            raise RunError(_failure(number, child.returncode, output))


def _start(number: int, workers: int, output: Path) -> subprocess.Popen:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    environ, command = dict(os.environ), [sys.executable, *sys.argv, "--workers=1"]
    if gpus := _gpus():
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(_share(gpus, number, workers))
    with output.open("a") as file:
        streams: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        child = subprocess.Popen(command, env=environ, **streams)
    if cores:  # before it has any other thread
        os.sched_setaffinity(child.pid, _share(cores, number, workers))
    return child


def _share(things: list[Any], number: int, workers: int) -> list[Any]:
    return things[number::workers] or [things[number % len(things)]]


def _gpus() -> list[str]:
    """Returns the names of NVIDIA's GPUs that this process may use, without starting CUDA."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name]
    found = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i, _ in enumerate(found.iterdir())] if found.is_dir() else []


def _failure(number: int, code: int, output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
    ended = f": {lines[-1].removeprefix('error: ')}"
    if code < 0:
        ended = f" killed by {signal.Signals(-code).name}"
    return (
        f"expected all cells to be run, got worker {number}{ended}; the same command goes on, "
        f"{output} has more"
    )


def overview(comparison: Comparison, workers: int = 1) -> str:
    """Returns a table of what is done, runs and is left, and about how long that takes."""
    rows = [("arm", "tuned", "final runs", "running", "best validation")]
    left, seconds, wanted = 0, [], comparison.plan.settings.seeds
    for arm in comparison.plan.arms.values():
        tried, final = comparison.cells_of(arm)
        tuned, ran = ([*filter(None, map(comparison.records.get, of))] for of in (tried, final))
        running = sum(
            comparison.records.get(cell) is None and is_held(comparison.cell_dir(cell) / _CLAIM)
            for cell in [*tried, *final]
        )
        scores = [r.validation[comparison.best.name] for r in [*tuned, *ran] if not r.diverged]
        best = f"{(max if comparison.best.largest else min)(scores):.4f}" if scores else ""
        done = f"{len(tuned)}/{len(tried)}", f"{len(ran)}/{wanted}"
        rows.append((arm.name, *done, str(running or ""), best))
        seconds += [record.seconds["run"] for record in [*tuned, *ran]]
        left += len(tried) - len(tuned) + wanted - len(ran)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" ".join(f"{c:{w}} " for c, w in zip(row, widths, strict=True)) for row in rows]
    rest = ""
    if left and seconds:
        minutes = round(left * statistics.mean(seconds) / workers / 60)
        hours = f"{minutes // 60} h " if minutes >= 60 else ""
        rest = f", about {hours}{minutes % 60} min"
    lines.append(f"{left} cells left{rest}; more where a best value lies at an edge")
    return "\n".join(map(str.rstrip, lines))


def describe(record: Record, best: str) -> str:
    """Returns a line about a finished cell."""
    # Of a path the last part, the last two where several end alike.
    last = [path.rpartition(".")[2] for path in record.values]
    values = "".join(
        f"  {name if last.count(name) == 1 else '.'.join(path.split('.')[-2:])} {value}"
        for name, (path, value) in zip(last, record.values.items(), strict=True)
    )
    score = f"diverged at step {record.steps}"
    if not record.diverged:
        score = f"validation {best} {record.validation[best]:.4f}"
    return (
        f"{record.arm}  {record.phase}  seed {record.seed}{values}  {score}  "
        f"{record.seconds['run']:.0f} s"
    )
