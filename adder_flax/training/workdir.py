"""The directory of a run: what makes the run this one, the refusal of another one, its lock."""

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
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils

from adder_flax.errors import RunError, first_line, writing
from adder_flax.experiment import as_config
from adder_flax.extras import needs
from adder_flax.files import write_whole
from adder_flax.settings import RunSettings, completed, unread
from adder_flax.text import printable

with needs("train"):
    import filelock
    from ml_collections import ConfigDict

_SHOWN_DIFFERENCES = 20

OPERATIONAL_FIELDS = (
    "mesh",
    "log_every_steps",
    "checkpoint_every_steps",
    "profile_steps",
    "topology",
    "data.data_dir",
)
"""How a run is executed, not what it computes."""

# May change between two starts of one run: what it had computed before it met something broken is
# the same. A record of a comparison is of a whole run, which with another of these ends elsewhere.
_CHANGEABLE_FIELDS = (*OPERATIONAL_FIELDS, "data.on_unreadable", "non_finite")


def flatten_config(config: Any) -> dict[str, Any]:
    """Returns ``{"model.width": 192, …}``, with lists for tuples as JSON has them."""
    flat = flatten_dict(config.to_dict() if hasattr(config, "to_dict") else config, sep=".")
    return {name: list(x) if isinstance(x, tuple) else x for name, x in flat.items()}


def with_defaults(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flattened fields with those that a later version has added, at their defaults."""
    return flatten_config(completed(RunSettings, unflatten_dict(flat, sep=".")))


def fingerprint(config: Any) -> dict[str, Any]:
    """Returns the fields, flattened, that make a run this one: all that no later start may change.

    Example:
      >>> of = fingerprint(ConfigDict({"seed": 3, "mesh": {"data": 8}, "model": {"mean": (0.5,)}}))
      >>> of["model.mean"], of["seed"], of["optimizer.name"], "mesh.data" in of
      ([0.5], 3, 'adamw', False)
    """
    flat = flatten_config(completed(RunSettings, json.loads(config.to_json())))
    return {name: flat[name] for name in sorted(flat) if not name.startswith(_CHANGEABLE_FIELDS)}


def computing(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those flattened fields that say what is computed, and are read by the run at all.

    Example:
      >>> computing({"optimizer.name": "sgd", "optimizer.kfac.damping": 3.0, "mesh.data": 2})
      {'optimizer.name': 'sgd'}
    """
    not_read = (f"{path}." for path in unread(RunSettings, unflatten_dict(flat, sep=".")))
    idle = (*OPERATIONAL_FIELDS, *not_read)
    return {path: value for path, value in flat.items() if not path.startswith(idle)}


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns in words which fields of two runs differ; what neither reads does not count, nor what
    a later start may change.

    Example:
      >>> differences({"seed": 0, "batch_size": 32}, {"seed": 1, "batch_size": 32})
      ['seed: 0 there, 1 now']
    """
    there, now = computing(with_defaults(there)), computing(with_defaults(now))
    shown = lambda fields, name: printable(repr(fields[name]), 60) if name in fields else "absent"
    return [
        f"{printable(name, 60)}: {shown(there, name)} there, {shown(now, name)} now"
        for name in sorted(there.keys() | now.keys())
        if there.get(name) != now.get(name) and not name.startswith(_CHANGEABLE_FIELDS)
    ]


def saved_steps(checkpoints: Path) -> list[int]:
    """Returns the steps of which there are checkpoints in a directory, in order."""
    try:
        names = [path.name for path in checkpoints.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))


def open_workdir(workdir: str | Path, config: ConfigDict) -> Path:
    """Returns the directory of a run as an absolute path; writes nothing.

    A run that has not saved a checkpoint does not bind the next one: a mistake can be mended in the
    same directory.
    """
    workdir = Path(workdir).absolute()
    stored = _read_config(workdir)
    if stored is None or not saved_steps(workdir / "checkpoints"):
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
    if saved_steps(workdir / "checkpoints"):
        if _read_config(workdir) is not None:
            return  # it differs at most in how the run is executed; the first start stays on record
        logging.warning(
            "No config.json beside the checkpoints in %s: taking them to be of this run", workdir
        )
    _write(workdir, "config.json", completed(RunSettings, json.loads(config.to_json())))


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
    """Writes ``data.json``: what tells each split from another, `Source.marks`."""
    _write(workdir, "data.json", records)


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

    >>> other_records({"train": [60, 7.0], "val": [20]}, {"train": [60, 9.0], "val": [20, 1.0]})
    ['train other records']
    """
    found = []
    for split, now in records.items():
        then = before.get(split, now)
        try:
            same = len(then) != len(now) or np.allclose(then, now, 0, _SAME, equal_nan=True)
            number = f"{then[0]:g}"
        except (TypeError, ValueError, LookupError):
            continue  # damaged, and no more than a help
        if then[0] != now[0]:
            found.append(f"{split} {number} records then, {now[0]:g} now")
        elif not same:
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
def lock_workdir(workdir: str | Path, name: str = "trainer.lock") -> Iterator["Lock | None"]:
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
    try:
        yield lock
    finally:
        if lock is not None:
            lock.release()


def is_held(path: Path) -> bool:
    """Whether a process says that it holds the lock; one that was killed still does."""
    return path.with_suffix(".owner").exists()


class Lock:
    """A lock of this process, beside a file that names it; the system lets go when it ends."""

    def __init__(self, path: Path):
        self._path, self._lock = path, filelock.FileLock(path, timeout=0)
        self._owner = path.with_suffix(".owner")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._found = os.stat(path)
            since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
            write_whole(self._owner, json.dumps(owner).encode())
        except filelock.Timeout as error:
            raise HeldError(
                f"expected {path.parent} without another trainer, got {self._other()}; wait for "
                "its end, or choose another --workdir"
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
            self._owner.unlink(missing_ok=True)
        self._lock.release()

    def _other(self) -> str:
        try:
            owner = json.loads(self._owner.read_text())
            return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
        except (OSError, ValueError, TypeError, KeyError):
            return "one that just begins"
