"""The training and evaluation steps as functions of state and batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from adder_flax.tasks import Classification, ImageFacts, Outcome
from adder_flax.training.optimizers import CurvatureOptimizer
from adder_flax.training.step import _mean, evaluation_params
from tests.training.pieces import BATCH, make_step


class Classifier(nnx.Module):
    """A dense layer with dropout that is told its random numbers."""

    def __init__(self, dropout_rate=0.0, dtype=jnp.float32):
        self.dense = nnx.Linear(6, 4, param_dtype=dtype, rngs=nnx.Rngs(1))
        self.dropout = nnx.Dropout(dropout_rate)

    def __call__(self, images, *, deterministic=True, rngs=None):
        return self.dense(
            self.dropout(images.reshape(len(images), -1), deterministic=deterministic, rngs=rngs)
        )


def _with_curvature():
    """Plain SGD that asks for curvature in the pass of the gradient."""
    sgd = optax.sgd(1.0)
    update = lambda gradient, state, params=None, **curvature: sgd.update(gradient, state, params)
    return CurvatureOptimizer(sgd.init, update, None, "mc", interval=1, stride=1)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("optimizer", "parts"), [(optax.sgd(1.0), 1), (optax.sgd(1.0), 2), (_with_curvature(), 8)]
)
def test_one_sgd_step_against_numpy(optimizer, parts):
    """Of the whole batch or of parts of it, with curvature beside the gradient too."""
    _, step, state = make_step(optimizer, Classifier(), accumulation_steps=parts)
    new, metrics = step(state, BATCH)
    x = BATCH["image"].reshape(8, 6) / 255.0
    weights = {name: np.asarray(p, np.float64) for name, p in state["params"]["dense"].items()}
    logits = x @ weights["kernel"] + weights["bias"]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    targets = np.eye(4)[BATCH["label"]]
    loss = -np.log((probabilities * targets).sum(-1)).mean()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert metrics["task"]["accuracy"] == (logits.argmax(-1) == BATCH["label"]).mean()
    error = (probabilities - targets) / 8
    moved = weights["kernel"] - x.T @ error
    np.testing.assert_allclose(new["params"]["dense"]["kernel"], moved, rtol=1e-5, atol=1e-7)
    norm = np.sqrt(((x.T @ error) ** 2).sum() + (error.sum(0) ** 2).sum())
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert new["step"] == 1


@pytest.mark.unchecked
@pytest.mark.parametrize("optimizer", [optax.sgd(1.0), _with_curvature()], ids=["sgd", "curvature"])
def test_each_microbatch_drops_features_of_its_own(optimizer):
    """With one mask for all eight, half of the features would have no gradient at all."""
    _, step, state = make_step(optimizer, Classifier(0.5), accumulation_steps=8)
    kernel = np.asarray(state["params"]["dense"]["kernel"])
    moved = np.asarray(step(state, BATCH)[0]["params"]["dense"]["kernel"]) != kernel
    assert moved.any(axis=1).all()


def test_the_average_of_narrow_parameters_moves_by_less_than_they_can():
    _, step, state = make_step(optax.sgd(0.0), Classifier(dtype=jnp.bfloat16), ema_decay=0.999)
    state["step"] = jnp.int32(100_000)
    state["params"] = jax.tree.map(jnp.ones_like, state["params"])
    state["ema_params"] = jax.tree.map(jnp.zeros_like, state["ema_params"])
    for _ in range(3):
        state, _ = step(state, BATCH)
    for leaf in jax.tree.leaves(state["ema_params"]):
        np.testing.assert_allclose(leaf, 1 - 0.999**3, rtol=1e-4)
    evaluated = jax.tree.leaves(evaluation_params(state))
    assert {leaf.dtype for leaf in evaluated} == {jnp.dtype(jnp.bfloat16)}


def test_gradients_of_narrow_parameters_are_summed_in_float32():
    """1,024 equal ones: in bfloat16 their sum stops at 256."""
    outcome = Outcome(jnp.float32(0), jnp.zeros(()), {}, model_state={})
    part = lambda *_: ({"g": jnp.bfloat16(1)}, outcome)
    means, _ = _mean(part, jnp.zeros(1024), jax.random.key(0), {}, 1024)
    assert means["g"] == 1


def test_a_batch_without_weight_has_a_loss_of_zero_in_parts_too():
    outcome = Outcome(jnp.float32(0), jnp.zeros(()), {}, jnp.zeros(2), {})
    means, _ = _mean(lambda *_: (jnp.zeros(3), outcome), jnp.zeros(4), jax.random.key(0), {}, 2)
    assert not means.any()


_GOOD = {**BATCH, "image": np.minimum(BATCH["image"], 254)}
_BAD = {**BATCH, "image": np.full_like(BATCH["image"], 255)}


def _poisoned(images):
    return jnp.where(images[0, 0, 0, 0] == 1.0, jnp.nan, images)


@pytest.mark.parametrize("skip", [True, False])
def test_a_step_that_is_not_finite_changes_no_weight_and_no_statistic(skip):
    options = dict(images=_poisoned, skip_non_finite=skip, ema_decay=0.5)
    _, step, state = make_step(optax.adam(0.1), **options)
    before, _ = step(state, _GOOD)
    after, metrics = step(before, _BAD)
    assert not metrics["finite"]
    assert (int(after["step"]), int(after["skipped"])) == (2, 1)
    assert {"params", "opt_state", "ema_params", "model_state", "ema_model_state"} < after.keys()
    for name in after.keys() - {"step", "skipped"}:
        jax.tree.map(np.testing.assert_array_equal, after[name], before[name])
    later, metrics = step(after, _GOOD)
    assert metrics["finite"]
    moved = (later["params"]["head"]["kernel"] != after["params"]["head"]["kernel"]).any()
    assert moved == skip


def test_the_rate_on_record_is_that_of_the_update():
    """After a batch that was left out, too: the optimizer's count does not have it."""
    rate = lambda count: 0.1 * (1 + count)
    options = dict(images=_poisoned, learning_rate=rate, skip_non_finite=True)
    _, step, state = make_step(optax.sgd(rate), **options)
    for each in (_GOOD, _BAD, _GOOD):
        before = state["params"]
        state, metrics = step(state, each)
    moved = jax.tree.map(jnp.subtract, state["params"], before)
    applied = optax.tree.norm(moved) / metrics["grad_norm"]
    np.testing.assert_allclose(metrics["learning_rate"], applied, rtol=1e-5)


