"""The directory of a run: its configuration, the refusal to mix two runs in it, its lock."""

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from adder_flax.errors import RunError, first_line, writing
from adder_flax.experiment import as_config
from adder_flax.extras import needs
from adder_flax.files import write_whole
from adder_flax.settings import RunSettings, completed
from adder_flax.text import printable
from adder_flax.training.checkpoints import SavedCheckpoints
from adder_flax.training.fingerprint import differences, fingerprint

with needs("train"):
    import filelock
    from ml_collections import ConfigDict

_LOCK = "trainer.lock"
_SHOWN_DIFFERENCES = 20


def open_workdir(workdir: str | Path, config: ConfigDict) -> Path:
    """Returns the directory of a run as an absolute path; writes nothing.

    A run that has not saved a checkpoint does not bind the next one: a mistake can be mended in the
    same directory.
    """
    workdir = Path(workdir).absolute()
    stored = _read_config(workdir)
    if stored is None or not SavedCheckpoints(workdir / "checkpoints").steps:
        return workdir
    if found := differences(fingerprint(ConfigDict(stored)), fingerprint(config)):
        more = len(found) - _SHOWN_DIFFERENCES
        lines = found[:_SHOWN_DIFFERENCES] + [f"and {more} more"] * (more > 0)
        raise RunError(
            f"expected the configuration of the run in {workdir}, got another:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nchoose another --workdir for a new run, or the same values to go on with that one"
        )
    return workdir


def write_config(workdir: str | Path, config: ConfigDict) -> None:
    """Writes ``config.json``, once the run is known to be good, unless it is there."""
    workdir = open_workdir(workdir, config)
    given = completed(RunSettings, json.loads(config.to_json()))
    stored = _read_config(workdir)
    if SavedCheckpoints(workdir / "checkpoints").steps:
        if stored is not None:
            return  # it differs at most in how the run is executed; the first start stays on record
        logging.warning(
            "No config.json beside the checkpoints in %s: taking them to be of this run", workdir
        )
    _write(workdir, "config.json", given)


def read_config(workdir: str | Path) -> ConfigDict:
    """Returns the configuration of a run; what was added since is at its default."""
    stored = _read_config(Path(workdir))
    if stored is None:
        raise RunError(
            f"expected the directory of a run, with its config.json, got {workdir}; train there "
            "first"
        )
    return as_config(completed(RunSettings, stored))


def _read_config(workdir: Path) -> dict[str, Any] | None:
    path = workdir / "config.json"
    if (text := read_file(path)) is None:
        return None
    try:
        stored = json.loads(text)
        if not isinstance(stored, dict):
            raise ValueError(f"a JSON {type(stored).__name__}")
        as_config(stored)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else printable(error)
        reason = f"no JSON ({reason})" if isinstance(error, json.JSONDecodeError) else reason
        raise RunError(
            f"expected the configuration of a run in {path}, got: {reason}; put it back from a "
            "copy, or move it away: the run is then taken to be of the configuration it is started "
            "with"
        ) from error
    return stored


def read_file(path: Path) -> bytes | None:
    """Returns what a file holds, or None where there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(
            f"expected to read {path}, got: {error.strerror}; make it readable, or move it away"
        ) from error


def write_data(workdir: str | Path, records: Mapping[str, Sequence[float]]) -> None:
    """Writes ``data.json``: what tells each split from another, `Source.marks`, for a later start
    to compare with.
    """
    _write(workdir, "data.json", dict(records))


def changed_data(
    workdir: str | Path, records: Callable[[], Mapping[str, Sequence[float]]]
) -> str | None:
    """Returns in words what became of the data set since :func:`write_data`, if anything.

    What it is now is asked for where there is something to compare it with.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as workdir:
      ...     write_data(workdir, {"train": [60], "val": [20, 0.5]})
      ...     changed_data(workdir, lambda: {"train": [50], "val": [20, 0.5]})
      'the data set has changed since this run was last started: train 60 records then, 50 now'
    """
    before = _read_facts(workdir, "data.json")
    changes = other_records(before, records()) if before else []
    since = "the data set has changed since this run was last started"
    return f"{since}: {', '.join(changes)}" if changes else None


def other_records(before: Mapping[str, Any], records: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns in words in which splits there are other records than before.

    >>> other_records({"train": [60, 7.0], "val": 20}, {"train": [60, 9.0], "val": [20, 1.0]})
    ['train other records']
    """
    found = []
    for split, now in records.items():
        then = before.get(split, now)
        then = then if isinstance(then, list) else [then]  # a number by older versions
        if not (then and all(isinstance(mark, int | float) for mark in then)):
            continue  # damaged, and no more than a help
        if then[0] != now[0]:
            found.append(f"{split} {then[0]:g} records then, {now[0]:g} now")
        elif len(then) == len(now) and not np.allclose(then, now, 0, _SAME, equal_nan=True):
            found.append(f"{split} other records")
    return found


