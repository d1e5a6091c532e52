"""Where this user's compiled code is kept."""

import contextlib
import hashlib
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import platformdirs

from adder_flax.files import write_whole

_Used = TypeVar("_Used")
_DIGEST_BYTES = 32


def folder() -> Path:
    """Returns where to keep things: ``adder_flax`` in the user's cache folder; it may not exist."""
    return platformdirs.user_cache_path("adder_flax", appauthor=False)


def processor_name() -> str:
    """Returns the model name of the host's processor, for records of what was measured."""
    name = next((line for line in _facts() if line.startswith("model name")), "")
    return name.partition(":")[2].strip() or platform.processor() or platform.machine()


def processor() -> str:
    """Returns the model and the features of the host's processor, as far as the system tells.

    A home that machines share holds code for all of them, and an instruction that one does not have
    ends the process.
    """
    told = ("model name", "flags", "features", "cpu part")
    found = "\n".join(line for line in _facts() if line.lower().startswith(told))
    return found or f"{platform.machine()} {platform.processor()}"


def _facts() -> list[str]:
    with contextlib.suppress(OSError):  # not of Linux
        return Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return []


def kept(
    name: str, make: Callable[[], bytes], use: Callable[[bytes], _Used], *, key: str, owner: str
) -> _Used:
    """Returns what is made of a file of the cache, or of a new one, which is kept.

    A file is written whole or not at all, with a digest of its content and the key at its end: what
    ends early or is damaged is made anew.

    Args:
      name: of the file.
      make: gives its content, where the cache does not have it.
      use: makes of the content what is returned; raises OSError at one that it cannot use.
      key: what the content depends on.
      owner: who wants it, in the words of a message.
    """
    path = folder() / name
    with contextlib.suppress(OSError):
        sealed = path.read_bytes()
        content = sealed[:-_DIGEST_BYTES]
        if sealed[-_DIGEST_BYTES:] == _digest(content, key):
            return use(content)
    content = make()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, content + _digest(content, key))
    except OSError as error:
        logging.getLogger(__name__).warning(
            "%s: expected to keep compiled kernels in %s, got: %s; every process compiles them "
            "anew; set XDG_CACHE_HOME",
            *(owner, path.parent, error),
        )
    return use(content)


def _digest(content: bytes, key: str) -> bytes:
    return hashlib.sha256(hashlib.sha256(key.encode()).digest() + content).digest()
