"""Comparisons that are killed, interrupted or shared out end with the tables of one left alone."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from adder_flax.packed import NAME, read_packed
from tests.processes import ROOT, run_python, simulated_devices

EXPERIMENT = """
from tests.compare.tiny import make_config


def get_config():
    factors = {"arm": {"dot": {}, "additive": {"model": {"score": "additive"}}}}
    search = {"optimizer": {"learning_rate": ("log", 1e-3, 1e-2)}}
    base = {"num_epochs": 1.0, "checkpoint_every_steps": 5}
    tuning = dict(search=search, trials=2, extensions=1)
    return make_config(factors=factors, baseline={"arm": "dot"}, seeds=2, base=base, **tuning)
"""
# Of a record, what takes no time.
_COMPUTED = ("validation", "test", "curve", "steps", "values", "diverged")


def _start(workdir, *flags, stdout=subprocess.PIPE):
    (workdir.parent / "x.py").write_text(EXPERIMENT)
    given = f"--config={workdir.parent / 'x.py'}", f"--workdir={workdir}"
    return subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "main.py"), "--mode=compare", *given, *flags],
        env=simulated_devices(1) | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _finish(workdir, *flags):
    process = _start(workdir, *flags)
    output = process.communicate(timeout=1200)[0]
    assert process.returncode == 0, output
    return output


def computed(workdir):
    """All that records say but for what takes time; tables of scores and of what was tuned."""
    _, records = read_packed(workdir / "results" / NAME)
    text = (workdir / "results" / "results.md").read_text()
    tables = re.findall(r"## (?:Test accuracy|What was tuned)\n\n.*?(?=\n## )", text, re.DOTALL)
    return {name: [record[f] for f in _COMPUTED] for name, record in records.items()}, tables


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "run"
    _finish(workdir)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_kills_at_random_moments_leave_the_tables_as_they_are(workers, alone, tmp_path):
    """Ten moments, spread over the steps of all cells, each a little after a step: inside of one,
    of a checkpoint, of an evaluation, of what begins or ends a cell. One that has passed when the
    runner is up again is a moment of its start. A runner that is faster than a moment has ended
    well, and most are not."""
    draw, steps = random.Random(workers), steps_done(alone)
    assert steps > 100
    kills = 0
    for moment in sorted(draw.uniform(0, 0.98) * steps for _ in range(10)):
        process = _start(tmp_path / "run", f"--workers={workers}", stdout=subprocess.DEVNULL)
        if steps_done(tmp_path / "run") >= moment:
            time.sleep(draw.uniform(0, 5))
        while steps_done(tmp_path / "run") < moment and process.poll() is None:
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 0.2))
        if process.poll() is None:
            _kill(process, draw, workers)
            kills += 1
        else:
            assert process.returncode == 0
    assert kills > 5
    assert "0 cells left" in _finish(tmp_path / "run", f"--workers={workers}")
    assert computed(tmp_path / "run") == computed(alone)


def steps_done(workdir):
    """Of all cells together, as far as their metrics have been written."""
    rows = (
        path.read_text().rpartition('"step": ')[2] for path in workdir.glob("cells/*/metrics.jsonl")
    )
    return sum(int(re.match(r"\d+|", row)[0] or 0) for row in rows)


def _kill(process, draw, workers):
    """Kills everything, or one worker alone."""
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    if workers > 1 and children and draw.random() < 0.5:
        os.kill(int(draw.choice(children)), signal.SIGKILL)
        time.sleep(1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_an_interrupt_stops_workers_at_a_step_that_is_saved(alone, tmp_path):
    process = _start(tmp_path / "run", "--workers=2")
    while steps_done(tmp_path / "run") < 0.3 * steps_done(alone):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    _finish(tmp_path / "run", "--workers=2")
    assert computed(tmp_path / "run") == computed(alone)


@pytest.mark.slow
def test_the_command_beside_a_row_gives_its_number(alone, tmp_path):
    lines = (alone / "results" / "results.md").read_text().splitlines()
    command = next(line for line in lines if "additive-final" in line)
    file, _, name = re.search(r"--config=(\S+)", command)[1].partition("#")
    record = read_packed(file)[1][name]
    flags = [word for word in command.split()[2:] if not word.startswith("--workdir")]
    done = run_python("main.py", *flags, f"--workdir={tmp_path}")
    said = f"test accuracy {record['test']['accuracy']:.4f} after"
    assert said in done.stdout, done.stdout + done.stderr
