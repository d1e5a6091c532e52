"""Every learned array of a score has curvature: products against per-example gradients, factors
against NumPy."""

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from adder_flax import attention, linen
from adder_flax.attention import _additive
from kfac.solve import _systems as systems

pytestmark = pytest.mark.usefixtures("x64")
BATCH, QUERIES, KEYS = 4, 5, 3


def inputs(width=6):
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.float64)
    return draw(1, BATCH, QUERIES, width), draw(2, BATCH, KEYS, width)


def loss_of(kind, score, score_options=(), **options):
    """The loss of a module with learned arrays of every kind, and its parameters."""
    options |= dict(score=score, score_options=dict(score_options), temperature="learned")
    if kind is attention.MultiHeadAttention:
        options |= dict(identity=False, key_bias_length=KEYS)
    sizes = (6, 6) if kind is attention.SequenceAttention else (2, 6)
    graphdef, state = nnx.split(kind(*sizes, **options, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda p: p.astype(jnp.float64) + 0.1, nnx.to_pure_dict(state))
    run = lambda params, *inputs: nnx.merge(graphdef, params)(*inputs)
    return lambda *a: (run(*a) ** 2).sum((1, 2)).mean(), params


def check(loss_fn, params):
    report = kfac.verify(loss_fn, params, *inputs())
    assert report.layers.coverage == 1.0
    for row in report.rows:
        assert max(row.capture_error, row.product_error) < 1e-10, row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "score", "options"),
    [
        (attention.MultiHeadAttention, "additive", {"hidden_dim": 4}),
        (attention.MultiHeadAttention, "additive", {"layer_norm": True, "hidden_dim": 4}),
        (attention.MultiHeadAttention, "bilinear", {}),
        (attention.SequenceAttention, "additive", {}),
    ],
)
def test_products_and_coverage(kind, score, options):
    check(*loss_of(kind, score, options))


@pytest.mark.slow
def test_linen_parameters_are_known_by_identity_too():
    options = dict(num_heads=2, score="bilinear", identity=False, temperature="learned")
    module = linen.MultiHeadAttention(**options)
    params = nn.unbox(module.init(jax.random.key(0), *inputs()))
    params = jax.tree.map(lambda p: p.astype(jnp.float64), params)
    check(lambda p, q, k: (module.apply(p, q, k) ** 2).sum((1, 2)).mean(), params)


@pytest.mark.slow
def test_nothing_is_reported_from_blocks_of_keys():
    loss_fn, params = loss_of(attention.MultiHeadAttention, "additive")
    blocked, _ = loss_of(attention.MultiHeadAttention, "additive", key_block=2)
    assert kfac.find_layers(blocked, params, *inputs()).coverage == 1.0
    np.testing.assert_allclose(blocked(params, *inputs()), loss_fn(params, *inputs()), rtol=1e-12)


def factors_of_v(params, loss_fn, args):
    _, _, curvature = kfac.value_grad_and_curvature(loss_fn, fisher="empirical")(params, *args)
    block = curvature.layers.blocks["v"]
    lanes = systems.lanes_of(block, {"v": params["v"]})
    return systems.new_factors(block, curvature, lanes, "factors")


@pytest.mark.slow
def test_factors_of_the_vector_that_reads_hidden_units():
    loss_fn, params = loss_of(attention.SequenceAttention, "additive")
    query, key = inputs()
    left, right = factors_of_v(params, loss_fn, (query, key))
    q = np.asarray(query) @ np.asarray(params["query_kernel"]) + np.asarray(params["bias"])
    k = np.asarray(key) @ np.asarray(params["key_kernel"])
    units = np.tanh(q[:, :, None] + k[:, None]).reshape(-1, q.shape[-1])
    np.testing.assert_allclose(left[0], units.T @ units / len(units), rtol=1e-6)

    # The cotangent of scores by finite differences of each example's own loss.
    def loss_of_scores(scores):
        cooled = np.exp(scores / np.exp(params["log_temperature"]))
        weights = cooled / cooled.sum(-1, keepdims=True)
        return ((weights @ np.asarray(key)) ** 2).sum((1, 2))

    scores, gradients = (units @ np.asarray(params["v"])).reshape(BATCH, QUERIES, KEYS), 0.0
    for i, j in np.ndindex(QUERIES, KEYS):
        shift = np.zeros_like(scores)
        shift[:, i, j] = 1e-5
        change = loss_of_scores(scores + shift) - loss_of_scores(scores - shift)
        gradients += (change / 2e-5) ** 2
    np.testing.assert_allclose(right[0, 0, 0], gradients.mean(), rtol=1e-6)


@pytest.mark.slow
def test_a_sample_of_the_pairs_estimates_the_second_moment(monkeypatch):
    """Of alike tokens every sample is the whole; of others its expectation is."""
    loss_fn, params = loss_of(attention.SequenceAttention, "additive")
    query, key = inputs()
    alike = jnp.broadcast_to(query[:, :1], query.shape), key
    whole = [factors_of_v(params, loss_fn, args)[0] for args in (alike, (query, key))]
    monkeypatch.setattr(_additive, "_MOST_PAIRS", 2 * KEYS)  # queries 0 and 3
    sample = [factors_of_v(params, loss_fn, args)[0] for args in (alike, (query, key))]
    np.testing.assert_allclose(sample[0], whole[0], rtol=1e-6)
    assert not np.allclose(sample[1], whole[1], rtol=1e-3)
    np.testing.assert_allclose(jnp.trace(sample[1][0]), jnp.trace(whole[1][0]), rtol=0.5)
