"""Attention maps of whole models: ours, other people's, NNX and Linen."""

import flax.linen as nn
import flax.nnx as nnx
import jax
import numpy as np
import pytest

from adder_flax import attention, linen
from adder_flax.models import VisionTransformer
from tests.attention import reference
from tests.modules import randomised

TOKENS = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    "options", [dict(score=["dot", "adder"]), dict(score="additive", scan_blocks=True, remat=True)]
)
def test_every_map_of_a_vision_transformer_and_the_model_is_left_alone(graph, options):
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        size = dict(image_size=4, patch_size=2, channels=1, num_classes=3, width=8, depth=2, num_heads=2)
        model = randomised(lambda: VisionTransformer(**size, attention_dropout_rate=0.5, **options, rngs=nnx.Rngs(0)))
        images = np.random.default_rng(0).normal(size=(3, 4, 4, 1)).astype(np.float32)
        before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
        maps = attention.capture_attention(model, images)
        after = nnx.to_pure_dict(nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert [m.shape for m in maps] == [(3, 2, 5, 5)] * 2
    sums = (1.0, 2.0) if options["score"] == ["dot", "adder"] else (1.0, 1.0)
    for attention_map, total in zip(maps, sums, strict=True):
        np.testing.assert_allclose(attention_map.sum(-1), total, rtol=1e-5)
    tokens = jax.jit(lambda x: model.embed_positions(model.patch_embed(x)))(images)
    block = model.blocks[0]
    _, first = jax.jit(lambda x: block.attention(block.norm1(x), return_weights=True))(tokens)
    np.testing.assert_allclose(maps[0], first, rtol=1e-5, atol=1e-6)


class Borrower(nnx.Module):
    """A model that knows nothing of capturing: Flax's attention with a function from here, then a module from here."""

    def __init__(self, wrap=lambda call: call):
        options = dict(decode=False, dropout_rate=0.0, keep_rngs=False, rngs=nnx.Rngs(0))
        self.first = nnx.MultiHeadAttention(2, 8, attention_fn=attention.adder_attention, **options)
        self.second = attention.MultiHeadAttention(4, 8, score="additive", rngs=nnx.Rngs(1))
        self.wrap = wrap

    def __call__(self, tokens):
        return self.second(tokens + self.wrap(self.first)(tokens)).mean(axis=1)


def test_other_peoples_nnx_models():
    model = randomised(Borrower)
    first, second = attention.capture_attention(model, TOKENS)
    assert (first.shape, second.shape) == ((3, 2, 5, 5), (3, 4, 5, 5))
    p = jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(model.first)))
    query, key = (np.einsum("bnd,dhe->bnhe", TOKENS, p[n]["kernel"]) + p[n]["bias"] for n in ("query", "key"))
    expected = reference.attention("adder", query, key, key, identity=True)[1]
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second.sum(-1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("make", [nn.MultiHeadDotProductAttention, nn.remat(nn.MultiHeadDotProductAttention)])
def test_other_peoples_linen_models(make):
    model = make(2, attention_fn=attention.gaussian_attention)
    variables = model.init(jax.random.key(0), TOKENS)
    apply = lambda tokens: model.apply(variables, tokens)
    if make is nn.MultiHeadDotProductAttention:
        (weights,) = attention.capture_attention(apply, TOKENS)
        _, sown = model.apply(variables, TOKENS, sow_weights=True, mutable=["intermediates"])
        np.testing.assert_allclose(weights, sown["intermediates"]["attention_weights"][0], rtol=1e-6, atol=1e-7)
    else:
        with pytest.raises(ValueError, match=r"expected attention outside of jax.checkpoint.*got a map from inside"):
            attention.capture_attention(apply, TOKENS)


def test_linen_vision_transformer_in_both_ways():
    model = linen.VisionTransformer(patch_size=2, num_classes=3, width=8, depth=2, num_heads=2, score="adder")
    images = np.random.default_rng(1).normal(size=(3, 4, 4, 1)).astype(np.float32)
    variables = model.init(jax.random.key(0), images)
    asked = model.apply(variables, images, return_weights=True)[1]
    seen = attention.capture_attention(lambda images: model.apply(variables, images), images)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), seen, asked)


def test_a_single_attention_module():
    module = randomised(lambda: attention.MultiHeadAttention(2, 8, score="gaussian", rngs=nnx.Rngs(0)))
    (weights,) = attention.capture_attention(module, TOKENS)
    np.testing.assert_allclose(weights, module(TOKENS, return_weights=True)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_a_map_inside_a_transformation_is_an_error_even_if_it_was_traced_before(wrap):
    model = Borrower(wrap)
    model(TOKENS)  # fills the caches of the inner transformation
    with pytest.raises(ValueError, match="expected attention outside of jax.checkpoint"):
        attention.capture_attention(lambda tokens: model(tokens), TOKENS)
    assert model(TOKENS).shape == (3, 8)  # and nothing of the failed attempt stays


def test_a_model_without_our_attention_is_refused():
    with pytest.raises(ValueError, match="expected a model that attends through adder_flax.attention, got one"):
        attention.capture_attention(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), TOKENS)


def test_only_a_capture_pays_for_the_map_with_its_identity():
    trace = lambda **options: jax.make_jaxpr(
        lambda x: attention.adder_attention(x, x, x, **options)  # one head of eight channels
    )(TOKENS[:, :, None])
    before = len(trace().eqns)
    attention.capture_attention(Borrower(), TOKENS)
    assert len(trace().eqns) == before < len(trace(return_weights=True).eqns)
