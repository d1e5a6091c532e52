"""The lock of a run's directory: one trainer at a time."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from adder_flax.errors import RunError, first_line
from adder_flax.text import printable

_NAME = "trainer.lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class HeldError(RunError):
    """Another process holds a lock."""


@contextlib.contextmanager
def lock_workdir(workdir: str | Path, name: str = _NAME) -> Iterator["Lock | None"]:
    """Makes a run's directory this process's own for as long as the context is open.

    The file, ``trainer.lock`` unless named, names its owner and is locked in the kernel, which lets
    go of it when the process ends in whatever way. What a killed one leaves is therefore known to
    be stale on the same machine. That a process on another machine has ended cannot be known here:
    the message says which file to remove.

    Of several processes the first holds the lock for all of them.

    Returns:
      The lock, None in all processes but the first.

    Raises:
      HeldError: another process holds it.
      RunError: the directory cannot be written to.

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
    if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(
        np.int32(refused is not None)
    ):
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


class Lock:
    """A lock that this process holds.

    Args:
      path: of its file.

    Raises:
      RunError: another trainer holds it, or the directory cannot be written to.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = _acquire(path)
        self._directory = os.stat(path.parent)

    def check(self) -> None:
        """Makes sure that the directory is still this process's own.

        To be called before something is saved there.

        A file that was removed is put back, where nobody else has taken the directory meanwhile.

        Raises:
          RunError: somebody has, or it is no longer there.
        """
        try:
            moved = not os.path.samestat(os.stat(self._path.parent), self._directory)
        except OSError:
            moved = True
        if moved:
            raise RunError(
                f"expected the directory {self._path.parent} to stay where it is while a run "
                "trains, got none or another one there; put it back and run the same command again "
                "to resume, or begin anew"
            )
        if _is_at(self._file, self._path):
            return
        file = _acquire(self._path)
        os.close(self._file)
        self._file = file
        logging.warning("Somebody removed %s while this run trained; it is put back", self._path)

    def release(self) -> None:
        """Removes the file, if it is still there."""
        with contextlib.suppress(OSError):  # someone removed the directory
            if _is_at(self._file, self._path):
                self._path.unlink()
        os.close(self._file)


def _acquire(path: Path) -> int:
    """Returns the descriptor of the locked file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644
            )
            try:
                _claim(descriptor, path)
            except BaseException:
                os.close(descriptor)
                raise
            if _is_at(descriptor, path):
                return descriptor
            os.close(descriptor)  # its owner has just ended and removed it
    except OSError as error:
        raise RunError(
            f"expected a directory to write to, got {path.parent}: {first_line(error)}; make it "
            "writable, or choose another --workdir"
        ) from error


def _claim(descriptor: int, path: Path) -> None:
    """Locks an open file and writes this process into it, or raises a message about its owner."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise RunError(f"expected {path} to be a file, got something else; remove it")
    exclusive = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise _held(path, _read(descriptor)) from error
        exclusive = False
    owner = _read(descriptor)
    if owner is not None and not _is_stale(owner, exclusive):
        raise _held(path, owner)
    text = json.dumps(_this_process()).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text, 0)
    os.fsync(descriptor)
    if not exclusive:
        time.sleep(0.5)  # the last of several that began at once has written over the others
        if os.pread(descriptor, 4096, 0) != text:
            raise _held(path, _read(descriptor))


def _held(path: Path, owner: dict[str, Any] | None) -> HeldError:
    if owner is None:
        return HeldError(
            f"expected {path.parent} without another trainer, got one that just begins; wait for "
            "its end"
        )
    return HeldError(
        f"expected {path.parent} without another trainer, got process {owner['pid']} on "
        f"{owner['host']} since {owner['since']}; wait for its end, choose another --workdir, or, "
        f"if that process is gone, remove {path}"
    )


def _read(descriptor: int) -> dict[str, Any] | None:
    """Returns the owner in a lock file, or None where there is none that can be understood."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        pid, host, since = int(owner["pid"]), str(owner["host"]), str(owner["since"])
        return {**owner, "pid": pid, "host": printable(host, 100), "since": printable(since, 100)}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_stale(owner: dict[str, Any], exclusive: bool) -> bool:
    """Whether an owner's process has ended, as far as that can be known.

    Args:
      owner: what the lock file says.
      exclusive: whether the kernel gave us the lock: then no process of this machine holds it.
    """
    here = _this_process()
    if owner.get("boot") != here["boot"]:
        return owner["host"] == here["host"]  # this machine has started again since
    return exclusive or _started(owner["pid"]) != owner.get("started")


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "since": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
    }


def _boot() -> str:
    """Returns what names this start of this machine, whatever container asks."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _started(pid: int) -> int | None:
    """Returns when a process began, in the kernel's clock ticks.

    A number is given again, but not at the same time.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
