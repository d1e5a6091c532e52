"""The lock of a run's directory: one trainer at a time."""

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from adder_flax.errors import RunError, first_line
from adder_flax.extras import needs
from adder_flax.files import write_whole

with needs("train"):
    import filelock

_NAME = "trainer.lock"


class HeldError(RunError):
    """Another process holds a lock."""


@contextlib.contextmanager
def lock_workdir(workdir: str | Path, name: str = _NAME) -> Iterator["Lock | None"]:
    """Makes a run's directory this process's own for as long as the context is open.

    Of several processes the first holds the lock for all of them; the others get None.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as workdir, lock_workdir(workdir):
      ...     lock_workdir(workdir).__enter__()  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      adder_flax.training.lock.HeldError: expected ... without another trainer, got process ... since ...
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