_SAME = 1e-3  # a quarter of a grey level: decoders of another version round otherwise

# By version of JAX and by environment these differ, and with them the numbers of a run.
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)


def write_jax_settings(workdir: str | Path) -> None:
    """Writes ``jax.json``: what of JAX decides a run's random numbers and its precision."""
    _write(workdir, "jax.json", _jax_settings())


def check_jax_settings(workdir: str | Path) -> None:
    """Refuses to go on with a run under which JAX would draw or round otherwise."""
    before, now = _read_facts(workdir, "jax.json"), _jax_settings()
    if others := [name for name in now if before.get(name, now[name]) != now[name]]:
        lines = [f"  {name}: {before[name]} there, {now[name]} now" for name in others]
        variables = " ".join(f"{name.upper()}={before[name]}" for name in others if before[name])
        raise RunError(
            f"expected the settings of JAX that the run in {workdir} began with, got others, by "
            "which it would end elsewhere:\n"
            + "\n".join(lines)
            + f"\nset them as they were{f' ({variables})' * bool(variables)}, or choose another "
            "--workdir for a new run"
        )


def _jax_settings() -> dict[str, Any]:
    return {name: jax.config.values[name] for name in _JAX_SETTINGS}


def _write(workdir: str | Path, name: str, facts: Mapping[str, Any]) -> None:
    if jax.process_index() == 0:
        with writing(name, workdir):
            Path(workdir).mkdir(parents=True, exist_ok=True)
            write_whole(Path(workdir) / name, (json.dumps(facts, indent=2) + "\n").encode())


def _read_facts(workdir: str | Path, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads((Path(workdir) / name).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


class HeldError(RunError):
    """Another process holds a lock."""


@contextlib.contextmanager
def lock_workdir(workdir: str | Path, name: str = _LOCK) -> Iterator["Lock | None"]:
    """Makes a run's directory this process's own for as long as the context is open.

    Of several processes the first holds the lock for all of them; the others get None.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as workdir, lock_workdir(workdir):
      ...     lock_workdir(workdir).__enter__()  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      adder_flax.training.workdir.HeldError: expected ... without another trainer, got process ... since ...
    """  # noqa: E501 - a message is one line
    path, lock, refused = Path(workdir).absolute() / name, None, None
    if jax.process_index() == 0:
        try:
            lock = Lock(path)
        except RunError as error:
            refused = error
    several = jax.process_count() > 1
    if several and multihost_utils.broadcast_one_to_all(np.int32(refused is not None)):
        refused = refused or RunError(
            f"expected process 0 to lock {path.parent}, got a refusal; see its message"
        )
    if refused is not None:
        raise refused
    with contextlib.ExitStack() as stack:
        if lock is not None:
            stack.callback(lock.release)
        yield lock


def is_held(path: Path) -> bool:
    """Whether a process says that it holds the lock; one that was killed still does."""
    return _owner_file(path).exists()


class Lock:
    """A lock of this process, beside a file that names it; the system lets go when it ends."""

    def __init__(self, path: Path):
        self._path, self._lock = path, filelock.FileLock(path, timeout=0)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._found = os.stat(path)
            since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
            write_whole(_owner_file(path), json.dumps(owner).encode())
        except filelock.Timeout as error:
            raise HeldError(
                f"expected {path.parent} without another trainer, got {_owner(path)}; wait for its "
                "end, or choose another --workdir"
            ) from error
        except OSError as error:
            self._lock.release()
            raise RunError(
                f"expected a directory to write to, got {path.parent}: {first_line(error)}; make "
                "it writable, or choose another --workdir"
            ) from error

    def check(self) -> None:
        """Refuses to save where somebody removed the lock or moved the directory: he may train."""
        try:
            same = os.path.samestat(os.stat(self._path), self._found)
        except OSError:
            same = False
        if not same:
            raise RunError(
                f"expected {self._path} to stay where it is while a run trains, got none or "
                "another one there; put the directory back, see that nobody else trains in it, and "
                "run the same command again to resume"
            )

    def release(self) -> None:
        """Lets others have the directory."""
        with contextlib.suppress(RunError):
            self.check()
            _owner_file(self._path).unlink(missing_ok=True)
        self._lock.release()


def _owner_file(path: Path) -> Path:
    return path.with_suffix(".owner")


def _owner(path: Path) -> str:
    try:
        owner = json.loads(_owner_file(path).read_text())
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "one that just begins"
