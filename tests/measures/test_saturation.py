"""Gradient norms against automatic differentiation, entropies against their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax.measures import entropy_by_width, gradient_norms, unattended_gradient
from adder_flax.measures.saturation import additive_gradient_norm, dot_product_gradient


def additive(w_s, w_h, v, query, key, layer_norm):
    z = query @ w_s + key @ w_h
    if layer_norm:
        z = (z - z.mean()) / jnp.sqrt(z.var() + 1e-6)
    return v @ jnp.tanh(z)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("size", [0.3, 3.0])
def test_additive_gradient_norm_against_jax(layer_norm, size):
    rng = np.random.default_rng(0)
    w_s, w_h, v = rng.standard_normal((5, 7)), rng.standard_normal((4, 7)), rng.standard_normal(7)
    query, key = size * rng.standard_normal(5), size * rng.standard_normal(4)
    gradient = jax.grad(additive)(*map(jnp.asarray, (w_s, w_h, v, query, key)), layer_norm)
    z, norm = query @ w_s + key @ w_h, np.linalg.norm(query)
    ours = additive_gradient_norm(z, v, norm, layer_norm=layer_norm)
    assert ours == pytest.approx(float(jnp.linalg.norm(gradient)), rel=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_dot_product_gradient_against_jax(scale):
    query, *keys = np.random.default_rng(0).standard_normal((10, 16))
    keys = np.array(keys)
    loss = lambda query: -jax.nn.log_softmax(keys @ query * scale)[0]
    gradient, weights = dot_product_gradient(query, keys, scale=scale)
    np.testing.assert_allclose(gradient, jax.grad(loss)(jnp.asarray(query)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(weights, jax.nn.softmax(keys @ query * scale), rtol=1e-4)


def test_additive_gradients_vanish_for_almost_every_draw_but_not_in_the_mean():
    norms = gradient_norms([1.0, 10.0, 1000.0])
    assert norms.additive[2] < 1e-3 * norms.additive[0]
    # P(unit unsaturated) ~ 1/‖s‖ and its contribution ~ ‖s‖²: the mean square grows like ‖s‖.
    assert norms.additive_rms[2] > norms.additive_rms[1] > norms.additive_rms[0]
    np.testing.assert_allclose(norms.additive_layer_norm, norms.additive_layer_norm[0], rtol=1e-3)
    # Scaling keeps the softmax alive.
    assert norms.active[0] < 0.15
    assert norms.active_scaled[0] > 0.6


def test_entropy_falls_with_width_only_without_scaling():
    entropies = entropy_by_width([16, 256], keys=100)
    for name in ("dot", "adder", "adder, variance-matched"):
        assert entropies[name][1] == pytest.approx(entropies[name][0], abs=0.1)
    for name in ("dot, unscaled", "adder, unscaled"):
        assert entropies[name][1] < 0.6 * entropies[name][0]
    # Lower variance, flatter map: of normal logits of variance s² about ln(n) − s²/2.
    assert entropies["adder"][1] > entropies["adder, variance-matched"][1]
    expected = np.log(100) - 0.5 * 2 * (1 - 2 / np.pi)
    assert entropies["adder"][1] == pytest.approx(expected, abs=0.1)


def test_gradient_of_keys_that_are_not_attended_is_that_of_differences():
    # One query, so that the median is over keys alone.
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((1, 6)), rng.standard_normal((9, 6))
    scores, wanted = (query @ key.T)[0] / np.sqrt(6), rng.integers(0, 9, 1)[0]
    loss = lambda e: np.log(np.exp(e).sum()) - e[wanted]
    step = 1e-6 * np.eye(9)
    gradient = np.array([(loss(scores + d) - loss(scores - d)) / 2e-6 for d in step])
    others = [j for j in range(9) if j not in (wanted, scores.argmax())]
    found = unattended_gradient([6], keys=9, queries=1)["dot"][0]
    np.testing.assert_allclose(found, np.median(gradient[others]), rtol=1e-5)
