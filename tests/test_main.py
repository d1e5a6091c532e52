"""``main.py`` as a user meets it, in processes of its own: modes, mistakes and interruptions."""

import json
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import adder_flax
from adder_flax.experiment import experiment_names
from tests.data.files import write_dictionary
from tests.processes import ROOT, run_python, simulated_devices
from tests.training.tiny import TINY_FLAGS

EXPERIMENT = "--config=experiments/adder_deit_tiny.py"
COMPARED = "--config=experiments/compare_mechanisms.py"


def _slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.optimizer.learing_rate=1"], "did you mean 'optimizer.learning_rate'"),
        _slow(["--config.data.data_dri=x"], "got 'data.data_dri'; did you mean 'data.data_dir'"),
        _slow(["--config.model.depth=twelve"], "depth"),
        (["--config.model.num_heads=5"], r"expected .*192.*5"),
        _slow(["--config.model.patch_size=3"], r"expected .*patch.* 8"),
        _slow(["--config.model.score=adderr"], r"expected .*adder.*got 'adderr'"),
        _slow(["--config.optimizer.name=adamv"], r"among adamw.*got 'adamv'"),
        _slow(["--config.batch_size=2000"], "1437 .*got 2000"),
        _slow(["--config.mesh.data=3"], "1 devices"),
        (["--mode=eval"], "expected a readable checkpoint in .*train first"),
        (["--checkpoint=best"], "--checkpoint with --mode=eval or .*export only, got train"),
        # Below the base of a comparison.
        ([COMPARED, "--mode=compare", "--config.seed=8"], "got 'seed'; did you mean 'base.seed'"),
        _slow([COMPARED, "--mode=compare", "--config.data.data_dir=8"], "'base.data.data_dir'"),
        (["--config=experiments/no_such_file.py"], "no_such_file"),
        _slow(["--config=experiments/adder_deit_tiny.py:no_such_set"], "no_such_set"),
        (["--config=experiments/adder_deit_tiny.py:folder"], "data_dir"),
    ],
)
def test_a_mistake_is_one_message_and_a_non_zero_exit(flags, message, run_main, tmp_path):
    own = [] if flags[0].startswith("--config=") else [EXPERIMENT]
    done = run_main(*own, f"--workdir={tmp_path / 'run'}", *flags)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert re.search(message, " ".join(done.stderr.split())), done.stderr
    assert "first step" not in done.stdout
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_without_its_libraries_it_is_one_message():
    done = run_python("-S", "main.py", EXPERIMENT)  # no installed package is found
    assert done.returncode == 1
    said = "error: expected absl, got none; in the repository of this project: "
    assert done.stderr == said + 'pip install ".[train]"\n'


def test_train_then_eval(run_main, tmp_path):
    flags = [EXPERIMENT, f"--workdir={tmp_path}", *TINY_FLAGS]
    trained = run_main(*flags)
    assert trained.returncode == 0, trained.stderr
    said = ("parameters", "multiplications", "mesh data 1", "first step done", "test accuracy")
    assert all(part in trained.stdout for part in said)
    files = ("config.json", "metrics.jsonl", "curves.png", "attention.png", "tensorboard")
    assert all((tmp_path / name).exists() for name in (*files, "checkpoints"))
    accuracy = re.search(r"test accuracy (\S+) after 9 steps", trained.stdout).group(1)
    evaluated = run_main(f"--workdir={tmp_path}", "--mode=eval")  # which holds the rest
    assert evaluated.returncode == 0, evaluated.stderr
    assert f"accuracy {accuracy}" in evaluated.stdout


def _final_state(workdir):
    with ocp.training.Checkpointer(workdir / "checkpoints") as checkpointer:
        step = max(kept.step for kept in checkpointer.checkpoints)
        return step, checkpointer.load(step)


_DIGITS = [EXPERIMENT, *TINY_FLAGS, "--config.num_epochs=1.0", "--config.ema_decay=0.9"]
_WORDS = [
    *("--config=experiments/additive_g2p.py", "--config.num_epochs=0.5", "--config.model.width=16"),
    *("--config.batch_size=32", "--config.log_every_steps=1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "number"),
    [(_DIGITS, signal.SIGINT), _slow(_DIGITS, signal.SIGTERM), _slow(_WORDS, signal.SIGTERM)],
)
def test_an_interrupted_and_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(
    flags, number, run_main, tmp_path
):
    if flags is _WORDS:
        write_dictionary(tmp_path / "dictionary")
        flags = [*flags, f"--config.data.data_dir={tmp_path / 'dictionary'}"]
    assert run_main(*flags, f"--workdir={tmp_path / 'whole'}").returncode == 0
    process = subprocess.Popen(
        [sys.executable, ROOT / "main.py", *flags, f"--workdir={tmp_path / 'broken'}"],
        env=simulated_devices(1) | {"PYTHONUNBUFFERED": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    stop_after = int(np.random.default_rng(number).integers(1, 20))
    for line in process.stdout:
        if line.startswith(f"step {stop_after}/"):
            process.send_signal(number)
            break
    rest = process.stdout.read()
    assert process.wait(timeout=120) == 128 + number
    assert f"{number.name} at step" in rest
    resumed = run_main(f"--workdir={tmp_path / 'broken'}")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at step" in resumed.stdout
    (last, whole), (step, broken) = (_final_state(tmp_path / n) for n in ("whole", "broken"))
    assert step == last > stop_after
    jax.tree.map(np.testing.assert_array_equal, whole, broken)
    lines = (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps)
    assert len([step for step in steps if step == last]) == 2  # training and evaluation


def test_neither_an_experiment_nor_a_run_is_said(run_main, tmp_path):
    done = run_main(f"--workdir={tmp_path}", "--mode=eval")
    assert done.returncode == 2
    assert done.stderr.startswith("error: expected --config=<experiment>, or --workdir=")


def test_help_names_the_flags(run_main):
    done = run_main("--helpshort")
    assert "--config" in done.stdout
    assert "experiments/adder_deit_tiny.py" in done.stdout
    lines = done.stdout.splitlines()
    assert lines[2] == "  python main.py --config=adder_deit_tiny"
    assert max(map(len, lines)) <= 80
    named = done.stdout.partition("Experiments:")[2].partition("flags:")[0]
    assert set(named.replace(",", " ").split()) == set(experiment_names())


def test_experiments_are_the_files_that_have_get_config():
    has = re.compile(
        r"^(def get_config\b|get_config =|from .* import .*\bget_config\b)", re.MULTILINE
    )
    files = (ROOT / "experiments").glob("*.py")
    assert set(experiment_names()) == {file.stem for file in files if has.search(file.read_text())}


def test_the_version_is_that_of_the_package(run_main):
    assert run_main("--version").stdout == f"adder_flax {adder_flax.__version__}\n"
