"""Who may train in a directory: one at a time, and whoever comes after one that was killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from adder_flax.errors import RunError
from adder_flax.training import lock
from adder_flax.training.lock import lock_workdir
from tests.processes import ROOT, simulated_devices

_HOLD = """
import sys, time
from adder_flax.training.lock import lock_workdir
try:
    with lock_workdir(sys.argv[1]):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except Exception as error:
    print(error, flush=True)
"""


def hold(workdir, seconds):
    arguments = [sys.executable, "-c", _HOLD, str(workdir), str(seconds)]
    return subprocess.Popen(
        arguments, env=simulated_devices(1), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def owner_of(workdir):
    return json.loads((workdir / "trainer.lock").read_text())


def test_another_process_is_refused_until_the_first_ends_or_is_killed(tmp_path):
    first = hold(tmp_path, 60)
    assert first.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=rf"got process {first.pid} on .* remove .*trainer.lock"):
        lock_workdir(tmp_path).__enter__()
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert owner_of(tmp_path)["pid"] == first.pid
    with lock_workdir(tmp_path):
        assert owner_of(tmp_path)["pid"] == os.getpid()
    assert not (tmp_path / "trainer.lock").exists()


def test_of_several_that_start_at_once_exactly_one_wins(tmp_path):
    processes = [hold(tmp_path, 600) for _ in range(4)]
    outcomes = [
        process.stdout.readline() for process in processes
    ]  # the winner holds it until all have tried
    for process in processes:
        process.kill()
        process.wait()
    assert sum(outcome == "held\n" for outcome in outcomes) == 1
    assert sum("without another trainer" in outcome for outcome in outcomes) == 3


def test_a_lock_of_another_machine_is_kept_and_one_from_before_a_restart_is_not(tmp_path):
    with lock_workdir(tmp_path):
        left = owner_of(tmp_path)
    path = tmp_path / "trainer.lock"
    path.write_text(json.dumps(left | {"host": "elsewhere", "boot": "another"}))
    with pytest.raises(RunError, match=r"on elsewhere since .*if that process is gone, remove"):
        lock_workdir(tmp_path).__enter__()
    assert owner_of(tmp_path)["host"] == "elsewhere"
    path.write_text(json.dumps(left | {"boot": "before the restart"}))
    with lock_workdir(tmp_path):
        pass


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"pid": "x"}', "\x00\xff" * 10, "[" * 100_000]
)
def test_what_is_no_lock_does_not_stop_a_run(content, tmp_path):
    (tmp_path / "trainer.lock").write_text(content)
    with lock_workdir(tmp_path):
        assert owner_of(tmp_path)["pid"] == os.getpid()


def test_where_the_kernel_locks_nothing_the_owner_decides(tmp_path, monkeypatch):
    def unsupported(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    first = hold(tmp_path, 60)
    assert first.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=f"got process {first.pid}"):
        lock_workdir(tmp_path).__enter__()
    first.kill()
    first.wait()
    again = owner_of(tmp_path) | {
        "pid": os.getpid()
    }  # the number was given to another process since
    (tmp_path / "trainer.lock").write_text(json.dumps(again))
    with lock_workdir(tmp_path):
        assert owner_of(tmp_path)["started"] != again["started"]


@pytest.mark.parametrize("place", ["directory", "pipe", "link"])
def test_what_is_no_file_is_refused_in_one_message(place, tmp_path):
    path = tmp_path / "trainer.lock"
    {
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to("x"),
    }[place]()
    with pytest.raises(RunError, match=r"trainer\.lock"):
        lock_workdir(tmp_path).__enter__()


def test_a_lock_that_was_removed_is_put_back_unless_somebody_took_the_directory(tmp_path):
    path = tmp_path / "trainer.lock"
    with lock_workdir(tmp_path) as held:
        held.check()
        path.unlink()
        held.check()
        assert owner_of(tmp_path)["pid"] == os.getpid()
        path.unlink()
        second = hold(tmp_path, 60)
        assert second.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=rf"without another trainer, got process {second.pid}"):
            held.check()
    assert owner_of(tmp_path)["pid"] == second.pid  # the end of the first leaves it alone
    second.kill()
    second.wait()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_that_went_away_is_one_message(replaced, tmp_path):
    workdir = tmp_path / "run"
    with lock_workdir(workdir) as held:
        workdir.rename(tmp_path / "moved")
        if replaced:
            workdir.mkdir()
        with pytest.raises(
            RunError, match="run to stay where it is while a run trains, got none or another"
        ):
            held.check()
    assert workdir.exists() == replaced  # nothing is made in its place
