"""Theorem 1 against its closed form, by sampling and by integration."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from adder_flax import attention
from adder_flax.measures import live_variance, monte_carlo_variance, pair_scores, predicted_variance

SCORES = ["dot", "adder", "gaussian"]


def component_variance(function):
    """Variance of function(x − y) for unit-normal x, y, by quadrature over the normal
    difference."""
    density = scipy.stats.norm(scale=np.sqrt(2)).pdf
    of = lambda power: lambda t: function(t) ** power * density(t)
    first, second = (scipy.integrate.quad(of(n), -40, 40, limit=200)[0] for n in (1, 2))
    return second - first**2


@pytest.mark.parametrize(
    ("score", "function"), [("adder", np.abs), ("gaussian", lambda t: t**2 / 2)]
)
def test_predicted_variance_by_quadrature(score, function):
    expected = 10 * component_variance(function)
    assert predicted_variance(score, 10) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("score", SCORES)
def test_sampled_variance_agrees_with_the_theorem(score):
    for estimate in monte_carlo_variance(score, [1, 8, 64]):
        predicted = predicted_variance(score, estimate.head_dim)
        assert abs(estimate.variance - predicted) < 5 * estimate.standard_error
        assert estimate.standard_error < 0.1 * predicted


def test_the_standard_error_is_that_of_a_mean():
    """Of a sample variance of n normal numbers it is σ² √(2 / n); of R of them √R times less."""
    [found] = monte_carlo_variance("adder", [64], samples=100, repetitions=400)
    expected = predicted_variance("adder", 64) * np.sqrt(2 / (100 * 400))
    assert found.standard_error == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("score", SCORES)
def test_scores_are_those_of_the_attention(score):
    query, key = np.random.default_rng(0).standard_normal((2, 3, 5, 8)).astype(np.float32)
    expected = attention.get_score(score).function(jnp.asarray(query), jnp.asarray(key))
    np.testing.assert_allclose(pair_scores(query, key, score), expected, rtol=2e-5, atol=2e-5)
    assert attention.get_score(score).variance(8) == pytest.approx(predicted_variance(score, 8))


def test_live_variance_sees_sizes_equal_queries_and_keys_and_heavy_tails():
    query, key = np.random.default_rng(1).standard_normal((2, 40, 60, 16))
    live = live_variance(3 * query, 2 * key, "adder")
    assert live.query_rms == pytest.approx(3, rel=0.02)
    assert abs(live.component_correlation) < 0.02
    assert abs(live.excess_kurtosis) < 0.2
    assert live_variance(query, query, "dot").component_correlation == pytest.approx(1)
    query, key = np.random.default_rng(3).laplace(size=(2, 50, 400, 4))
    assert live_variance(query, key, "adder").excess_kurtosis == pytest.approx(3, abs=0.4)


def test_scores_with_parameters_are_refused():
    with pytest.raises(ValueError, match="one of .*'adder', 'dot', 'gaussian'.*; got 'additive'"):
        predicted_variance("additive", 8)


@pytest.mark.parametrize("score", SCORES)
def test_live_variance_of_components_of_different_size(score):
    """Of normal numbers: Σ σ²τ², (1 − 2/π) Σ (σ² + τ²) and ½ Σ (σ² + τ²)², of few tokens too."""
    sizes = np.multiply.outer([1, 0.7], np.linspace(0.5, 3, 8))
    normal = np.random.default_rng(4).standard_normal((2, 4000, 17, 8))
    live = live_variance(*normal * sizes[:, None, None], score)
    of_query, of_key = sizes**2
    expected = {
        "dot": (of_query * of_key).sum(),
        "adder": (1 - 2 / np.pi) * (of_query + of_key).sum(),
        "gaussian": ((of_query + of_key) ** 2).sum() / 2,
    }
    assert live.rescaled == pytest.approx(expected[score], rel=0.02)
    assert live.measured == pytest.approx(expected[score], rel=0.05)
    assert live.predicted == predicted_variance(score, 8)
