"""The parameter-free mechanisms as `attention_fn` of Flax's own multi-head attention, NNX and
Linen."""

import functools

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import attention
from tests.attention import reference

WIDTH, HEADS, LENGTH = 8, 2, 5
FUNCTIONS = dict(
    dot=attention.dot_product_attention,
    adder=attention.adder_attention,
    gaussian=attention.gaussian_attention,
)


@pytest.fixture(scope="module")
def inputs():
    return np.random.default_rng(0).normal(size=(3, LENGTH, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def mask():
    return np.random.default_rng(1).random((3, HEADS, LENGTH, LENGTH)) < 0.6


@pytest.fixture(scope="module")
def params(inputs):
    module = nn.MultiHeadDotProductAttention(HEADS)
    shapes = jax.eval_shape(module.init, jax.random.key(0), inputs)["params"]
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 3, shapes)


def with_nnx(attention_fn, params, inputs, built, *, rng=None, sow=False, **options):
    """The output, and the map if asked for, of Flax NNX's module with given parameters."""
    built = dict(attention_fn=attention_fn, decode=False, keep_rngs=False) | built
    module = nnx.MultiHeadAttention(HEADS, WIDTH, **built, rngs=nnx.Rngs(0))
    nnx.update(module, params)
    options |= dict(rngs=None if rng is None else nnx.Rngs(dropout=rng), sow_weights=sow)
    if not sow:
        return module(inputs, **options), None
    out, sown = nnx.capture(module, nnx.Intermediate)(inputs, **options)
    return out, nnx.to_pure_dict(sown)["attention_weights"][0]


def with_linen(attention_fn, params, inputs, built, *, rng=None, sow=False, **options):
    """The same of Flax Linen's."""
    module = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, **built)
    options |= dict(rngs={} if rng is None else dict(dropout=rng), sow_weights=sow)
    out, state = module.apply({"params": params}, inputs, **options, mutable=["intermediates"])
    return out, state["intermediates"]["attention_weights"][0] if sow else None


of_both = pytest.mark.parametrize("run", [with_nnx, with_linen])


def expected(name, params, inputs, mask):
    project = lambda p: (
        np.einsum("bnd,dhe->bnhe", inputs.astype(np.float64), p["kernel"]) + p["bias"]
    )
    query, key, value = (project(params[n]) for n in ("query", "key", "value"))
    out, weights = reference.attention(name, query, key, value, mask=mask, identity=name == "adder")
    return np.einsum("bnhe,hed->bnd", out, params["out"]["kernel"]) + params["out"]["bias"], weights


@of_both
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mask_dtype_and_sown_weights_arrive(run, name, dtype, params, inputs, mask):
    built = dict(dtype=dtype, precision="highest") if dtype else {}
    found = run(FUNCTIONS[name], params, inputs, built, mask=jnp.asarray(mask), sow=True)
    assert [x.dtype for x in found] == [dtype or jnp.float32, jnp.float32]  # output and map
    tolerances = (0.05, 0.05, 0.03) if dtype else (1e-5, 5e-6, 2e-6)
    rtol, *atols = tolerances
    for got, truth, atol in zip(found, expected(name, params, inputs, mask), atols, strict=True):
        np.testing.assert_allclose(np.float64(got), truth, rtol=rtol, atol=atol)


@of_both
def test_options_are_bound_with_partial(run, params, inputs):
    options = dict(identity=False, scale="variance_matched")
    bound = functools.partial(attention.adder_attention, **options)
    out, weights = run(bound, params, inputs, {}, sow=True)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
    assert not np.allclose(out, run(attention.adder_attention, params, inputs, {})[0])


@of_both
def test_dropout_arrives(run, params, inputs):
    call = functools.partial(run, attention.adder_attention, params, inputs)
    dropping = functools.partial(call, {"dropout_rate": 0.5})
    dropped, same = (dropping(rng=jax.random.key(0), deterministic=False)[0] for _ in range(2))
    kept, _ = dropping(deterministic=True)
    np.testing.assert_array_equal(dropped, same)
    assert not np.allclose(dropped, kept)
    np.testing.assert_allclose(kept, call({})[0], rtol=1e-6)


@pytest.mark.parametrize("wrap", [None, jax.jit, jax.checkpoint])
def test_decoding_takes_the_place_of_each_token_or_says_that_it_is_unknown(wrap, params, inputs):
    core = (wrap or (lambda function: function))(
        lambda q, k, v, mask: attention.adder_attention(q, k, v, mask=mask)
    )
    hook = lambda q, k, v, mask=None, **_: core(q, k, v, mask)
    module = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=hook, decode=True, rngs=nnx.Rngs(0))
    nnx.update(module, params)
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    truth, _ = expected("adder", params, inputs, causal)
    tokens = np.split(inputs, LENGTH, axis=1)

    for step in (lambda m, x: m(x), nnx.jit(lambda m, x: m(x))):
        module.init_cache(inputs.shape)
        if wrap is None:
            found = jnp.concatenate([step(module, x) for x in tokens], 1)
            np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-5)
        else:  # it would keep the place of the first
            with pytest.raises(ValueError, match="query_position"):
                step(module, tokens[0])


@pytest.mark.parametrize("key_block", [None, 2])
def test_what_is_added_to_scores_is_no_mask(key_block, params, inputs):
    """Flax's own masks are floating, too."""
    hook = functools.partial(attention.adder_attention, key_block=key_block)
    causal = nn.make_causal_mask(jnp.ones((3, LENGTH)))
    assert causal.dtype == jnp.float32
    eager = lambda mask: with_nnx(hook, params, inputs, {}, mask=mask)[0]
    np.testing.assert_allclose(jax.jit(eager)(causal), eager(causal), rtol=1e-5, atol=1e-6)
    for added in (jnp.where(causal > 0, 0.0, -1e9), jnp.where(causal > 0, 0, -(10**9))):
        with pytest.raises(ValueError, match="pass what is added to scores as bias"):
            eager(added)
        assert np.isnan(jax.jit(eager)(added)).all()
