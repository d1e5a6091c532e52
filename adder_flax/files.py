"""Files read and written whole.

A pipe in their place is not waited for, and no reader meets half of one.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def open_regular(path: str | Path) -> Iterator[IO[bytes]]:
    """Opens a regular file, or a link to one, for reading.

    Raises:
      OSError: it cannot be read, or is of another kind: a pipe would keep its reader waiting, a
        device never ends.

    Example:
      >>> with open_regular("/dev/zero") as file:
      ...     file.read()
      Traceback (most recent call last):
      ...
      OSError: [Errno 22] a device, which is no regular file
    """
    _require_regular(os.stat(path))  # some devices act when they are opened
    # What is there may have changed since: a FIFO must not make us wait for its other end.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        _require_regular(os.fstat(stream.fileno()))
        yield stream


def write_whole(path: str | Path, content: bytes | bytearray) -> None:
    """Writes a file whole or not at all; one that is there stays until the new one is on the disk.

    Args:
      path: of a regular file, of a link to one, or of nothing.
      content: of the file.

    Raises:
      OSError: it cannot be written; what was there is still there.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_whole(f"{folder}/data.json", b"{}")
      ...     os.listdir(folder)
      ['data.json']
    """
    target = Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError):
        _require_regular(target.stat())
    temporary = target.with_name(f".{target.name[:50]}.{os.urandom(8).hex()}")
    try:
        with open(temporary, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append(path: str | Path, content: bytes) -> None:
    """Adds to the end of a regular file, or of a new one, and waits until that is on the disk.

    Raises:
      OSError: it cannot be written.
    """
    descriptor = os.open(
        path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    with open(descriptor, "ab") as stream:
        _require_regular(os.fstat(descriptor))
        stream.write(content)
        stream.flush()
        os.fsync(descriptor)


def _require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"{kind}, which is no regular file")
