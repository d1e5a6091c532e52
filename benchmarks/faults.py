"""Kills training runs at random moments, resumes them, and compares how they end with a run left
alone.

    python -m benchmarks.faults                             # 30 times SIGKILL
    python -m benchmarks.faults --signal=TERM --trials=10

The run is a two-block adder transformer on the handwritten digits that writes a checkpoint after
every second step, so that most kills come while one is written. A trial is a run of its own, killed
once at a moment drawn uniformly from the time that the whole run took, and resumed. It prints the
step of the newest checkpoint at the kill, the step at which the resumed run went on, and whether
the last train state is bit for bit that of the run left alone.
"""

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adder_flax import training
from adder_flax.experiments import common

ROOT = Path(__file__).parents[1]
FIELDS = {
    "model.width": 16,
    "model.depth": 2,
    "model.num_heads": 2,
    "num_epochs": 1.0,  # 22 steps
    "ema_decay": 0.9,
    "checkpoint_every_steps": 2,
    "log_every_steps": 1,
}
EXPERIMENT = "experiments/adder_deit_tiny.py"


def make_config() -> Any:
    """Returns the configuration of the run."""
    config = common.deit("adder", "tiny")
    config.update_from_flattened_dict(FIELDS)
    return config


def start(workdir: Path, *flags: str, **options) -> subprocess.Popen:
    """Starts the run in a directory, or resumes it.

    Args:
        workdir: of the run.
        *flags: further ones of ``main.py``.
        **options: of ``subprocess.Popen``.
    """
    fields = [f"--config.{field}={value}" for field, value in FIELDS.items()]
    command = [
        sys.executable,
        "-u",
        "main.py",
        f"--config={EXPERIMENT}",
        *fields,
        f"--workdir={workdir}",
        *flags,
    ]
    return subprocess.Popen(
        command, cwd=ROOT, **{"stdout": subprocess.PIPE, "text": True} | options
    )


def finish(workdir: Path) -> tuple[str, float]:
    """Lets the run end; returns its output and the seconds from its first step to its end."""
    process, lines, began = start(workdir), [], time.perf_counter()
    for line in process.stdout:
        if line.startswith(("first step", "resuming")):
            began = time.perf_counter()
        lines.append(line)
    if process.wait() != 0:
        raise SystemExit(
            f"expected the run to end, got exit code {process.returncode}:\n{''.join(lines)}"
        )
    return "".join(lines), time.perf_counter() - began


def kill(workdir: Path, number: signal.Signals, seconds: float) -> None:
    """Starts the run and sends a signal so long after its first step."""
    process = start(workdir)
    for line in process.stdout:
        if line.startswith("first step"):
            break
    time.sleep(seconds)
    process.send_signal(number)
    process.stdout.read()
    process.wait()


def final_state(workdir: Path) -> Any:
    """Returns the newest checkpoint of a run."""
    run = training.build_run(make_config())
    return training.SavedCheckpoints(workdir / "checkpoints").restore(run.abstract_state)


def newest_checkpoint(workdir: Path) -> int:
    """Returns the step of the newest whole checkpoint, 0 where there is none."""
    return max(training.SavedCheckpoints(workdir / "checkpoints").steps, default=0)


def same_bits(a: Any, b: Any) -> bool:
    """Returns whether two trees hold the same numbers."""
    same = jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b)
    return all(jax.tree.leaves(same))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table.

    Args:
        arguments: command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--signal", default="KILL", choices=["KILL", "TERM", "INT"])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    number, draw = signal.Signals[f"SIG{options.signal}"], random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        _, seconds = finish(whole)
        expected = final_state(whole)
        print(
            f"{number.name}; the run left alone took {seconds:.2f} s from its first step on",
            flush=True,
        )
        print(
            "| trial | sent after | newest checkpoint | resumed at step | final state "
            "|\n|---|---|---|---|---|",
            flush=True,
        )
        for trial in range(1, options.trials + 1):
            workdir, after = Path(folder, str(trial)), draw.uniform(0, seconds)
            kill(workdir, number, after)
            newest = newest_checkpoint(workdir)
            output, _ = finish(workdir)
            resumed = re.search(r"(?:resuming|complete) at step (\d+)", output)
            verdict = "identical" if same_bits(final_state(workdir), expected) else "DIFFERENT"
            print(
                f"| {trial} | {after:.2f} s | {newest} | {resumed[1] if resumed else 0} | "
                f"{verdict} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
