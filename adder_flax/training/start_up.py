"""Where the time from the start of a process to its first step goes."""

import time

import jax

_COMPILATION = "/jax/core/compile/backend_compile_duration"


class StartUp:
    """Times set-up, parameters, kernels and first step; to be made when the set-up is done.

    Args:
      start_time: ``time.monotonic()`` when the process began.

    Example:
      >>> start_up = StartUp(time.monotonic())
      >>> start_up.parameters_ready()
      >>> start_up.kernels_ready()
      >>> print(start_up.report())  # doctest: +ELLIPSIS
      first step done ... after the start: ... parameters, ... kernels, ... compiling, ... tracing and computing
    """  # noqa: E501 - a message is one line

    def __init__(self, start_time: float):
        self._start, self._set_up = start_time, time.monotonic()
        self._initialized = self._ready = self._set_up
        self._compiling = 0.0

    def parameters_ready(self) -> None:
        """Marks the end of the initialisation or restoration."""
        self._initialized = self._ready = time.monotonic()

    def kernels_ready(self) -> None:
        """Marks the end of the wait for kernels that are compiled on this machine."""
        self._ready = time.monotonic()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def report(self) -> str:
        """Returns one line in seconds; to be called when the first step is done, once."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
        now = time.monotonic()
        return (
            f"first step done {now - self._start:.1f} s after the start: "
            f"{self._set_up - self._start:.1f} set-up, {self._initialized - self._set_up:.1f} "
            f"parameters, {self._ready - self._initialized:.1f} kernels, {self._compiling:.1f} "
            f"compiling, {now - self._ready - self._compiling:.1f} tracing and computing"
        )

    def _listen(self, event: str, duration_secs: float, **unused) -> None:
        if event == _COMPILATION:
            self._compiling += duration_secs
