"""Who may train in a directory: one at a time, and whoever comes after one that was killed."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from adder_flax.errors import RunError
from adder_flax.training.workdir import is_held, lock_workdir
from tests.processes import ROOT, simulated_devices

_HOLD = """
import sys, time
from adder_flax.training.workdir import lock_workdir
with lock_workdir(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def holder(workdir):
    """Another process that holds the directory."""
    command = [sys.executable, "-c", _HOLD, str(workdir)]
    options = dict(env=simulated_devices(1), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **options) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def owner_of(workdir):
    return json.loads((workdir / "trainer.owner").read_text())


@pytest.mark.slow
def test_another_process_is_refused_until_the_first_ends_or_is_killed(tmp_path):
    said = r"got process {} on .*since"
    with holder(tmp_path) as first, pytest.raises(RunError, match=said.format(first.pid)):
        lock_workdir(tmp_path).__enter__()
    assert owner_of(tmp_path)["pid"] == first.pid
    with lock_workdir(tmp_path):
        assert owner_of(tmp_path)["pid"] == os.getpid()
        assert is_held(tmp_path / "trainer.lock")
    assert not is_held(tmp_path / "trainer.lock")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3, "host": "x", "since": "then"}'])
def test_what_an_older_version_or_a_killed_run_left_does_not_stop_a_run(content, tmp_path):
    for name in ("trainer.lock", "trainer.owner"):
        (tmp_path / name).write_text(content)
    with lock_workdir(tmp_path):
        assert owner_of(tmp_path)["pid"] == os.getpid()


@pytest.mark.slow
def test_who_lost_the_lock_saves_nothing(tmp_path):
    with contextlib.ExitStack() as alive:
        with lock_workdir(tmp_path) as held:
            held.check()
            (tmp_path / "trainer.lock").unlink()
            second = alive.enter_context(holder(tmp_path))
            with pytest.raises(RunError, match="trainer.lock to stay where it is while a run"):
                held.check()
        assert owner_of(tmp_path)["pid"] == second.pid  # the end of the first leaves it alone
