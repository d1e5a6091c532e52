"""Products of every kind of layer against dense matrices made of per-example gradients or Kronecker
products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from adder_flax import ops
from kfac.curvature import _blocks, _layers
from kfac.solve import _systems as systems
from tests.kfac.reference import (
    check_exact_blocks,
    cross_entropy,
    dense_fisher,
    flatten,
    matrices,
    matrix_of,
    normal,
    per_example_gradients,
    system_of,
)

pytestmark = pytest.mark.usefixtures("x64")


def lookup(params, tokens):
    return params["table"][tokens]


def scale(params, x):
    return x * params["scale"] + params["bias"]


def rms_norm(params, x):
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True))
    return x * params.get("scale", 1) + params.get("bias", 0)


def convolution(params, x):
    return jax.lax.conv_general_dilated(
        x, params["kernel"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )


def l1(params, x, rule):
    return ops.adder_matmul(x, params["kernel"], w_gradient=rule)


def l1_pushforward(params, x, v, rule):
    return ops.adder_matmul_jvp(x, params["kernel"], None, v["kernel"], w_gradient=rule)


L1_FULL = kfac.L1Dense(distances=ops.adder_matmul)
L1_SIGN = kfac.Generic(l1, (("rule", "sign"),), l1_pushforward)
L1_HARDTANH = kfac.Generic(l1, (("rule", "hardtanh"),), l1_pushforward)


def every_layer(params, tokens, labels):
    """A network of tokens with one layer of each kind, and a layer used twice."""
    tap = lambda layer, name, x: kfac.tap(layer, params[name], x, path=name)
    x = tap(kfac.Generic(lookup), "embedding", tokens)
    x = tap(kfac.Dense(), "dense", x)
    x = tap(kfac.Generic(scale), "scale", jnp.tanh(x))
    x = tap(kfac.Scale(fn=rms_norm), "norm", jnp.tanh(x))
    x = tap(kfac.Generic(convolution), "conv", x)
    x = jnp.tanh(tap(kfac.Dense(), "tied", x))
    x = jnp.tanh(tap(kfac.Dense(), "tied", x))
    x = tap(L1_FULL, "l1_full", x.reshape(-1, 4)) / 4
    x = tap(L1_SIGN, "l1_sign", x) / 4
    x = tap(L1_HARDTANH, "l1_hardtanh", x) / 4
    x = x.reshape(len(tokens), -1, 4).mean(1)
    return cross_entropy(tap(kfac.Dense(transpose=True), "output", x), labels)


EVERY_PARAMS = {
    "embedding": {"table": (6, 3)},
    "dense": {"kernel": (3, 4), "bias": (4,)},
    "scale": {"scale": (4,), "bias": (4,)},
    "norm": {"scale": (4,), "bias": (4,)},
    "conv": {"kernel": (3, 4, 4)},
    "tied": {"kernel": (4, 4), "bias": (4,)},
    "l1_full": {"kernel": (4, 4)},
    "l1_sign": {"kernel": (4, 4)},
    "l1_hardtanh": {"kernel": (4, 4)},
    "output": {"kernel": (5, 4)},
}


def make(shapes):
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s, tuple))
    return jax.tree.unflatten(treedef, [normal(i, *shape) for i, shape in enumerate(leaves)])


def test_every_kind_of_layer_has_the_exact_fisher_block():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 6, (5, 6)))
    layers = check_exact_blocks(
        every_layer,
        make(EVERY_PARAMS),
        tokens,
        jnp.arange(5),
        blocks=dict.fromkeys(EVERY_PARAMS, 1),
        traces=True,
    )
    assert layers.coverage == 1.0
    assert len(layers.blocks["tied"].uses) == 2


@pytest.mark.parametrize("rule", ["sign", "full", "hardtanh"])
def test_the_transpose_of_the_pullback_is_the_layers_own_pushforward(rule):
    layer = kfac.Generic(l1, (("rule", rule),))  # JAX transposes the backward pass
    params, x, v = {"kernel": normal(0, 4, 3)}, normal(1, 5, 4), {"kernel": normal(2, 4, 3)}
    with ops.use_backend("reference"):
        pushed = layer.jvp(layer.linearize(params, x), v, jax.ShapeDtypeStruct((5, 3), jnp.float64))
        np.testing.assert_allclose(pushed, l1_pushforward(params, x, v, rule), rtol=1e-12)


def dense_loss(layer, params, x, labels):
    """Dense layers on tokens, averaged."""
    x = jnp.tanh(kfac.tap(layer, params["a"], x, path="a"))
    return cross_entropy(kfac.tap(kfac.Dense(), params["b"], x, path="b").mean(1), labels)


DENSE_PARAMS = {"a": {"kernel": (3, 4), "bias": (4,)}, "b": {"kernel": (4, 3)}}


DENSE_LOSS = functools.partial(dense_loss, kfac.Dense())
EXACT, FACTORS, KRON = "exact", "factors", "kron"


@pytest.mark.cases(1)
@pytest.mark.parametrize(("num_examples", "num_tokens"), [(1, 1), (6, 1), (5, 3)])
def test_kron_is_the_kronecker_product_of_second_moments(num_examples, num_tokens):
    params, x = make(DENSE_PARAMS), normal(3, num_examples, num_tokens, 3)
    forms = [EXACT, FACTORS, KRON]
    found, curvature = matrices(
        DENSE_LOSS, params, x, jnp.arange(num_examples) % 3, [("a", form) for form in forms]
    )
    features, g = (np.asarray(a) for a in curvature.captured["a"])
    np.testing.assert_array_equal(features, x)
    features, g = np.concatenate([features, np.ones((*features.shape[:-1], 1))], axis=-1), g[0]
    expand = np.kron(
        np.einsum("nti,ntj->ij", features, features) / (num_examples * num_tokens),
        np.einsum("nto,ntp->op", g, g) / num_examples,
    )
    # Rows of [kernel; bias]; a block's parameters are in another order.
    places = {"a/kernel": np.arange(12), "a/bias": np.arange(12, 16)}
    rows = np.concatenate([places[p.path] for p in curvature.layers.blocks["a"].params])
    expected = expand[np.ix_(rows, rows)]
    for matrix in found[1:]:
        np.testing.assert_allclose(matrix[0], expected, rtol=1e-11, atol=1e-14)
        if num_examples == num_tokens == 1:
            np.testing.assert_allclose(found[0][0], expected, rtol=1e-10, atol=1e-15)
        else:
            assert np.abs(found[0][0] - expected).max() > 1e-3 * np.abs(expected).max()


def test_kron_of_an_adder_layer_pairs_all_inputs_with_all_cotangents():
    params, x = make(DENSE_PARAMS), normal(3, 5, 2, 3)
    loss_fn = functools.partial(dense_loss, L1_FULL)
    found, curvature = matrices(
        loss_fn, params, x, jnp.arange(5) % 3, [("a", FACTORS), ("a", KRON)]
    )
    assert [p.path for p in curvature.layers.blocks["a"].params] == ["a/bias", "a/kernel"]
    g = np.asarray(curvature.captured["a"][1])[0].reshape(-1, 4)
    rows, kernel = np.asarray(x).reshape(-1, 3), np.asarray(params["a"]["kernel"])
    # Of one token's input with another token's cotangent.
    one = lambda a, h: np.concatenate([h, ((a[:, None] - kernel) * h).ravel()])
    gradients = np.stack([one(a, h) for a in rows for h in g])
    for matrix in found:
        np.testing.assert_allclose(
            matrix[0], gradients.T @ gradients / (len(rows) * 5), rtol=1e-10, atol=1e-14
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("roles", [("bias", "scale"), ("scale",), ("bias",)])
def test_kron_of_a_norm_pairs_all_inputs_with_all_cotangents(roles):
    params, x = make({"a": dict.fromkeys(roles, (3,)), "b": {"kernel": (3, 4)}}), normal(3, 5, 2, 3)
    loss_fn = functools.partial(dense_loss, kfac.Scale(fn=rms_norm))
    forms = [FACTORS, KRON, EXACT]
    found, curvature = matrices(
        loss_fn, params, x, jnp.arange(5) % 3, [("a", form) for form in forms]
    )
    assert [p.path for p in curvature.layers.blocks["a"].params] == [f"a/{role}" for role in roles]
    g = np.asarray(curvature.captured["a"][1])[0]
    x_hat = np.asarray(rms_norm({}, x))

    def paired(inputs, cotangents, scale):
        pairs = [{"bias": h, "scale": a * h} for a in inputs for h in cotangents]
        gradients = np.stack([np.concatenate([pair[role] for role in roles]) for pair in pairs])
        return gradients.T @ gradients / scale

    expand = paired(x_hat.reshape(-1, 3), g.reshape(-1, 3), 10 * 5)
    for matrix in found[:2]:
        np.testing.assert_allclose(matrix[0], expand, rtol=1e-10, atol=1e-14)
    by_example = np.concatenate(
        [{"bias": g, "scale": x_hat * g}[role].sum(1) for role in roles], axis=1
    )
    np.testing.assert_allclose(found[-1][0], by_example.T @ by_example / 5, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "params"),
    [
        (kfac.Dense(), {"kernel": (3, 4), "bias": (4,)}),
        (L1_FULL, {"kernel": (3, 4), "bias": (4,)}),
        (L1_FULL, {"kernel": (3, 4)}),
        (kfac.Scale(fn=rms_norm), {"scale": (4,), "bias": (4,)}),
        (kfac.Scale(fn=rms_norm), {"scale": (4,)}),
        (kfac.Scale(fn=rms_norm), {"bias": (4,)}),
    ],
)
def test_left_factors_seen_through_the_lift(layer, params):
    params = make(params)
    lift = lambda matrix: layer.lift(params, layer.unmatrix(params, matrix))
    # Lifted row, output, row, output.
    jacobian = np.asarray(jax.jacobian(lift)(layer.matrix(params)))
    half = np.asarray(normal(9, len(jacobian), len(jacobian)))
    seen = [jacobian[:, o, :, o].T @ (half @ half.T) @ jacobian[:, o, :, o] for o in range(4)]
    np.testing.assert_allclose(
        layer.mean_left(params, half @ half.T), np.mean(seen, axis=0), rtol=1e-12
    )
    np.testing.assert_allclose(
        layer.left_traces(params, half @ half.T), [np.trace(m) for m in seen], rtol=1e-12
    )
    pulled = layer.matrix(layer.project(params, lift(layer.matrix(params))))
    np.testing.assert_allclose(
        pulled, np.einsum("ijkl,ij->kl", jacobian, lift(layer.matrix(params))), rtol=1e-12
    )


def test_factors_with_too_many_rows_are_diagonal(monkeypatch):
    monkeypatch.setattr(_blocks, "MOST_ROWS", 2)
    params, x, labels = make(DENSE_PARAMS), normal(3, 4, 3, 3), jnp.arange(4) % 3
    (found,), curvature = matrices(DENSE_LOSS, params, x, labels, [("b", KRON)])
    a, g = (np.asarray(v) for v in curvature.captured["b"])
    left = np.einsum("nti,ntj->ij", a, a) / 12
    wide = np.kron(left, np.diag(np.einsum("nto,nto->o", g[0], g[0]) / 4))
    np.testing.assert_allclose(found[0], wide, rtol=1e-11, atol=1e-15)


def test_kron_is_the_gauss_newton_block_of_a_deep_linear_network():
    # Squared error and no nonlinearity: the output's Jacobian is the same for all examples, so
    # K-FAC is exact.
    params = make({"a": {"kernel": (3, 4)}, "b": {"kernel": (4, 2)}})

    def loss_fn(params, x, y):
        x = kfac.tap(kfac.Dense(), params["a"], x, path="a")
        x = kfac.tap(kfac.Dense(), params["b"], x, path="b")
        return 0.5 * ((x - y) ** 2).sum(-1).mean(), x

    x, y = normal(1, 6, 3), normal(2, 6, 2)
    requests = [("a", form) for form in (EXACT, FACTORS)]
    found, _ = matrices(loss_fn, params, x, y, requests, fisher="enumerate", likelihood="gaussian")
    # ∂(x A B)_c / ∂A_ij = x_i B_jc
    jacobian = np.einsum("ni,jc->ncij", x, params["b"]["kernel"]).reshape(6, 2, 12)
    for matrix in found:
        np.testing.assert_allclose(
            matrix[0], np.einsum("ncp,ncq->pq", jacobian, jacobian) / 6, rtol=1e-10, atol=1e-13
        )


def test_the_left_factor_of_tied_weights_is_a_mean_over_the_tokens_of_all_uses():
    def twice(params, x, labels):
        x = jnp.tanh(kfac.tap(kfac.Dense(), params["a"], x, path="a"))
        return cross_entropy(kfac.tap(kfac.Dense(), params["a"], x.mean(1), path="a"), labels)

    params, x = {"a": {"kernel": normal(0, 4, 4)}}, normal(1, 5, 3, 4)  # three tokens, then one
    function = kfac.curvature(twice, has_aux=True, fisher="empirical")
    curvature = function(params, x, jnp.arange(5) % 4)
    left = np.asarray(system_of("a", FACTORS, curvature, params).state[0])
    first = np.asarray(x).reshape(-1, 4)
    second = np.tanh(np.asarray(x) @ np.asarray(params["a"]["kernel"])).mean(1)
    expected = (first.T @ first + second.T @ second) / (5 * (3 + 1))
    np.testing.assert_allclose(left[0, :4, :4], expected, rtol=1e-12)


@pytest.mark.slow
def test_products_are_symmetric_and_positive():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 6, (4, 6)))
    params = make(EVERY_PARAMS)
    names = kfac.find_layers(every_layer, params, tokens, jnp.arange(4)).blocks
    factored = {name for name, block in names.items() if block.factored}
    requests = [(name, FACTORS if name in factored else KRON) for name in names]
    assert factored == {"dense", "norm", "tied", "l1_full", "output"}
    for (name, form), matrix in zip(
        requests, matrices(every_layer, params, tokens, jnp.arange(4), requests)[0], strict=True
    ):
        scale = np.abs(matrix).max()
        assert scale > 0, name
        np.testing.assert_allclose(
            matrix, np.swapaxes(matrix, 1, 2), rtol=0, atol=1e-12 * scale, err_msg=name
        )
        assert np.linalg.eigvalsh(matrix).min() > -1e-12 * scale * len(matrix[0]), f"{name} {form}"


def test_blocks_of_equal_form_are_solved_together():
    shapes = {f"l{i}": {"kernel": (4, 4), "bias": (4,)} for i in range(3)}

    def loss_fn(params, x, labels):
        for name in shapes:
            x = jnp.tanh(kfac.tap(kfac.Dense(), params[name], x, path=name))
        return cross_entropy(x, labels)

    def compute(params, x, labels):
        curvature = kfac.value_grad_and_curvature(loss_fn, fisher="empirical", has_aux=True)(
            params, x, labels
        )[2]
        (together,) = systems.build(curvature, flatten(params), dict.fromkeys(shapes, EXACT))
        gradients = per_example_gradients(loss_fn, params, x, labels)
        return matrix_of(together), [dense_fisher(block, gradients)[0] for block in together.blocks]

    for matrix, expected in zip(
        *jax.jit(compute)(make(shapes), normal(5, 6, 4), jnp.arange(6) % 4), strict=True
    ):
        np.testing.assert_allclose(matrix, expected, rtol=1e-10, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [kfac.Dense(), L1_FULL], ids=["dense", "adder"])
def test_traces_and_their_estimates(layer):
    params, x, labels = make(DENSE_PARAMS), normal(3, 5, 2, 3), jnp.arange(5) % 3
    loss_fn = functools.partial(dense_loss, layer)
    function = kfac.value_grad_and_curvature(loss_fn, fisher="empirical", has_aux=True)

    def compute(params, x, labels):
        curvature = function(params, x, labels)[2]
        kron, factors = (system_of("a", form, curvature, params) for form in (KRON, FACTORS))
        estimates = jax.lax.map(kron.trace, jax.random.split(jax.random.key(0), 2000))
        closed_form = factors.trace(jax.random.key(0))[0]
        return estimates, matrix_of(kron)[0], closed_form, matrix_of(factors)[0]

    estimates, kron, closed_form, factors = jax.jit(compute)(params, x, labels)
    assert abs(estimates.mean() - np.trace(kron)) < 4 * estimates.std() / 2000**0.5
    np.testing.assert_allclose(closed_form, np.trace(factors), rtol=1e-12)


def test_bfloat16_layers_keep_their_curvature():
    with jax.enable_x64(False):
        params = jax.tree.map(lambda p: p.astype(jnp.float32), make(DENSE_PARAMS))

        def in_bfloat16(params, x, labels):
            half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            loss, aux = DENSE_LOSS(half, x.astype(jnp.bfloat16), labels)
            return loss.astype(jnp.float32), aux

        x, labels = normal(3, 6, 2, 3).astype(jnp.float32), jnp.arange(6) % 3
        (half,), curvature = matrices(in_bfloat16, params, x, labels, [("a", EXACT)])
        (full,), _ = matrices(DENSE_LOSS, params, x, labels, [("a", EXACT)])
    assert curvature.captured["a"][0].dtype == jnp.bfloat16
    assert half.dtype == np.float32
    assert np.linalg.norm(half - full) < 0.05 * np.linalg.norm(full)


def test_an_adder_layer_that_is_called_wants_its_distances():
    layer, params = kfac.L1Dense(), {"kernel": jnp.ones((3, 2))}
    with pytest.raises(ValueError, match=r"expected distances=.*got none; give kfac.L1Dense"):
        kfac.tap(layer, params, jnp.ones((4, 3)), path="")


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [0, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [kfac.Dense(), L1_FULL])
def test_rows_of_zeros_change_no_step(layer, bias, iterations, monkeypatch):
    params = {"kernel": normal(0, 6, 4)} | ({"bias": normal(1, 4)} if bias else {})
    x, labels = normal(2, 9, 6), jnp.arange(9) % 4

    def loss_fn(params, x):
        return cross_entropy(kfac.tap(layer, params, x, path=""), labels)

    def step():
        function = kfac.value_grad_and_curvature(loss_fn, fisher="empirical", has_aux=True)
        _, grads, curvature = function(params, x)
        optimizer = kfac.kfac(1.0, curvature.layers, step="share", iterations=iterations)
        updates, state = optimizer.update(
            grads, optimizer.init(params), params, curvature=curvature
        )
        ((left, _),) = kfac.find_state(state).averages.factors.values()
        return updates, left.shape[-1]

    expected, rows = step()
    monkeypatch.setattr(_layers, "_filled", lambda rows: rows + 5)
    updates, filled = step()
    assert filled == rows + (5 if bias or layer is L1_FULL else 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), updates, expected)


def test_a_kernel_with_two_biases():
    """[x, 1, 0] and [x, 0, 1] of its two uses, which no one lift makes."""
    params = {"w": normal(0, 3, 2), "b": normal(1, 2), "c": normal(2, 2)}
    x, rows = normal(3, 5, 3), normal(4, 2, 5, 2)

    def loss_fn(params, x, rows):
        own = [{"kernel": params["w"], "bias": params[name]} for name in "bc"]
        paths = [{"kernel": "w", "bias": name} for name in "bc"]
        inputs = (x, jnp.tanh(x))
        uses = zip(own, inputs, paths, strict=True)
        y = [kfac.tap(kfac.Dense(), p, a, path=path) for p, a, path in uses]
        return (y[0] * rows[:, 0] + y[1] * rows[:, 1]).sum(-1).mean(), None

    (found,), curvature = matrices(loss_fn, params, x, rows.swapaxes(0, 1), [("w", "kron")])
    left = np.zeros((5, 5))
    for i, inputs in enumerate((np.asarray(x), np.tanh(x))):
        features = np.concatenate([inputs, np.ones((5, 1)) * np.eye(2)[i]], axis=1)
        left += features.T @ features / (5 * 2)
    right = sum(g.T @ g for g in np.asarray(rows)) / 5
    np.testing.assert_allclose(found[0], np.kron(left, right), rtol=1e-12, atol=1e-14)
    layers = curvature.layers
    assert not layers.blocks["w"].factored
    kfac.kfac(1e-3, layers).init(params)
