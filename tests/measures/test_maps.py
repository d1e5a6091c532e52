"""Attention maps against SciPy and small cases worked by hand."""

import numpy as np
import pytest
import scipy.stats

from adder_flax.measures import (
    entropy,
    has_identity,
    mean_distance,
    patch_attention,
    patch_grid,
    stochastic_part,
)


def random_maps(*shape, seed=0):
    return np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), shape[:-1])


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_identity_is_told_by_the_row_sums_and_taken_off(tokens):
    maps = random_maps(2, 3, tokens, tokens)
    assert not has_identity(maps)
    assert has_identity(maps + np.eye(tokens))
    np.testing.assert_allclose(stochastic_part(maps + np.eye(tokens)), maps, atol=1e-12)
    sums = stochastic_part(maps.astype(np.float32)).sum(-1)
    np.testing.assert_allclose(sums, 1.0, rtol=0, atol=1e-12)


def test_rows_that_sum_to_neither_are_refused():
    with pytest.raises(ValueError, match="rows all sum to 1, or to 2.*got sums from 1.5 to 1.5"):
        has_identity(1.5 * random_maps(4, 4))


@pytest.mark.parametrize("identity", [0.0, 1.0])
def test_patch_attention_is_the_class_row_without_the_class_token(identity):
    maps = random_maps(2, 5, 5)
    expected = maps[:, 0, 1:] / (1 - maps[:, 0, :1])
    np.testing.assert_allclose(patch_attention(maps + identity * np.eye(5)), expected)


def test_patch_attention_without_class_token_is_the_mean_over_queries():
    maps = random_maps(2, 4, 4)
    np.testing.assert_allclose(patch_attention(maps, prefix_tokens=0), maps.mean(-2))


def test_patch_attention_leaves_registers_out():
    """As rows and as columns: timm's mean over the patches does not read them."""
    maps = random_maps(2, 7, 7)
    with_class = patch_attention(maps, prefix_tokens=3)
    np.testing.assert_allclose(with_class, maps[:, 0, 3:] / maps[:, 0, 3:].sum(-1)[:, None])
    without = patch_attention(maps, prefix_tokens=3, class_token=False)
    patches = maps[:, 3:, 3:].sum(1)
    np.testing.assert_allclose(without, patches / patches.sum(-1)[:, None])


@pytest.mark.parametrize("identity", [0.0, 1.0])
def test_entropy_against_scipy(identity):
    maps = random_maps(2, 3, 7, 7)
    expected = scipy.stats.entropy(maps, axis=-1)
    np.testing.assert_allclose(entropy(maps + identity * np.eye(7)), expected)


def test_entropy_of_certainty_is_zero():
    assert entropy(np.eye(4)[[1, 2, 3, 0]]).tolist() == [0.0] * 4


def test_mean_distance_by_loops():
    maps = random_maps(7, 7)
    rows = []
    for query in range(6):
        weights = maps[1 + query, 1:] / maps[1 + query, 1:].sum()
        distance = [np.hypot(query // 3 - key // 3, query % 3 - key % 3) for key in range(6)]
        rows.append(weights @ distance)
    np.testing.assert_allclose(mean_distance(maps, (2, 3)), np.mean(rows))
    np.testing.assert_allclose(mean_distance(maps + np.eye(7), (2, 3)), np.mean(rows))


def test_patch_grid_of_what_does_not_tile():
    assert patch_grid((224, 224, 3), 196) == (14, 14)
    with pytest.raises(ValueError, match="got 197. Set prefix_tokens"):
        patch_grid((224, 224, 3), 197)