@pytest.mark.parametrize(
    ("logits", "labels", "hits", "among_five"),
    [
        (np.zeros((5, 4)), np.zeros(5), 0, None),  # a tie is none
        (np.eye(4)[[0] * 5], np.zeros(5), 3, None),
        (np.full((5, 4), np.nan), np.zeros(5), 0, None),
        (np.arange(5.0)[None].repeat(5, 0), np.array([3, 4, 0, 4, 4]), 1, None),
        (np.arange(6.0)[None].repeat(5, 0), np.array([0, 5, 1, 5, 5]), 1, 2),
    ],
)
def test_evaluation_counts_real_examples_only(logits, labels, hits, among_five):
    """Three of five; whether a class is among five answers where there are more classes."""
    classes = logits.shape[-1]
    facts = ImageFacts((1, 1, 1), classes, mean=(0.0,), std=(1.0,), crops_on_host=False)
    batch = {
        "image": np.zeros((5, 1, 1, 1), np.uint8),
        "label": labels.astype(np.int32),
        "mask": np.arange(5) < 3,
    }

    class Constant(nnx.Module):
        def __call__(self, images):
            return jnp.asarray(logits, jnp.float32)

    sums = Classification(None, facts).sums(Constant(), batch)
    assert (float(sums["count"]), float(sums["accuracy"])) == (3, hits)
    assert sums.get("top5_accuracy") == among_five
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(5), batch["label"]]
    np.testing.assert_allclose(sums["loss"], losses[:3].sum(), rtol=1e-6)
