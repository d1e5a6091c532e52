"""Every backend that runs here against float64 NumPy: values and all gradient rules, on awkward
shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import ops
from tests.ops.programs import (
    BACKENDS,
    additive,
    additive_gradients,
    l1,
    l1_gradients,
    normal,
    value_and_gradients,
)

SHAPES = [(1, 1, 1), (2, 17, 3), (17, 65, 19), (65, 33, 130), (0, 4, 3), (3, 0, 4), (5, 64, 1)]


def assert_close(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_adder_matmul_values(backend, shape):
    m, k, n = shape
    x, w = normal((m, k), (k, n))
    got = jax.jit(ops.adder_matmul)(x, w)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, l1(x, w.T), rtol=1e-5, atol=1e-5 * max(k, 1))


@pytest.mark.cases(9)
@pytest.mark.parametrize("x_rule", ["sign", "full", "hardtanh"])
@pytest.mark.parametrize("w_rule", ["sign", "full", "hardtanh"])
def test_adder_matmul_gradients_under_every_pair_of_rules(backend, x_rule, w_rule):
    x, w, g = normal((17, 33), (33, 19), (17, 19))
    x[2, 5] = w[5, 3]  # a tie: the sign of zero is zero
    rules = dict(x_gradient=x_rule, w_gradient=w_rule, hardtanh_slope=4.0)
    _, dx, dw = value_and_gradients(lambda x, w: ops.adder_matmul(x, w, **rules), g, x, w)
    assert_close((dx, dw.T), l1_gradients(x, w.T, g, x_rule, w_rule, 4.0))


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "dim", "rule"),
    [
        ((2, 3), 1, 1, 1, "sign"),
        ((2, 3), 17, 65, 64, "sign"),
        ((2, 3), 5, 3, 7, "sign"),
        *((batch, 13, 40, 20, rule) for batch in ((1,), (2,)) for rule in ("full", "hardtanh")),
    ],
)
def test_l1_scores_and_their_gradients(backend, batch, queries, keys, dim, rule):
    """With a batch, both gradients come from one pass over the pairs."""
    q, k, g = normal((*batch, queries, dim), (*batch, keys, dim), (*batch, queries, keys))
    options = {} if rule == "sign" else dict(gradient=rule, hardtanh_slope=4.0)
    got = value_and_gradients(lambda q, k: ops.l1_scores(q, k, **options), g, q, k)
    assert_close(got, (l1(q, k), *l1_gradients(q, k, g, rule, rule, 4.0)))


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "dim"), [((2, 3), 17, 5, 9), ((1, 1), 5, 3, 3_100)]
)
def test_additive_scores_and_gradients_with_weights_for_each_head(
    backend, batch, queries, keys, dim
):
    """The long sums are three pieces of the native kernels, of which each adds to those before."""
    q, k, g = normal((*batch, queries, dim), (*batch, keys, dim), (*batch, queries, keys))
    (v,) = normal((batch[1], dim), seed=1)
    scores, *gradients = value_and_gradients(ops.additive_scores, g, q, k, v)
    np.testing.assert_allclose(scores, additive(q, k, v), rtol=1e-4, atol=3e-7 * dim + 1e-5)
    dq, dk, dv = additive_gradients(q, k, v, g)
    assert_close(gradients, (dq, dk, dv.sum(0)))
    np.testing.assert_allclose(jax.jit(ops.l1_scores)(q, k), l1(q, k), rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_small_distances_beside_large_values_do_not_cancel(backend, offset):
    x, noise = normal((1, 64), (64, 8))
    x = x + np.float32(offset)
    w = (x.T + 1e-2 * noise).astype(np.float32)
    np.testing.assert_allclose(jax.jit(ops.adder_matmul)(x, w), l1(x, w.T), rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_long_sums_are_not_lost_in_their_rounding(backend):
    x, w = normal((1, 2_000_000), (2_000_000, 1))
    np.testing.assert_allclose(jax.jit(ops.adder_matmul)(x, w), l1(x, w.T), rtol=3e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_propagate(backend, bad):
    x, w = normal((7, 20), (20, 70))
    x[3, 4] = bad
    np.testing.assert_allclose(jax.jit(ops.adder_matmul)(x, w), l1(x, w.T), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_accumulates_in_float32(backend, dtype):
    x, w = (jnp.asarray(a, dtype) for a in normal((5, 768), (768, 11)))
    got = jax.jit(ops.adder_matmul)(x, w)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, l1(x, w.T), rtol=1e-5)


def test_under_vmap_scan_and_leading_axes(backend):
    x, w = normal((4, 3, 17, 33), (33, 19))
    scan = lambda x: jax.lax.scan(lambda carry, row: (carry, ops.adder_matmul(row, w)), 0, x)[1]
    mapped = lambda x: jax.vmap(ops.adder_matmul, (0, None))(x, w)
    for call in (lambda x: ops.adder_matmul(x, w), mapped, scan):
        np.testing.assert_allclose(jax.jit(call)(x), l1(x, w.T), rtol=1e-5, atol=1e-4)
