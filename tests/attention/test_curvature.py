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
    draw = lambda seed, length: jax.random.normal(
        jax.random.key(seed), (BATCH, length, width), jnp.float64
    )
    return draw(1, QUERIES), draw(2, KEYS)


def multi_head(score, **options):
    own = dict(identity=False, temperature="learned", key_bias_length=KEYS)
    module = attention.MultiHeadAttention(
        2, 6, score=score, score_options=options, **own, rngs=nnx.Rngs(0)
    )
    return module, lambda m, q, k: m(q, k)


def sequence(score, **options):
    own = dict(temperature="learned", rngs=nnx.Rngs(0))
    module = attention.SequenceAttention(6, 6, score=score, score_options=options, **own)
    return module, lambda m, q, k: m(q, k)


def loss_of(module, call):
    graphdef, state = nnx.split(module)
    params = jax.tree.map(lambda p: p.astype(jnp.float64) + 0.1, nnx.to_pure_dict(state))

    def loss_fn(params, query, key):
        output = call(nnx.merge(graphdef, params), query, key)
        return (output**2).sum((1, 2)).mean()

    return loss_fn, params


SCORES = [
    pytest.param(multi_head, "additive", {"hidden_dim": 4}, marks=pytest.mark.slow),
    pytest.param(
        multi_head,
        "additive",
        {"layer_norm": True, "hidden_dim": 4},
        marks=pytest.mark.slow,
    ),
    pytest.param(multi_head, "bilinear", {}, marks=pytest.mark.slow),
    pytest.param(sequence, "additive", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("make", "score", "options"), SCORES)
def test_products_and_coverage(make, score, options):
    loss_fn, params = loss_of(*make(score, **options))
    report = kfac.verify(loss_fn, params, *inputs())
    assert report.layers.coverage == 1.0
    for row in report.rows:
        assert max(row.capture_error, row.product_error) < 1e-10, row


@pytest.mark.slow
def test_linen_parameters_are_known_by_identity_too():
    module = linen.MultiHeadAttention(
        num_heads=2, score="bilinear", identity=False, temperature="learned"
    )
    query, key = inputs()
    params = jax.tree.map(
        lambda p: p.astype(jnp.float64), nn.unbox(module.init(jax.random.key(0), query, key))
    )
    report = kfac.verify(
        lambda p, q, k: (module.apply(p, q, k) ** 2).sum((1, 2)).mean(), params, query, key
    )
    assert report.layers.coverage == 1.0
    assert max(max(row.capture_error, row.product_error) for row in report.rows) < 1e-10


@pytest.mark.slow
def test_nothing_is_reported_from_blocks_of_keys():
    loss_fn, params = loss_of(*multi_head("additive"))
    blocked, _ = loss_of(
        attention.MultiHeadAttention(
            2,
            6,
            score="additive",
            key_block=2,
            identity=False,
            temperature="learned",
            key_bias_length=KEYS,
            rngs=nnx.Rngs(0),
        ),
        lambda m, q, k: m(q, k),
    )
    assert kfac.find_layers(blocked, params, *inputs()).coverage == 1.0
    np.testing.assert_allclose(blocked(params, *inputs()), loss_fn(params, *inputs()), rtol=1e-12)


def factors_of_v(params, loss_fn, args):
    _, _, curvature = kfac.value_grad_and_curvature(loss_fn, fisher="empirical")(params, *args)
    block = curvature.layers.blocks["v"]
    lanes = systems.lanes_of(block, {"v": params["v"]})
    return systems.new_factors(block, curvature, lanes, "factors")


@pytest.mark.slow
def test_factors_of_the_vector_that_reads_hidden_units():
    loss_fn, params = loss_of(*sequence("additive"))
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

    scores, gradients, step = (
        (units @ np.asarray(params["v"])).reshape(BATCH, QUERIES, KEYS),
        0.0,
        1e-5,
    )
    for i in range(QUERIES):
        for j in range(KEYS):
            shift = np.zeros_like(scores)
            shift[:, i, j] = step
            gradients += (
                (loss_of_scores(scores + shift) - loss_of_scores(scores - shift)) / (2 * step)
            ) ** 2
    np.testing.assert_allclose(right[0, 0, 0], gradients.mean(), rtol=1e-6)


@pytest.mark.slow
def test_a_sample_of_the_pairs_estimates_the_second_moment(monkeypatch):
    """Of alike tokens every sample is the whole; of others its expectation is."""
    loss_fn, params = loss_of(*sequence("additive"))
    query, key = inputs()
    alike = jnp.broadcast_to(query[:, :1], query.shape), key
    whole = [factors_of_v(params, loss_fn, args)[0] for args in (alike, (query, key))]
    monkeypatch.setattr(_additive, "_MOST_PAIRS", 2 * KEYS)  # queries 0 and 3
    sample = [factors_of_v(params, loss_fn, args)[0] for args in (alike, (query, key))]
    np.testing.assert_allclose(sample[0], whole[0], rtol=1e-6)
    assert not np.allclose(sample[1], whole[1], rtol=1e-3)
    np.testing.assert_allclose(jnp.trace(sample[1][0]), jnp.trace(whole[1][0]), rtol=0.5)
