"""Every backend that runs here against float64 NumPy: values and all gradient rules, on awkward
shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import ops
from tests.ops.programs import BACKENDS, normal, value_and_gradients

SHAPES = [(1, 1, 1), (2, 17, 3), (17, 65, 19), (65, 33, 130), (0, 4, 3), (3, 0, 4), (5, 64, 1)]


def _rule(difference, rule, slope):
    """The factor that a rule puts in the place of d(-|x - w|)/dx, for difference = w - x."""
    if rule == "sign":
        return np.sign(difference)
    return difference if rule == "full" else np.clip(slope * difference, -1, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_adder_matmul_values(backend, shape):
    m, k, n = shape
    x, w = normal((m, k), (k, n))
    with ops.use_backend(backend):
        got = jax.jit(ops.adder_matmul)(x, w)
    expected = -np.abs(x[:, :, None].astype(np.float64) - w[None].astype(np.float64)).sum(1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * max(k, 1))


@pytest.mark.cases(9)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("x_rule", ["sign", "full", "hardtanh"])
@pytest.mark.parametrize("w_rule", ["sign", "full", "hardtanh"])
def test_adder_matmul_gradients_under_every_pair_of_rules(backend, x_rule, w_rule):
    x, w, g = normal((17, 33), (33, 19), (17, 19))
    x[2, 5] = w[5, 3]  # a tie: the sign of zero is zero
    slope = 4.0
    with ops.use_backend(backend):
        matmul = lambda x, w: ops.adder_matmul(
            x, w, x_gradient=x_rule, w_gradient=w_rule, hardtanh_slope=slope
        )
        dx, dw = jax.jit(lambda x, w, g: jax.vjp(matmul, x, w)[1](g))(x, w, g)
    difference = w[None].astype(np.float64) - x[:, :, None]
    expected_dx = (g[:, None, :] * _rule(difference, x_rule, slope)).sum(2)
    expected_dw = -(g[:, None, :] * _rule(difference, w_rule, slope)).sum(0)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, expected_dw, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("queries", "keys", "dim"), [(1, 1, 1), (17, 65, 64), (5, 3, 7)])
def test_l1_scores_and_their_exact_gradient(backend, queries, keys, dim):
    q, k, g = normal((2, 3, queries, dim), (2, 3, keys, dim), (2, 3, queries, keys))
    with ops.use_backend(backend):
        scores, dq, dk = value_and_gradients(ops.l1_scores, g, q, k)
    difference = q[..., :, None, :].astype(np.float64) - k[..., None, :, :]
    np.testing.assert_allclose(scores, -np.abs(difference).sum(-1), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(
        dq, -(g[..., None] * np.sign(difference)).sum(-2), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        dk, (g[..., None] * np.sign(difference)).sum(-3), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_additive_scores_and_gradients_with_weights_for_each_head(backend):
    q, k, v, g = normal((2, 3, 17, 9), (2, 3, 5, 9), (3, 9), (2, 3, 17, 5))
    with ops.use_backend(backend):
        scores, dq, dk, dv = value_and_gradients(ops.additive_scores, g, q, k, v)
    hidden = np.tanh(q[..., :, None, :].astype(np.float64) + k[..., None, :, :])
    weights = v[:, None, None, :].astype(np.float64)
    np.testing.assert_allclose(scores, (weights * hidden).sum(-1), rtol=1e-4, atol=1e-5)
    slope = g[..., None] * weights * (1 - hidden**2)
    np.testing.assert_allclose(dq, slope.sum(-2), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dk, slope.sum(-3), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dv, (g[..., None] * hidden).sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_longer_than_what_is_packed_at_once(backend):
    """Three pieces of the native kernels, of which each adds to those before it."""
    width = 3_100
    q, k, g = normal((1, 5, width), (1, 3, width), (1, 5, 3))
    v = np.random.default_rng(1).uniform(0.5, 1.0, width).astype(np.float32)
    with ops.use_backend(backend):
        scores, dq, dk, dv = value_and_gradients(ops.additive_scores, g, q, k, v)
        distances = jax.jit(ops.l1_scores)(q, k)
    hidden = np.tanh(q[..., :, None, :].astype(np.float64) + k[..., None, :, :])
    np.testing.assert_allclose(scores, hidden @ v.astype(np.float64), rtol=1e-4, atol=1e-3)
    slope = g[..., None] * v * (1 - hidden**2)
    np.testing.assert_allclose(dq, slope.sum(-2), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dk, slope.sum(-3), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dv, (g[..., None] * hidden).sum((0, 1, 2)), rtol=1e-4, atol=1e-4)
    expected = np.abs(q[..., :, None, :].astype(np.float64) - k[..., None, :, :]).sum(-1)
    np.testing.assert_allclose(distances, -expected, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rule", ["full", "hardtanh"])
def test_scores_under_a_rule_with_a_slope(backend, batch, rule):
    """With a batch, both gradients come from one pass over the pairs."""
    q, k, g = normal((batch, 13, 20), (batch, 40, 20), (batch, 13, 40))
    scores = lambda q, k: ops.l1_scores(q, k, gradient=rule, hardtanh_slope=4.0)
    with ops.use_backend(backend):
        _, dq, dk = value_and_gradients(scores, g, q, k)
    slope = _rule(k[..., None, :, :].astype(np.float64) - q[..., :, None, :], rule, 4.0)
    np.testing.assert_allclose(dq, (g[..., None] * slope).sum(-2), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dk, -(g[..., None] * slope).sum(-3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_small_distances_beside_large_values_do_not_cancel(backend, offset):
    x, noise = normal((6, 64), (64, 8))
    x = x + np.float32(offset)
    w = (x[:1].T + 1e-2 * noise).astype(np.float32)
    with ops.use_backend(backend):
        got = jax.jit(ops.adder_matmul)(x[:1], w)
    expected = -np.abs(x[0, :, None].astype(np.float64) - w.astype(np.float64)).sum(0)
    np.testing.assert_allclose(got[0], expected, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_long_sums_are_not_lost_in_their_rounding(backend):
    x, w = normal((1, 2_000_000), (2_000_000, 1))
    with ops.use_backend(backend):
        got = jax.jit(ops.adder_matmul)(x, w)
    np.testing.assert_allclose(
        got[0, 0], -np.abs(x[0].astype(np.float64) - w[:, 0]).sum(), rtol=3e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_propagate(backend, bad):
    x, w = normal((7, 20), (20, 70))
    x[3, 4] = bad
    with ops.use_backend(backend):
        got = np.asarray(jax.jit(ops.adder_matmul)(x, w))
    assert (np.isnan(got[3]) if np.isnan(bad) else np.isneginf(got[3])).all()
    assert np.isfinite(np.delete(got, 3, axis=0)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_accumulates_in_float32(backend, dtype):
    x, w = (jnp.asarray(a, dtype) for a in normal((5, 768), (768, 11)))
    with ops.use_backend(backend):
        got = jax.jit(ops.adder_matmul)(x, w)
    exact = -np.abs(np.asarray(x, np.float64)[:, :, None] - np.asarray(w, np.float64)[None]).sum(1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_vmap_scan_and_leading_axes(backend):
    x, w = normal((4, 3, 17, 33), (33, 19))
    flat = (
        -np.abs(x.reshape(-1, 33)[:, :, None].astype(np.float64) - w[None])
        .sum(1)
        .reshape(4, 3, 17, 19)
    )
    with ops.use_backend(backend):
        direct = jax.jit(ops.adder_matmul)(x, w)
        mapped = jax.jit(jax.vmap(ops.adder_matmul, (0, None)))(x, w)
        _, scanned = jax.jit(
            lambda x: jax.lax.scan(lambda carry, row: (carry, ops.adder_matmul(row, w)), 0, x)
        )(x)
    for got in (direct, mapped, scanned):
        np.testing.assert_allclose(got, flat, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_again(backend):
    x, w, g = normal((197, 192), (192, 65), (197, 65))
    with ops.use_backend(backend):
        run = jax.jit(
            lambda x, w, g: (ops.adder_matmul(x, w), jax.vjp(ops.adder_matmul, x, w)[1](g))
        )
        first, second = run(x, w, g), run(x, w, g)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_an_unknown_backend_names_the_known_ones():
    with pytest.raises(ValueError, match="xla"), ops.use_backend("no_such_backend"):
        pass
