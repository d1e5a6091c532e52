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


def taken(options, *names):
    return {name: options.pop(name) for name in names if name in options}


class Nnx:
    """Flax NNX's module with given parameters."""

    @staticmethod
    def apply(attention_fn, params, inputs, *, rng=None, sow=False, **options):
        built = taken(options, "dropout_rate", "dtype", "precision")
        built |= dict(attention_fn=attention_fn, decode=False, keep_rngs=False)
        module = nnx.MultiHeadAttention(HEADS, WIDTH, **built, rngs=nnx.Rngs(0))
        nnx.update(module, params)
        options |= dict(rngs=None if rng is None else nnx.Rngs(dropout=rng), sow_weights=sow)
        if not sow:
            return module(inputs, **options), None
        out, sown = nnx.capture(module, nnx.Intermediate)(inputs, **options)
        return out, nnx.to_pure_dict(sown)["attention_weights"][0]


class Linen:
    """Flax Linen's module with given parameters."""

    @staticmethod
    def apply(attention_fn, params, inputs, *, rng=None, sow=False, **options):
        built = taken(options, "dropout_rate", "dtype", "precision")
        module = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, **built)
        rngs = {} if rng is None else dict(dropout=rng)
        options |= dict(sow_weights=sow, rngs=rngs, mutable=["intermediates"])
        out, state = module.apply({"params": params}, inputs, **options)
        return out, state["intermediates"]["attention_weights"][0] if sow else None


def expected(name, params, inputs, mask):
    project = lambda p: (
        np.einsum("bnd,dhe->bnhe", inputs.astype(np.float64), p["kernel"]) + p["bias"]
    )
    query, key, value = (project(params[n]) for n in ("query", "key", "value"))
    out, weights = reference.attention(name, query, key, value, mask=mask, identity=name == "adder")
    return np.einsum("bnhe,hed->bnd", out, params["out"]["kernel"]) + params["out"]["bias"], weights


@pytest.mark.parametrize("api", [Nnx, Linen])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mask_and_sown_weights_arrive(api, name, params, inputs, mask):
    out, weights = api.apply(FUNCTIONS[name], params, inputs, mask=jnp.asarray(mask), sow=True)
    expected_out, expected_weights = expected(name, params, inputs, mask)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("api", [Nnx, Linen])
def test_options_are_bound_with_partial(api, params, inputs):
    attention_fn = functools.partial(
        attention.adder_attention, identity=False, scale="variance_matched"
    )
    with_identity, _ = api.apply(attention.adder_attention, params, inputs)
    _, weights = api.apply(attention_fn, params, inputs, sow=True)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
    assert not np.allclose(api.apply(attention_fn, params, inputs)[0], with_identity)


@pytest.mark.parametrize("api", [Nnx, Linen])
def test_dropout_arrives(api, params, inputs):
    run = functools.partial(api.apply, attention.adder_attention, params, inputs, dropout_rate=0.5)
    dropped, _ = run(rng=jax.random.key(0), deterministic=False)
    same, _ = run(rng=jax.random.key(0), deterministic=False)
    kept, _ = run(deterministic=True)
    np.testing.assert_array_equal(dropped, same)
    assert not np.allclose(dropped, kept)
    np.testing.assert_allclose(
        kept, api.apply(attention.adder_attention, params, inputs)[0], rtol=1e-6
    )


@pytest.mark.parametrize("api", [Nnx, Linen])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtype_arrives_and_softmax_stays_float32(api, name, params, inputs, mask):
    options = dict(dtype=jnp.bfloat16, precision="highest", mask=jnp.asarray(mask), sow=True)
    out, weights = api.apply(FUNCTIONS[name], params, inputs, **options)
    assert (out.dtype, weights.dtype) == (jnp.bfloat16, jnp.float32)
    expected_out, expected_weights = expected(name, params, inputs, mask)
    np.testing.assert_allclose(weights, expected_weights, atol=0.03)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, rtol=0.05, atol=0.05)
