"""Derivatives of the reductions: true gradients, adjoints, memory, and what happens to shapes and
dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import ops
from tests.ops.programs import BACKENDS, differences, factor, l1, normal, value_and_gradients

RULES = ("sign", "full", "hardtanh")


@pytest.mark.cases(9)
@pytest.mark.parametrize("x_gradient", RULES)
@pytest.mark.parametrize("w_gradient", RULES)
def test_the_jvp_is_the_adjoint_of_the_backward_pass(backend, x_gradient, w_gradient):
    x, dx, w, dw, g = normal((2, 5, 23), (2, 5, 23), (23, 9), (23, 9), (2, 5, 9))
    rules = {"x_gradient": x_gradient, "w_gradient": w_gradient, "hardtanh_slope": 2.5}

    @jax.jit
    def tangents(x, dx, w, dw):
        jvp = functools.partial(ops.adder_matmul_jvp, x, w, **rules)
        return jvp(dx, dw), jvp(dx, None) + jvp(None, dw), jvp(None, None)

    dy, parts, nothing = tangents(x, dx, w, dw)
    _, x_bar, w_bar = value_and_gradients(lambda x, w: ops.adder_matmul(x, w, **rules), g, x, w)
    np.testing.assert_allclose(np.vdot(g, dy), np.vdot(x_bar, dx) + np.vdot(w_bar, dw), rtol=1e-4)
    np.testing.assert_allclose(parts, dy, atol=1e-5)
    np.testing.assert_array_equal(nothing, np.zeros((2, 5, 9)))


def _slope(rule, difference):
    """The derivative of a rule."""
    return float(rule == "full") + 2.5 * (rule == "hardtanh") * (np.abs(2.5 * difference) < 1)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("x_rule", "w_rule"), [("hardtanh", "full"), ("hardtanh", "hardtanh"), ("full", "sign")]
)
def test_forward_mode_and_second_derivatives_are_those_of_the_declared_rules(
    backend, x_rule, w_rule
):
    x, dx, w, dw, g, u = normal((5, 23), (5, 23), (23, 9), (23, 9), (5, 9), (5, 23))
    rules = {"x_gradient": x_rule, "w_gradient": w_rule, "hardtanh_slope": 2.5}
    product = lambda x, w: ops.adder_matmul(x, w, **rules)
    gradients = lambda x, w: jax.vjp(product, x, w)[1](g)

    @jax.jit
    def derivatives(x, w):
        forward = jax.jvp(product, (x, w), (dx, dw))[1]
        one_side = jax.jvp(lambda w: product(x, w), (w,), (dw,))[1]
        forward_over_reverse = jax.jvp(gradients, (x, w), (dx, dw))[1]
        reverse_over_reverse = jax.grad(lambda x, w: (u * gradients(x, w)[0]).sum(), (0, 1))(x, w)
        return forward, one_side, *forward_over_reverse, *reverse_over_reverse

    # Of rows, columns and terms.
    difference, moved = differences(x, w.T), differences(dx, dw.T)
    by_x = dx[:, None] * factor(x_rule, difference, 2.5)
    by_w = -dw.T * factor(w_rule, difference, 2.5)
    by_slope_x, by_slope_w = (g[..., None] * _slope(r, difference) for r in (x_rule, w_rule))
    expected = (
        (by_x + by_w).sum(-1),
        by_w.sum(-1),
        (by_slope_x * moved).sum(1),
        -(by_slope_w * moved).sum(0).T,
        -(by_slope_x * u[:, None]).sum(1),
        (by_slope_x * u[:, None]).sum(0).T,
    )
    for got, truth in zip(derivatives(x, w), expected, strict=True):
        np.testing.assert_allclose(got, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.cases(1)
def test_tangents_and_second_derivatives_of_additive_scores_are_true_ones(backend):
    arrays = normal((2, 4, 3), (2, 5, 3), (3,))

    def derivatives(score, *arrays):
        loss = lambda *arrays: (jnp.arange(5.0) * score(*arrays)).sum()
        hessian, mixed = jax.hessian(loss, 1), jax.jacrev(jax.grad(loss, 0), 2)
        run = lambda *a: (hessian(*a), mixed(*a), jax.jvp(score, a, a)[1])
        return jax.jit(run)(*arrays)

    formula = lambda query, key, v: (
        jnp.tanh(query[..., :, None, :] + key[..., None, :, :]) * v
    ).sum(-1)
    with jax.enable_x64(True):
        expected = derivatives(formula, *(a.astype(np.float64) for a in arrays))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, derivatives(ops.additive_scores, *arrays), expected)


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_nothing_of_the_size_of_the_broadcast_is_stored(backend):
    x, w, q = jnp.ones((256, 192)), jnp.ones((192, 320)), jnp.ones((2, 256, 64))
    additive = lambda q, k: ops.additive_scores(q, k, jnp.ones(64)).sum()
    losses = [
        (lambda x, w: ops.adder_matmul(x, w).sum(), (x, w)),
        (lambda x, w: ops.adder_matmul(x, w, w_gradient="sign").sum(), (x, w)),
        (lambda q, k: ops.l1_scores(q, k).sum(), (q, q)),
        (additive, (q, q)),
        (lambda q, k: jax.grad(additive)(q, k).sum(), (q, q)),
    ]
    for loss, arrays in losses:
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile()
        broadcast_bytes = 4 * arrays[0].size * (320 if arrays[1] is w else 256)
        assert compiled.memory_analysis().temp_size_in_bytes < broadcast_bytes / 16


def test_residuals_are_the_inputs():
    x, w = normal((50, 40), (40, 30))
    residuals = jax.tree.leaves(jax.vjp(ops.adder_matmul, x, w)[1])
    assert sorted(np.size(r) for r in residuals) == [40 * 30, 50 * 40]


@pytest.mark.parametrize("shape", [(3,), (0, 3), (2, 0, 3), (1, 1, 3), (2, 3, 4, 3)])
def test_leading_axes_of_any_number(shape):
    x, w = normal(shape, (3, 5))
    y, vjp = jax.vjp(ops.adder_matmul, x, w)
    assert y.shape == (*shape[:-1], 5)
    assert [d.shape for d in vjp(y)] == [x.shape, w.shape]
    np.testing.assert_allclose(y, l1(x, w.T).reshape(y.shape), rtol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_scores_of_nothing(backend, sizes):
    queries, keys, dim = sizes
    query, key, v = jnp.ones((2, queries, dim)), jnp.ones((2, keys, dim)), jnp.ones(dim)
    for score, arrays in ((ops.l1_scores, (query, key)), (ops.additive_scores, (query, key, v))):
        g = np.ones((2, queries, keys), np.float32)
        for got, like in zip(value_and_gradients(score, g, *arrays), (g, *arrays), strict=True):
            np.testing.assert_array_equal(got, np.zeros(like.shape))


def test_leading_axes_of_scores_broadcast():
    query, key, v = normal((4, 1, 6, 8), (3, 7, 8), (3, 8))
    s, vjp = jax.vjp(ops.l1_scores, query, key)
    assert s.shape == (4, 3, 6, 7)
    assert [d.shape for d in vjp(s)] == [query.shape, key.shape]
    s, vjp = jax.vjp(ops.additive_scores, query, key, v)
    assert [d.shape for d in vjp(s)] == [query.shape, key.shape, v.shape]


def test_gradients_have_the_dtype_of_their_operand():
    x, w = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((4, 5), jnp.float32)
    y, vjp = jax.vjp(ops.adder_matmul, x, w)
    assert [y.dtype, *(d.dtype for d in vjp(y))] == [jnp.float32, jnp.bfloat16, jnp.float32]


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


X, W = ones(2, 3), ones(3, 4)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("function", "arrays", "options", "error", "words"),
    [
        (ops.adder_matmul, (X, ones(4, 5)), {}, ValueError, "same K"),
        (ops.adder_matmul, (X, ones(3, 4, dtype=int)), {}, TypeError, "`w` in .*got int32"),
        (ops.adder_matmul, (X, W), {"x_gradient": "relu"}, ValueError, "hardtanh"),
        (ops.adder_matmul, (X.astype(jnp.float8_e4m3fn), W), {}, TypeError, "float8_e4m3fn"),
        (ops.l1_scores, (X, X.astype(jnp.float8_e5m2)), {}, TypeError, "`key` in bfloat16"),
        (ops.adder_matmul, (X, W), {"hardtanh_slope": 0}, ValueError, "positive"),
        (ops.l1_scores, (X, ones(2, 4)), {}, ValueError, "same d"),
        (ops.l1_scores, (ones(2, 5, 3), ones(3, 5, 3)), {}, ValueError, "broadcast"),
        (ops.additive_scores, (X, ones(4, 3), ones(4)), {}, ValueError, "v of shape"),
    ],
)
def test_errors_say_what_was_expected(function, arrays, options, error, words):
    with pytest.raises(error, match=words):
        function(*arrays, **options)
