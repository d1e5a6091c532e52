"""Whatever stops a run, and when: the same command ends with the bits of one left alone."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from adder_flax import training
from tests.properties import runs

pytestmark = pytest.mark.slow
_LONG = hypothesis_settings(max_examples=3)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run that nobody disturbed: seconds that it takes, its directory, its last state."""
    folder = tmp_path_factory.mktemp("alone")
    runs.finish(folder / "first")  # compiles
    began = time.perf_counter()
    state = runs.finish(folder / "whole")
    return time.perf_counter() - began, folder / "whole", state


def end_of(process: subprocess.Popen) -> str:
    """Waits for a process that ends well or with one message; returns that."""
    _, errors = process.communicate(timeout=600)
    # Threads of Orbax log tracebacks where a checkpoint's folder goes; one of ours ends with 1.
    if process.returncode == 0:
        return ""
    messages = [line for line in errors.splitlines() if line.startswith("error: expected")]
    assert process.returncode == 2
    assert len(messages) == 1, errors[-1000:]
    return messages[0]


@contextlib.contextmanager
def new_run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="properties", ignore_cleanup_errors=True) as folder:
        yield Path(folder, "run")


@pytest.mark.parametrize("kind", ["killed", "interrupted"])
@_LONG
@given(
    share=st.floats(0, 1),
    number=st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]),
    again=st.none() | st.floats(0, 0.5),
)
def test_stopped_it_says_so_and_resumes_with_the_same_bits(alone, kind, share, number, again):
    seconds, _, state = alone
    number = signal.SIGKILL if kind == "killed" else number
    with new_run() as workdir:
        process = runs.start(workdir)
        time.sleep(share * seconds)
        process.send_signal(number)
        if again is not None:
            time.sleep(again)
            process.send_signal(number)
        output, errors = process.communicate(timeout=600)
        # Before and after training, and the second time, the system ends it.
        assert process.returncode in (0, 128 + number, -number), errors
        if process.returncode == 128 + number:
            assert number.name in output + errors
        assert runs.same_bits(runs.finish(workdir), state)


@contextlib.contextmanager
def small_disk(size: int = 32 * 2**20) -> Iterator[Path]:
    """A disk of so many bytes, which root alone may mount."""
    with tempfile.TemporaryDirectory(prefix="disk") as place:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("only root may mount a tmpfs")
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)


def fill(folder: Path, free: int) -> None:
    """Leaves so many bytes of a disk."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while (room := os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize) > free:
            file.write(bytes(min(2**20, room - free)))


@_LONG
@given(free=st.just(0) | st.integers(2**9, 2**20), share=st.none() | st.floats(0.3, 1))
def test_on_a_full_disk_it_stops_and_with_room_resumes_with_the_same_bits(alone, free, share):
    seconds, _, state = alone
    with small_disk() as folder:
        if share is None:
            fill(folder, free)
        process = runs.start(folder / "run")
        if share is not None:
            time.sleep(share * seconds)
            fill(folder, free)
        end_of(process)
        (folder / "filler").unlink()
        assert runs.same_bits(runs.finish(folder / "run"), state)


_TAKEN_AWAY = {
    "all of it": shutil.rmtree,
    "moved": lambda workdir: workdir.rename(workdir.with_name("moved")),
    "another in its place": lambda w: w.rename(w.with_name("moved")) and w.mkdir(),
    "checkpoints": lambda workdir: shutil.rmtree(workdir / "checkpoints"),
    "a file as checkpoints": lambda workdir: (
        shutil.rmtree(workdir / "checkpoints"),
        (workdir / "checkpoints").touch(),
    ),
    "metrics": lambda workdir: (workdir / "metrics.jsonl").unlink(),
    "events": lambda workdir: shutil.rmtree(workdir / "tensorboard"),
    "the lock": lambda workdir: (workdir / "trainer.lock").unlink(),
    "the configuration": lambda workdir: (workdir / "config.json").unlink(),
}


@pytest.mark.parametrize("what", _TAKEN_AWAY)
def test_what_is_taken_away_while_it_trains_is_said_or_made_again(alone, what):
    with new_run() as workdir:
        process = runs.start(workdir)
        next(line for line in process.stdout if line.startswith("step 7/"))
        with contextlib.suppress(OSError):  # a checkpoint is just written or deleted
            _TAKEN_AWAY[what](workdir)
        end_of(process)
        if (moved := workdir.with_name("moved")).exists():
            if what == "moved":  # nothing is made there but what Orbax was just writing
                made = [path for path in workdir.rglob("*") if path.is_file()]
                assert all("orbax-checkpoint-tmp" in str(path) for path in made)
            workdir = moved
        if (workdir / "checkpoints").is_file():
            (workdir / "checkpoints").unlink()
        assert runs.same_bits(runs.finish(workdir), alone[2])


def _rows(workdir: Path) -> list[dict[str, float]]:
    """The rows of a run without how fast it was."""
    rows = training.read_metrics(workdir)
    for row in rows:
        row.pop("train/images_per_second", None)
    return rows


@_LONG
@given(delay=st.just(0.0) | st.floats(0, 10))
def test_of_two_trainers_one_is_refused_and_the_other_undisturbed(alone, delay):
    _, whole, state = alone
    with new_run() as workdir:
        first = runs.start(workdir)
        time.sleep(delay)
        said = [end_of(process) for process in (runs.start(workdir), first)]
        assert sum("without another trainer" in message for message in said) <= 1
        assert "" in said
        assert runs.same_bits(runs.finish(workdir), state)
        assert _rows(workdir) == _rows(whole)


def test_who_looks_at_a_run_that_trains_does_not_disturb_it(alone):
    _, whole, state = alone
    with new_run() as workdir:
        trainer, number = runs.start(workdir), 0
        modes = ["--mode=eval", "--mode=analyze", "--mode=export"]
        while trainer.poll() is None:
            end_of(runs.start(workdir, modes[number % 3]))
            number += 1
        assert end_of(trainer) == ""
        assert runs.same_bits(runs.finish(workdir), state)
        assert _rows(workdir) == _rows(whole)
