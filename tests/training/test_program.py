"""Runs that differ in numbers alone share one program: nothing is compiled for the second, and its
numbers count."""

import contextlib

import jax
import numpy as np
import pytest

from adder_flax import data, training
from adder_flax.training import Trainer, build_run, read_metrics
from adder_flax.training.sharding import put_batch

# Every number of the settings that an experiment may vary, on.
ON = {
    "ema_decay": 0.9,
    "model.dropout_rate": 0.1,
    "model.attention_dropout_rate": 0.1,
    "model.drop_path_rate": 0.1,
    "model.depth": 2,
    "optimizer.warmup_epochs": 0.02,  # one step
    "task.flip_probability": 0.5,
    "task.mixup_alpha": 0.8,
    "task.cutmix_alpha": 1.0,
    "task.erase_probability": 0.25,
    "task.color_jitter": 0.1,
    "task.label_smoothing": 0.1,
}
OTHER = {
    "seed": 7,
    "num_epochs": 0.3,
    "ema_decay": 0.05,  # the decay of a short history is at most 1/10
    "model.dropout_rate": 0.3,
    "model.attention_dropout_rate": 0.4,
    "model.drop_path_rate": 0.2,
    "optimizer.learning_rate": 0.02,
    "optimizer.final_learning_rate": 1e-4,
    "optimizer.warmup_epochs": 0.05,
    "optimizer.weight_decay": 0.0,
    "optimizer.b1": 0.8,
    "optimizer.b2": 0.9,
    "optimizer.clip_norm": 0.5,
    "task.flip_probability": 0.1,
    "task.mixup_alpha": 0.3,
    "task.cutmix_alpha": 0.4,
    "task.mix_probability": 0.5,
    "task.erase_probability": 0.5,
    "task.color_jitter": 0.4,
    "task.label_smoothing": 0.3,
}


@contextlib.contextmanager
def compilations():
    """The events of lowering and compiling within a ``with`` block."""
    events = []

    def listen(event, duration, **unused):
        if "backend_compile" in event or "jaxpr_to_mlir" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def changed(config, fields):
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(fields)
    return config


def fit(config, workdir):
    return Trainer(build_run(config), training.open_workdir(workdir, config)).fit()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("optimizer", "numbers"),
    [
        ("adamw", {}),
        ("sgd", {"momentum": 0.5}),
        ("kfac", {"kfac.learning_rate": 0.5, "kfac.damping": 1.0, "kfac.kl_clip": 1e-4}),
    ],
)
def test_another_seed_and_other_rates_compile_nothing(optimizer, numbers, tiny_config, tmp_path):
    # Of its steps the one that reads every number.
    chosen = {"optimizer.name": optimizer, "optimizer.kfac.step": "clip"}
    first = tiny_config("multiplicative", **ON, **chosen)
    with compilations() as events:
        fit(first, tmp_path / "first")
    assert events
    every = OTHER | {f"optimizer.{name}": value for name, value in numbers.items()}
    for i, fields in enumerate(({"seed": 1}, {"optimizer.learning_rate": 0.01}, every)):
        with compilations() as events:
            fit(changed(first, fields), tmp_path / str(i))
        assert not events, fields
    losses = {
        tuple(row["train/loss"] for row in read_metrics(path)[:9]) for path in tmp_path.iterdir()
    }
    assert len(losses) == 4


@pytest.mark.slow
def test_every_number_counts(tiny_config):
    """A number that is data reaches the step: each changes what three steps give, from what the
    shared program gave."""
    base = tiny_config("multiplicative", **ON)

    def after_three_steps(**fields):
        run = build_run(changed(base, fields))
        batches, state = data.TrainPipeline(run.train_source, base.batch_size, 0), run.init()
        for i in range(3):
            state, metrics = run.train_step(state, put_batch(batches[i], run.mesh), run.hyper)
        leaves = jax.tree.leaves((training.evaluation_params(state), metrics["learning_rate"]))
        return np.concatenate([np.ravel(leaf) for leaf in leaves])

    expected = after_three_steps()
    np.testing.assert_array_equal(after_three_steps(), expected)
    for name, value in OTHER.items():
        assert (after_three_steps(**{name: value}) != expected).any(), name


def test_numbers_that_are_off_are_left_out_of_the_program(tiny_config):
    on, off = build_run(tiny_config(**ON)), build_run(tiny_config())
    assert on.program is not off.program
    assert "drop_path_rate" in on.numbers["model"]
    assert not off.numbers["model"]
    assert "ema_params" not in off.abstract_state
    assert build_run(tiny_config(seed=3)).program is off.program


@pytest.mark.parametrize(
    "fields",
    [
        {"model.dropout_rate": 0.2, "model.attention_dropout_rate": 0.2, "model.key_block": "8"},
        {"model.drop_path_rate": 0.4, "model.depth": 2},
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_the_shared_program_gives_what_its_own_would(fields, remat, tiny_config, monkeypatch):
    """The second run of a program against the first of another one: numbers are nowhere kept from
    the first run."""
    other = {name: value / 2 for name, value in fields.items() if "rate" in name}

    def loss(run):
        batch = put_batch(data.TrainPipeline(run.train_source, 32, 0)[0], run.mesh)
        return run.train_step(run.init(), batch, run.hyper)[1]["loss"]

    config = tiny_config("multiplicative", **fields, **{"model.remat": remat})
    shared = build_run(config)
    first = loss(shared)
    config = changed(config, other)
    second = build_run(config)
    assert second.program is shared.program
    monkeypatch.setattr(training.program, "_PROGRAMS", {})
    alone = build_run(config)
    assert alone.program is not shared.program
    assert float(loss(second)) == pytest.approx(float(loss(alone)), rel=1e-6)
    assert float(loss(second)) != float(first)
