"""The start of ``main.py`` and ``adder-flax``.

Signals and output are seen to before anything slow is imported.
"""

import sys
import time

from adder_flax import host, interrupt


def main() -> None:
    """Runs the command of this process, and ends the process where it fails."""
    start_time = time.monotonic()
    host.leave_cores_to_xla()
    host.use_huge_pages()
    host.collect_garbage_rarely()
    interrupt.end_at_signals()
    try:
        from adder_flax import environment, terminal
    except ImportError as error:
        sys.exit(f"error: {error}")

    terminal.prepare()
    with terminal.messages():
        with environment.importing():
            from adder_flax import command
        command.run(start_time)
