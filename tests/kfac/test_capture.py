"""Taps under JAX's transformations, and the Fisher matrices that the extra pull-back gives."""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx  # noqa: F401  both adapters are in use

import kfac
from kfac.solve import _systems as systems
from tests.kfac.reference import (
    check_exact_blocks,
    close,
    cross_entropy,
    flatten,
    matrix_of,
    normal,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_what_is_replaced_comes_back_when_an_adapter_fails(monkeypatch):
    """A version of Flax without what the NNX adapter replaces, which comes after
    ``jax.lax.scan``."""
    scan, conv = jax.lax.scan, nnx.Conv.__call__
    loss_fn = lambda p, x: kfac.tap(kfac.Dense(), p, x, path="").mean()
    kfac.find_layers(loss_fn, {"kernel": jnp.ones((3, 2))}, X)  # loads the adapters
    with monkeypatch.context() as patch:
        patch.delattr(nnx.Linear, "__call__")
        with pytest.raises(RuntimeError, match="expected Linear to define '__call__'"):
            kfac.find_layers(loss_fn, {"kernel": jnp.ones((3, 2))}, X)
    assert jax.lax.scan is scan
    kfac.find_layers(loss_fn, {"kernel": jnp.ones((3, 2))}, X)  # and captures go on working
    with pytest.raises(ZeroDivisionError):  # in the loss itself
        kfac.find_layers(lambda p, x: 1 / 0, {"kernel": jnp.ones((3, 2))}, X)
    assert jax.lax.scan is scan
    assert nnx.Conv.__call__ is conv


def layer(params, x, path):
    return jnp.tanh(kfac.tap(kfac.Dense(), params, x, path=path))


SHAPES = {"kernel": (3, 3), "bias": (3,)}
STACK = {"stack": {name: normal(i, 2, *shape) for i, (name, shape) in enumerate(SHAPES.items())}}
X, LABELS = normal(7, 4, 2, 3), jnp.arange(4) % 3


def pool(x, labels):
    return cross_entropy(x.mean(-2), labels)


def scanned(params, x, labels, *, wrap=lambda f: f):
    body = wrap(lambda x, p: (layer(p, x, "stack"), None))
    return pool(jax.lax.scan(body, x, params["stack"])[0], labels)


def in_scan_of_examples(params, x, labels):
    """A vmap over examples around a scan over layers."""
    one = lambda x: jax.lax.scan(lambda x, p: (layer(p, x, "stack"), None), x, params["stack"])[0]
    return pool(jax.vmap(one)(x), labels)


def vmapped_layers_in_vmapped_examples(params, x, labels):
    one = lambda x: jax.vmap(lambda p: layer(p, x, "stack"))(params["stack"]).sum(0)
    return pool(jax.vmap(one)(x), labels)


def jitted_in_vmap(params, x, labels):
    one = jax.jit(lambda p, x: layer(p, x, "stack"))
    return pool(
        jax.vmap(lambda x: jax.vmap(lambda p: one(p, x))(params["stack"]).sum(0))(x), labels
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "loss_fn",
    [
        scanned,
        functools.partial(scanned, wrap=jax.checkpoint),
        functools.partial(scanned, wrap=jax.jit),
        in_scan_of_examples,
        vmapped_layers_in_vmapped_examples,
        jitted_in_vmap,
    ],
    ids=["scan", "remat in scan", "jit in scan", "scan in vmap", "vmap in vmap", "jit in vmap"],
)
def test_transformations(loss_fn):
    layers = check_exact_blocks(loss_fn, STACK, X, LABELS, blocks={"stack": 2}, traces=True)
    assert layers.coverage == 1.0


@jax.checkpoint
def rematerialised_globally(params, x):
    return layer(params, x, "l")


@pytest.mark.slow
def test_functions_that_jax_has_cached_are_traced_anew():
    params = {"l": {name: normal(1, *shape) for name, shape in SHAPES.items()}}
    loss_fn = lambda p, x, y: pool(rematerialised_globally(p["l"], x), y)
    jax.grad(lambda p: loss_fn(p, X, LABELS)[0])(params)  # in the cache without taps
    check_exact_blocks(loss_fn, params, X, LABELS, blocks={"l": 1})
    check_exact_blocks(loss_fn, params, X, LABELS, blocks={"l": 1})  # taps of another trace


def test_flags_and_functions_among_the_arguments_stay_what_they_are():
    def loss_fn(params, x, labels, training, activation):
        x = activation(kfac.tap(kfac.Dense(), params, x, path=""))
        return pool(2 * x if training else x, labels)

    params = {name: normal(1, *shape) for name, shape in SHAPES.items()}
    args = X, LABELS, True, jnp.tanh
    assert kfac.find_layers(loss_fn, params, *args).coverage == 1.0
    function = kfac.value_grad_and_curvature(loss_fn, fisher="empirical", has_aux=True)
    grads = jax.grad(loss_fn, has_aux=True)(params, *args)[0]
    close(function(params, *args)[1], grads, rtol=1e-12)


@pytest.mark.slow
def test_networks_that_are_trained_beside_each_other_have_their_own_curvature():
    """A vmap around the gradient of a loss that has vmaps over examples and layers itself."""
    networks = jax.tree.map(lambda p: jnp.stack([p, -2 * p, 3 * p]), STACK)
    function = kfac.value_grad_and_curvature(
        vmapped_layers_in_vmapped_examples, fisher="empirical", has_aux=True
    )
    captured = lambda params: function(params, X, LABELS)[2].captured
    alone = [captured(jax.tree.map(lambda p, i=i: p[i], networks)) for i in range(3)]
    close(jax.vmap(captured)(networks), jax.tree.map(lambda *a: jnp.stack(a), *alone), rtol=1e-12)


def test_original_scan_needs_the_other_name():
    from jax.lax import scan as kept

    with_kfac = lambda p, x, y: pool(
        kfac.scan(lambda x, q: (layer(q, x, "stack"), None), x, p["stack"])[0], y
    )
    check_exact_blocks(with_kfac, STACK, X, LABELS, blocks={"stack": 2})
    summed = lambda c, x: (c + x, c)
    scans = [f(summed, 0, jnp.arange(3))[1] for f in (kfac.scan, kept)]
    np.testing.assert_array_equal(*scans)


def test_other_threads_see_no_taps():
    captured, release, inside = {}, threading.Event(), threading.Event()
    params = {"l": {name: normal(1, *shape) for name, shape in SHAPES.items()}}

    def slow(params, x, labels):
        inside.set()
        release.wait(60)
        return pool(layer(params["l"], x, "l"), labels)

    def work():
        with jax.enable_x64(True):
            captured["layers"] = kfac.find_layers(slow, params, X, LABELS)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(60)
    y = layer(params["l"], X, "l")  # no capture on this thread: nothing recorded, nothing raised
    total = jax.lax.scan(lambda c, x: (c + x.sum(), None), 0.0, X)[0]
    release.set()
    thread.join()
    assert y.shape == X.shape
    np.testing.assert_allclose(total, X.sum())
    assert list(captured["layers"].blocks) == ["l"]


DENSE = {"l": {"kernel": normal(1, 3, 4)}}


def categorical(params, x, labels):
    return cross_entropy(kfac.tap(kfac.Dense(), params["l"], x, path="l"), labels)


def fisher_block(fisher, key=None, *, labels=LABELS, x=X[:, 0], **options):
    function = kfac.value_grad_and_curvature(categorical, fisher=fisher, has_aux=True, **options)

    @jax.jit
    def gradient_and_block(x, labels, key):
        _, grads, curvature = function(DENSE, x, labels, key=key)
        (system,) = systems.build(curvature, flatten(DENSE), {"l": "exact"})
        return grads, matrix_of(system)[0]

    return gradient_and_block(x, labels, key)


def gauss_newton(loss_of_outputs, x=X[:, 0]):
    """Σ_n J_nᵀ H_n J_n / N of the dense layer, by JAX's own Hessian."""

    @jax.jit
    def factors(kernel):
        outputs = lambda kernel: x @ kernel
        return jax.jacobian(outputs)(kernel), jax.vmap(jax.hessian(loss_of_outputs))(
            outputs(kernel)
        )

    jacobian, hessians = factors(DENSE["l"]["kernel"])
    jacobian = np.reshape(jacobian, (len(x), 4, 12))
    return np.einsum("ncp,ncd,ndq->pq", jacobian, hessians, jacobian) / len(x)


LOSSES = {
    "categorical": lambda z: -jax.nn.log_softmax(z)[0],
    "bernoulli": lambda z: jnp.logaddexp(0, z).sum(),
    "gaussian": lambda z: 0.5 * (z**2).sum(),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("likelihood", list(LOSSES))
def test_enumeration_is_the_gauss_newton_matrix(likelihood):
    _, block = fisher_block("enumerate", likelihood=likelihood)
    np.testing.assert_allclose(block, gauss_newton(LOSSES[likelihood]), rtol=1e-11, atol=1e-15)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "likelihood",
    [
        "categorical",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bernoulli", "gaussian")),
    ],
)
@pytest.mark.parametrize("fisher", ["mc", "ggn"])
def test_draws_average_to_the_gauss_newton_matrix(fisher, likelihood):
    errors = []
    expected = gauss_newton(LOSSES[likelihood])
    for samples in (100, 10000):
        _, block = fisher_block(
            fisher, jax.random.key(0), likelihood=likelihood, num_samples=samples
        )
        errors.append(np.linalg.norm(block - expected) / np.linalg.norm(expected))
    assert errors[1] < 0.05
    assert errors[1] < errors[0] / 3  # 1/√100 of it, on average


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
    function = kfac.value_grad_and_curvature(categorical, has_aux=True)
    run = jax.jit(
        lambda refresh: function(DENSE, X[:, 0], LABELS, key=jax.random.key(0), refresh=refresh)
    )
    always = function(DENSE, X[:, 0], LABELS, key=jax.random.key(0))
    for refresh in (True, False):
        _, grads, curvature = run(refresh)
        x, g = curvature.captured["l"]
        np.testing.assert_allclose(grads["l"]["kernel"], always[1]["l"]["kernel"], rtol=1e-12)
        np.testing.assert_array_equal(x, X[:, 0])
        np.testing.assert_allclose(g, always[2].captured["l"][1] * refresh, rtol=1e-12)
        assert bool(curvature.fresh) == refresh
    assert always[2].fresh is None


@pytest.mark.slow
def test_curvature_alone_leaves_a_compiled_function_as_arrays():
    function = kfac.curvature(categorical, has_aux=True)
    run = jax.jit(
        lambda refresh: function(DENSE, X[:, 0], LABELS, key=jax.random.key(0), refresh=refresh)
    )
    always = function(DENSE, X[:, 0], LABELS, key=jax.random.key(0)).captured["l"]
    for refresh in (True, False):
        curvature = run(refresh)
        assert dict(curvature.captured).keys() == {"l"}
        for value, expected in zip(curvature.captured["l"], always, strict=True):
            np.testing.assert_allclose(value, expected * refresh, rtol=1e-12)
    deferred = function(
        DENSE, X[:, 0], LABELS, key=jax.random.key(0), refresh=jnp.array(True)
    ).captured
    assert (list(deferred), len(deferred)) == (["l"], 1)
    np.testing.assert_allclose(deferred["l"][1], always[1], rtol=1e-12)


def test_parts_of_curvature_are_computed_once_each():
    def loss_fn(params, x):
        for name in params:
            x = kfac.tap(kfac.Dense(), params[name], x, path=name)
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


def test_errors_say_what_was_expected():
    function = kfac.value_grad_and_curvature
    with pytest.raises(ValueError, match="expected fisher to be one of"):
        function(categorical, fisher="exact")
    with pytest.raises(ValueError, match="expected has_aux=True"):
        function(lambda p, x: 0.0, fisher="mc")
    with pytest.raises(ValueError, match="expected a likelihood among"):
        function(categorical, likelihood="poisson", has_aux=True)
    with pytest.raises(ValueError, match="expected key="):
        function(categorical, has_aux=True)(DENSE, X[:, 0], LABELS)
    with pytest.raises(ValueError, match=r"expects outputs of shape \(batch, classes\)"):
        function(categorical, fisher="enumerate", has_aux=True)(DENSE, X, jnp.zeros((4, 2), int))
    with pytest.raises(ValueError, match="to name parameters of the differentiated tree"):
        kfac.find_layers(lambda p, x: kfac.tap(kfac.Dense(), p["l"], x, path="m").sum(), DENSE, X)
    with pytest.raises(ValueError, match="pass batch_size="):
        kfac.find_layers(lambda p: kfac.tap(kfac.Dense(), p["l"], X, path="l").sum(), DENSE)


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (lambda y: (y.mean(), (y, 0)), {"fisher": "mc"}, "classes.*got tuple.*by outputs="),
        (lambda y: (y.mean(), y[:, 0]), {"fisher": "mc"}, r"classes.*got \(4,\).*z\[:, None\]"),
        (lambda y: (y[:, 0], y), {"fisher": "mc"}, r"a number.*got arrays of shape \(4,\)"),
        (lambda y: (y.mean(), y), {"fisher": "empirical", "has_aux": False}, "with has_aux=True"),
    ],
)
def test_losses_and_outputs_of_another_shape_are_refused(made, options, message):
    loss_fn = lambda p, x: made(kfac.tap(kfac.Dense(), p, x, path=""))
    function = kfac.value_grad_and_curvature(loss_fn, **{"has_aux": True} | options)
    with pytest.raises(ValueError, match=message):
        function({"kernel": jnp.ones((3, 3))}, X[:, 0], key=jax.random.key(0))


def test_the_fisher_matrix_of_the_loss_takes_outputs_of_any_shape():
    """They tell it the number of examples alone."""

    def loss_fn(p, x):
        y = kfac.tap(kfac.Dense(), p, x, path="")
        return y.mean(), y[:, 0]

    options = dict(fisher="empirical", outputs=lambda aux: aux, has_aux=True)
    function = kfac.value_grad_and_curvature(loss_fn, **options)
    *_, curvature = function({"kernel": jnp.ones((3, 3))}, X[:, 0])
    (block,) = curvature.layers.blocks.values()
    assert block.uses[0].num_examples == len(X)
