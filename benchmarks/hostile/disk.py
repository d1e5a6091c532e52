"""A disk that fills up: at random moments of a run, or has little room from the start. Root alone can mount a tmpfs."""

import contextlib
import functools
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import faults
from benchmarks.hostile import moments
from benchmarks.hostile.case import Case, Fault, Group, Observed, Verdict

_BYTES = 32 * 2**20
_MOST_SECONDS = 600
_FILLS = Fault("a disk that fills up while a run trains", "every checkpoint that was whole; resumed, the same bits")
_SMALL = Fault("a disk with little or no room left", "every checkpoint that was whole; resumed, the same bits")


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """Yields a folder that has room for little."""
    with tempfile.TemporaryDirectory(prefix="disk") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_BYTES}", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path, free: int) -> None:
    """Leaves so many bytes of a disk, by a file ``filler``."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while (room := os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize) > free:
            file.write(bytes(min(2**20, room - free)))


def attack(free: int, share: float | None) -> Observed:
    """Runs on a disk that is filled but for ``free`` bytes, at a share of the run's time or before; then makes room."""
    if os.geteuid():
        return Observed(Verdict.RIGHT, "skipped: only root may mount a tmpfs")
    seconds, expected = moments.left_alone()
    with small_disk() as folder:
        if share is None:
            fill(folder, free)
        process = moments.start(folder / "run")
        if share is not None:
            time.sleep(share * seconds)
            fill(folder, free)
        try:
            out, err = process.communicate(timeout=_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return Observed(Verdict.HANG, "no end on a full disk")
        if "Traceback" in out + err:
            return Observed(Verdict.TRACEBACK, (out + err)[-2000:])
        last = err.strip().splitlines()[-1:] or [""]
        if process.returncode and not (process.returncode == 2 and last[0].startswith("error: ")):
            return Observed(Verdict.TRACEBACK, f"exit code {process.returncode}, last line: {last[0][:500]}")
        (folder / "filler").unlink(missing_ok=True)
        out, err = (resumed := moments.start(folder / "run")).communicate(timeout=_MOST_SECONDS)
        if resumed.returncode:
            return Observed(Verdict.LOST, f"resumed, it ended with {resumed.returncode}: {err[-1000:]}")
        if not faults.same_bits(faults.final_state(folder / "run"), expected):
            return Observed(Verdict.LOST, "the resumed run ended with other numbers")
    return Observed(Verdict.MESSAGE, last[0].removeprefix("error: ")) if process.returncode else Observed(Verdict.RIGHT)


def _cases(seed: int, count: int) -> Iterator[Case]:
    """Yields disks that fill up and disks that are full in turn, a third of them to the last byte."""
    draw = random.Random(seed)
    for index in range(count):
        free = 0 if index % 3 == 0 else int(2 ** draw.uniform(9, 20))
        share = draw.uniform(0.3, 1) if index % 4 else None
        name = f"disk {index + 1}: {free} bytes left " + (
            "from the start" if share is None else f"after {share:.3f} of the run"
        )
        yield Case(_SMALL if share is None else _FILLS, name, functools.partial(attack, free, share))


GROUP = Group("disk", 50, _cases)
