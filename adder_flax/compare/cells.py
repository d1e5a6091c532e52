"""One cell: an ordinary run in a directory of its own, and the record that is made of it."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from adder_flax import counting, data, own_cache, settings, training
from adder_flax.compare.plan import FINAL, Cell
from adder_flax.compare.records import CURVE_DIGITS, Record
from adder_flax.data import usable_cores
from adder_flax.extras import needs
from adder_flax.training.setup import load_split

with needs("train"):
    from ml_collections import ConfigDict

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")


class StoppedError(Exception):
    """A signal stopped a cell, which goes on from its checkpoint; ``exit_code`` is 128 + signal."""

    def __init__(self, text: str, exit_code: int):
        super().__init__(text)
        self.exit_code = exit_code


def run_cell(
    cell: Cell, workdir: Path, test_split: str, load: Callable[..., data.Source]
) -> Record:
    """Trains a cell, or goes on with it, and returns its record.

    What the run prints goes to ``output.txt`` in its directory. A run that is no longer finite is a
    result. The test split is read once, after the last step of a final run.

    Raises:
      StoppedError: a signal asked to stop.
      RunError: what the user must mend.
    """
    began, diverged, scores, test = time.monotonic(), None, {}, {}
    workdir.mkdir(parents=True, exist_ok=True)
    with (
        (workdir / "output.txt").open("a", buffering=1) as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        marks = marks_of(cell.config, test_split, load)
        run = training.build_run(cell.config, load=load)
        own = training.open_workdir(workdir, cell.config)
        steps = run.num_steps
        try:
            result = training.Trainer(run, own, start_time=began).fit()
        except training.NonFiniteLossError as error:
            # What happened, without what became of the checkpoints and what to do.
            diverged = str(error).partition(". Checkpoints kept")[0].partition("; the state is")[0]
            rows = training.read_metrics(workdir)
            steps = max((int(row["step"]) for row in rows), default=0)
        else:
            if stop := result.interrupted:
                where = f"{stop.name} in {cell.id} at step {result.step} of {run.num_steps}"
                raise StoppedError(where, 128 + stop)
            scores = result.evaluation
            if cell.phase == FINAL:
                config = ConfigDict(cell.config.to_dict())
                config.data.eval_split = test_split
                tested = training.build_run(config, load=load)
                test = training.Evaluator(tested)(training.evaluation_params(result.state))
            best = f"eval/{run.task.best.name}"
            ends = [found[best] for found in (scores, test) if found]
            if broken := [end for end in ends if not math.isfinite(end)]:
                diverged, scores, test = f"{run.task.best.name} {broken[0]} at its end", {}, {}
    rows = training.read_metrics(workdir)
    return Record(
        arm=cell.arm.name,
        levels=dict(cell.arm.levels),
        phase=cell.phase,
        seed=cell.seed,
        values=dict(cell.values),
        config=json.loads(cell.config.to_json()),
        steps=steps,
        diverged=diverged,
        validation=_plain(scores),
        test=_plain(test),
        curve=_curve(rows),
        facts=facts(run),
        seconds={"step": _step_seconds(rows, run), "run": round(time.monotonic() - began, 3)},
        machine=machine(),
        versions=versions(),
        date=datetime.date.today().isoformat(),
        data=marks,
    )


def marks_of(
    config: ConfigDict, test_split: str, load: Callable[..., data.Source]
) -> dict[str, list[float]]:
    """Returns what tells the data of a cell from another set, by split, the test split included."""
    run = settings.read(settings.RunSettings, config)
    splits = dict.fromkeys((run.data.train_split, run.data.eval_split, test_split))
    with training.user_errors():
        return {split: load_split(load, run, run.data.name, split).marks() for split in splits}


_FACTS: dict[Any, dict[str, float]] = {}


def facts(run: training.Run) -> dict[str, float]:
    """Returns what all runs of a program have in common: see `Record`."""
    if run.program not in _FACTS:
        model = run.model(run.abstract_state["params"])
        forward = counting.count_operations(model, *run.task.example().inputs)
        step = training.step_operations(run)
        _FACTS[run.program] = {
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state["params"])),
            "multiplications": forward.multiplications,
            "additions": forward.additions,
            "joules": counting.energy(forward).total_arithmetic_joules,
            "step_operations": step.multiplications + step.additions,
            "step_joules": counting.energy(step).total_arithmetic_joules,
        }
    return _FACTS[run.program]


def machine() -> dict[str, Any]:
    """Returns what a cell runs on."""
    return {
        "processor": own_cache.processor_name(),
        "cores": usable_cores(),
        "device": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that compute."""
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in _LIBRARIES
    }


def _plain(scores: dict[str, float]) -> dict[str, float]:
    """Scores without their split; what is not finite is left out, as JSON does not know it."""
    return {
        name.removeprefix("eval/"): value for name, value in scores.items() if math.isfinite(value)
    }


def _curve(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Without scores that are never finite, and without evaluations of which another one is not."""
    evaluated = [row for row in rows if math.isfinite(row.get("eval/loss", math.nan))]
    every = dict.fromkeys(name for row in evaluated for name in row if name.startswith("eval/"))
    finite = lambda row, name: math.isfinite(row.get(name, math.nan))
    names = [name for name in every if any(finite(row, name) for row in evaluated)]
    kept = [row for row in evaluated if all(finite(row, name) for name in names)]
    of = lambda name: [round(row[name], CURVE_DIGITS) for row in kept]
    scores = {name.removeprefix("eval/"): of(name) for name in names}
    return {"step": [int(row["step"]) for row in kept], **scores}


def _step_seconds(rows: list[dict[str, float]], run: training.Run) -> float:
    """Returns the median seconds of a step, 0 where no speed was measured."""
    rates = [row[name] for row in rows for name in row if name.endswith("_per_second")]
    return round(run.config.batch_size / statistics.median(rates), 6) if rates else 0.0
