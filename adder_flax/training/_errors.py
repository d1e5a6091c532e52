"""The errors of a run that its user can mend."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunError(Exception):
    """A problem in the configuration, data or checkpoints, told in one message: expected, got, how to fix.

    ``main.py`` prints it without a traceback and exits with ``exit_code``.

    Example:
      >>> raise RunError("expected a batch size over 0, got 0; set --config.batch_size")
      Traceback (most recent call last):
      ...
      adder_flax.training._errors.RunError: expected a batch size over 0, got 0; set --config.batch_size
    """

    exit_code = 2


class NonFiniteLossError(RunError):
    """The loss or a gradient became infinite or NaN."""

    exit_code = 3


@contextmanager
def writing(what: str, directory: str | Path) -> Iterator[None]:
    """Turns a failure to write, such as a full disk, into an error of the run.

    Example:
      >>> with writing("metrics", "runs/a"):  # doctest: +ELLIPSIS
      ...     raise OSError("[Errno 28] No space left on device")
      Traceback (most recent call last):
      ...
      adder_flax.training._errors.RunError: expected to write metrics under runs/a, got: [Errno 28] No space left on...
    """
    try:
        yield
    except (OSError, ValueError) as error:
        # TensorStore, which writes arrays for Orbax, reports the system's errors as values that it cannot use.
        if isinstance(error, ValueError) and "os_error_code" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"expected to write {what} under {directory}, got: {reason}; older checkpoints are intact, free some space "
            "and run the same command again to resume"
        ) from error
