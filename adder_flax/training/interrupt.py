"""Signals that ask a run to stop: finish the step, write a checkpoint, leave."""

import signal
from types import FrameType


class InterruptWatch:
    """Notes SIGINT and SIGTERM while its context is open; a second SIGINT ends the process at once.

    Example:
      >>> with InterruptWatch() as watch:
      ...     signal.raise_signal(signal.SIGTERM)
      ...     watch.signal.name
      'SIGTERM'
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._previous = {}

    def __enter__(self) -> "InterruptWatch":
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc_info) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
