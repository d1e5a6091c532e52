"""What a person can mend is a :class:`RunError`; what else means the same is turned into one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunError(Exception):
    """A problem that a person can mend, told in one message: expected, got, how to fix.

    ``main.py`` prints it without a traceback and exits with ``exit_code``.
    """

    exit_code = 2


class NonFiniteLossError(RunError):
    """The loss or a gradient became infinite or NaN."""

    exit_code = 3


@contextmanager
def user_errors(
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, ImportError),
) -> Iterator[None]:
    """Turns the library's complaints about its arguments into errors of the run.

    Example:
      >>> with user_errors():
      ...     raise ValueError("expected width divisible by 3 heads, got 64")
      Traceback (most recent call last):
      ...
      adder_flax.errors.RunError: expected width divisible by 3 heads, got 64
    """
    try:
        yield
    except RunError:
        raise
    except kinds as error:
        raise RunError(str(error)) from error


@contextmanager
def writing(what: str, directory: str | Path) -> Iterator[None]:
    """Turns a failure to write, such as a full disk, into an error of the run."""
    try:
        yield
    # TensorStore reports the system's errors, and Orbax what is gone, as values they cannot use.
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise RunError(
            f"expected to write {what} under {directory}, got: {reason}; {_fix(reason, directory)}"
        ) from error


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, or its kind where it says nothing.

    Example:
      >>> first_line(FileNotFoundError(2, "No such file or directory", "runs/a/config.json"))
      'No such file or directory: runs/a/config.json'
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename is not None else "")
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def _fix(reason: str, directory: str | Path) -> str:
    if not Path(directory).exists():
        return (
            "the directory is gone: put it back and run the same command again to resume, or begin "
            "anew"
        )
    fix = "free some space" if "No space left" in reason or "quota" in reason else "mend that"
    return f"what was written before is whole, {fix} and run the same command again to resume"
