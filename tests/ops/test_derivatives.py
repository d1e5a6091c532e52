"""Derivatives of the reductions: true gradients, adjoints, memory, and what happens to shapes and
dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import ops
from tests.ops.programs import BACKENDS, normal, value_and_gradients

RULES = ("sign", "full", "hardtanh")


@pytest.mark.cases(9)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("x_gradient", RULES)
@pytest.mark.parametrize("w_gradient", RULES)
def test_the_jvp_is_the_adjoint_of_the_backward_pass(backend, x_gradient, w_gradient):
    x, dx, w, dw, g = normal((2, 5, 23), (2, 5, 23), (23, 9), (23, 9), (2, 5, 9))
    rules = {"x_gradient": x_gradient, "w_gradient": w_gradient, "hardtanh_slope": 2.5}

    @jax.jit
    def forward_and_backward(x, dx, w, dw, g):
        dy = ops.adder_matmul_jvp(x, w, dx, dw, **rules)
        parts = ops.adder_matmul_jvp(x, w, dx, None, **rules) + ops.adder_matmul_jvp(
            x, w, None, dw, **rules
        )
        return dy, parts, *jax.vjp(lambda x, w: ops.adder_matmul(x, w, **rules), x, w)[1](g)

    with ops.use_backend(backend):
        dy, parts, x_bar, w_bar = forward_and_backward(x, dx, w, dw, g)
    np.testing.assert_allclose(np.vdot(g, dy), np.vdot(x_bar, dx) + np.vdot(w_bar, dw), rtol=1e-4)
    np.testing.assert_allclose(parts, dy, atol=1e-5)
    assert dy.shape == (2, 5, 9)


def _rule_and_slope(name, difference):
    """A rule and its derivative, at w - x."""
    if name == "full":
        return difference, np.ones_like(difference)
    if name == "sign":
        return np.sign(difference), np.zeros_like(difference)
    return np.clip(2.5 * difference, -1, 1), 2.5 * (np.abs(2.5 * difference) < 1)


@pytest.mark.cases(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("x_rule", "w_rule"), [("hardtanh", "full"), ("hardtanh", "hardtanh"), ("full", "sign")]
)
def test_forward_mode_and_second_derivatives_are_those_of_the_declared_rules(
    backend, x_rule, w_rule
):
    x, dx, w, dw, g, u = normal((5, 23), (5, 23), (23, 9), (23, 9), (5, 9), (5, 23))
    product = lambda x, w: ops.adder_matmul(
        x, w, x_gradient=x_rule, w_gradient=w_rule, hardtanh_slope=2.5
    )
    gradients = lambda x, w: jax.vjp(product, x, w)[1](g)

    @jax.jit
    def derivatives(x, w):
        forward = jax.jvp(product, (x, w), (dx, dw))[1]
        one_side = jax.jvp(lambda w: product(x, w), (w,), (dw,))[1]
        forward_over_reverse = jax.jvp(gradients, (x, w), (dx, dw))[1]
        reverse_over_reverse = jax.grad(lambda x, w: (u * gradients(x, w)[0]).sum(), (0, 1))(x, w)
        return forward, one_side, forward_over_reverse, reverse_over_reverse

    with ops.use_backend(backend):
        forward, one_side, forward_over_reverse, reverse_over_reverse = derivatives(x, w)
    difference = w[None].astype(np.float64) - x[:, :, None]
    (r_x, slope_x), (r_w, slope_w) = (
        _rule_and_slope(rule, difference) for rule in (x_rule, w_rule)
    )
    moved = dw[None] - dx[:, :, None]
    by_x, by_w, g = dx[:, :, None] * r_x, -dw[None] * r_w, g[:, None]
    close = lambda got, truth: np.testing.assert_allclose(got, truth, rtol=1e-4, atol=1e-4)
    close(forward, (by_x + by_w).sum(1))
    close(one_side, by_w.sum(1))
    close(forward_over_reverse[0], (g * slope_x * moved).sum(2))
    close(forward_over_reverse[1], -(g * slope_w * moved).sum(0))
    close(reverse_over_reverse[0], -(g * slope_x * u[:, :, None]).sum(2))
    close(reverse_over_reverse[1], (g * slope_x * u[:, :, None]).sum(0))


@pytest.mark.cases(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tangents_and_second_derivatives_of_additive_scores_are_true_ones(backend):
    query, key, v = normal((2, 4, 3), (2, 5, 3), (3,))

    def sums(score):
        def loss(query, key, v):
            return (jnp.arange(5.0) * score(query, key, v)).sum()

        return jax.jit(
            lambda *arrays: (
                jax.hessian(loss, 1)(*arrays),
                jax.jacrev(jax.grad(loss, 0), 2)(*arrays),
                jax.jvp(score, arrays, arrays)[1],
            )
        )

    plain = lambda query, key, v: (v * jnp.tanh(query[..., :, None, :] + key[..., None, :, :])).sum(
        -1
    )
    with jax.enable_x64(True):
        expected = sums(plain)(*(a.astype(np.float64) for a in (query, key, v)))
    with ops.use_backend(backend):
        got = sums(ops.additive_scores)(query, key, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def test_the_jvp_without_tangents_is_zero():
    x, w = normal((2, 3), (3, 4))
    np.testing.assert_array_equal(ops.adder_matmul_jvp(x, w, None, None), np.zeros((2, 4)))


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_nothing_of_the_size_of_the_broadcast_is_stored(backend):
    rows, depth, columns = 256, 192, 320
    x, w = jnp.ones((rows, depth)), jnp.ones((depth, columns))
    q = jnp.ones((2, 256, 64))
    losses = [
        (lambda x, w: ops.adder_matmul(x, w).sum(), (x, w), rows * depth * columns),
        (
            lambda x, w: ops.adder_matmul(x, w, w_gradient="sign").sum(),
            (x, w),
            rows * depth * columns,
        ),
        (lambda q, k: ops.l1_scores(q, k).sum(), (q, q), q.size * 256),
        (lambda q, k: ops.additive_scores(q, k, jnp.ones(64)).sum(), (q, q), q.size * 256),
        (
            lambda q, k: jax.grad(lambda q: ops.additive_scores(q, k, jnp.ones(64)).sum())(q).sum(),
            (q, q),
            q.size * 256,
        ),
    ]
    for loss, arrays, broadcast in losses:
        with ops.use_backend(backend):
            compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * broadcast / 16


def test_residuals_are_the_inputs():
    x, w = normal((50, 40), (40, 30))
    residuals = jax.tree.leaves(jax.vjp(ops.adder_matmul, x, w)[1])
    assert sorted(np.size(r) for r in residuals) == [40 * 30, 50 * 40]


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_remat_the_gradients_are_the_same(backend):
    x, w, g = normal((6, 20), (20, 12), (6, 12))
    loss = lambda x, w: (g * ops.adder_matmul(x, w)).sum()
    with ops.use_backend(backend):
        plain, again = (jax.jit(jax.grad(f, (0, 1)))(x, w) for f in (loss, jax.checkpoint(loss)))
    for a, b in zip(plain, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (0, 3), (2, 0, 3), (1, 1, 3), (2, 3, 4, 3)])
def test_leading_axes_of_any_number(shape):
    x, w = normal(shape, (3, 5))
    y, vjp = jax.vjp(ops.adder_matmul, x, w)
    assert y.shape == (*shape[:-1], 5)
    assert [d.shape for d in vjp(y)] == [x.shape, w.shape]
    np.testing.assert_allclose(y, -np.abs(x[..., None] - w).sum(-2), rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_scores_of_nothing(backend, sizes):
    queries, keys, dim = sizes
    query, key, v = jnp.ones((2, queries, dim)), jnp.ones((2, keys, dim)), jnp.ones(dim)
    with ops.use_backend(backend):
        for score, arrays in (
            (ops.l1_scores, (query, key)),
            (ops.additive_scores, (query, key, v)),
        ):
            s, *gradients = value_and_gradients(
                score, np.ones((2, queries, keys), np.float32), *arrays
            )
            np.testing.assert_array_equal(s, np.zeros((2, queries, keys)))
            for gradient, array in zip(gradients, arrays, strict=True):
                np.testing.assert_array_equal(gradient, np.zeros(array.shape))


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


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ops.adder_matmul(jnp.ones((2, 3)), jnp.ones((4, 5))), ValueError, "same K"),
        (
            lambda: ops.adder_matmul(jnp.ones((2, 3)), jnp.ones((3, 4), int)),
            TypeError,
            "`w` in .*got int32",
        ),
        (
            lambda: ops.adder_matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), x_gradient="relu"),
            ValueError,
            "hardtanh",
        ),
        (
            lambda: ops.adder_matmul(jnp.ones((2, 3), jnp.float8_e4m3fn), jnp.ones((3, 4))),
            TypeError,
            "float8_e4m3fn",
        ),
        (
            lambda: ops.l1_scores(jnp.ones((2, 3)), jnp.ones((2, 3), jnp.float8_e5m2)),
            TypeError,
            "`key` in bfloat16",
        ),
        (
            lambda: ops.adder_matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), hardtanh_slope=0),
            ValueError,
            "positive",
        ),
        (lambda: ops.l1_scores(jnp.ones((2, 3)), jnp.ones((2, 4))), ValueError, "same d"),
        (lambda: ops.l1_scores(jnp.ones((2, 5, 3)), jnp.ones((3, 5, 3))), ValueError, "broadcast"),
        (
            lambda: ops.additive_scores(jnp.ones((2, 3)), jnp.ones((4, 3)), jnp.ones(4)),
            ValueError,
            "v of shape",
        ),
    ],
)
def test_errors_say_what_was_expected(call, error, words):
    with pytest.raises(error, match=words):
        call()
