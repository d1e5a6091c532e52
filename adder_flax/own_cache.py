"""Where this user's compiled code is kept, such that no other user can put theirs in its place.

Code that a process loads runs with all its rights. So nothing is taken from a folder or a file that
somebody else owns or may write to (root may), and nothing whose digest is not that of what was
written.
"""

import contextlib
import hashlib
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

_Used = TypeVar("_Used")
_MAX_BYTES = 2**28
_DIGEST_BYTES = 32


def folders() -> Iterator[Path]:
    """Yields where to keep things, best first.

    These are ``$XDG_CACHE_HOME/adder_flax``, and one below the system's folder for
    temporary files. Neither need be there, or be this user's own.

    Example:
      >>> [folder.name.partition("-")[0] for folder in folders()]
      ['adder_flax', 'adder_flax']
    """
    # A home is not always known; and the convention is that a relative path be ignored.
    with contextlib.suppress(RuntimeError):
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        yield (named if named.is_absolute() else Path.home() / ".cache") / "adder_flax"
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir()) / f"adder_flax-{os.geteuid()}"


def processor_name() -> str:
    """Returns the model name of the host's processor, for records of what was measured.

    Example:
      >>> processor_name() != ""
      True
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def processor() -> str:
    """Returns the model and the features of the host's processor, as far as the system tells.

    A home that machines share holds code for all of them, and an instruction that one does not have
    ends the process.

    Example:
      >>> processor() == processor() != ""
      True
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        line
        for line in lines
        if line.lower().startswith(("model name", "flags", "features", "cpu part"))
    )


def make(folder: Path, *below: str) -> Path:
    """Makes one of :func:`folders` and folders in it, whatever is not there.

    They are made with access for this user alone.

    Returns:
      The innermost.

    Raises:
      OSError: it cannot be made, or others own one of them or may write to it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for name in ("", *below):
        folder = folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        if reason := distrust(folder.stat(), f"the folder {folder}"):
            raise PermissionError(reason)
    return folder


def read(folder: Path, name: str, *, key: str) -> tuple[bytes | None, str | None]:
    """Reads what :func:`write` wrote.

    Args:
      folder: one of :func:`folders`.
      name: of the file.
      key: as it was written under.

    Returns:
      The content and None; None twice where there is no such file; or None, and why the file is not
      used.

    Example:
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = write(Path(folder), "kernels", b"code", key="of this machine")
      ...     read(Path(folder), "kernels", key="of this machine")
      (b'code', None)
    """
    # Folder and file are looked at through what was opened, since a name may lead elsewhere a
    # moment later; and what is read is what is checked. A FIFO must not make us wait for its other
    # end.
    try:
        with contextlib.ExitStack() as opened:
            inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, inside)
            if reason := distrust(os.fstat(inside), "the folder"):
                return None, reason
            file = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside
            )
            opened.callback(os.close, file)
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                return None, "it is no regular file"
            if reason := distrust(found, "it"):
                return None, reason
            if found.st_size > _MAX_BYTES:
                return None, f"it has {found.st_size} bytes"
            with open(file, "rb", closefd=False) as stream:
                sealed = stream.read(_MAX_BYTES)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, _words(error)
    content, digest = sealed[:-_DIGEST_BYTES], sealed[-_DIGEST_BYTES:]
    if digest != _digest(content, key):
        return None, "it is damaged: its digest is not that of its content"
    return content, None


def write(folder: Path, name: str, content: bytes, *, key: str) -> str | None:
    """Writes a file whole or not at all, with a digest of its content and the key at its end.

    Args:
      folder: one of :func:`folders`; made with access for this user alone if it is not there.
      name: of the file; one that is there is replaced, for everybody who opens it from this moment
        on.
      content: of any kind; what ignores bytes at the end, as loaders of libraries do, can use the
        file as it is.
      key: what the content depends on.

    Returns:
      None, or why it could not be written.
    """
    try:
        make(folder)
        file, temporary = tempfile.mkstemp(prefix=f"{name}.", dir=folder)
        try:
            with open(file, "wb") as stream:
                stream.write(content + _digest(content, key))
                stream.flush()
                os.fsync(file)
            os.replace(temporary, folder / name)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        return _words(error)
    return None


def kept(
    name: str, make: Callable[[], bytes], use: Callable[[bytes], _Used], *, key: str, owner: str
) -> _Used:
    """Returns what is made of a file of the first cache that has it whole, or of a new one.

    A new one is kept. What a cache has and cannot be used is logged in one line.

    Args:
      name: of the file.
      make: gives its content, where no cache has it.
      use: makes of the content what is returned; raises OSError at one that it cannot use.
      key: what the content depends on.
      owner: who wants it, in the words of a message.

    Raises:
      OSError: `use` cannot use what `make` gives; beside that, what `make` raises.

    Example:
      >>> from unittest import mock
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
      ...         for _ in range(2):
      ...             kept("k", lambda: print("made") or b"code", len, key="1", owner="example")
      made
      4
      4
    """
    complaints: dict[Path, str] = {}
    for folder in folders():
        content, complaint = read(folder, name, key=key)
        if content is not None:
            try:
                used = use(content)
            except OSError as error:
                complaint = str(error)
            else:
                _warn(complaints, name, owner)
                return used
        if complaint:
            complaints[folder] = complaint
    content = make()
    for folder in folders():
        complaint = write(folder, name, content, key=key)
        if complaint is None:
            break
        complaints.setdefault(folder, complaint)
    _warn(complaints, name, owner)
    return use(content)


def _warn(complaints: Mapping[Path, str], name: str, owner: str) -> None:
    if complaints:
        logger.warning(
            "%s: expected kernels in a cache that no other user can write to, got %s; compiled "
            "ones are used from elsewhere or built anew; mend or remove what is there, or set "
            "XDG_CACHE_HOME",
            owner,
            ", ".join(f"{folder / name}: {complaint}" for folder, complaint in complaints.items()),
        )


def _digest(content: bytes, key: str) -> bytes:
    return hashlib.sha256(hashlib.sha256(key.encode()).digest() + content).digest()


def distrust(found: os.stat_result, what: str) -> str | None:
    """Returns why what was found cannot be trusted, or None.

    In a sticky folder nobody can replace the files of others.

    Args:
      found: of a folder or file.
      what: it is called in the answer.
    """
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_uid not in (0, os.geteuid()):
        return f"{what} belongs to another user (uid {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        return f"others may write to {what} (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _words(error: OSError) -> str:
    return error.strerror or str(error)
