"""The errors of a run that its user can mend."""


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
