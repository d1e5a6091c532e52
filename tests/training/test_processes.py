"""Several processes of one run: finding each other, the same batches, one log, stopping and
resuming together."""

import functools
import shutil
import signal
import socket
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from adder_flax import training
from adder_flax.training import RunError, connect, read_metrics
from adder_flax.training.processes import HEARTBEAT_SECONDS, InterruptWatch, peer_errors
from tests.processes import ROOT, run_python, simulated_devices
from tests.training.tiny import TINY_FLAGS

FLAGS = ["--config=experiments/deit_tiny.py", *TINY_FLAGS, "--config.num_epochs=0.5"]


def test_half_an_environment_is_refused():
    with pytest.raises(RunError, match="got: no JAX_COORDINATOR_ADDRESS and no JAX_PROCESS_ID; "):
        connect({"JAX_NUM_PROCESSES": "2"})


_PLAIN = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "8"}, None),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a"}, None),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, None),
        (_PLAIN, {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1}),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "node[1-2]"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "host0,host1"}, {}),
    ],
)
def test_environments_of_several_processes_connect(variables, given, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    connect(variables)
    expected = [] if given is None else [given | {"heartbeat_timeout_seconds": HEARTBEAT_SECONDS}]
    assert calls == expected


@pytest.fixture
def start_two():
    """Starts ``main.py`` for both processes of a run, one device each: ``start_two(*flags)``."""
    started = []
    watchdog = threading.Timer(240, lambda: [process.kill() for process in started])
    watchdog.start()

    def start(*flags):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        of_both = {"JAX_COORDINATOR_ADDRESS": address, "PYTHONUNBUFFERED": "1"}
        environment = simulated_devices(1) | _PLAIN | of_both
        command = [sys.executable, "main.py", *FLAGS, *flags]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for index in "01":
            own = environment | {"JAX_PROCESS_ID": index}
            started.append(subprocess.Popen(command, env=own, cwd=ROOT, **pipes))
        return started[-2:]

    yield start
    watchdog.cancel()
    for process in started:
        process.kill()


def read_until(process, text):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    raise AssertionError(f"no {text!r} in:\n{''.join(lines)}")


@pytest.mark.slow
def test_two_processes_train_stop_and_resume_as_one_would(start_two, tiny_config, tmp_path):
    run = training.build_run(tiny_config("multiplicative", num_epochs=0.5))
    alone_in = lambda name: training.Trainer(run, tmp_path / name).fit()
    whole = alone_in("whole")

    first, second = start_two(f"--workdir={tmp_path / 'two'}")
    read_until(first, "step 7/22")
    second.send_signal(signal.SIGTERM)  # the other one must follow
    outputs = [process.communicate(timeout=240)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [128 + signal.SIGTERM] * 2, outputs
    assert "2 × cpu on 2 hosts" not in outputs[1]
    assert "step" not in outputs[1]
    shutil.copytree(tmp_path / "two", tmp_path / "one")

    processes = start_two(f"--workdir={tmp_path / 'two'}")
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "resuming at step" in outputs[0]
    alone = alone_in("one")

    expected = read_metrics(tmp_path / "whole")
    for name in ("two", "one"):
        rows = read_metrics(tmp_path / name)
        assert [row["step"] for row in rows] == [row["step"] for row in expected]
        for metric in ("train/loss", "train/grad_norm", "eval/loss"):
            values = [[row[metric] for row in each if metric in row] for each in (rows, expected)]
            np.testing.assert_allclose(*values, rtol=2e-4, err_msg=f"{name} {metric}")
    saved = training.SavedCheckpoints(tmp_path / "two" / "checkpoints")
    for state in (saved.restore(run.abstract_state), alone.state):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
        jax.tree.map(close, state["params"], whole.state["params"])


_GLOO = "UNKNOWN: Gloo all-reduce failed: reset by peer"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (jax.errors.JaxRuntimeError(_GLOO), True),
        (ValueError(_GLOO), True),  # as it is when dispatched
        (ValueError("expected a batch"), False),
    ],
)
def test_a_failed_exchange_points_to_the_other_processes(error, hint, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    expected, words = (RunError, "all of them again") if hint else (ValueError, "a batch")
    with pytest.raises(expected, match=words), peer_errors():
        raise error
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    with pytest.raises(type(error)), peer_errors():
        raise error


@pytest.mark.cases(1)
@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_one_signal_is_noted_and_the_second_ends_the_process(second):
    code = f"""
import os, signal
from adder_flax.training.processes import InterruptWatch
with InterruptWatch() as watch:
    os.kill(os.getpid(), signal.SIGHUP)
    print(watch.signal.name, flush=True)
    os.kill(os.getpid(), signal.{second})
    print("still here")
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stdout) == (-signal.Signals[second], "SIGHUP\n")


def test_after_a_watch_signals_do_what_they_did_before():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with InterruptWatch() as watch:
        signal.raise_signal(signal.SIGTERM)
    assert watch.signal is signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.slow
def test_a_dead_process_ends_the_other(start_two, tmp_path):
    first, second = start_two(f"--workdir={tmp_path}", "--config.num_epochs=100.0")
    read_until(first, "step 3/")
    second.kill()
    output, _ = first.communicate(timeout=3 * HEARTBEAT_SECONDS)
    assert first.returncode != 0
    said = "all of them again", "JAX distributed service detected fatal errors"
    assert any(words in output for words in said), output[-3000:]
