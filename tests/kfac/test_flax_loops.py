"""Flax's own training loops with curvature: ``nnx.Optimizer``, ``TrainState``, batch statistics."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import kfac
from tests.kfac.reference import F64, flatten, matrices, normal

LABELS = jnp.arange(6) % 3


def losses_of(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# ---- Batch normalisation: tensorflow/kfac#11, gpauloski/kfac-pytorch#23


class Normalized(nnx.Module):
    def __init__(self):
        self.fc = nnx.Linear(3, 4, **F64, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, dtype=jnp.float64, **F64, rngs=nnx.Rngs(1))
        self.head = nnx.Linear(4, 3, **F64, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.head(jnp.tanh(self.norm(self.fc(x))))


class LinenNormalized(nn.Module):
    training: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, **F64, name="fc")(x)
        norm = nn.BatchNorm(not self.training, dtype=jnp.float64, **F64, name="norm")
        return nn.Dense(3, **F64, name="head")(jnp.tanh(norm(x)))


def normalized_nnx(training):
    model = Normalized()
    model.norm.mean[...], model.norm.var[...] = normal(1, 4), normal(2, 4) ** 2
    (model.train if training else model.eval)()
    graphdef, state, rest = nnx.split(model, nnx.Param, ...)
    rest = nnx.as_pure(rest)
    return lambda p, x: nnx.merge(graphdef, p, rest)(x), nnx.to_pure_dict(state)


def normalized_linen(training):
    model = LinenNormalized(training)
    variables = model.init(jax.random.key(0), normal(0, 6, 3))
    state = {"batch_stats": {"norm": {"mean": normal(1, 4), "var": normal(2, 4) ** 2}}}
    apply = lambda p, x: model.apply({"params": p, **state}, x, mutable=["batch_stats"])[0]
    return apply, variables["params"]


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("make", [normalized_nnx, normalized_linen])
def test_scale_and_bias_of_batch_norm_have_curvature(make, training):
    apply, params = make(training)
    params["norm"] = {"bias": normal(3, 4), "scale": normal(4, 4)}
    x = normal(5, 6, 3)

    def loss_fn(params, x, labels):
        logits = apply(params, x)
        return losses_of(logits, labels).mean(), logits

    requests = [("norm", "exact"), ("head", "exact")]
    found, curvature = matrices(loss_fn, params, x, LABELS, requests)
    assert curvature.layers.coverage == 1.0
    # Every example's own loss, but in its batch, whose statistics it shares.
    each = jax.jacrev(lambda params: losses_of(apply(params, x), LABELS))(params)
    for (name, _), matrix in zip(requests, found, strict=True):
        paths = [p.path for p in curvature.layers.blocks[name].params]
        u = np.concatenate([np.reshape(flatten(each)[path], (6, -1)) for path in paths], axis=1)
        expected = u.T @ u / 6
        np.testing.assert_allclose(matrix[0], expected, atol=1e-12 * np.abs(expected).max())
    assert curvature.layers.blocks["norm"].factored


def test_batch_norm_along_another_axis_says_why_it_has_none():
    model = nnx.BatchNorm(4, axis=1, rngs=nnx.Rngs(0))
    loss_fn = lambda model, x: model(x).mean()
    with pytest.warns(UserWarning, match="it holds state"):
        layers = kfac.find_layers(loss_fn, model, jnp.ones((6, 4, 2)))
    assert "fallback (it holds state" in str(layers)


# ---- nnx.Optimizer: google/flax#4144, google/flax#4545


class Small(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(4, 3, rngs=nnx.Rngs(1))
        self.free = nnx.Param(jnp.ones(()))  # for the fallback

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x))) * self.free[...]


def loss_of(model, x, labels):
    logits = model(x)
    return losses_of(logits, labels).mean(), logits


KEY = jax.random.key(0)
X = jax.random.normal(KEY, (6, 3))
VALUE_GRAD = kfac.value_grad_and_curvature(loss_of, fisher="ggn", has_aux=True)


@functools.cache
def reference_run():
    """Two steps of a pure dict under optax's own loop."""
    graphdef, state = nnx.split(Small())
    params = nnx.to_pure_dict(state)
    loss_fn = lambda p, x, y: loss_of(nnx.merge(graphdef, p), x, y)
    optimizer = kfac.kfac(0.1, kfac.find_layers(loss_fn, params, X, LABELS), step="share")
    function = kfac.value_grad_and_curvature(loss_fn, fisher="ggn", has_aux=True)

    @jax.jit
    def step(params, opt_state, key):
        (loss, _), grads, curvature = function(params, X, LABELS, key=key)
        updates, opt_state = optimizer.update(grads, opt_state, params, curvature=curvature)
        return optax.apply_updates(params, updates), opt_state

    opt_state = optimizer.init(params)
    for i in range(2):
        params, opt_state = step(params, opt_state, jax.random.key(i))
    return params


