"""Signals that ask a run to stop: finish the step, write a checkpoint, leave.

Before there is anything to save, and the second time, at once.

A thread of its own ends the process, so that neither a compilation nor an import holds it up.
"""

import atexit
import contextlib
import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What people at a terminal, schedulers and closed connections send."""


class InterruptWatch:
    """Notes the first of :data:`SIGNALS` while its context is open.

    A second SIGINT is a KeyboardInterrupt.

    Where :func:`end_at_signals` was called, a second signal of any kind ends the process at once,
    and so does the first one outside of such a context or before there is anything to save, see
    :meth:`hold_one`.

    Example:
      >>> with InterruptWatch() as watch:
      ...     signal.raise_signal(signal.SIGHUP)
      ...     watch.signal.name
      'SIGHUP'
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._previous = {}

    def __enter__(self) -> "InterruptWatch":
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exc_info) -> None:
        _listener.expected = 0
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def hold_one(self) -> None:
        """Lets the next signal wait for the end of a step.

        There is something to save from now on.
        """
        _listener.expected = 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)


def end_at_signals() -> None:
    """Lets signals that nobody is to note end the process at once, from now on.

    With one line, and exit code 128 + signal.

    Nothing is torn by it: whatever a run saves appears whole or not at all.
    """
    # A standard stream that is closed would be given to the next file that is opened.
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    for number in SIGNALS:
        signal.signal(number, lambda *unused: None)  # the byte below is what counts
    # To be run last. Python's own end takes the handlers away: a signal would then look like a
    # crash of a complete run.
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in SIGNALS])
    # Python's own handlers wait for the end of whatever runs in C; this byte is written at once.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_listener.listen, args=(reader,), name="signals", daemon=True).start()


class _Listener:
    """Counts signals; ``expected`` of them are somebody else's."""

    expected = 0

    def listen(self, reader: int) -> None:
        while received := os.read(reader, 1):
            if received[0] not in SIGNALS:
                continue
            if self.expected:
                self.expected -= 1
                continue
            name = signal.Signals(received[0]).name
            said = "ended at once; what was saved is whole, the same command goes on from it"
            with contextlib.suppress(OSError):
                os.write(2, f"{name}: {said}\n".encode())
            os._exit(128 + received[0])


_listener = _Listener()
