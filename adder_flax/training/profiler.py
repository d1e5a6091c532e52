"""A window of steps whose timeline is recorded."""

from collections.abc import Sequence
from pathlib import Path

import jax

from adder_flax.errors import RunError


class Profiler:
    """Records the steps from ``first`` to ``last``, both included.

    To ``<directory>/plugins/profile/<time>``.

    XProf (``pip install xprof``, ``xprof --logdir=<directory>``) and https://ui.perfetto.dev open
    what it leaves.

    Args:
      window: (first, last), counted from 1 as in the log, or empty for none.
      directory: where the trace goes.

    Raises:
      RunError: the window is not two ascending numbers of steps.

    Example:
      >>> Profiler((7, 3), "runs/a/profile")
      Traceback (most recent call last):
      ...
      adder_flax.errors.RunError: expected config.profile_steps as (first, last) or (), got (7, 3)
    """

    def __init__(self, window: Sequence[int], directory: str | Path):
        if window and not (len(window) == 2 and 1 <= window[0] <= window[1]):
            raise RunError(
                f"expected config.profile_steps as (first, last) or (), got {tuple(window)}"
            )
        self._window = tuple(window) or (0, 0)
        self._directory = str(directory)
        self._recording = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exc_info) -> None:
        self._stop()

    def before_step(self, step: int) -> None:
        """Starts or ends the recording where the window asks for it.

        Args:
          step: number of steps done.
        """
        first, last = self._window
        if self._recording and step >= last:
            self._stop()
        elif first <= step + 1 <= last and not self._recording:
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self._recording = True

    def _stop(self) -> None:
        if self._recording:
            jax.profiler.stop_trace()
            self._recording = False
