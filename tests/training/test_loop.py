"""Whole small runs: what is on disk after them, resuming, what stops them, and what waits for
what."""

import dataclasses
import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from adder_flax import data, own_cache, training
from adder_flax.app import modes
from adder_flax.settings import RunSettings
from adder_flax.tasks import Classification
from adder_flax.training import (
    Checkpoints,
    Evaluator,
    RunError,
    Trainer,
    build_run,
    evaluation_params,
    read_metrics,
)
from adder_flax.training.setup import _count_steps


def fit(config, workdir):
    run = build_run(config)
    return run, Trainer(run, training.open_workdir(workdir, config)).fit()


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.cases(1)
@pytest.mark.parametrize("mechanism", ["adder", "multiplicative", "additive"])
def test_a_run_learns_and_leaves_its_numbers(mechanism, tiny_config, tmp_path):
    fields = {"num_epochs": 4.0, "optimizer.learning_rate": 5e-3, "model.width": 32}
    config = tiny_config(mechanism, **fields)
    run, result = fit(config, tmp_path)
    assert (result.step, run.num_steps, result.interrupted) == (176, 176, None)
    rows = read_metrics(tmp_path)
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 176
    assert np.mean(losses[-10:]) < 0.9 * np.log(10)  # clearly better than not knowing the digit
    evaluations = [row for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in evaluations] == [44, 88, 132, 176]
    assert evaluations[-1]["eval/accuracy"] == result.evaluation["eval/accuracy"]
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model"]["score"] == config.model.score
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        restored = checkpoints.restore(run.abstract_state)
        assert checkpoints.best_step in checkpoints.steps
    assert_same_bits(restored, result.state)
    assert Evaluator(run)(evaluation_params(restored)) == result.evaluation


@pytest.mark.parametrize("split", ["test", pytest.param("train", marks=pytest.mark.slow)])
def test_the_scores_of_a_split_are_those_of_the_model_s_own_answers(split, tiny_config):
    """Each example counts once, whatever the batch."""
    run = build_run(tiny_config(), eval_split=split)
    params = run.init()["params"]
    batch = run.eval_source.first(len(run.eval_source))
    logits = np.asarray(run.model(params)(*run.task.inputs(batch)), np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), batch["label"]]
    right = logits.argmax(-1) == batch["label"]
    assert len(right) == {"test": 360, "train": 1437}[split]
    for run.config.eval_batch_size in (360, 7, 1000):
        scores = Evaluator(run)(params)
        assert scores["eval/accuracy"] == pytest.approx(right.mean(), abs=1e-9)
        assert scores["eval/loss"] == pytest.approx(losses.mean(), rel=1e-5)
    with pytest.raises(RunError, match=r"split out of \('train', 'test'\) .* got 'validation'"):
        build_run(tiny_config(), eval_split="validation")


def test_another_set_of_the_same_classes_can_be_scored(tiny_config):
    """Images of the training split under another name get the scores of that split; other classes
    are refused."""

    def load(split, **_):
        digits = data.load_source("digits", "train")
        arrays = digits.read(np.arange(len(digits)))[0].values()
        return data.ArraySource("again", split, ["test"], *arrays, digits.label_names)

    with data.SETS.temporary():
        data.register_source(data.DataSet("again", load, ("test",), (8, 8, 1), 10))
        again = build_run(tiny_config(), eval_data="again")
    params = again.init()["params"]
    assert (again.eval_source.name, len(again.eval_source)) == ("again", 1437)
    own = build_run(tiny_config(), eval_split="train")
    assert Evaluator(again)(params) == Evaluator(own)(params)
    with pytest.raises(RunError, match="images like those of digits, .* got fake; set --data"):
        build_run(tiny_config(), eval_data="fake")


