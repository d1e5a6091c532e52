"""Spectra against closed forms, and Proposition 1 where it holds and where it does not."""

import numpy as np
import pytest

from adder_flax.measures import (
    asymmetry,
    cumulative,
    effective_rank,
    equivalent_rank,
    identity_effect,
)
from tests.measures.test_maps import random_maps


def symmetric_positive_map(size):
    """A doubly stochastic, symmetric, positive semidefinite map: the square of a symmetric doubly
    stochastic one."""
    rng = np.random.default_rng(0)
    matrix = np.zeros((size, size))
    for weight in rng.dirichlet(np.ones(6)):
        permutation = np.eye(size)[rng.permutation(size)]
        matrix += weight * (permutation + permutation.T) / 2
    return matrix @ matrix


def test_ranks_of_a_known_spectrum():
    sigma = np.array([4.0, 3.0, 2.0, 1.0])
    np.testing.assert_allclose(cumulative(sigma), [0.4, 0.7, 0.9, 1.0])
    assert equivalent_rank(sigma) == 3
    assert equivalent_rank(sigma, level=0.91) == 4
    share = sigma / 10
    assert effective_rank(sigma) == pytest.approx(np.prod(share**-share))


@pytest.mark.parametrize("size", [1, 2, 17, 65])
def test_proposition_is_exact_for_symmetric_positive_semidefinite_maps(size):
    effect = identity_effect(symmetric_positive_map(size))
    assert effect.deviation < 1e-12
    assert effect.asymmetry < 1e-12
    assert effect.lowest_eigenvalue > -1e-12
    assert np.all(effect.ratio >= 1 - 1e-12)
    assert np.all(effect.difference_identity <= effect.difference + 1e-12)
    assert effect.rank_identity >= effect.rank


def test_proposition_fails_for_a_symmetric_map_with_negative_eigenvalues():
    effect = identity_effect(np.array([[0.0, 1.0], [1.0, 0.0]]))  # eigenvalues 1, −1; with I: 2, 0
    assert effect.asymmetry == 0
    assert effect.lowest_eigenvalue == pytest.approx(-1)
    assert effect.deviation == pytest.approx(2)
    assert effect.rank_identity < effect.rank


def test_proposition_fails_for_a_cycle():
    effect = identity_effect(np.eye(5)[[1, 2, 3, 4, 0]])
    # Normal: singular values of A + I are |λ + 1|.
    eigenvalues = np.exp(2j * np.pi * np.arange(5) / 5)
    assert effect.deviation == pytest.approx(np.max(2 - np.abs(eigenvalues + 1)))


@pytest.mark.parametrize("identity", [0.0, 1.0])
def test_curves_are_those_of_numpy_and_the_identity_is_taken_off_first(identity):
    maps = random_maps(2, 6, 6)
    effect = identity_effect(maps + identity * np.eye(6))
    sigma, shifted = (np.linalg.svd(m, compute_uv=False) for m in (maps, maps + np.eye(6)))
    share = lambda sigma: np.cumsum(sigma, -1) / sigma.sum(-1, keepdims=True)
    np.testing.assert_allclose(effect.f, share(sigma), atol=1e-12)
    np.testing.assert_allclose(effect.f_identity, share(shifted), atol=1e-12)
    np.testing.assert_allclose(effect.ratio, share(sigma) / share(shifted))
    np.testing.assert_allclose(effect.difference, share(sigma) - np.arange(1, 7) / 6, atol=1e-12)


def test_asymmetry_of_antisymmetric_part():
    assert asymmetry(random_maps(4, 4) + random_maps(4, 4).T) == pytest.approx(0)
    assert asymmetry(np.array([[0.0, 1.0], [-1.0, 0.0]])) == pytest.approx(2)


@pytest.mark.parametrize("n", [10, 20, 50, 197, 200])
def test_equal_singular_values_have_the_exact_rank_in_either_precision(n):
    exact = -(-9 * n // 10)  # the smallest r with r / n ≥ 9 / 10
    assert equivalent_rank(np.ones(n)) == exact
    assert equivalent_rank(np.full(n, 0.3, np.float32)) == exact
    assert equivalent_rank(np.r_[np.ones(n), 1e-3]) == exact + (9 * n % 10 == 0)