@pytest.mark.cases(2)
@pytest.mark.parametrize("found_of", ["module", "state", "pure state", "dict"])
def test_nnx_optimizer(found_of):
    model = Small()
    graphdef, state = nnx.split(model)
    pure = lambda p, x, y: loss_of(nnx.merge(graphdef, p), x, y)
    tree = {"state": state, "pure state": nnx.as_pure(state), "dict": nnx.to_pure_dict(state)}
    found = (loss_of, model) if found_of == "module" else (pure, tree[found_of])
    layers = kfac.find_layers(*found, X, LABELS)
    assert list(layers.blocks) == ["first", "last"]
    optimizer = nnx.Optimizer(model, kfac.kfac(0.1, layers, step="share"), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, key):
        (loss, _), grads, curvature = VALUE_GRAD(model, X, LABELS, key=key)
        optimizer.update(model, grads, curvature=curvature)

    for i in range(2):
        step(model, optimizer, jax.random.key(i))
    expected = reference_run()
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        nnx.to_pure_dict(nnx.state(model)),
        expected,
    )
    assert float(kfac.telemetry(nnx.as_pure(optimizer.opt_state))["kfac/damping"]) > 0


@pytest.mark.slow
def test_options_see_the_aux_of_a_function_of_modules():
    model = Small()
    graphdef, state = nnx.split(model)
    mask = jnp.array([1.0, 1.0, 0.0, 0.5, 1.0, 0.0])

    def masked(model, x, labels):
        logits = model(x)
        return jnp.average(losses_of(logits, labels), weights=mask), {"z": logits, "w": mask}

    options = dict(has_aux=True, outputs=lambda aux: aux["z"], weights=lambda aux: aux["w"])

    def captured(loss_fn, params):
        function = kfac.value_grad_and_curvature(loss_fn, **options)
        return dict(jax.jit(lambda p: function(p, X, LABELS, key=KEY)[2])(params).captured)

    pure = captured(lambda p, *args: masked(nnx.merge(graphdef, p), *args), state)
    jax.tree.map(np.testing.assert_array_equal, captured(masked, model), pure)
    alone = kfac.curvature(masked, **options)(model, X, LABELS, key=KEY)
    assert list(alone.captured) == ["first", "last"]


# ---- A convolutional network with dropout and batch normalisation, as in Flax's first example


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.025)
        self.fc = nnx.Linear(4 * 4 * 8, 32, rngs=rngs)
        self.late = nnx.Dropout(0.025, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = nnx.relu(self.norm(self.dropout(self.conv(x), rngs=rngs)))
        x = nnx.avg_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        return self.head(self.late(nnx.relu(self.fc(x))))


def digits_loss(model, batch, rngs):
    logits = model(batch["image"], rngs)
    return losses_of(logits, batch["label"]).mean(), logits


@pytest.mark.slow
def test_digits_with_dropout_and_batch_norm():
    digits = load_digits()
    images, labels = digits.images[..., None].astype(np.float32) / 16, digits.target
    batch = lambda i: {"image": images[i::14][:128], "label": labels[i::14][:128]}
    model, rngs = CNN(nnx.Rngs(0)), nnx.Rngs(0, dropout=1)
    layers = kfac.find_layers(digits_loss, model, batch(0), rngs)
    assert layers.coverage == 1.0
    optimizer = nnx.Optimizer(model, kfac.kfac(1e-2, layers), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    function = kfac.value_grad_and_curvature(digits_loss, has_aux=True)

    @nnx.jit
    def train_step(model, optimizer, metrics, batch, rngs, key):
        (loss, logits), grads, curvature = function(model, batch, rngs, key=key)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads, curvature=curvature)

    model.train()
    losses = []
    for i in range(12):
        train_step(model, optimizer, metrics, batch(i), rngs, jax.random.key(i))
        losses.append(float(metrics.compute()["loss"]))
        metrics.reset()
    assert losses[-1] < 0.5 * losses[0]
    assert rngs.dropout.count[...] == 12
    assert model.late.rngs.count[...] == 12
    assert np.abs(model.norm.mean[...]).max() > 0
    model.eval()
    held_out = batch(13)
    accuracy = (model(held_out["image"]).argmax(-1) == held_out["label"]).mean()
    assert accuracy > 0.8


# ---- Linen's TrainState: google/flax#4471


class CurvatureState(TrainState):
    """A ``TrainState`` that hands what stands beside the gradient on to the optimizer."""

    def apply_gradients(self, *, grads, curvature, **fields):
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params, curvature=curvature)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **fields)


@functools.cache
def trained():
    """A state after two steps, the one before them, and the losses."""
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), X)["params"]

    def loss_fn(params, x, labels):
        logits = model.apply({"params": params}, x)
        return losses_of(logits, labels).mean(), logits

    optimizer = kfac.kfac(1.0, kfac.find_layers(loss_fn, params, X, LABELS))
    first = state = CurvatureState.create(apply_fn=model.apply, params=params, tx=optimizer)
    function = kfac.value_grad_and_curvature(loss_fn, fisher="ggn", has_aux=True)

    @jax.jit
    def step(state, key):
        (loss, _), grads, curvature = function(state.params, X, LABELS, key=key)
        return state.apply_gradients(grads=grads, curvature=curvature), loss

    losses = []
    for i in range(3):
        state, loss = step(state, jax.random.key(i))
        losses.append(float(loss))
    return state, first, losses


def test_linen_train_state():
    state, _, losses = trained()
    assert losses[-1] < losses[0]
    assert int(state.step) == int(kfac.find_state(state.opt_state).count) == 3


def test_the_state_is_stored_by_flax_serialization():
    state, first, _ = trained()
    restored = flax.serialization.from_bytes(first, flax.serialization.to_bytes(state))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
