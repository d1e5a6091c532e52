"""A tiny run to be damaged, killed and resumed, and what its directory must hold afterwards."""

import collections
import contextlib
import dataclasses
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from adder_flax import training
from adder_flax.experiments import common
from tests.processes import ROOT

FIELDS = {
    "model.width": 16,
    "model.depth": 2,
    "model.num_heads": 2,
    "num_epochs": 1.0,  # 22 steps
    "ema_decay": 0.9,
    "checkpoint_every_steps": 2,
    "eval_every_steps": 2,
    "log_every_steps": 1,
}


def make_config() -> Any:
    """Returns the configuration of the run."""
    config = common.deit("adder", "tiny")
    config.update_from_flattened_dict(FIELDS)
    return config


class Template(NamedTuple):
    """A run directory with checkpoints at steps 2 and 4 of 6, of which cases take copies; the run,
    and its states by step."""

    workdir: Path
    run: training.Run
    states: dict[int, Any]


@functools.cache
def template() -> Template:
    """Makes the run, once a process; its folder stays as long as that."""
    _FOLDERS.append(folder := tempfile.TemporaryDirectory(prefix="properties"))
    workdir, half, states = Path(folder.name, "run"), Path(folder.name, "half"), {}
    whole = training.build_run(make_config())
    for steps in (2, 4, 6):
        run = dataclasses.replace(whole, num_steps=steps)
        states[steps] = training.Trainer(run, workdir).fit().state
        if steps < 6:  # a later one takes the place of an earlier one
            shutil.copytree(workdir, half, dirs_exist_ok=True)
    return Template(half, run, states)


_FOLDERS: list[Any] = []


@contextlib.contextmanager
def copy() -> Iterator[Path]:
    """Gives a copy of the template's directory for as long as the context is open."""
    with tempfile.TemporaryDirectory(prefix="properties", ignore_cleanup_errors=True) as folder:
        yield Path(shutil.copytree(template().workdir, Path(folder, "run")))


def train(workdir: Path) -> Any:
    """Resumes the run and returns its last state."""
    run = template().run
    return training.Trainer(run, training.open_workdir(workdir, run.config)).fit().state


def restore(workdir: Path, which: int | str = "last") -> Any:
    """Restores a checkpoint as the modes do that only read."""
    run = template().run
    directory = training.open_workdir(workdir, run.config) / "checkpoints"
    saved = training.SavedCheckpoints(directory, of=training.fingerprint(run.config))
    return saved.restore(run.abstract_state, which)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees hold the same numbers."""
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def contents(workdir: Path) -> dict[str, collections.Counter[bytes]]:
    """What must not get lost: files of checkpoints by their content, and lines of metrics."""
    read = lambda pattern: [p.read_bytes() for p in workdir.glob(pattern) if p.is_file()]
    files = collections.Counter(read("checkpoints/**/*"))
    rows = collections.Counter(b"\n".join(read("metrics.jsonl*")).split(b"\n"))
    del rows[b""]
    return {"files": files, "rows": rows}


def start(workdir: Path, *flags: str, **options: Any) -> subprocess.Popen:
    """Starts the run in a process of its own, or resumes it there."""
    fields = [f"--config.{field}={value}" for field, value in FIELDS.items()]
    experiment = "--config=experiments/adder_deit_tiny.py"
    command = [sys.executable, "-u", "main.py", experiment, *fields, f"--workdir={workdir}", *flags]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes | options)


def finish(workdir: Path) -> Any:
    """Lets the run end in a process of its own and returns its last state."""
    process = start(workdir)
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, output + errors
    abstract = training.build_run(make_config()).abstract_state
    return training.SavedCheckpoints(workdir / "checkpoints").restore(abstract)
