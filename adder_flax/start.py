"""The start of ``main.py`` and ``adder-flax``.

Signals and output are seen to before anything slow is imported.
"""

import time

from adder_flax import host_memory, interrupt


def main() -> None:
    """Runs the command of this process, and ends the process where it fails."""
    start_time = time.monotonic()
    # Before there is a second thread, which waits for signals.
    host_memory.keep_freed_memory()
    host_memory.collect_garbage_rarely()
    interrupt.end_at_signals()
    from adder_flax import environment, terminal

    terminal.prepare()
    with terminal.messages():
        with environment.importing():
            from adder_flax import command
        command.run(start_time)
