"""Seconds from the start of the command to the end of its first step, and what they went to.

    python -m benchmarks.start
    python -m benchmarks.start --config=experiments/deit_tiny.py --rounds=3

The first process has empty caches: it compiles the step and the native kernels. The others find
both. Each is ended after its first step. The line is the one that every training prints.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from adder_flax import own_cache

FIRST = "first step done "


def first_step(config: str, place: Path, number: int) -> str:
    """Returns what a training says of its first step.

    Args:
        config: the experiment.
        place: a folder that holds the caches and, in folders of their own, the runs.
        number: of the process.
    """
    program = Path(__file__).parents[1] / "main.py"
    command = [sys.executable, program, f"--config={config}", f"--workdir={place / str(number)}"]
    caches = {"XDG_CACHE_HOME": str(place / "caches"), "JAX_COMPILATION_CACHE_DIR": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | caches
    ) as process:
        said = next((line for line in process.stdout or () if line.startswith(FIRST)), "")
        process.send_signal(signal.SIGTERM)
        for _ in process.stdout or ():
            pass
    if not said:
        raise SystemExit(
            f"expected a training that takes a step, got exit code {process.returncode}"
        )
    return said.removeprefix(FIRST).strip()


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each process.

    Args:
        arguments: command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="experiments/adder_deit_tiny.py")
    parser.add_argument("--rounds", type=int, default=4, help="processes, the first of them cold")
    options = parser.parse_args(arguments)
    print(f"{options.config} on {len(os.sched_getaffinity(0))} × {own_cache.processor_name()}")
    with tempfile.TemporaryDirectory() as place:
        Path(place, "caches").mkdir()
        for number in range(options.rounds):
            state = "warm" if number else "cold"
            print(state, first_step(options.config, Path(place), number), flush=True)


if __name__ == "__main__":
    main()
