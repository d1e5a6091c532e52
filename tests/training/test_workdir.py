"""One run in one directory: its configuration is written once it is good, and another one's is
refused."""

import dataclasses
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import training
from adder_flax.errors import NonFiniteLossError, RunError
from adder_flax.experiment import as_config
from adder_flax.experiments import common
from adder_flax.settings import RunSettings, completed, read
from adder_flax.training import (
    Trainer,
    build_run,
    open_workdir,
    read_config,
    read_metrics,
    write_config,
)
from adder_flax.training.workdir import differences, fingerprint


def written(config):
    return as_config(completed(RunSettings, config.to_dict()))


@pytest.fixture
def config():
    return common.deit("adder", "tiny")


@pytest.fixture
def begun(tmp_path):
    """``begun(fields)``: the directory of a run with that configuration and a checkpoint."""

    def make(fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        (tmp_path / "checkpoints" / "4").mkdir(parents=True)
        return tmp_path

    return make


def test_another_configuration_is_refused_once_there_is_a_checkpoint(config, tmp_path):
    other = config.copy_and_resolve_references()
    other.optimizer.learning_rate = 0.123
    for stored in (config, other):  # a mistake, corrected
        assert open_workdir(tmp_path, stored) == tmp_path
        write_config(tmp_path, stored)
        assert read_config(tmp_path) == written(stored)
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    for function in (open_workdir, write_config):
        with pytest.raises(RunError, match=r"optimizer.learning_rate: 0.123 there"):
            function(tmp_path, config)


def test_what_a_run_of_an_earlier_version_leaves_open_has_its_default(config, begun):
    """Two settings were not there, nor a section, and another had other fields."""
    fields = json.loads(config.to_json())
    del fields["data"]["repeats"], fields["model"]["mlp_ratio"], fields["optimizer"]["kfac"]
    fields["optimizer"]["cg_fac"] = {"max_iterations": 2, "kl_clip": 0.5}
    workdir = begun(fields)
    assert open_workdir(workdir, config) == workdir
    assert read_config(workdir) == written(config)
    read(RunSettings, read_config(workdir))
    config.data.repeats = 3
    with pytest.raises(RunError, match=r"\n  data.repeats: 1 there, 3 now\n"):
        open_workdir(workdir, config)


def test_what_a_configuration_leaves_open_is_on_record(config, tmp_path):
    config.optimizer.name = "kfac"
    config.optimizer.kfac.update(step="share", damping=0.2)
    write_config(tmp_path, config)
    stored = json.loads((tmp_path / "config.json").read_text())["optimizer"]["kfac"]
    assert (stored["learning_rate"], stored["damping"], stored["iterations"]) == (0.1, 0.2, 2)


def test_what_is_done_about_what_is_broken_may_change(config, begun):
    # As checkpoints once had it.
    of = fingerprint(config) | {"non_finite": "stop", "data.on_unreadable": "raise"}
    workdir = begun(json.loads(config.to_json()))
    config.non_finite, config.data.on_unreadable = "skip", "skip"
    assert open_workdir(workdir, config) == workdir
    assert differences(of, fingerprint(config)) == []


def test_opening_writes_nothing(config, tmp_path):
    assert open_workdir(tmp_path / "new", config) == tmp_path / "new"
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_mistake_can_be_corrected_in_the_same_directory_and_no_row_is_lost(
    tiny_config, tmp_path, capsys
):
    fields = {"optimizer.name": "sgd", "optimizer.clip_norm": 0.0, "optimizer.learning_rate": 1e6}
    config = tiny_config("multiplicative", **fields)
    with pytest.raises(NonFiniteLossError):
        Trainer(build_run(config), open_workdir(tmp_path, config)).fit()
    assert os.listdir(tmp_path / "checkpoints") == []
    first = (tmp_path / "metrics.jsonl").read_text()
    config.optimizer.learning_rate = 0.01
    done = Trainer(build_run(config), open_workdir(tmp_path, config)).fit()
    assert done.step == 9
    assert read_config(tmp_path) == written(config)
    assert (tmp_path / "metrics.jsonl.aside").read_text() == first != ""
    log = (tmp_path / "metrics.jsonl").read_bytes() + b"no row\n"
    (tmp_path / "metrics.jsonl").write_bytes(log)
    again = Trainer(build_run(config), open_workdir(tmp_path, config)).fit()
    assert "already complete at step 9" in capsys.readouterr().out
    assert (again.step, again.evaluation) == (9, done.evaluation)
    assert (tmp_path / "metrics.jsonl").read_bytes() == log


_INFINITE = lambda kernel: kernel.at[3, 3].set(np.inf)
_LARGE = lambda kernel: jnp.sign(kernel) * 3e38  # finite, unlike the logits


@pytest.mark.parametrize(
    ("harm", "said", "non_finite"),
    [
        (_INFINITE, "got an infinity or NaN in params/head/kernel;.*none yet", "stop"),
        (_LARGE, "evaluation after step 1 of 1, got (nan|inf); .*none yet", "stop"),
        pytest.param(_LARGE, None, "skip", marks=pytest.mark.slow),
    ],
)
def test_what_is_not_finite_is_neither_saved_nor_scored_unless_told_to_go_on(
    harm, said, non_finite, tiny_config, tmp_path
):
    config = tiny_config("multiplicative", num_epochs=0.02, non_finite=non_finite)
    run = build_run(config)

    def train_step(state, batch, hyper):
        state, metrics = run.train_step(state, batch, hyper)
        state["params"]["head"]["kernel"] = harm(state["params"]["head"]["kernel"])
        return state, metrics

    trainer = Trainer(dataclasses.replace(run, train_step=train_step), tmp_path)
    if non_finite == "skip":
        assert trainer.fit().step == 1
        return
    with pytest.raises(NonFiniteLossError, match=said):
        trainer.fit()
    assert training.SavedCheckpoints(tmp_path / "checkpoints").steps == []
    assert not any("eval/loss" in row for row in read_metrics(tmp_path))
