"""Attention maps of whole models: ours, other people's, NNX and Linen."""

import functools

import flax.linen as nn
import flax.nnx as nnx
import jax
import numpy as np
import pytest

from adder_flax import attention, linen, recorder
from tests.attention import reference
from tests.modules import randomised, tiny_vit

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
TOKENS = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    ("scores", "options"),
    [(["dot", "adder"], {}), (["additive"] * 2, dict(scan_blocks=True, remat=True))],
)
def test_every_map_of_a_vision_transformer_and_the_model_is_left_alone(graph, scores, options):
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        model = randomised(lambda: tiny_vit(score=scores, attention_dropout_rate=0.5, **options))
        images = np.random.default_rng(0).normal(size=(3, 4, 4, 1)).astype(np.float32)
        before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
        maps = attention.capture_attention(model, images)
        after = nnx.to_pure_dict(nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert [m.shape for m in maps] == [(3, 2, 5, 5)] * 2
    for attention_map, score in zip(maps, scores, strict=True):
        np.testing.assert_allclose(attention_map.sum(-1), 1 + (score == "adder"), rtol=1e-5)
    tokens = jax.jit(lambda x: model.embed_positions(model.patch_embed(x)))(images)
    block = model.blocks[0]
    query, key = (
        getattr(block.attention, n)(block.norm1(tokens)).reshape(3, 5, 2, 4)
        for n in ("query", "key")
    )
    parameters = {name: p[...] for name, p in block.attention.score.items()}
    expected = reference.attention(scores[0], query, key, key, parameters)[1]
    np.testing.assert_allclose(maps[0], expected, rtol=1e-4, atol=1e-6)


class Borrower(nnx.Module):
    """A model that knows nothing of capturing: Flax's attention with a function from here, then a
    module from here."""

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
    query, key = (
        np.einsum("bnd,dhe->bnhe", TOKENS, p[n]["kernel"]) + p[n]["bias"] for n in ("query", "key")
    )
    expected = reference.attention("adder", query, key, key, identity=True)[1]
    close(first, expected)
    close(second.sum(-1), 1.0)


@pytest.mark.parametrize(
    "make", [nn.MultiHeadDotProductAttention, nn.remat(nn.MultiHeadDotProductAttention)]
)
def test_other_peoples_linen_models(make):
    model = make(2, attention_fn=attention.gaussian_attention)
    variables = model.init(jax.random.key(0), TOKENS)
    (weights,) = attention.capture_attention(lambda tokens: model.apply(variables, tokens), TOKENS)
    plain = nn.MultiHeadDotProductAttention(2, attention_fn=attention.gaussian_attention)
    _, sown = plain.apply(variables, TOKENS, sow_weights=True, mutable=["intermediates"])
    close(weights, sown["intermediates"]["attention_weights"][0])


def test_linen_layers_stacked_in_a_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, tokens, _):
            return tokens + linen.MultiHeadAttention(2, score="adder", name="attend")(tokens), None

    def recorded(module, variables, tokens):
        run = lambda x: module.apply(variables, x, None)[0]
        tokens, [record] = recorder.record({"attention": ["weights"]}, run, tokens)
        return tokens, record

    options = dict(variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    stacked = nn.scan(nn.remat(Layer), **options)()
    variables = stacked.init(jax.random.key(0), TOKENS, None)
    output, record = recorded(stacked, variables, TOKENS)
    assert (record.path, record.loops) == ("attend", (3,))
    tokens = TOKENS
    for index, weights in enumerate(record.arrays["weights"]):
        layer = jax.tree.map(lambda x, index=index: x[index], variables)
        tokens, alone = recorded(Layer(), layer, tokens)
        close(weights, alone.arrays["weights"])
    close(output, tokens)


def test_linen_vision_transformer_as_its_nnx_twin():
    images = np.random.default_rng(1).normal(size=(3, 4, 4, 1)).astype(np.float32)
    ours = randomised(lambda: tiny_vit(score="adder"))
    variables = {"params": linen.from_nnx(nnx.to_pure_dict(nnx.state(ours)))}
    sizes = dict(patch_size=2, num_classes=3, width=8, depth=2, num_heads=2)
    model = linen.VisionTransformer(**sizes, score="adder")
    wanted = {
        "attention": ["query", "key", "scores", "weights"],
        "block": ["tokens", "normalized", "output"],
    }
    logits, seen = recorder.record(wanted, lambda images: model.apply(variables, images), images)
    expected, records = recorder.record(wanted, ours, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert [(r.kind, r.path, r.facts) for r in seen] == [(r.kind, r.path, r.facts) for r in records]
    names = ("blocks.0.attention", "blocks.0", "blocks.1.attention", "blocks.1")
    assert tuple(r.path for r in seen) == names
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, [r.arrays for r in records], [r.arrays for r in seen])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, lambda call: jax.vmap(lambda x: call(x[None])[0])]
)
def test_a_map_inside_a_transformation_even_if_it_was_traced_before(wrap):
    expected = attention.capture_attention(randomised(Borrower), TOKENS)
    model = randomised(lambda: Borrower(wrap))
    before = model(TOKENS)  # fills the caches of the inner transformation
    seen = attention.capture_attention(lambda tokens: model(tokens), TOKENS)
    for ours, theirs in zip(expected, seen, strict=True):
        close(ours, theirs.reshape(ours.shape))
    np.testing.assert_array_equal(model(TOKENS), before)


def test_steps_of_a_loop_are_the_first_axis():
    decoder = attention.AdditiveAttention(8, 8, rngs=nnx.Rngs(0))
    step = lambda state, _: (state + decoder(state, TOKENS), None)
    decode = lambda state: jax.lax.scan(step, state, length=4, reverse=True)[0]
    state = jax.numpy.ones((3, 1, 8))
    (maps,) = attention.capture_attention(decode, state)
    assert maps.shape == (4, 3, 1, 1, 5)
    for index in reversed(range(4)):
        context, alignment = decoder(state, TOKENS, return_weights=True)
        close(maps[index, :, 0], alignment)
        state = state + context


def test_a_map_of_one_branch_or_of_a_loop_without_an_end_is_refused():
    attend = lambda x: attention.adder_attention(x, x, x)
    x = TOKENS[:, :, None]
    branch = lambda x: jax.lax.cond(x.sum() > 0, attend, lambda x: x, x)
    until = lambda x: jax.lax.while_loop(lambda x: x.sum() < 0, attend, x)
    for call, name in ((branch, "cond"), (until, "while")):
        message = f"outside of conditionals, while loops and shard_map, got .*'{name}'"
        with pytest.raises(ValueError, match=message):
            attention.capture_attention(call, x)


def test_a_model_without_our_attention_is_refused():
    message = "expected a model that attends through adder_flax.attention, got one"
    with pytest.raises(ValueError, match=message):
        attention.capture_attention(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), TOKENS)


def test_only_a_capture_pays_for_the_map_with_its_identity():
    trace = lambda **options: jax.make_jaxpr(
        lambda x: attention.adder_attention(x, x, x, **options)  # one head of eight channels
    )(TOKENS[:, :, None])
    before = len(trace().eqns)
    attention.capture_attention(Borrower(), TOKENS)
    assert len(trace().eqns) == before < len(trace(return_weights=True).eqns)
