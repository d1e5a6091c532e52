"""Classification: both losses against their formulas, and what second-order optimizers take for
their curvature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from ml_collections import ConfigDict

from adder_flax.experiments import common
from adder_flax.settings import ClassificationSettings, RunSettings, SettingsError, defaults, read
from adder_flax.tasks import TASKS, call_to_train
from adder_flax.tasks._classification import is_any_label
from adder_flax.tasks._distillation import DistillationSettings
from kfac.curvature._fisher import get_likelihood, output_cotangents
from tests.training.tiny import TINY

LOGITS = np.random.default_rng(0).normal(0, 2, (3, 4))
TARGETS = np.array([[0, 1, 0, 0], [0.3, 0, 0, 0.7], [0, 0, 1, 0]], np.float32)


def task(loss):
    return TASKS.get("classification")(ClassificationSettings(loss=loss, label_smoothing=0.0), None)


def outcome(loss):
    says_the_same = lambda images, **_: jnp.asarray(LOGITS, jnp.float32)
    images = jnp.zeros((len(TARGETS), 2, 2, 1))
    return task(loss).loss(says_the_same, (images, jnp.asarray(TARGETS)), rngs=nnx.Rngs(0))


def by_formula(loss, logits=LOGITS):
    if loss == "softmax":
        return -(TARGETS * (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))).sum(-1).mean()
    probability = 1 / (1 + np.exp(-logits))
    return -np.log(np.where(TARGETS > 0, probability, 1 - probability)).mean()


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_loss_is_its_formula(loss):
    np.testing.assert_allclose(outcome(loss).loss, by_formula(loss), rtol=1e-6)
    assert outcome(loss).metrics["accuracy"] == np.mean(LOGITS.argmax(-1) == TARGETS.argmax(-1))


def test_the_curvature_of_the_sigmoid_loss_is_its_hessian():
    """Second differences of the mean over classes and examples, times the examples: a Hessian for
    each of them."""
    likelihood = get_likelihood(task("sigmoid").likelihood)
    columns = output_cotangents("ggn", likelihood, outcome("sigmoid").outputs, jax.random.key(0), 1)
    second, step = np.zeros(LOGITS.shape), 1e-3
    for place in np.ndindex(*LOGITS.shape):
        moved = np.zeros(LOGITS.shape)
        moved[place] = step
        below, here, above = (by_formula("sigmoid", LOGITS + n * moved) for n in (-1, 0, 1))
        second[place] = len(LOGITS) * (below - 2 * here + above) / step**2
    np.testing.assert_allclose(np.square(columns[0, ..., 0]), second, rtol=1e-4, atol=1e-8)


def test_a_tie_with_a_wrong_class_and_nan_are_no_hits():
    nan, none = float("nan"), [False] * 3
    logits = jnp.array([[2.0, 2.0, 1.0], [2.0, 2.0, 1.0], [nan, 2.0, 1.0], [2.0, nan, 1.0], none])
    right = jnp.array([[1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0], none], bool)
    assert is_any_label(logits, right).tolist() == [False, True, False, False, False]


def test_a_model_that_hands_on_what_it_is_called_with_trains():
    rngs, hands_on = nnx.Rngs(0), lambda images, **options: options
    assert call_to_train(hands_on, None, rngs=rngs) == {"deterministic": False, "rngs": rngs}
    layers = nnx.Sequential(nnx.Linear(2, 2, rngs=rngs), nnx.Dropout(0.5))
    assert (call_to_train(layers, jnp.ones((9, 2)), rngs=rngs) == 0).any()


class Told(nnx.Module):
    """A model that has to be told that it trains, under one of the names that Flax code has."""

    def __init__(self):
        self.norm, self.dropout = nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)

    def _call(self, x, trains, rngs):
        normed = self.norm(x, use_running_average=not trains)
        return self.dropout(normed, deterministic=not trains, rngs=rngs)


class Train(Told):
    def __call__(self, x, train=False, rngs=None):
        return self._call(x, train, rngs)


class IsTraining(Told):
    def __call__(self, x, *, rngs=None, is_training: bool):
        return self._call(x, is_training, rngs)


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, x, training: bool = False):
        x = linen.BatchNorm(use_running_average=not training)(x)
        return linen.Dropout(0.5, deterministic=not training)(x)


def bridged():
    return nnx.bridge.ToNNX(OfLinen(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 2)))


@pytest.mark.parametrize("make", [Train, IsTraining, bridged])
def test_a_model_is_told_that_it_trains_by_the_name_that_it_has_for_it(make):
    model, x = make(), jax.random.normal(jax.random.key(0), (9, 2)) + 3
    output = call_to_train(model, x, rngs=nnx.Rngs(dropout=1))
    assert 0 < (output == 0).sum() < output.size
    means = [leaf for leaf in jax.tree.leaves(nnx.state(model, nnx.BatchStat)) if leaf[0] != 0]
    np.testing.assert_allclose(means[0], 0.01 * x.mean(0), rtol=1e-5)


def test_a_model_that_trains_when_it_is_not_told_is_refused():
    with pytest.raises(ValueError, match="got train=True by default; give train the default False"):
        call_to_train(lambda x, train=True: x, None, rngs=nnx.Rngs(0))


def test_smoothing_and_a_teacher_are_refused_with_the_sigmoid_loss():
    config = common.deit("multiplicative", "tiny")
    config.update_from_flattened_dict(TINY | {"task.loss": "sigmoid", "task.label_smoothing": 0.1})
    said = r"label_smoothing: expected 0 with .*loss='sigmoid'.*got 0.1"
    with pytest.raises(SettingsError, match=said):
        read(RunSettings, config)
    own = {"teacher": "somewhere", "loss": "sigmoid", "label_smoothing": 0.0}
    config.task = ConfigDict(defaults(DistillationSettings) | own)
    with pytest.raises(SettingsError, match="loss: expected 'softmax'.*got 'sigmoid'"):
        read(RunSettings, config)
