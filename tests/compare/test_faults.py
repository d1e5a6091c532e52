"""Comparisons that are killed, interrupted or shared out end with the tables of one left alone."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, simulated_devices

_EXPERIMENT = """
from tests.compare.tiny import make_config

def get_config():
    factors = {"arm": {"dot": {}, "additive": {"model": {"score": "additive"}}}}
    search = {"optimizer": {"learning_rate": ("log", 1e-3, 1e-2)}}
    base = {"num_epochs": 1.0, "checkpoint_every_steps": 5}
    return make_config(
        factors=factors, baseline={"arm": "dot"}, search=search, trials=2, extensions=1, seeds=2, base=base
    )
"""


# Of a record, what takes no time.
_COMPUTED = ("validation", "test", "curve", "steps", "values", "diverged")


def _start(workdir, *flags):
    command = [sys.executable, "-u", ROOT / "main.py", "--mode=compare", f"--config={workdir.parent / 'x.py'}"]
    return subprocess.Popen(
        [*map(str, command), f"--workdir={workdir}", *flags],
        env=simulated_devices(1) | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _finish(workdir, *flags):
    process = _start(workdir, *flags)
    output = process.communicate(timeout=1200)[0]
    assert process.returncode == 0, output
    return output


def _numbers(workdir):
    """All that records say but for what takes time."""
    kept = {}
    for path in (workdir / "results" / "records").glob("*.json"):
        record = json.loads(path.read_text())
        kept[path.name] = {
            name: record[name] for name in ("validation", "test", "curve", "steps", "values", "diverged")
        }
    return kept


def _tables(workdir):
    """The scores and what was tuned, as written."""
    text = (workdir / "results" / "results.md").read_text()
    return re.findall(r"## (?:Test accuracy|What was tuned)\n\n.*?(?=\n## )", text, re.DOTALL)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    (folder / "x.py").write_text(_EXPERIMENT)
    began = time.monotonic()
    _finish(folder / "run")
    return folder / "run", time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_kills_at_random_moments_leave_the_tables_as_they_are(workers, alone, tmp_path):
    whole, seconds = alone
    (tmp_path / "x.py").write_text(_EXPERIMENT)
    draw, kills = random.Random(workers), 0
    for _ in range(10):
        process = _start(tmp_path / "run", f"--workers={workers}")
        try:
            process.communicate(timeout=draw.uniform(0.1, 0.5) * seconds)
        except subprocess.TimeoutExpired:
            kills += 1
            _kill(process, draw, workers)
        else:
            break
    assert kills > 2
    assert "0 cells left" in _finish(tmp_path / "run", f"--workers={workers}")
    assert _numbers(tmp_path / "run") == _numbers(whole)
    assert _tables(tmp_path / "run") == _tables(whole)


def _kill(process, draw, workers):
    """Kills everything, or one worker alone."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    if workers > 1 and children and draw.random() < 0.5:
        os.kill(int(draw.choice(children)), signal.SIGKILL)
        time.sleep(1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_an_interrupt_stops_workers_at_a_step_that_is_saved(alone, tmp_path):
    (tmp_path / "x.py").write_text(_EXPERIMENT)
    process = _start(tmp_path / "run", "--workers=2")
    time.sleep(0.5 * alone[1])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    _finish(tmp_path / "run", "--workers=2")
    assert _numbers(tmp_path / "run") == _numbers(alone[0])


@pytest.mark.slow
def test_the_command_beside_a_row_gives_its_number(alone, tmp_path):
    whole, _ = alone
    command = next(
        line for line in (whole / "results" / "results.md").read_text().splitlines() if "additive-final" in line
    )
    record = json.loads(Path(re.search(r"--config=(\S+)", command)[1]).read_text())
    flags = [word for word in command.split()[2:] if not word.startswith("--workdir")]
    done = subprocess.run(
        [sys.executable, ROOT / "main.py", *flags, f"--workdir={tmp_path}"],
        env=simulated_devices(1),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert f"test accuracy {record['test']['accuracy']:.4f} after" in done.stdout, done.stdout + done.stderr
