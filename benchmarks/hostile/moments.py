"""Signals at random moments from the start of the process to its last line, each then resumed to
the end."""

import atexit
import functools
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import faults
from benchmarks.hostile.case import Case, Fault, Group, Observed, Verdict

_SIGNALS = (signal.SIGHUP, signal.SIGINT)
_FAULTS = {
    number: Fault(
        f"{number.name} at any moment",
        "everything: the resumed run ends with the bits of one left alone",
    )
    for number in _SIGNALS
}
_MOST_SECONDS = 600


start = functools.partial(faults.start, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


class Alone(NamedTuple):
    """A run that nobody disturbed: how many seconds it took, its directory, never to be changed,
    its last state."""

    seconds: float
    workdir: Path
    state: Any


@functools.cache
def left_alone() -> Alone:
    """Runs it; the folder stays until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="moments"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    start(folder / "first").communicate()  # compiles
    began = time.perf_counter()
    _, errors = (process := start(folder / "whole")).communicate()
    if process.returncode:
        raise RuntimeError(f"expected the run to end, got: {errors}")
    return Alone(
        time.perf_counter() - began, folder / "whole", faults.final_state(folder / "whole")
    )


def judge_end(process: subprocess.Popen) -> Observed:
    """Waits for a process that ends well or with one message, the last line of what it says."""
    try:
        out, err = process.communicate(timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return Observed(Verdict.HANG, f"no end after {_MOST_SECONDS} s")
    if "Traceback" in out + err:
        return Observed(Verdict.TRACEBACK, (out + err)[-2000:])
    if not process.returncode:
        return Observed(Verdict.RIGHT)
    last = (err.strip().splitlines() or [""])[-1]
    if process.returncode != 2 or not last.startswith("error: "):
        return Observed(
            Verdict.TRACEBACK, f"exit code {process.returncode}, last line: {last[:500]}"
        )
    return Observed(Verdict.MESSAGE, last.removeprefix("error: "))


def judge_resumed(workdir: Path, expected: Any) -> Observed | None:
    """Starts a run again, and returns what is wrong unless it ends with the expected state."""
    out, err = (resumed := start(workdir)).communicate(timeout=_MOST_SECONDS)
    if resumed.returncode:
        return Observed(Verdict.LOST, f"resumed, it ended with {resumed.returncode}: {err[-1000:]}")
    if not faults.same_bits(faults.final_state(workdir), expected):
        return Observed(Verdict.LOST, "the resumed run ended with other numbers")
    return None


def interrupted(number: signal.Signals, share: float, again: float | None) -> Observed:
    """Sends a signal at a share of the whole run's time, perhaps a second one, and resumes."""
    seconds, _, expected = left_alone()
    with tempfile.TemporaryDirectory(prefix="moments") as folder:
        workdir = Path(folder, "run")
        process = start(workdir)
        time.sleep(share * seconds)
        process.send_signal(number)
        if again is not None:
            time.sleep(again)
            process.send_signal(number)
        try:
            out, err = process.communicate(timeout=_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return Observed(Verdict.HANG, f"{number.name} was not obeyed")
        if "Traceback" in out + err:
            return Observed(Verdict.TRACEBACK, (out + err)[-2000:])
        # The first 50 ms are those of Python itself, which knows of no handler yet.
        early = process.returncode == -number and share * seconds < 0.3
        if process.returncode not in (0, 128 + number) and not early:
            return Observed(Verdict.CRASH, f"exit code {process.returncode}: {err[-500:]}")
        last = (out + err).strip().splitlines()
        seen = [line for line in last if line.startswith(number.name)]
        if process.returncode > 0 and len(seen) != 1:
            return Observed(Verdict.CRASH, f"exit code {process.returncode}, said: {last[-3:]}")
        return judge_resumed(workdir, expected) or Observed(
            Verdict.MESSAGE if seen else Verdict.RIGHT, seen[0] if seen else ""
        )


def _cases(seed: int, count: int) -> Iterator[Case]:
    """Yields the signals in turn, each third of a kind sent twice."""
    draw = random.Random(seed)
    for index in range(count):
        number, share = _SIGNALS[index % len(_SIGNALS)], draw.uniform(0, 1)
        again = draw.uniform(0, 0.5) if index % 6 >= 4 else None
        name = f"after {share:.3f} of the run" + (
            f", and again {again:.2f} s later" if again is not None else ""
        )
        yield Case(_FAULTS[number], name, functools.partial(interrupted, number, share, again))


GROUP = Group("moments", 60, _cases)
