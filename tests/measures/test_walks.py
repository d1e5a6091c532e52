"""Markov chains whose answers are known."""

from fractions import Fraction

import numpy as np
import pytest

from adder_flax.measures import (
    diffusion_map,
    eigenvalues,
    irreversibility,
    k_step,
    mixing_time,
    rollout,
    spectral_gap,
    stationary_distribution,
)
from tests.measures.test_maps import random_maps


def lazy_cycle(size):
    """Stay with probability ½, else one step left or right: eigenvalues (1 + cos(2πj/N)) / 2."""
    eye = np.eye(size)
    return eye / 2 + (np.roll(eye, 1, 0) + np.roll(eye, -1, 0)) / 4


@pytest.mark.parametrize("tokens", [1, 2, 17, 65])
def test_stationary_distribution_is_a_left_eigenvector(tokens):
    maps = random_maps(2, 3, tokens, tokens)
    stationary = stationary_distribution(maps)
    step = np.einsum("...i,...ij->...j", stationary, maps)
    np.testing.assert_allclose(step, stationary, atol=1e-12)
    np.testing.assert_allclose(stationary.sum(-1), 1)
    assert np.all(stationary > 0)


def test_random_walk_on_a_graph_visits_by_degree():
    adjacency = np.array([[0, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]], float)
    degree = adjacency.sum(-1)
    walk = adjacency / degree[:, None]
    np.testing.assert_allclose(stationary_distribution(walk), degree / degree.sum())
    assert irreversibility(walk) == pytest.approx(0, abs=1e-12)


def by_fractions(walk):
    """π by Gauss and Jordan's elimination without rounding."""
    size = len(walk)
    rows = [[Fraction(value) for value in row] for row in walk]
    rows = [[value / sum(row) for value in row] for row in rows]
    # π (A − I) = 0 in all columns but the last, which says Σ π = 1.
    equations = [[rows[i][j] - (i == j) for i in range(size)] + [0] for j in range(size - 1)]
    equations.append([Fraction(1)] * (size + 1))
    for k in range(size):
        pivot = next(row for row in equations[k:] if row[k])
        equations.remove(pivot)
        pivot = [value / pivot[k] for value in pivot]
        take = lambda row, k=k, pivot=pivot: [
            a - row[k] * b for a, b in zip(row, pivot, strict=True)
        ]
        equations = [take(row) for row in equations]
        equations.insert(k, pivot)
    return [float(row[-1]) for row in equations]


@pytest.mark.parametrize("spread", [1, 20, 50])
def test_stationary_distribution_of_sharp_maps_has_all_its_digits(spread):
    logits = np.random.default_rng(0).normal(size=(3, 8, 8)) * spread
    walks = np.exp(logits - logits.max(-1, keepdims=True))
    walks /= walks.sum(-1, keepdims=True)
    found = stationary_distribution(walks)
    np.testing.assert_allclose(found, list(map(by_fractions, walks)), rtol=1e-12)
    assert np.isfinite(diffusion_map(walks)).all()


def test_a_walk_stays_where_it_does_not_leave():
    """Tokens that it leaves for good have π = 0; of two that it never leaves, one has all of it."""
    last, first = [[0.5, 0.5, 0], [0, 0, 1], [0, 1, 0]], [[0, 1, 0], [1, 0, 0], [0.5, 0, 0.5]]
    found = stationary_distribution(np.array([last, first]))
    np.testing.assert_allclose(found, [[0, 0.5, 0.5], [0.5, 0.5, 0]], atol=1e-15)
    apart = np.eye(2)
    np.testing.assert_array_equal(stationary_distribution(apart) @ apart, [1, 0])
    assert mixing_time(apart) == -1


def test_cycle_has_its_known_spectrum():
    expected = np.sort((1 + np.cos(2 * np.pi * np.arange(9) / 9)) / 2)[::-1]
    np.testing.assert_allclose(eigenvalues(lazy_cycle(9)), expected, atol=1e-12)
    assert spectral_gap(lazy_cycle(9)) == pytest.approx(1 - expected[1])


@pytest.mark.parametrize("epsilon", [0.25, 0.1, 1e-3, 1e-8])
def test_mixing_time_of_two_states(epsilon):
    """π = (3/4, 1/4) and λ₂ = 0.6, so that the distance after k steps is 0.75 · 0.6^k."""
    steps = np.ceil(np.log(epsilon / 0.75) / np.log(0.6))
    assert mixing_time(np.array([[0.9, 0.1], [0.3, 0.7]]), epsilon=epsilon) == steps


def test_mixing_time_by_walking():
    maps = lazy_cycle(12)
    distance = lambda steps: np.abs(np.linalg.matrix_power(maps, steps) - 1 / 12).sum(-1).max() / 2
    steps = next(k for k in range(1000) if distance(k) <= 0.25)
    assert mixing_time(np.stack([maps, np.full((12, 12), 1 / 12)])).tolist() == [steps, 1]
    # One token is mixed at once, a periodic walk never.
    assert mixing_time(np.ones((1, 1))) == 0
    assert mixing_time(np.array([[0.0, 1.0], [1.0, 0.0]])) == -1


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_k_steps_one_by_one(steps):
    maps = random_maps(2, 6, 6)
    expected = np.linalg.matrix_power(maps, steps)
    np.testing.assert_allclose(k_step(maps + np.eye(6), steps), expected, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_diffusion_coordinates_give_the_diffusion_distance(steps):
    first, second = np.random.default_rng(0).standard_normal((2, 4, 8, 3))
    kernel = np.exp(-np.square(first[:, :, None] - second[:, None]).sum(-1))
    kernel = kernel + kernel.mT  # a symmetric kernel gives a reversible walk
    walk = kernel / kernel.sum(-1, keepdims=True)
    stationary = stationary_distribution(walk)
    power = np.linalg.matrix_power(walk, steps)
    # Coifman and Lafon: D_k(i, j)² = Σ_l (A^k_il − A^k_jl)² / π_l
    between = lambda rows: rows[:, :, None] - rows[:, None]
    distance = np.sqrt((between(power) ** 2 / stationary[:, None, None]).sum(-1))
    found = np.linalg.norm(between(diffusion_map(walk, steps=steps, dims=7)), axis=-1)
    np.testing.assert_allclose(found, distance, atol=1e-10)


def test_rollout_by_pushing_tokens_through_linear_blocks():
    """Blocks that only mix, x + A x, move one-hot tokens as rollout says, up to the growth of each
    block."""
    plain, identity = random_maps(2, 3, 5, 5, seed=1), random_maps(2, 3, 5, 5, seed=2)
    tokens = np.broadcast_to(np.eye(5), (2, 5, 5))
    tokens = tokens + plain.mean(1) @ tokens
    tokens = tokens + (identity.mean(1) + np.eye(5)) @ tokens
    rolled = rollout([plain, identity + np.eye(5)])
    np.testing.assert_allclose(rolled, tokens / (2 * 3), atol=1e-12)
    np.testing.assert_allclose(rolled.sum(-1), 1)
