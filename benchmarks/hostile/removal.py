"""What is taken away from a run while it trains: its directory, or a part of it; each is then
resumed to the end."""

import functools
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.hostile import moments
from benchmarks.hostile.case import Case, Fault, Group, Observed

_WHOLE = Fault(
    "the directory of a run removed or moved while it trains", "what was moved, to go on from there"
)
_PART = Fault(
    "a part of a run's directory removed or replaced while it trains",
    "the rest: resumed, it ends with the same bits",
)


def _replace(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


_HARMS: dict[str, tuple[Fault, Callable[[Path], object]]] = {
    "all of it is removed": (_WHOLE, shutil.rmtree),
    "it is moved": (_WHOLE, lambda workdir: workdir.rename(workdir.with_name("moved"))),
    "another one is put in its place": (
        _WHOLE,
        lambda workdir: workdir.rename(workdir.with_name("moved")) and workdir.mkdir(),
    ),
    "a file is put in its place": (_WHOLE, _replace),
    "checkpoints/ is removed": (_PART, lambda workdir: shutil.rmtree(workdir / "checkpoints")),
    "a file in place of checkpoints/": (_PART, lambda workdir: _replace(workdir / "checkpoints")),
    "metrics.jsonl is removed": (_PART, lambda workdir: (workdir / "metrics.jsonl").unlink()),
    "tensorboard/ is removed": (_PART, lambda workdir: shutil.rmtree(workdir / "tensorboard")),
    "trainer.lock is removed": (_PART, lambda workdir: (workdir / "trainer.lock").unlink()),
    "config.json is removed": (_PART, lambda workdir: (workdir / "config.json").unlink()),
}


def _attack(harm: Callable[[Path], object], step: int) -> Observed:
    """Does harm when a step is logged, and lets the run end; then mends what is in the way and
    starts it again."""
    expected = moments.left_alone().state
    with tempfile.TemporaryDirectory(prefix="removal", ignore_cleanup_errors=True) as folder:
        workdir = Path(folder, "run")
        process = moments.start(workdir)
        for line in process.stdout:
            if line.startswith(f"step {step}/"):
                break
        try:
            harm(workdir)
        except OSError:  # a checkpoint that is just being written or deleted
            shutil.rmtree(workdir, ignore_errors=True)
        observed = moments.judge_end(process)
        if not observed.verdict.sound:
            return observed
        if (moved := workdir.with_name("moved")).exists():
            workdir = moved
        for place in (workdir, workdir / "checkpoints"):
            if place.is_file():
                place.unlink()
        return moments.judge_resumed(workdir, expected) or observed


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields all kinds in turn, each at a step drawn anew."""
    draw = random.Random(seed)
    for number, (name, (fault, harm)) in zip(
        range(count), itertools.cycle(_HARMS.items()), strict=False
    ):
        step = draw.randrange(1, 21)
        yield Case(
            fault, f"{number + 1}: {name} at step {step}", functools.partial(_attack, harm, step)
        )


GROUP = Group("removal", 30, cases)
