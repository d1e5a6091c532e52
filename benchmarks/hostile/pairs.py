"""Two processes on one run at once: two trainers, and a trainer beside the modes that only read."""

import functools
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adder_flax import training
from benchmarks import faults
from benchmarks.hostile.case import ROOT, Case, Fault, Group, Observed, Verdict, judge_process

_KEPT = "all: the run ends with the bits and rows of one left alone"
_TRAINERS = Fault("two trainers started in one directory", _KEPT)
_EVALUATION = Fault("a run evaluated every 2 s while it trains", _KEPT)
_STUDIES = Fault("a run analyzed and exported while it trains", _KEPT)
_PAUSE = 2.0  # seconds between two looks at a run

_PROGRAM = """
import sys
from adder_flax import cli, terminal, training
from benchmarks.hostile import pairs

terminal.prepare()
with terminal.messages():
    config, workdir, mode = pairs.make_config(), sys.argv[1], sys.argv[2]
    if mode == "train":
        training.Trainer(training.build_run(config), training.open_workdir(workdir, config)).fit()
    else:
        getattr(cli, mode)(config, workdir, "last", *sys.argv[3:])
"""
_LOOKS = {
    "evaluate": [["evaluate"]],
    "study": [["analyze"], ["export", "adder_flax"], ["export", "timm"]],
}


def make_config() -> Any:
    """Returns the run of ``benchmarks.faults``, six times as long: 132 steps and 66 checkpoints."""
    config = faults.make_config()
    config.num_epochs = 6.0
    return config


def _run(workdir: Path, *arguments: str) -> Observed:
    return judge_process(
        ["-c", _PROGRAM, workdir, *arguments], timeout=600, is_right=lambda output: True
    )


@functools.cache
def _alone() -> tuple[Any, list[dict[str, float]]]:
    """Returns the last state and the rows of a run left alone."""
    with tempfile.TemporaryDirectory(prefix="hostile") as folder:
        workdir = Path(folder, "run")
        if (end := _run(workdir, "train")).verdict is not Verdict.RIGHT:
            raise SystemExit(f"expected a run left alone to end, got {end}")
        return _final_state(workdir), _rows(workdir)


def _final_state(workdir: Path) -> Any:
    run = training.build_run(make_config())
    return training.SavedCheckpoints(workdir / "checkpoints").restore(run.abstract_state)


def _rows(workdir: Path) -> list[dict[str, float]]:
    """Returns the rows of a run without how fast it was."""
    return [
        {name: value for name, value in row.items() if name != "train/images_per_second"}
        for row in training.read_metrics(workdir)
    ]


def _compare(workdir: Path) -> Observed | None:
    """Returns what is wrong with a run that should have ended like one left alone."""
    state, rows = _alone()
    if _rows(workdir) != rows:
        return Observed(
            Verdict.LOST,
            f"{len(rows)} rows of metrics in a run left alone, here {len(_rows(workdir))}",
        )
    if not faults.same_bits(_final_state(workdir), state):
        return Observed(Verdict.WRONG, "other bits than a run left alone")
    return None


def _trainers(delay: float) -> Observed:
    with tempfile.TemporaryDirectory(prefix="hostile") as folder:
        workdir, ends = Path(folder, "run"), {}
        threads = [
            threading.Thread(
                target=lambda number=number: ends.update({number: _run(workdir, "train")})
            )
            for number in range(2)
        ]
        threads[0].start()
        time.sleep(delay)
        threads[1].start()
        for thread in threads:
            thread.join()
        if unsound := [end for end in ends.values() if not end.verdict.sound]:
            return unsound[0]
        refused = [end for end in ends.values() if end.verdict is Verdict.MESSAGE]
        if len(refused) == 2:
            return Observed(Verdict.WRONG, f"neither of two trainers ran: {refused[0].seen}")
        return _compare(workdir) or Observed(Verdict.RIGHT, refused[0].seen if refused else "")


def _looked_at(looks: str, delay: float) -> Observed:
    with tempfile.TemporaryDirectory(prefix="hostile") as folder:
        workdir = Path(folder, "run")
        trainer = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, workdir, "train"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        seen, number = [], 0
        time.sleep(delay)
        while trainer.poll() is None:
            seen.append(_run(workdir, *_LOOKS[looks][number % len(_LOOKS[looks])]))
            number += 1
            time.sleep(_PAUSE)
        said = trainer.stderr.read().decode(errors="replace")
        if trainer.returncode != 0:
            return Observed(
                Verdict.LOST, f"the trainer ended with {trainer.returncode}: {said[-500:]}"
            )
        if unsound := [look for look in seen if not look.verdict.sound]:
            return unsound[0]
        right = sum(look.verdict is Verdict.RIGHT for look in seen)
        return _compare(workdir) or Observed(
            Verdict.RIGHT, f"looked at {len(seen)} times, {right} with a checkpoint"
        )


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields rounds of the three kinds in turn; the second process begins at a random moment."""
    draw = random.Random(seed)
    kinds: list[tuple[Fault, Callable[[float], Observed]]] = [
        (_TRAINERS, _trainers),
        (_EVALUATION, functools.partial(_looked_at, "evaluate")),
        (_STUDIES, functools.partial(_looked_at, "study")),
    ]
    for number in range(count):
        fault, run = kinds[number % len(kinds)]
        delay = 0.0 if number % (2 * len(kinds)) < len(kinds) else draw.uniform(0, 10)
        yield Case(
            fault,
            f"round {number // len(kinds)}, the second begins {delay:.1f} s later",
            functools.partial(run, delay),
        )


GROUP = Group("pairs", 60, cases)