@pytest.mark.slow
def test_an_image_may_have_several_right_labels_or_none(tiny_config, tmp_path):
    """The accuracy of ImageNet ReaL, counted one by one; names run across the classes."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (50, 8, 8, 3), np.uint8)
    for number, image in enumerate(pixels):
        for split in ("train", "val"):
            folder = tmp_path / split / str(number % 3)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number:02d}.png")
    right = [sorted(rng.choice(3, rng.integers(0, 4), replace=False).tolist()) for _ in pixels]
    (tmp_path / "real.json").write_text(json.dumps(right))
    fields = {"data.name": "folder", "data.data_dir": str(tmp_path), "data.eval_crop_ratio": 1.0}
    config = tiny_config(**fields, eval_batch_size=7)
    run = build_run(config, eval_labels=str(tmp_path / "real.json"))
    params = run.init()["params"]
    logits = run.model(params)(*run.task.inputs({"image": pixels}))
    taken = np.asarray(logits).argmax(-1).tolist()
    assert len(set(taken)) > 1
    hits = [label in labels for label, labels in zip(taken, right, strict=True) if labels]
    assert 0 < sum(hits) < len(hits) < 50
    scores = Evaluator(run)(params)
    assert scores["eval/any_label_accuracy"] == pytest.approx(sum(hits) / len(hits), abs=1e-9)
    assert scores["eval/labelled"] == pytest.approx(len(hits) / 50, abs=1e-9)
    own = sum(label == number % 3 for number, label in enumerate(taken))
    assert scores["eval/accuracy"] == pytest.approx(own / 50, abs=1e-9)
    without = Evaluator(build_run(config))(params)
    assert not {"eval/any_label_accuracy", "eval/labelled"} & without.keys()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_layer(tiny_config, tmp_path):
    fields = {"optimizer.name": "sgd", "optimizer.clip_norm": 0.0, "optimizer.learning_rate": 1e6}
    config = tiny_config("multiplicative", **fields, checkpoint_every_steps=1)
    said = r"at step \d of 9: first in the forward pass, at .*Checkpoints kept: \["
    with pytest.raises(training.NonFiniteLossError, match=said) as error:
        fit(config, tmp_path)
    run = build_run(config)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        state = checkpoints.restore(run.abstract_state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))
    assert error.value.exit_code != 0
    assert f"--workdir={tmp_path} --config.non_finite=skip" in str(error.value)
    config.non_finite = "skip"
    _, result = fit(config, tmp_path)
    assert result.step == 9
    assert int(result.state["skipped"]) > 0
    # No step after a batch that was left out is sound for a run that stops at one.
    config.non_finite = "stop"
    with pytest.raises(RunError, match=r"left out \d batches, got 'stop'"):
        fit(config, tmp_path)


def test_what_is_not_finite_is_looked_for_at_its_own_step(tiny_config, tmp_path, monkeypatch):
    whole = Classification.loss

    def loss(self, model, examples, *, rngs):
        found = whole(self, model, examples, rngs=rngs)
        return found._replace(loss=found.loss + jnp.log(self.progress))  # 0 at the first step

    monkeypatch.setattr(Classification, "loss", loss)
    config = tiny_config("multiplicative", **{"model.width": 12})  # no other test's program
    with pytest.raises(training.NonFiniteLossError, match=r"in the forward pass, at .*\(log\)"):
        fit(config, tmp_path)


def test_weights_are_read_unless_there_is_a_checkpoint(tiny_config, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "5").touch()  # which is none
    with pytest.raises(RunError, match="expected a safetensors file in /no/weights"):
        modes.train(tiny_config(init_from="/no/weights"), tmp_path)


@pytest.mark.parametrize(
    ("workdir", "message"),
    [
        ("gs://bucket/run", "mount it"),
        ("{}/file", "got a file at {}/file"),
        ("{}/file/a/b", "choose another"),
        ("{}/" + 30 * ",optimizer.b2=0.9", "name too long; set --workdir"),
    ],
)
def test_a_place_that_can_be_no_directory_is_refused(workdir, message, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=message.format(tmp_path)):
        modes.check_workdir(workdir.format(tmp_path))


def test_a_tilde_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert modes.check_workdir("~/run") == f"{tmp_path}/run"


def test_the_host_waits_for_a_step_only_when_the_next_one_is_under_way(
    tiny_config, tmp_path, monkeypatch
):
    run, events = build_run(tiny_config("multiplicative")), []
    put = training.sharding.put_batch

    class Fetched:
        """A number on the device that notes when the host waits for it."""

        def __init__(self, value):
            self.value = value

        def __bool__(self):
            events.append("fetch")
            return bool(self.value)

    def put_batch(batch, mesh):
        events.append("put")
        return put(batch, mesh)

    def train_step(state, batch, hyper):
        events.append("dispatch")
        state, metrics = run.train_step(state, batch, hyper)
        return state, metrics | {"finite": Fetched(metrics["finite"])}

    monkeypatch.setattr(training.sharding, "put_batch", put_batch)
    Trainer(dataclasses.replace(run, train_step=train_step), tmp_path).fit()
    step = ["put", "dispatch", "fetch"]  # the last of them of the step before
    expected = [*step[:2], *step * (run.num_steps - 1), "fetch"]
    assert events[: len(expected)] == expected


@pytest.mark.slow
def test_a_window_of_steps_is_profiled(tiny_config, tmp_path):
    run, events = build_run(tiny_config("multiplicative")), []
    for window in ((3, 3), (4, 6)):
        run.config.profile_steps = window
        workdir = training.open_workdir(tmp_path / str(window), run.config)
        Trainer(run, workdir).fit()
        (trace,) = (workdir / "profile" / "plugins" / "profile").glob("*/perfetto_trace.json.gz")
        with gzip.open(trace) as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        events.append(names.count("PjitFunction(train_step)"))
    assert events[1] == 3 * events[0] > 0


def test_compiled_programs_are_kept_in_the_users_cache_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    before = jax.config.jax_compilation_cache_dir
    try:
        used = []
        places = ((None, "one"), (None, "another"), (None, "one"), ("elsewhere", "one"))
        places += (("gs://bucket", "one"),)
        for chosen, machine in places:
            monkeypatch.setattr(own_cache, "processor", lambda machine=machine: machine)
            jax.config.update("jax_compilation_cache_dir", chosen)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
            modes.enable_compilation_cache()
            least = 1.0 if chosen == "gs://bucket" else 0.0
            assert jax.config.jax_persistent_cache_min_compile_time_secs == least
            used.append(jax.config.jax_compilation_cache_dir)
        assert {Path(folder).parent for folder in used[:3]} == {tmp_path / "adder_flax" / "jax"}
        assert used[0] == used[2] != used[1]  # processors that share a home do not share code
        assert used[3] == "elsewhere"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # as in conftest.py


@pytest.mark.unchecked  # a source by its length alone
@pytest.mark.parametrize(("num_epochs", "steps"), [(1.1, 11), (1.11, 12), (0.05, 1), (3.0, 30)])
def test_an_epoch_s_fraction_ends_with_the_step_that_it_names(num_epochs, steps):
    """1.1 × 10 is 11.000000000000002."""
    settings = RunSettings(batch_size=1, num_epochs=num_epochs)
    assert _count_steps(settings, range(10)) == (10, steps)
