"""Taps under JAX's transformations, and the Fisher matrices that the extra pull-back gives."""

import dataclasses
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx  # noqa: F401  both adapters are in use

import kfac
from tests.kfac.reference import (
    check_exact_blocks,
    close,
    cross_entropy,
    empirical,
    matrices,
    normal,
    random,
    tap,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_what_is_replaced_comes_back_when_an_adapter_fails(monkeypatch):
    """A version of Flax without what the NNX adapter replaces, which comes after
    ``jax.lax.scan``."""
    scan, conv = jax.lax.scan, nnx.Conv.__call__
    mean = lambda p, x: kfac.tap(kfac.Dense(), p, x, path="").mean()
    find = lambda loss_fn=mean: kfac.find_layers(loss_fn, {"kernel": jnp.ones((3, 2))}, X)
    find()  # loads the adapters
    with monkeypatch.context() as patch:
        patch.delattr(nnx.Linear, "__call__")
        with pytest.raises(RuntimeError, match="expected Linear to define '__call__'"):
            find()
    assert jax.lax.scan is scan
    find()  # and captures go on working
    with pytest.raises(ZeroDivisionError):  # in the loss itself
        find(lambda p, x: 1 / 0)
    assert jax.lax.scan is scan
    assert nnx.Conv.__call__ is conv


def layer(params, x, path):
    return jnp.tanh(kfac.tap(kfac.Dense(), params, x, path=path))


SHAPES = {"kernel": (3, 3), "bias": (3,)}
PARAMS = {"l": random(SHAPES)}
STACK = {"stack": random({name: (2, *shape) for name, shape in SHAPES.items()})}
X = normal(7, 4, 2, 3)
LABELS = jnp.arange(4) % 3


def pool(x, labels):
    return cross_entropy(x.mean(-2), labels)


def stacked(params, x):
    return layer(params, x, "stack")


def scan(layer, params, x):
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["stack"])[0]


def side_by_side(layer, params, x):
    return jax.vmap(layer, (0, None))(params["stack"], x).sum(0)


