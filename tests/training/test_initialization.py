"""Weights drawn by path: models that differ in part begin alike where they agree."""

import jax
import numpy as np
import pytest

from adder_flax.training import build_run
from adder_flax.training.sharding import leaves_by_path


@pytest.fixture
def params(tiny_config):
    """``make(**fields)``: the initial parameters of a run by path."""

    def make(**fields):
        run = build_run(tiny_config("multiplicative", init="path", **fields))
        return leaves_by_path(jax.device_get(run.init()["params"]))

    return make


def test_models_of_another_mechanism_and_width_begin_alike_where_they_agree(params):
    dot, other = params(), params(**{"model.score": "additive", "model.mlp_ratio": 3.0})
    wider = {name for name in dot if dot[name].shape != other[name].shape}
    for names, part in ((other.keys() - dot.keys(), "score"), (wider, "mlp")):
        assert names
        assert all(part in name for name in names)
    for name in dot.keys() - wider:
        np.testing.assert_array_equal(dot[name], other[name], err_msg=name)


@pytest.mark.slow
def test_seeds_and_paths_give_other_numbers_of_the_same_distribution(params):
    sizes = {"model.depth": 2, "model.width": 64}
    first, second = params(**sizes), params(**sizes, seed=1)
    name, other = (f"blocks/{block}/mlp/fc1/kernel" for block in (0, 1))
    drawn = np.array([np.ravel(x) for x in (first[name], second[name], first[other])])
    np.testing.assert_allclose(np.corrcoef(drawn), np.eye(3), atol=0.05)
    # A truncated normal distribution of deviation 0.02, as without pairing.
    assert first[name].std() == pytest.approx(0.02, rel=0.05)
