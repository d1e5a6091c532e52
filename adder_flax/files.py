"""Files written whole: no reader meets half of one."""

import os
from pathlib import Path


def write_whole(path: str | Path, content: bytes | bytearray) -> None:
    """Writes a file whole or not at all; one that is there stays until the new one is on the disk.

    Where the path is a link, the file that it points to is replaced.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_whole(f"{folder}/data.json", b"{}")
      ...     os.listdir(folder)
      ['data.json']
    """
    target = Path(os.path.realpath(path))
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
    """Adds to the end of a file, or of a new one, and waits until that is on the disk."""
    with open(path, "ab") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