OVER_LAYERS = {
    "scan": lambda p, x: scan(stacked, p, x),
    "remat in scan": lambda p, x: scan(jax.checkpoint(stacked), p, x),
    "jit in scan": lambda p, x: scan(jax.jit(stacked), p, x),
    "scan in vmap": jax.vmap(functools.partial(scan, stacked), (None, 0)),
    "vmap in vmap": jax.vmap(functools.partial(side_by_side, stacked), (None, 0)),
    "jit in vmap": jax.vmap(functools.partial(side_by_side, jax.jit(stacked)), (None, 0)),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", list(OVER_LAYERS))
def test_transformations(name):
    loss_fn = lambda params, x, labels: pool(OVER_LAYERS[name](params, x), labels)
    layers = check_exact_blocks(loss_fn, STACK, X, LABELS, blocks={"stack": 2})
    assert layers.coverage == 1.0


@jax.checkpoint
def rematerialised_globally(params, x):
    return layer(params, x, "l")


@pytest.mark.slow
def test_functions_that_jax_has_cached_are_traced_anew():
    loss_fn = lambda p, x, y: pool(rematerialised_globally(p["l"], x), y)
    jax.grad(lambda p: loss_fn(p, X, LABELS)[0])(PARAMS)  # in the cache without taps
    check_exact_blocks(loss_fn, PARAMS, X, LABELS, blocks={"l": 1})
    check_exact_blocks(loss_fn, PARAMS, X, LABELS, blocks={"l": 1})  # taps of another trace


def test_flags_and_functions_among_the_arguments_stay_what_they_are():
    def loss_fn(params, x, labels, training, activation):
        x = activation(tap(params, x, "l"))
        return pool(2 * x if training else x, labels)

    args = PARAMS, X, LABELS, True, jnp.tanh
    assert kfac.find_layers(loss_fn, *args).coverage == 1.0
    close(empirical(loss_fn)(*args)[1], jax.grad(loss_fn, has_aux=True)(*args)[0], rtol=1e-12)


@pytest.mark.slow
def test_networks_that_are_trained_beside_each_other_have_their_own_curvature():
    """A vmap around the gradient of a loss that has vmaps over examples and layers itself."""
    networks = jax.tree.map(lambda p: jnp.stack([p, -2 * p, 3 * p]), STACK)
    function = empirical(lambda params, x: pool(OVER_LAYERS["vmap in vmap"](params, x), LABELS))
    captured = lambda params: function(params, X)[2].captured
    alone = [captured(jax.tree.map(lambda p, i=i: p[i], networks)) for i in range(3)]
    close(jax.vmap(captured)(networks), jax.tree.map(lambda *a: jnp.stack(a), *alone), rtol=1e-12)


def test_original_scan_needs_the_other_name():
    from jax.lax import scan as kept

    def with_kfac(p, x, y):
        return pool(kfac.scan(lambda x, q: (layer(q, x, "stack"), None), x, p["stack"])[0], y)

    check_exact_blocks(with_kfac, STACK, X, LABELS, blocks={"stack": 2})
    summed = lambda c, x: (c + x, c)
    scans = [f(summed, 0, jnp.arange(3))[1] for f in (kfac.scan, kept)]
    np.testing.assert_array_equal(*scans)


def test_other_threads_see_no_taps():
    release, inside = threading.Event(), threading.Event()

    def slow(params, x, labels):
        inside.set()
        release.wait(60)
        return pool(layer(params["l"], x, "l"), labels)

    def work():
        with jax.enable_x64(True):
            return kfac.find_layers(slow, PARAMS, X, LABELS)

    with ThreadPoolExecutor() as threads:
        layers = threads.submit(work)
        inside.wait(60)
        y = layer(PARAMS["l"], X, "l")  # no capture on this thread: nothing recorded, none raised
        total = jax.lax.scan(lambda c, x: (c + x.sum(), None), 0.0, X)[0]
        release.set()
    assert y.shape == X.shape
    close(total, X.sum())
    assert list(layers.result().blocks) == ["l"]


DENSE = {"l": {"kernel": normal(1, 3, 4)}}


def categorical(params, x, labels):
    return cross_entropy(tap(params, x, "l"), labels)


def fisher_block(fisher, key=None, **options):
    options |= dict(key=key, fisher=fisher)
    (block,), _ = matrices([("l", "exact")], categorical, DENSE, X[:, 0], LABELS, **options)
    return block[0]


def gauss_newton(loss_of_outputs):
    """Σ_n J_nᵀ H_n J_n / N of the dense layer, by JAX's own Hessian."""
    loss = lambda kernel: jax.vmap(loss_of_outputs)(X[:, 0] @ kernel).mean()
    return jax.jit(jax.hessian(loss))(DENSE["l"]["kernel"]).reshape(12, 12)


LOSSES = {
    "categorical": lambda z: -jax.nn.log_softmax(z)[0],
    "bernoulli": lambda z: jnp.logaddexp(0, z).sum(),
    "gaussian": lambda z: 0.5 * (z**2).sum(),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("likelihood", list(LOSSES))
def test_enumeration_is_the_gauss_newton_matrix(likelihood):
    block = fisher_block("enumerate", likelihood=likelihood)
    close(block, gauss_newton(LOSSES[likelihood]), rtol=1e-11, atol=1e-15)


@pytest.mark.cases(2)
@pytest.mark.parametrize("likelihood", list(LOSSES))
@pytest.mark.parametrize("fisher", ["mc", "ggn"])
def test_draws_average_to_the_gauss_newton_matrix(fisher, likelihood):
    expected = gauss_newton(LOSSES[likelihood])

    def error(num_samples):
        options = dict(likelihood=likelihood, num_samples=num_samples)
        block = fisher_block(fisher, jax.random.key(0), **options)
        return np.linalg.norm(block - expected) / np.linalg.norm(expected)

    least = error(10000)
    assert least < 0.05
    assert least < error(100) / 3  # 1/√100 of it, on average


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_labels_are_drawn_as_often_as_narrow_logits_say(dtype):
    rare, count = 0.002, 20000  # of each but the first of 21 classes
    logits = np.log([1 - 20 * rare, *[rare] * 20])

    def loss_fn(params, x):
        z = kfac.tap(kfac.Dense(), params, x, path="")
        return -jax.nn.log_softmax(z)[:, 0].mean(), z

    params, x = {"kernel": jnp.asarray(logits[None], dtype)}, jnp.ones((count, 1), dtype)
    function = kfac.value_grad_and_curvature(loss_fn, has_aux=True)
    captured = function(params, x, key=jax.random.key(0))[2].captured
    ((_, cotangents),) = captured.values()  # p − e of the label that was drawn
    drawn = (np.asarray(cotangents[0]).argmin(-1) > 0).mean()
    assert abs(drawn - 20 * rare) < 5 * (20 * rare / count) ** 0.5


def test_refresh_switches_the_extra_pullback_off():
    args, key = (DENSE, X[:, 0], LABELS), {"key": jax.random.key(0)}
    function = kfac.value_grad_and_curvature(categorical, has_aux=True)
    run = jax.jit(lambda refresh: function(*args, **key, refresh=refresh))
    always = function(*args, **key)
    for refresh in (True, False):
        _, grads, curvature = run(refresh)
        x, g = curvature.captured["l"]
        close(grads, always[1], rtol=1e-12)
        np.testing.assert_array_equal(x, X[:, 0])
        close(g, always[2].captured["l"][1] * refresh, rtol=1e-12)
        assert bool(curvature.fresh) == refresh
    assert always[2].fresh is None


@pytest.mark.slow
def test_curvature_alone_leaves_a_compiled_function_as_arrays():
    args, key = (DENSE, X[:, 0], LABELS), {"key": jax.random.key(0)}
    function = kfac.curvature(categorical, has_aux=True)
    run = jax.jit(lambda refresh: function(*args, **key, refresh=refresh))
    x, g = function(*args, **key).captured["l"]
    for refresh in (True, False):
        captured = run(refresh).captured
        assert list(captured) == ["l"]
        close(captured["l"], (x * refresh, g * refresh), rtol=1e-12)
    deferred = function(*args, **key, refresh=jnp.array(True)).captured
    assert (list(deferred), len(deferred)) == (["l"], 1)
    close(deferred["l"][1], g, rtol=1e-12)


def test_parts_of_curvature_are_computed_once_each():
    def loss_fn(params, x):
        for name in params:
            x = tap(params, x, name)
        return (x**2).mean()

    params = {name: {"kernel": jnp.eye(3)} for name in "abc"}
    function = kfac.curvature(loss_fn, fisher="empirical")

    def joined(refresh):
        parts = [function(params, X[:n, 0], refresh=refresh) for n in (2, 4)]
        return kfac.concatenate_curvature(parts).captured

    program = jax.make_jaxpr(joined)(True)
    assert sum(eqn.primitive.name == "cond" for eqn in program.eqns) == 2
    assert jax.jit(joined)(True)["c"][0].shape == (6, 3)
    part = function(params, X[:2, 0])
    with pytest.raises(ValueError, match="same layers and Fisher matrix"):
        kfac.concatenate_curvature([part, dataclasses.replace(part, fisher="mc")])


def made(of_outputs):
    return lambda p, x: of_outputs(tap(p, x, "l"))


@pytest.mark.parametrize(
    ("of_outputs", "options", "message"),
    [
        (lambda y: (y.mean(), y), {"fisher": "exact"}, "expected fisher to be one of"),
        (lambda y: y.mean(), {"has_aux": False}, "expected has_aux=True"),
        (lambda y: (y.mean(), y), {"has_aux": False, "fisher": "empirical"}, "with has_aux=True"),
        (lambda y: (y.mean(), y), {"likelihood": "poisson"}, "expected a likelihood among"),
        (lambda y: (y.mean(), y), {}, "expected key="),
        (lambda y: (y.mean(), y[:, None]), {"fisher": "enumerate"}, r"shape \(batch, classes\)"),
        (lambda y: (y.mean(), (y, 0)), {}, "classes.*got tuple.*by outputs="),
        (lambda y: (y.mean(), y[:, 0]), {}, r"classes.*got \(4,\).*z\[:, None\]"),
        (lambda y: (y[:, 0], y), {}, r"a number.*got arrays of shape \(4,\)"),
    ],
)
def test_errors_say_what_was_expected(of_outputs, options, message):
    options = {"has_aux": True, "fisher": "mc"} | options
    key = None if message == "expected key=" else jax.random.key(0)
    with pytest.raises(ValueError, match=message):
        kfac.value_grad_and_curvature(made(of_outputs), **options)(DENSE, X[:, 0], key=key)


def test_taps_outside_of_the_tree_and_losses_without_a_batch_are_refused():
    named = lambda path: lambda p, *x: kfac.tap(kfac.Dense(), p["l"], X, path=path).sum()
    with pytest.raises(ValueError, match="to name parameters of the differentiated tree"):
        kfac.find_layers(named("m"), DENSE, X)
    with pytest.raises(ValueError, match="pass batch_size="):
        kfac.find_layers(named("l"), DENSE)


def test_the_fisher_matrix_of_the_loss_takes_outputs_of_any_shape():
    """They tell it the number of examples alone."""
    function = empirical(made(lambda y: (y.mean(), y[:, 0])), outputs=lambda aux: aux)
    *_, curvature = function(DENSE, X[:, 0])
    assert curvature.layers.blocks["l"].uses[0].num_examples == len(X)
