"""The XOR task: the enumeration against linear programming, the bound against another solver."""

import itertools
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from adder_flax.attention import additive_hidden_dim
from adder_flax.measures import (
    bilinear_as_additive,
    hessian_blocks,
    score_parameters,
    train_xor,
    xor_bound,
    xor_pairs,
)
from adder_flax.measures.expressivity import separable


def test_targets_by_hand():
    queries, keys, targets = xor_pairs()
    assert len({tuple(pair) for pair in np.hstack([queries, keys])}) == 16
    for query, key, target in zip(queries, keys, targets, strict=True):
        assert target == ((query[0] == key[0]) != (query[1] == key[1]))


def test_separability_against_linear_programming():
    """y_i (c + w·x_i) ≥ 1 has a solution exactly for the labellings that `separable` accepts."""
    corners = np.array([[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]], float)
    for labels in itertools.product((False, True), repeat=4):
        sign = np.where(labels, 1.0, -1.0)
        rows, bounds = -sign[:, None] * corners, (None, None)
        solved = scipy.optimize.linprog(np.zeros(3), rows, -np.ones(4), bounds=bounds)
        assert solved.success == separable(labels)


def test_bound_against_mixed_integer_programming():
    """An independent solver maximises the number of right pairs over all bounded W."""
    queries, keys, targets = xor_pairs()
    one = np.ones((16, 1))
    features = np.einsum("ni,nj->nij", np.hstack([one, queries]), np.hstack([one, keys]))
    sign, big, right = np.where(targets > 0, 1.0, -1.0)[:, None], 1000.0, np.arange(25) >= 9
    # sign · features · w ≥ 1 − big (1 − right)
    rows = np.hstack([sign * features.reshape(16, 9), -big * np.eye(16)])
    best = scipy.optimize.milp(
        -right.astype(float),
        constraints=scipy.optimize.LinearConstraint(rows, lb=1 - big),
        integrality=right,
        bounds=scipy.optimize.Bounds(np.where(right, 0, -100), np.where(right, 1, 100)),
    )
    right = features.reshape(16, 9) @ best.x[:9] * sign[:, 0] > 0
    assert xor_bound() == Fraction(12, 16) == Fraction(round(-best.fun), 16)
    assert right.sum() == 12


def test_training_reaches_what_mathematics_allows():
    assert np.all(train_xor("additive", seeds=4) == 1.0)
    assert np.all(train_xor("bilinear", seeds=4) <= 0.75)


@pytest.mark.parametrize(("query_dim", "key_dim"), [(64, 128), (16, 16), (5, 3)])
def test_parameter_counts_cross_at_the_default_width(query_dim, key_dim):
    hidden = additive_hidden_dim(query_dim, key_dim)
    bilinear, additive = score_parameters(query_dim, key_dim, hidden)
    assert abs(bilinear - additive) <= (query_dim + key_dim + 1) / 2


def test_an_additive_score_comes_as_near_to_a_bilinear_one_as_its_inputs_are_small():
    rng = np.random.default_rng(0)
    weight, errors = rng.standard_normal((5, 3)), []
    query, key = rng.uniform(-1, 1, (50, 5)), rng.uniform(-1, 1, (50, 3))
    for size in (0.1, 0.05, 0.025):
        w_s, w_h, b, v = bilinear_as_additive(weight, size)
        assert w_s.shape == (12, 5)
        score = np.tanh(query @ w_s.T + key @ w_h.T + b) @ v
        errors.append(np.abs(score - np.einsum("ni,ij,nj->n", query, weight, key)).max())
    # In proportion to its square.
    np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 4, rtol=0.2)


def test_second_derivatives_are_the_blocks_of_the_quadratic_form():
    rng = np.random.default_rng(0)
    form = rng.standard_normal((5, 5))
    form = form + form.T
    score = lambda q, k: jnp.concatenate([q, k]) @ jnp.asarray(form) @ jnp.concatenate([q, k]) / 2
    found = hessian_blocks(score, jnp.ones(2), jnp.ones(3))
    blocks = form[:2, :2], form[:2, 2:], form[2:, 2:]
    np.testing.assert_allclose(found, [np.linalg.norm(block) for block in blocks], rtol=1e-5)
