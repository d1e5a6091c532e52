"""LayerNorm of the last axis against float64 NumPy and against Flax, on every backend."""

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from adder_flax import layers, linen, ops
from tests.ops.programs import normal, value_and_gradients

# Rows that are no multiple of any vector, one feature, one row, no row, several chunks of rows.
SHAPES = [(3, 5, 192), (5, 10), (2, 3, 4, 33), (1, 700, 48), (7,), (0, 4), (2, 0, 4), (1, 1)]


def _expected(x, scale, bias, g, epsilon):
    """Value and gradients by the formulas, in float64."""
    x, scale, bias, g = (np.asarray(a, np.float64) for a in (x, scale, bias, g))
    deviation = np.sqrt(x.var(-1, keepdims=True) + epsilon)
    normalized = (x - x.mean(-1, keepdims=True)) / deviation
    h = g * scale
    dx = (
        h - h.mean(-1, keepdims=True) - normalized * (h * normalized).mean(-1, keepdims=True)
    ) / deviation
    rows = tuple(range(x.ndim - 1))
    return normalized * scale + bias, dx, (g * normalized).sum(rows), g.sum(rows)


@pytest.mark.cases(7)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradients_are_those_of_the_formula(backend, shape):
    x, scale, bias, g = normal(shape, shape[-1:], shape[-1:], shape)
    function = lambda *a: ops.layer_norm(*a, epsilon=0.1)
    results = value_and_gradients(function, g, 3 * x + 2, scale, bias)
    for got, expected in zip(results, _expected(3 * x + 2, scale, bias, g, 0.1), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_a_mean_far_larger_than_the_spread_does_not_cancel(backend):
    (x,) = normal((6, 64))
    ones, zeros = np.ones(64, np.float32), np.zeros(64, np.float32)
    far = (1e3 + 1e-1 * x).astype(np.float32)
    got = ops.layer_norm(far, ones, zeros, fast_variance=False)
    # Of numbers near 1,000 float32 keeps steps of 6e-5, which is 6e-4 of their spread.
    np.testing.assert_allclose(got, _expected(far, ones, zeros, x, 1e-6)[0], atol=2e-3)


def test_what_is_not_finite_stays_in_its_row(backend):
    x, scale, bias = normal((3, 20), (20,), (20,))
    x[1, 4] = np.nan
    got = np.isnan(ops.layer_norm(x, scale, bias))
    np.testing.assert_array_equal(got, np.isnan(x).any(-1, keepdims=True) & np.ones(20, bool))


@pytest.mark.cases(1)
def test_vmap_over_any_operand_is_a_loop(backend):
    arrays = normal((4, 5, 12), (4, 12), (4, 12))
    (g,) = normal((12,), seed=1)
    both = lambda *a: value_and_gradients(lambda *a: ops.layer_norm(*a).sum(0), g, *a)
    for axes in [(0, 0, 0), (0, None, None), (None, 0, None), (0, None, 0)]:
        pairs = [*zip(arrays, axes, strict=True)]
        given = [a if axis == 0 else a[0] for a, axis in pairs]
        loop = [both(*(a[i if axis == 0 else 0] for a, axis in pairs)) for i in range(4)]
        for mapped, single in zip(
            jax.vmap(both, axes)(*given), zip(*loop, strict=True), strict=True
        ):
            np.testing.assert_allclose(mapped, single, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives_are_those_of_flax(backend):
    x, scale, bias, g = normal((3, 6), (6,), (6,), (3, 6))
    tangents = normal((3, 6), (6,), (6,), seed=1)

    def flax(x, scale, bias):
        layer = nn.LayerNorm(epsilon=0.1)
        return layer.apply({"params": {"scale": scale, "bias": bias}}, x)

    def derivatives(function):
        loss = lambda *a: jnp.sum(g * jnp.sin(function(*a)))
        return (
            jax.jvp(function, (x, scale, bias), tuple(tangents)),
            jax.hessian(loss, (0, 1, 2))(x, scale, bias),
            jax.jvp(jax.grad(loss), (x, scale, bias), tuple(tangents)),
        )

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
    ours = lambda *a: ops.layer_norm(*a, epsilon=0.1)
    jax.tree.map(close, derivatives(ours), derivatives(flax))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("options", [{}, {"use_bias": False}, {"use_scale": False}], ids=str)
def test_modules_are_those_of_flax(dtype, options):
    (x,) = normal((2, 5, 24))
    own = layers.LayerNorm(24, dtype=dtype, **options, rngs=nnx.Rngs(0))
    theirs = nnx.LayerNorm(24, dtype=dtype, **options, rngs=nnx.Rngs(0))
    for layer in (own, theirs):
        for name, value in zip(("scale", "bias"), normal((24,), (24,), seed=1), strict=True):
            if getattr(layer, name) is not None:
                getattr(layer, name)[...] = value
    assert jax.tree.structure(nnx.state(own)) == jax.tree.structure(nnx.state(theirs))
    of_linen, params = linen.LayerNorm(dtype=dtype, **options), nnx.to_pure_dict(nnx.state(own))
    made = of_linen.init(jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)
    wide, tolerance = np.float32(theirs(x)), 1e-2 if dtype else 1e-5
    for got in (own(x), of_linen.apply({"params": params}, x)):
        assert got.dtype == theirs(x).dtype
        np.testing.assert_allclose(np.float32(got), wide, rtol=tolerance, atol=tolerance)


def test_other_axes_and_masks_are_left_to_flax():
    (x,) = normal((2, 5, 24))
    mask = jnp.arange(24) < 20
    for options, call in [({"reduction_axes": (1, 2)}, {}), ({}, {"mask": mask})]:
        own = layers.LayerNorm(24, **options, rngs=nnx.Rngs(0))
        theirs = nnx.LayerNorm(24, **options, rngs=nnx.Rngs(0))
        np.testing.assert_array_equal(own(x, **call), theirs(x, **call))
        own, theirs = (cls(**options) for cls in (linen.LayerNorm, nn.LayerNorm))
        params = theirs.init(jax.random.key(0), x)
        np.testing.assert_array_equal(own.apply(params, x, **call), theirs.apply(params, x, **call))


def test_its_parameters_have_kronecker_factors():
    layer = layers.LayerNorm(8, rngs=nnx.Rngs(0))
    (x,) = normal((4, 8))
    found = kfac.find_layers(lambda layer, x: (layer(x) ** 2).mean(), layer, x)
    (block,) = found.blocks.values()
    assert [use.layer.kind for use in block.uses] == ["norm"]
    assert found.coverage == 1.0


@pytest.mark.unchecked  # annotations would speak first
def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"expected scale and bias of shape \(3,\).*\(4,\)"):
        ops.layer_norm(jnp.ones((2, 3)), jnp.ones(4), jnp.ones(3))
