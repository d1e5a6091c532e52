"""What the environment of a process says, checked before a library takes it amiss."""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

from adder_flax.errors import RunError, first_line
from adder_flax.extras import MissingExtraError

_LEAST_BYTES = 3 * 2**29  # 1.5 GiB: the smallest runs need a little less
_START_XLA = "import jaxlib.xla_client as client; client.make_cpu_client()"


class XlaTrial:
    """Starts XLA in another process where ``XLA_FLAGS`` is set.

    XLA ends a process whose flags it does not understand.

    It runs beside the imports of this one.
    """

    def __init__(self):
        self._process = None
        if os.environ.get("XLA_FLAGS", "").strip():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START_XLA],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )

    def check(self) -> None:
        """Waits for the outcome.

        Raises:
          RunError: XLA does not start with these flags.
        """
        if self._process is None:
            return
        reason = self._process.communicate()[1].decode(errors="replace").strip()
        if self._process.returncode:
            lines = [
                line.partition("] ")[2]
                for line in reason.splitlines()
                if line[:1] in "EF" and "] " in line
            ]
            raise RunError(
                f"expected XLA_FLAGS that XLA understands, got {os.environ['XLA_FLAGS']!r}: "
                f"{lines[0] if lines else reason[-200:]}; correct or unset XLA_FLAGS"
            )


def check_system() -> None:
    """Checks what XLA takes for granted.

    Raises:
      RunError: Linux without /proc, where XLA does not find the processors and fails at the first
        step; or a limit of memory that the libraries alone exceed: they end the process where they
        get none.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_BYTES:
        raise RunError(
            f"expected a limit of at least {_LEAST_BYTES >> 20} MiB for the addresses of a "
            f"process, got {limit >> 20}; raise it (ulimit -v)"
        )
    if sys.platform == "linux" and not os.path.exists("/proc/self/stat"):
        raise RunError("expected the system's /proc, got none; mount it (mount -t proc proc /proc)")


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Turns whatever keeps a library from being imported into an error of the run.

    Example:
      >>> with importing():  # doctest: +ELLIPSIS
      ...     import no_such_library
      Traceback (most recent call last):
      ...
      adder_flax.errors.RunError: expected libraries that can be imported, got ModuleNotFoundError: No module named ...
    """  # noqa: E501 - a message is one line
    try:
        yield
    except RunError:
        raise
    except MissingExtraError as error:
        raise RunError(str(error)) from error
    except Exception as error:
        raise RunError(
            f"expected libraries that can be imported, got {type(error).__name__}: "
            f"{first_line(error)}; install them again, and check variables as JAX_*, XLA_* and "
            "OMP_* and limits of memory (ulimit)"
        ) from error
