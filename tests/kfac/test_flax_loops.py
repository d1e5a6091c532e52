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

import kfac
from tests.kfac.reference import F64, close, empirical, flatten, matrices, normal

LABELS = jnp.arange(6) % 3


losses_of = optax.softmax_cross_entropy_with_integer_labels


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

    names = ("norm", "head")
    found, curvature = matrices([(n, "exact") for n in names], loss_fn, params, x, LABELS)
    assert curvature.layers.coverage == 1.0
    # Every example's own loss, but in its batch, whose statistics it shares.
    each = flatten(jax.jacrev(lambda params: losses_of(apply(params, x), LABELS))(params))
    for name, matrix in zip(names, found, strict=True):
        paths = [p.path for p in curvature.layers.blocks[name].params]
        u = np.concatenate([np.reshape(each[path], (6, -1)) for path in paths], axis=1)
        expected = u.T @ u / 6
        close(matrix[0], expected, atol=1e-12 * np.abs(expected).max())
    assert curvature.layers.blocks["norm"].factored


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


@functools.cache
def reference_run():
    """Two steps of a pure dict under optax's own loop."""
    graphdef, state = nnx.split(Small())
    params = nnx.to_pure_dict(state)
    loss_fn = lambda p, x, y: loss_of(nnx.merge(graphdef, p), x, y)
    optimizer = kfac.kfac(0.1, kfac.find_layers(loss_fn, params, X, LABELS), step="share")
    function = empirical(loss_fn, fisher="ggn")

    @jax.jit
    def step(params, opt_state, key):
        _, grads, curvature = function(params, X, LABELS, key=key)
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
    function = empirical(loss_of, fisher="ggn")

    @nnx.jit
    def step(model, optimizer, key):
        _, grads, curvature = function(model, X, LABELS, key=key)
        optimizer.update(model, grads, curvature=curvature)

    for i in range(2):
        step(model, optimizer, jax.random.key(i))
    close(nnx.to_pure_dict(nnx.state(model)), reference_run(), rtol=1e-4, atol=1e-6)
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
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.025)
        self.head = nnx.Linear(4 * 4 * 8, 10, rngs=rngs)
        self.late = nnx.Dropout(0.025, rngs=rngs)

    def __call__(self, x, rngs):
        x = nnx.relu(self.norm(self.dropout(self.conv(x), rngs=rngs)))
        return self.head(self.late(x.reshape(len(x), -1)))


def images_loss(model, batch, rngs):
    logits = model(batch["image"], rngs)
    return losses_of(logits, batch["label"]).mean(), logits


@pytest.mark.slow
def test_statistics_and_streams_move_as_without_curvature():
    images, labels = jax.random.normal(KEY, (2, 16, 4, 4, 1)), jnp.arange(16) % 10
    first = {"image": images[0], "label": labels}
    assert kfac.find_layers(images_loss, CNN(), first, nnx.Rngs(0)).coverage == 1.0
    function = kfac.value_grad_and_curvature(images_loss, has_aux=True)
    ends = []
    for gradient in (
        lambda *args: function(*args, key=KEY)[:2],
        nnx.value_and_grad(images_loss, has_aux=True),
    ):
        step, model, rngs = nnx.jit(gradient), CNN(), nnx.Rngs(0, dropout=1)
        found = [step(model, {"image": x, "label": labels}, rngs) for x in images]
        counts = rngs.dropout.count[...], model.late.rngs.count[...]
        assert counts == (2, 2)
        ends.append((jax.tree.leaves(found), model.norm.mean[...], model.norm.var[...]))
    close(*ends, rtol=1e-4, atol=1e-6)
    assert np.abs(ends[0][1]).max() > 0


# ---- Linen's TrainState: google/flax#4471


class CurvatureState(TrainState):
    """A ``TrainState`` that hands what stands beside the gradient on to the optimizer."""

    def apply_gradients(self, *, grads, curvature):
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params, curvature=curvature)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state)


def test_linen_train_state_and_its_serialization():
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), X)["params"]
    loss_fn = lambda params, *args: loss_of(lambda x: model.apply({"params": params}, x), *args)
    optimizer = kfac.kfac(1.0, kfac.find_layers(loss_fn, params, X, LABELS))
    first = state = CurvatureState.create(apply_fn=model.apply, params=params, tx=optimizer)
    function = empirical(loss_fn, fisher="ggn")

    @jax.jit
    def step(state, key):
        (loss, _), grads, curvature = function(state.params, X, LABELS, key=key)
        return state.apply_gradients(grads=grads, curvature=curvature), loss

    losses = []
    for i in range(3):
        state, loss = step(state, jax.random.key(i))
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert int(state.step) == int(kfac.find_state(state.opt_state).count) == 3

    restored = flax.serialization.from_bytes(first, flax.serialization.to_bytes(state))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
