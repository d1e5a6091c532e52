"""Attention maps against SciPy and small cases worked by hand."""

import numpy as np
import pytest
import scipy.spatial
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
    with pytest.raises(ValueError, match="rows all sum to 1, or to 2.*got sums from 1.5 to 1.5"):
        has_identity(1.5 * maps)


@pytest.mark.parametrize("identity", [0.0, 1.0])
@pytest.mark.parametrize(
    ("options", "rows", "first"),
    [
        ({}, 0, 1),  # the class token's row, without itself
        ({"prefix_tokens": 0}, slice(0, None), 0),  # the mean over queries
        # Registers are left out, as rows and as columns: timm's mean does not read them either.
        ({"prefix_tokens": 3}, 0, 3),
        ({"prefix_tokens": 3, "class_token": False}, slice(3, None), 3),
    ],
)
def test_patch_attention_by_hand(options, rows, first, identity):
    maps = random_maps(2, 7, 7)
    patches = maps[:, rows, first:].reshape(2, -1, 7 - first).sum(1)
    found = patch_attention(maps + identity * np.eye(7), **options)
    np.testing.assert_allclose(found, patches / patches.sum(-1)[:, None])


@pytest.mark.parametrize("identity", [0.0, 1.0])
def test_entropy_and_mean_distance_against_scipy(identity):
    maps = random_maps(2, 3, 7, 7)
    maps[0, 0] = np.eye(7)[[1, 2, 3, 4, 5, 6, 0]]  # certainty
    of = maps + identity * np.eye(7)
    np.testing.assert_allclose(entropy(of), scipy.stats.entropy(maps, axis=-1))
    places = np.argwhere(np.ones((2, 3)))
    maps = random_maps(7, 7)
    weights = maps[1:, 1:] / maps[1:, 1:].sum(-1, keepdims=True)
    expected = (weights * scipy.spatial.distance.cdist(places, places)).sum(-1).mean()
    found = mean_distance(maps + identity * np.eye(7), (2, 3))
    np.testing.assert_allclose(found, expected)


def test_patch_grid_of_what_does_not_tile():
    assert patch_grid((224, 224, 3), 196) == (14, 14)
    with pytest.raises(ValueError, match="got 197. Set prefix_tokens"):
        patch_grid((224, 224, 3), 197)
