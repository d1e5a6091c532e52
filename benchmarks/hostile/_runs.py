"""A tiny run that was stopped half way, to be damaged, and what its directory must hold
afterwards."""

import collections
import contextlib
import dataclasses
import functools
import io
import logging
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from absl import logging as absl_logging

from adder_flax import training
from benchmarks import faults
from benchmarks.hostile.case import Observed, Verdict, judge_call

_SECONDS = 240

CHECKPOINT_FILES = (
    "state/ocdbt.process_0/d/*",
    "state/d/*",
    "state/manifest.ocdbt",
    "state/ocdbt.process_0/manifest.ocdbt",
    "state/_METADATA",
    "_CHECKPOINT_METADATA",
    "state/_sharding",
    "state/array_metadatas/process_0",
    "state/commit_success.txt",
    "commit_success.txt",
)
"""All files of a checkpoint, as patterns of their names."""


class HangError(BaseException):
    """A call took too long."""


@dataclasses.dataclass(frozen=True)
class Template:
    """A run directory with checkpoints at steps 2 and 4 of 6.

    Attributes:
      workdir: never to be changed; cases work on copies.
      run: of the whole run.
      saved: states of the checkpoints by step.
      final: state of the run left alone at its end.
    """

    workdir: Path
    run: training.Run
    saved: dict[int, Any]
    final: Any


@functools.cache
def template() -> Template:
    """Makes the run; its folder stays until the process ends."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    folder = tempfile.TemporaryDirectory(prefix="hostile_runs", ignore_cleanup_errors=True)
    _FOLDERS.append(folder)
    root = Path(folder.name)
    jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
    config = faults.make_config()
    config.eval_every_steps = 2
    workdir, saved = root / "run", {}
    for steps in (2, 4, 6):
        if steps == 6:
            shutil.copytree(workdir, root / "half")
            shutil.copytree(root / "first", root / "half" / "checkpoints" / "2", dirs_exist_ok=True)
        run = dataclasses.replace(training.build_run(config), num_steps=steps)
        with quietly():
            saved[steps] = training.Trainer(run, training.open_workdir(workdir, config)).fit().state
        if steps == 2:
            shutil.copytree(workdir / "checkpoints" / "2", root / "first")
    return Template(root / "half", run, {2: saved[2], 4: saved[4]}, saved[6])


_FOLDERS: list[Any] = []


def find(folder: Path, pattern: str) -> Path:
    """Returns the first thing in a folder that fits a pattern."""
    return folder if pattern == "." else min(folder.glob(pattern))


@contextlib.contextmanager
def copy() -> Iterator[Path]:
    """Gives a copy of the template's directory for as long as the context is open."""
    with tempfile.TemporaryDirectory(prefix="hostile", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copytree(template().workdir, Path(folder) / "run"))


@contextlib.contextmanager
def quietly() -> Iterator[io.StringIO]:
    """Keeps what is printed and logged out of the terminal; gives what was logged as warnings."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setLevel(logging.WARNING)
    logger, root = absl_logging.get_absl_logger(), logging.getLogger()
    others = logger.handlers[:], root.handlers[:]
    logger.handlers[:], root.handlers[:] = [handler], [logging.NullHandler()]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield said
    finally:
        logger.handlers[:], root.handlers[:] = others


def judge(function: Callable[[], Any], is_right: Callable[[Any, str], Verdict | bool]) -> Observed:
    """Judges a call as :func:`judge_call` does, also how long it takes.

    Args:
      function: what is called.
      is_right: ``(what the function returns, what it warned of) → verdict``.
    """

    def too_long(*unused):
        raise HangError

    previous = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(_SECONDS)
    try:
        with quietly() as said:
            observed = judge_call(function, lambda value: is_right(value, said.getvalue()))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    if observed.verdict is Verdict.TRACEBACK and "HangError" in observed.seen:
        return Observed(Verdict.HANG, f"no end after {_SECONDS} s: {observed.seen}")
    if observed.verdict is Verdict.RIGHT and said.getvalue():
        return Observed(observed.verdict, said.getvalue().strip())
    return observed


def train(workdir: Path) -> Any:
    """Resumes the run and returns its last state."""
    run = template().run
    return training.Trainer(run, training.open_workdir(workdir, run.config)).fit().state


def restore(workdir: Path, which: int | str = "last") -> Any:
    """Restores a checkpoint as the modes do that only read."""
    run = template().run
    directory = training.open_workdir(workdir, run.config) / "checkpoints"
    return training.SavedCheckpoints(directory, of=training.identity(run.config)).restore(
        run.abstract_state, which
    )


@functools.cache
def best_step() -> int | None:
    """Returns the step of the template's best checkpoint."""
    return training.SavedCheckpoints(template().workdir / "checkpoints").best_step


def is_saved_state(state: Any, said: str, which: int | str = "last") -> Verdict | bool:
    """Whether a state is the one that was asked for, or an older one with a word about it."""
    step = int(state["step"])
    if step not in template().saved or not faults.same_bits(state, template().saved[step]):
        return Verdict.WRONG
    if which == "best":
        which = best_step()
    return step == which or (
        which == "last" and (step == 4 or "Checkpoint 4 cannot be read" in said)
    )


def is_final_state(state: Any, said: str) -> Verdict | bool:
    """Whether a state is that of the run left alone."""
    return faults.same_bits(state, template().final)


Contents = dict[str, collections.Counter[bytes]]


def contents(workdir: Path) -> Contents:
    """Returns what a run directory holds: files of checkpoints by their content, and lines of
    metrics."""
    files = [path for path in workdir.rglob("*") if path.is_file() and not path.is_symlink()]
    log = [path for path in files if path.name.startswith("metrics.jsonl")]
    others = [path for path in files if path not in log and path.name != "trainer.lock"]
    return {
        "files": collections.Counter(path.read_bytes() for path in others),
        "rows": collections.Counter(
            line for path in log for line in path.read_bytes().split(b"\n") if line
        ),
    }


def lost(before: Contents, workdir: Path, observed: Observed, *, trained: bool) -> str:
    """Returns what is no longer there, "" where nothing is lost.

    Args:
      before: what the directory held after it was damaged.
      workdir: what it holds now.
      observed: what came of the case.
      trained: whether a run has gone on to its end there. Then checkpoints have been replaced, but
        nothing may be gone that was said to be set aside.
    """
    after = contents(workdir)
    rows, files = before["rows"] - after["rows"], before["files"] - after["files"]
    if rows:
        return f"rows of metrics: {list(rows)[:3]}"
    if trained:
        if "set aside as" not in observed.seen:
            return ""
        if not list(workdir.glob("checkpoints/*.unreadable*")):
            return "a checkpoint that was said to be set aside"
        files -= contents(template().workdir)["files"]
    return f"files: {[content[:40] for content in files][:3]}" if files else ""
