"""Workers that are jobs of a real SLURM, of two nodes."""

import importlib.util
import signal
import subprocess
import sys
import time

import pytest

from adder_flax.compare import read_options
from adder_flax.errors import RunError
from tests.compare import slurm
from tests.compare.test_faults import EXPERIMENT, numbers, steps_done
from tests.processes import ROOT, simulated_devices

LACKING = slurm.missing() or (
    None if importlib.util.find_spec("submitit") else "no submitit; pip install submitit"
)
needs_slurm = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


def _start(workdir, environ, *flags):
    (workdir.parent / "x.py").write_text(EXPERIMENT)
    command = [
        sys.executable,
        "-u",
        ROOT / "main.py",
        "--mode=compare",
        f"--config={workdir.parent / 'x.py'}",
    ]
    options = {name: environ[name] for name in ("SLURM_CONF", "PATH")}
    return subprocess.Popen(
        [*map(str, command), f"--workdir={workdir}", *flags],
        env=simulated_devices(1) | options,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_options_are_read_or_refused():
    assert read_options("partition=gpu, gpus_per_node=1,time=720") == {
        "partition": "gpu", "gpus_per_node": 1, "time": 720
    }  # fmt: skip
    assert read_options("") == {}
    for text in ("gpu", "partition=", "a b=1"):
        with pytest.raises(RunError, match="expected --slurm as name=value"):
            read_options(text)


@pytest.mark.slow
@needs_slurm
def test_two_nodes_divide_the_cells_and_one_that_is_taken_away_goes_on(cluster, tmp_path):
    """Every cell runs once; SLURM's warning stops a worker at a step that is saved, and it is
    queued again."""
    process = _start(tmp_path / "run", cluster, "--workers=2", "--slurm=time=60,cpus_per_task=2")
    while steps_done(tmp_path / "run") < 60:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    jobs = subprocess.run(
        ["squeue", "--noheader", "--format=%i"], env=cluster, capture_output=True, text=True
    )
    warned = jobs.stdout.split()[0]
    subprocess.run(["scancel", "--signal=USR2", warned], env=cluster, check=True)
    output = process.communicate(timeout=1800)[0]
    assert process.returncode == 0, output
    assert "0 cells left" in output
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "slurm").glob("*_log.out")}
    assert "Requeued job" in logs[f"{warned}_0_log.out"], logs
    lines = [
        line
        for text in logs.values()
        for line in text.splitlines()
        if " s" in line and "seed" in line
    ]
    ran = [tuple(line.split("  ")[:4]) for line in lines]
    assert len(ran) == len(set(ran)) == len(numbers(tmp_path / "run"))
    assert len({name for name, text in logs.items() if "seed" in text}) == 2

    alone = _start(tmp_path / "alone", cluster, "--workers=1")
    assert alone.wait(timeout=1800) == 0
    assert numbers(tmp_path / "run") == numbers(tmp_path / "alone")


@pytest.mark.slow
@needs_slurm
def test_mistakes_and_an_interrupt_are_told_and_cancel_the_jobs(cluster, tmp_path):
    process = _start(tmp_path / "run", cluster, "--workers=1", "--slurm=partition=none")
    output = process.communicate(timeout=300)[0]
    assert process.returncode != 0
    assert "expected to submit jobs to SLURM" in output
    process = _start(tmp_path / "run", cluster, "--workers=1", "--slurm=")
    while not list((tmp_path / "run" / "slurm").glob("*_log.out")):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT
    for _ in range(120):
        left = subprocess.run(
            ["squeue", "--noheader"], env=cluster, capture_output=True, text=True
        ).stdout
        if not left:
            break
        time.sleep(1)
    assert not left
