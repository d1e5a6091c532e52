"""The sphere, the kernel and the motion, against exact identities and walks made to order."""

import jax
import numpy as np
import pytest
from flax import nnx
from scipy import special

from adder_flax.measures import (
    brownian_test,
    component_correlation,
    diffusion_ratio,
    dot_product_map,
    gaussian_kernel_map,
    layer_norm,
    relative_radius,
    total_variation,
)


def test_layer_norm_is_flax_layer_norm_and_lies_on_the_sphere():
    tokens = 3 + 2 * np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    flax = nnx.LayerNorm(64, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))(tokens)
    np.testing.assert_allclose(layer_norm(tokens), flax, atol=1e-5)
    np.testing.assert_allclose(relative_radius(layer_norm(tokens)), 1, atol=1e-6)
    tiny = 1e-3 * np.float64(tokens)  # inside of it
    radius = np.sqrt(tiny.var(-1) / (tiny.var(-1) + 1e-6))
    np.testing.assert_allclose(relative_radius(layer_norm(tiny)), radius)


@pytest.mark.parametrize("width", [2, 17, 64])
def test_gaussian_kernel_is_the_dot_product_map_for_keys_on_a_sphere_alone(width):
    query, key = np.random.default_rng(0).standard_normal((2, 9, width))
    apart = lambda *pair: total_variation(gaussian_kernel_map(*pair), dot_product_map(*pair))
    assert apart(query, layer_norm(key, epsilon=0.0)).max() < 1e-12
    assert apart(query, key).min() > 0.01


def test_maps_against_jax_softmax():
    query, key = np.random.default_rng(0).standard_normal((2, 3, 9, 16))
    expected = jax.nn.softmax(query @ np.swapaxes(key, -1, -2) / 4.0, axis=-1)
    np.testing.assert_allclose(dot_product_map(query, key), expected, atol=1e-6)
    distance = np.square(query[:, :, None] - key[:, None]).sum(-1)
    expected = jax.nn.softmax(-distance / 8.0, axis=-1)
    np.testing.assert_allclose(gaussian_kernel_map(query, key), expected, atol=1e-6)


def path_of(steps):
    return np.concatenate([np.zeros_like(steps[:1]), np.cumsum(steps, 0)])


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def test_brownian_paths_pass():
    result = brownian_test(path_of(normal(12, 40, 25, 32)))
    assert result.growth_exponent == pytest.approx(1, abs=0.02)
    np.testing.assert_allclose(result.displacement, np.arange(1, 13), rtol=0.03)
    assert abs(result.mean_correlation) < 0.01
    assert result.shared_drift < 0.01
    assert np.abs(result.excess_kurtosis).max() < 0.1


def test_what_is_not_brownian_is_seen():
    result = brownian_test(path_of(np.repeat(normal(1, 500, 32), 6, 0)))  # straight
    assert result.growth_exponent == pytest.approx(2)
    assert result.mean_correlation == pytest.approx(1)
    np.testing.assert_allclose(result.increment_correlation, 1)
    drift = path_of(normal(6, 1, 32) + np.zeros((6, 500, 32)))
    assert brownian_test(drift).shared_drift == pytest.approx(1)
    steps = np.random.default_rng(0).laplace(size=(3, 4000, 8))
    np.testing.assert_allclose(brownian_test(path_of(steps)).excess_kurtosis, 3, atol=0.6)


def test_one_block_has_no_exponent_and_no_block_is_refused():
    result = brownian_test(path_of(np.ones((1, 4, 8))))
    assert np.isnan(result.growth_exponent)
    assert np.isnan(result.mean_correlation)
    with pytest.raises(ValueError, match="at least 2 points, got 1"):
        brownian_test(np.ones((1, 4, 8)))


@pytest.mark.parametrize("width", [3, 16, 64, 192])
@pytest.mark.parametrize("concentration", [0.5, 8.0, 200.0])
def test_the_walks_rate_is_that_of_scipys_bessel_functions(width, concentration):
    i = lambda order: special.ive(order, concentration)
    expected = np.log(i(width / 2) / i(width / 2 - 1)) / (-(width - 1) / (2 * concentration))
    np.testing.assert_allclose(diffusion_ratio(width, concentration), expected, rtol=1e-9)


def test_the_first_harmonic_shrinks_as_integration_over_the_circle_says():
    # In two dimensions the walk is one over angles, and its eigenvalue a quotient of integrals.
    angle, concentration = np.linspace(-np.pi, np.pi, 20001), 3.0
    kernel = np.exp(concentration * np.cos(angle))
    shrinks = (kernel * np.cos(angle)).sum() / kernel.sum()
    rate = np.log(shrinks) / (-1 / (2 * concentration))
    np.testing.assert_allclose(diffusion_ratio(2, concentration), rate, rtol=1e-4)


def test_correlation_is_that_of_numpy_place_by_place():
    tokens = np.random.default_rng(1).standard_normal((6, 3, 4)) + np.arange(3)[:, None]
    tables = np.stack([np.corrcoef(tokens[:, place].T) ** 2 for place in range(3)])
    squared = tables[:, ~np.eye(4, dtype=bool)]
    found, chance = component_correlation(tokens)
    np.testing.assert_allclose(found, np.mean(squared))
    assert chance == 1 / 5
    # A component that is another one's double is not independent of it.
    found, _ = component_correlation(np.repeat(tokens, 2, axis=-1))
    assert found > np.mean(squared)
