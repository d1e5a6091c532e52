"""The training and evaluation steps as functions of state and batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from adder_flax.tasks import Classification, ImageFacts
from adder_flax.training import evaluation_params, make_eval_step, make_train_step
from adder_flax.training.optimizers import CurvatureOptimizer
from adder_flax.training.step import Skeleton, init_state
from tests.training.pieces import make_parts


class Classifier(nnx.Module):
    """A dense layer with dropout: the smallest model with everything that the step handles."""

    def __init__(self, dropout_rate=0.0):
        self.dense = nnx.Linear(6, 4, rngs=nnx.Rngs(1))
        self.dropout = nnx.Dropout(dropout_rate)

    def __call__(self, images, *, deterministic=True, rngs=None):
        return self.dense(
            self.dropout(images.reshape(len(images), -1), deterministic=deterministic, rngs=rngs)
        )


def augment(key, images, labels):
    return images.astype(jnp.float32) / 255, jax.nn.one_hot(labels, 4)


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (8, 2, 3, 1), dtype=np.uint8),
        "label": rng.integers(0, 4, 8).astype(np.int32),
    }


def make(optimizer=None, *, model=None, **options):
    optimizer = optimizer or optax.adam(0.1)
    graphdef, params = nnx.split(model or Classifier(), nnx.Param)
    state = init_state(
        nnx.to_pure_dict(params), optimizer=optimizer, ema=options.get("ema_decay", 0) > 0
    )
    parts = make_parts(
        graphdef, options.pop("augment", augment), optimizer, options.pop("ema_decay", 0.0)
    )
    step = jax.jit(make_train_step(parts, **options))
    return lambda state, batch: step(state, batch, {}), state


def _with_curvature():
    """Plain SGD that asks for curvature in the pass of the gradient."""
    sgd = optax.sgd(1.0)
    update = lambda gradient, state, params=None, **curvature: sgd.update(gradient, state, params)
    return CurvatureOptimizer(sgd.init, update, None, "mc", interval=1, stride=1)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("optimizer", "parts"), [(optax.sgd(1.0), 1), (optax.sgd(1.0), 2), (_with_curvature(), 8)]
)
def test_one_sgd_step_against_numpy(batch, optimizer, parts):
    """Of the whole batch or of parts of it, with curvature beside the gradient too."""
    step, state = make(optimizer, accumulation_steps=parts)
    new, metrics = step(state, batch)
    x = batch["image"].reshape(8, 6) / 255.0
    weights = {name: np.asarray(p, np.float64) for name, p in state["params"]["dense"].items()}
    logits = x @ weights["kernel"] + weights["bias"]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    targets = np.eye(4)[batch["label"]]
    np.testing.assert_allclose(
        metrics["loss"], -np.log((probabilities * targets).sum(-1)).mean(), rtol=1e-5
    )
    assert metrics["task"]["accuracy"] == (logits.argmax(-1) == batch["label"]).mean()
    error = (probabilities - targets) / 8
    np.testing.assert_allclose(
        new["params"]["dense"]["kernel"],
        weights["kernel"] - x.T @ error,
        rtol=1e-5,
        atol=1e-7,
    )
    norm = np.sqrt((x.T @ error).__pow__(2).sum() + (error.sum(0) ** 2).sum())
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert new["step"] == 1


@pytest.mark.unchecked
@pytest.mark.parametrize("optimizer", [optax.sgd(1.0), _with_curvature()], ids=["sgd", "curvature"])
def test_each_microbatch_drops_features_of_its_own(batch, optimizer):
    """With one mask for all eight, half of the features would have no gradient at all."""
    step, state = make(optimizer, model=Classifier(dropout_rate=0.5), accumulation_steps=8)
    kernel = np.asarray(state["params"]["dense"]["kernel"])
    moved = np.asarray(step(state, batch)[0]["params"]["dense"]["kernel"]) != kernel
    assert moved.any(axis=1).all()


def test_randomness_is_a_function_of_seed_and_step(batch):
    step, state = make(optax.sgd(0.0), model=Classifier(dropout_rate=0.5))
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert len(set(losses)) == 3
    again = step({**state, "step": jnp.int32(1)}, batch)[1]
    assert float(again["loss"]) == losses[1]


def test_average_of_parameters_against_its_formula(batch):
    step, state = make(ema_decay=0.3)
    average = np.asarray(state["params"]["dense"]["kernel"], np.float64)
    for i in range(4):
        state, _ = step(state, batch)
        decay = min(0.3, (1 + i) / (10 + i))
        average = decay * average + (1 - decay) * np.asarray(state["params"]["dense"]["kernel"])
    np.testing.assert_allclose(state["ema_params"]["dense"]["kernel"], average, rtol=1e-5)
    assert evaluation_params(state) is state["ema_params"]


def test_the_average_of_narrow_parameters_is_as_narrow(batch):
    model = Classifier()
    model.dense.kernel = nnx.Param(model.dense.kernel[...].astype(jnp.bfloat16))
    step, state = make(optax.sgd(0.1), model=model, ema_decay=0.3)
    new, _ = step(state, batch)
    dtypes = lambda state: jax.tree.map(lambda x: x.dtype, state["ema_params"])
    assert dtypes(new) == dtypes(state)


@pytest.mark.parametrize("skip", [True, False])
def test_a_step_that_is_not_finite_changes_no_weight(batch, skip):
    def poisoned(key, images, labels):
        images, targets = augment(key, images, labels)
        return jnp.where(images[0, 0, 0, 0] == 1.0, jnp.nan, images), targets

    step, state = make(augment=poisoned, skip_non_finite=skip, ema_decay=0.5)
    good = {**batch, "image": np.minimum(batch["image"], 254)}
    bad = {**batch, "image": np.full_like(batch["image"], 255)}
    before, _ = step(state, good)
    after, metrics = step(before, bad)
    assert not metrics["finite"]
    assert (int(after["step"]), int(after["skipped"])) == (2, 1)
    weights = lambda state: {name: state[name] for name in ("params", "opt_state", "ema_params")}
    jax.tree.map(np.testing.assert_array_equal, weights(after), weights(before))
    later, metrics = step(after, good)
    assert metrics["finite"]
    moved = (later["params"]["dense"]["kernel"] != after["params"]["dense"]["kernel"]).any()
    assert moved == skip


def test_the_rate_on_record_is_that_of_the_update(batch):
    """After a batch that was left out, too: the optimizer's count does not have it."""
    rate = lambda count: 0.1 * (1 + count)
    optimizer = optax.sgd(rate)
    graphdef, params = nnx.split(Classifier(), nnx.Param)
    poisoned = lambda key, images, labels: augment(key, images / (images.min() < 255), labels)
    parts = make_parts(graphdef, poisoned, optimizer)({})._replace(learning_rate=rate)
    step = jax.jit(make_train_step(lambda hyper: parts, skip_non_finite=True))
    state = init_state(nnx.to_pure_dict(params), optimizer=optimizer, ema=False)
    good = {**batch, "image": np.minimum(batch["image"], 254)}
    bad = {**batch, "image": np.full_like(batch["image"], 255)}
    for each in (good, bad, good):
        before = state["params"]
        state, metrics = step(state, each, {})
    moved = jax.tree.map(jnp.subtract, state["params"], before)
    applied = optax.tree.norm(moved) / metrics["grad_norm"]
    np.testing.assert_allclose(metrics["learning_rate"], applied, rtol=1e-5)


