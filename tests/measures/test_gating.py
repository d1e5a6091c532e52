"""Gates put together again give the scores of the attention library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from adder_flax import attention
from adder_flax.measures import gate

MODULES = {
    "dot": ("dot", {}),
    "bilinear": ("bilinear", {}),
    "additive": ("additive", {"hidden_dim": 5}),
    "additive with LayerNorm": ("additive", {"hidden_dim": 5, "layer_norm": True}),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", MODULES)
def test_gate_times_content_is_the_score(name):
    score, options = MODULES[name]
    made = dict(score=score, score_options=options, rngs=nnx.Rngs(0))
    module = attention.MultiHeadAttention(2, 12, **made)
    parameters = {name: np.asarray(parameter[...]) for name, parameter in module.score.items()}
    if "bias" in parameters:
        parameters["bias"] = np.random.default_rng(1).standard_normal(parameters["bias"].shape)
    query, key = np.random.default_rng(0).standard_normal((2, 3, 2, 7, 6)).astype(np.float32)
    arrays = jax.tree.map(jnp.asarray, (query, key, parameters))
    expected = attention.get_score(score).raw_scores(*arrays, options)
    found = gate(score, query, key, parameters)
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4, atol=1e-5)
    assert found.values.shape == (3, 2, 7, *((7, 5) if score == "additive" else (1, 6)))
    assert score != "additive" or np.abs(found.values).max() < 1


def test_shares_by_hand_and_distances_that_do_not_gate():
    found = gate("dot", np.array([[-2.0, 0.5, 0.1, 0.995]]), np.zeros((3, 4)))
    assert (found.negative_share, found.saturated_share) == (0.25, 0.5)
    with pytest.raises(ValueError, match="one of .*'dot'.*; got 'adder'"):
        gate("adder", np.zeros((1, 4)), np.zeros((1, 4)))
