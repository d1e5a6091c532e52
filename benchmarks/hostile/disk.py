"""A disk that fills up: at random moments of a run, or has little room from the start.

Root alone can mount a tmpfs.
"""

import contextlib
import functools
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.hostile import moments
from benchmarks.hostile.case import Case, Fault, Group, Observed, Verdict

_BYTES = 32 * 2**20
_KEPT = "every checkpoint that was whole; resumed, the same bits"
_FILLS = Fault("a disk that fills up while a run trains", _KEPT)
_SMALL = Fault("a disk with little or no room left", _KEPT)
_FILES = Fault("a disk with room for few files", _KEPT)
_EVENTS = Fault("a full disk below tensorboard/ alone", "everything; resumed, the same bits")
_STUDY = Fault(
    "a full disk when a run is exported or analyzed",
    "everything; with room, the same command goes through",
)


@contextlib.contextmanager
def small_disk(folder: Path | None = None, *, size: int = _BYTES, files: int = 0) -> Iterator[Path]:
    """Mounts a disk of so many bytes and files (0: any) on a folder, by default a new one."""
    with tempfile.TemporaryDirectory(prefix="disk") as new:
        place = folder or Path(new)
        options = f"size={size},nr_inodes={files}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)


def fill(folder: Path, free: int) -> None:
    """Leaves so many bytes of a disk, by a file ``filler``."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while (room := os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize) > free:
            file.write(bytes(min(2**20, room - free)))


def _as_root(attack: Callable[..., Observed]) -> Callable[..., Observed]:
    """Skips an attack without the rights to mount a disk."""

    @functools.wraps(attack)
    def run(*arguments) -> Observed:
        return (
            Observed(Verdict.RIGHT, "skipped: only root may mount a tmpfs")
            if os.geteuid()
            else attack(*arguments)
        )

    return run


@_as_root
def attack(free: int, share: float | None) -> Observed:
    """Runs on a disk that is filled but for ``free`` bytes, at a share of the run's time or before;
    then makes room."""
    seconds, _, expected = moments.left_alone()
    with small_disk() as folder:
        if share is None:
            fill(folder, free)
        process = moments.start(folder / "run")
        if share is not None:
            time.sleep(share * seconds)
            fill(folder, free)
        observed = moments.judge_end(process)
        if not observed.verdict.sound:
            return observed
        (folder / "filler").unlink(missing_ok=True)
        return moments.judge_resumed(folder / "run", expected) or observed


@_as_root
def _few_files(files: int) -> Observed:
    """Runs on a disk with room for so many files, which is then copied to a larger one."""
    expected = moments.left_alone().state
    with small_disk(files=files) as folder, small_disk() as larger:
        observed = moments.judge_end(moments.start(folder / "run"))
        if not observed.verdict.sound:
            return observed
        with contextlib.suppress(FileNotFoundError):  # there was room for none
            shutil.copytree(folder / "run", larger / "run")
        return moments.judge_resumed(larger / "run", expected) or observed


@_as_root
def _full_events(size: int) -> Observed:
    """Runs with a disk of so many bytes below the events for TensorBoard."""
    expected = moments.left_alone().state
    with tempfile.TemporaryDirectory(prefix="disk") as folder:
        events = Path(folder, "run", "tensorboard")
        events.mkdir(parents=True)
        with small_disk(events, size=size):
            observed = moments.judge_end(moments.start(events.parent))
        if not observed.verdict.sound:
            return observed
        return moments.judge_resumed(events.parent, expected) or observed


@_as_root
def _study(free: int, *flags: str) -> Observed:
    """Exports or analyzes a run on a full disk, then with room."""
    with small_disk() as folder:
        workdir = shutil.copytree(moments.left_alone().workdir, folder / "run")
        before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
        fill(folder, free)
        observed = moments.judge_end(moments.start(workdir, *flags))
        (folder / "filler").unlink()
        if not observed.verdict.sound:
            return observed
        if lost := [path.name for path, content in before.items() if path.read_bytes() != content]:
            return Observed(Verdict.LOST, f"changed: {lost}")
        again = moments.judge_end(moments.start(workdir, *flags))
        return (
            observed
            if again.verdict is Verdict.RIGHT
            else Observed(Verdict.LOST, f"with room: {again.seen}")
        )


def _cases(seed: int, count: int) -> Iterator[Case]:
    """Yields disks that fill up and disks that are full in turn, a third to the last byte; each
    fifth is another."""
    draw = random.Random(seed)
    for index in range(count):
        free = 0 if index % 3 == 0 else int(2 ** draw.uniform(9, 20))
        share = draw.uniform(0.3, 1) if index % 4 else None
        files, size, mode = (
            draw.randrange(4, 90),
            4096 * draw.randrange(1, 3),
            draw.choice(["export", "analyze"]),
        )
        when = "from the start" if share is None else f"after {share:.3f} of the run"
        usual = (
            _SMALL if share is None else _FILLS,
            f"{free} bytes left {when}",
            functools.partial(attack, free, share),
        )
        others = [
            (
                _STUDY,
                f"{free} bytes left, then {mode}",
                functools.partial(_study, free, f"--mode={mode}"),
            ),
            (_EVENTS, f"{size} bytes", functools.partial(_full_events, size)),
            (_FILES, f"{files} files", functools.partial(_few_files, files)),
        ]
        fault, name, run = others[index // 5 % len(others)] if index % 5 == 4 else usual
        yield Case(fault, f"disk {index + 1}: {name}", run)


GROUP = Group("disk", 60, _cases)