def test_evaluation_counts_real_examples_only_and_ties_against_the_model():
    graphdef, params = nnx.split(Classifier(), nnx.Param)
    params = jax.tree.map(jnp.zeros_like, nnx.to_pure_dict(params))
    facts = ImageFacts((2, 3, 1), 4, mean=(0.0,), std=(1.0,), crops_on_host=False)
    evaluate = jax.jit(
        make_eval_step(Skeleton(graphdef), lambda hyper: Classification(None, facts))
    )
    step = lambda params, batch: evaluate(params, batch, {})
    batch = {
        "image": np.zeros((5, 2, 3, 1), np.uint8),
        "label": np.zeros(5, np.int32),
        "mask": np.array([True, True, True, False, False]),
    }
    sums = step(params, batch)
    assert (float(sums["count"]), float(sums["accuracy"])) == (3.0, 0.0)
    np.testing.assert_allclose(sums["loss"], 3 * np.log(4), rtol=1e-6)
    params["dense"]["bias"] = jnp.array([1.0, 0.0, 0.0, 0.0])
    assert float(step(params, batch)["accuracy"]) == 3.0
    params["dense"]["bias"] = jnp.full(4, jnp.nan)
    assert float(step(params, batch)["accuracy"]) == 0.0


@pytest.mark.parametrize("classes", [5, 6])
def test_among_five_answers_counts_where_there_are_more_classes(classes):
    facts = ImageFacts((1, 1, 1), classes, mean=(0.0,), std=(1.0,), crops_on_host=False)
    logits = jnp.arange(float(classes))[None].repeat(classes, 0)  # the last class first
    batch = {
        "image": np.zeros((classes, 1, 1, 1), np.uint8),
        "label": np.arange(classes),
        "mask": np.ones(classes, bool),
    }

    class Constant(nnx.Module):
        def __call__(self, images):
            return logits

    sums = Classification(None, facts).sums(Constant(), batch)
    assert float(sums["accuracy"]) == 1
    assert float(sums.get("top5_accuracy", -1)) == (5 if classes > 5 else -1)
