"""Weights drawn by path: models that differ in part begin alike where they agree."""

import jax
import numpy as np
import pytest

from adder_flax.training import build_run
from adder_flax.training.sharding import tree_path


@pytest.fixture
def params(tiny_config):
    """``make(**fields)``: the initial parameters of a run by path."""

    def make(**fields):
        tree = build_run(tiny_config("multiplicative", init="path", **fields)).init()["params"]
        return {tree_path(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}

    return make


def test_models_of_another_mechanism_and_width_begin_alike_where_they_agree(params):
    dot, other = params(), params(**{"model.score": "additive", "model.mlp_ratio": 3.0})
    extra = other.keys() - dot.keys()
    assert extra
    assert all("score" in name for name in extra)
    wider = {name for name in dot if dot[name].shape != other[name].shape}
    assert wider
    assert all("mlp" in name for name in wider)
    for name in dot.keys() - wider:
        np.testing.assert_array_equal(dot[name], other[name], err_msg=name)


@pytest.mark.slow
def test_seeds_and_paths_give_other_numbers_of_the_same_distribution(params):
    sizes = {"model.depth": 2, "model.width": 64}
    first, second = params(**sizes), params(**sizes, seed=1)
    name = "blocks/0/mlp/fc1/kernel"
    assert np.abs(np.corrcoef(first[name].ravel(), second[name].ravel())[0, 1]) < 0.05
    other = first["blocks/1/mlp/fc1/kernel"]
    assert np.abs(np.corrcoef(first[name].ravel(), other.ravel())[0, 1]) < 0.05
    # A truncated normal distribution of deviation 0.02, as without pairing.
    assert first[name].std() == pytest.approx(0.02, rel=0.05)
