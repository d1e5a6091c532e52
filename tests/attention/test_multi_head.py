"""The multi-head module and the classical single-head modules."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import attention
from adder_flax.layers import AdderLinear
from tests.attention import reference
from tests.attention.test_functions import NAMES
from tests.modules import parameters, randomised, run, run_with_map

WIDTH, HEADS = 8, 2


def tokens(length=5, width=WIDTH, seed=0):
    return np.random.default_rng(seed).normal(size=(3, length, width)).astype(np.float32)


def expected(module, name, inputs_q, inputs_kv, **options):
    """The module's formula in float64 NumPy."""
    p = parameters(module)
    project = lambda part, x, heads: (x @ p[part]["kernel"] + p[part]["bias"]).reshape(
        *x.shape[:-1], heads, -1
    )
    kv_heads = module.num_kv_heads
    query = project("query", inputs_q, HEADS)
    key, value = project("key", inputs_kv, kv_heads), project("value", inputs_kv, kv_heads)
    if "log_temperature" in p:
        options["temperature"] = np.exp(p["log_temperature"])[:, None, None]
    if "key_bias" in p:
        options["bias"] = p["key_bias"][:, None, :]
    out, weights = reference.attention(name, query, key, value, p.get("score"), **options)
    return out.reshape(*inputs_q.shape[:-1], -1) @ p["out"]["kernel"] + p["out"]["bias"], weights


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_formula(name):
    module = randomised(
        lambda: attention.MultiHeadAttention(
            HEADS,
            WIDTH,
            score=name,
            temperature="learned",
            key_bias_length=5,
            identity=True,
            rngs=nnx.Rngs(0),
        )
    )
    mask = np.random.default_rng(2).random((3, 1, 5, 5)) < 0.7
    out, weights = run_with_map(module, tokens(), mask=jnp.asarray(mask))
    expected_out, expected_weights = expected(
        module, name, tokens(), tokens(), mask=mask, identity=True
    )
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(out, expected_out, rtol=2e-5, atol=5e-6)


def test_cross_attention_with_other_widths_and_grouped_heads():
    module = randomised(
        lambda: attention.MultiHeadAttention(
            HEADS,
            WIDTH,
            score="additive",
            score_options={"layer_norm": True, "hidden_dim": 3},
            qkv_features=12,
            out_features=7,
            in_kv_features=6,
            num_kv_heads=1,
            rngs=nnx.Rngs(0),
        )
    )
    inputs_q, inputs_kv = tokens(4), tokens(7, width=6, seed=3)
    out, weights = run_with_map(module, inputs_q, inputs_kv)
    expected_out, expected_weights = expected(module, "additive", inputs_q, inputs_kv)
    assert out.shape == (3, 4, 7)
    np.testing.assert_allclose(weights, expected_weights, rtol=5e-5, atol=5e-6)
    np.testing.assert_allclose(out, expected_out, rtol=5e-5, atol=1e-5)


def test_parameter_names_and_two_dimensional_kernels_are_flax_own():
    ours = randomised(lambda: attention.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0)))
    flax = randomised(
        lambda: nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, keep_rngs=False, rngs=nnx.Rngs(0)
        )
    )
    params = nnx.to_pure_dict(nnx.state(flax, nnx.Param))
    flat = jax.tree.map(
        lambda leaf, like: leaf.reshape(like.shape), params, nnx.to_pure_dict(nnx.state(ours))
    )
    nnx.update(ours, flat)
    np.testing.assert_allclose(run(ours, tokens()), run(flax, tokens()), rtol=1e-5, atol=1e-6)


def test_injected_projections_are_used():
    sloped = functools.partial(AdderLinear, hardtanh_slope=4.0)
    module = randomised(
        lambda: attention.MultiHeadAttention(
            HEADS, WIDTH, score="adder", qkv_linear=sloped, rngs=nnx.Rngs(0)
        )
    )
    assert isinstance(module.key, AdderLinear)
    assert module.key.hardtanh_slope == 4.0
    assert type(module.out) is nnx.Linear
    assert run(module, tokens()).shape == (3, 5, WIDTH)


def test_nnx_tabulate_shows_a_score_with_parameters():
    module = attention.MultiHeadAttention(2, 8, score="bilinear", rngs=nnx.Rngs(0))
    assert "Total Parameters: 320" in nnx.tabulate(module, jnp.ones((2, 5, 8)))  # 4 · 72 + 2 · 16


def test_dropout_takes_its_key_at_the_call():
    module = randomised(
        lambda: attention.MultiHeadAttention(HEADS, WIDTH, dropout_rate=0.5, rngs=nnx.Rngs(0))
    )
    assert not jax.tree.leaves(nnx.state(module, nnx.RngState))
    call = jax.jit(lambda key: module(tokens(), deterministic=False, rngs=nnx.Rngs(dropout=key)))
    first, second = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(call(first), call(first))
    assert not np.allclose(call(first), call(second))
    alike = jnp.repeat(tokens()[:1], 2, axis=0)  # samples that are the same drop other weights
    dropped = module(alike, deterministic=False, rngs=nnx.Rngs(dropout=first))
    assert not np.allclose(dropped[0], dropped[1])
    with pytest.raises(ValueError, match="expects a dropout_rng"):
        module(tokens(), deterministic=False)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_computation_in_half_precision_keeps_float32_parameters(dtype):
    module = randomised(
        lambda: attention.MultiHeadAttention(
            HEADS, WIDTH, score="adder", dtype=dtype, rngs=nnx.Rngs(0)
        )
    )
    out, weights = run_with_map(module, tokens())
    assert (out.dtype, weights.dtype) == (dtype, jnp.float32)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(module)))
    wide, _ = expected(module, "adder", tokens(), tokens(), identity=True)
    np.testing.assert_allclose(np.asarray(out, np.float64), wide, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_heads=3), "a width divisible by num_heads, got width 8 and 3 heads"),
        (dict(num_heads=4, num_kv_heads=3), "a multiple of num_kv_heads, got 4 and 3"),
        (dict(num_heads=2, score="cosine"), "expected a score among .*, got 'cosine'"),
        (
            dict(num_heads=2, temperature="learnt"),
            "expected a positive temperature or 'learned', got 'learnt'",
        ),
        (
            dict(num_heads=2, score="adder", score_options={"hidden_dim": 4}),
            r"the adder score expects options from \('gradient', 'bits'\), got 'hidden_dim'",
        ),
    ],
)
def test_errors_say_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        attention.MultiHeadAttention(in_features=WIDTH, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("layer_norm", [False, True])
def test_classical_additive_attention(layer_norm):
    options = dict(hidden_dim=5, layer_norm=layer_norm, temperature="learned")
    module = randomised(lambda: attention.AdditiveAttention(4, 6, **options, rngs=nnx.Rngs(0)))
    check_classical(module, "additive", temperature=np.exp(np.float64(module.log_temperature[...])))


def test_classical_bilinear_attention():
    check_classical(
        randomised(lambda: attention.BilinearAttention(4, 6, rngs=nnx.Rngs(0))), "bilinear"
    )


def check_classical(module, name, **options):
    query, key, value = tokens(3, width=4), tokens(7, width=6, seed=4), tokens(7, width=2, seed=5)
    mask = np.random.default_rng(6).random((3, 3, 7)) < 0.7
    bias = np.random.default_rng(7).normal(size=(1, 7)).astype(np.float32)
    out, weights = run(
        module,
        query,
        key,
        value,
        mask=jnp.asarray(mask),
        bias=jnp.asarray(bias),
        return_weights=True,
    )
    parameters = {
        n: p[None] for n, p in nnx.to_pure_dict(nnx.state(module)).items() if n != "log_temperature"
    }
    expected_out, expected_weights = reference.attention(
        name,
        *(x[:, :, None] for x in (query, key, value)),
        parameters,
        mask=mask[:, None],
        bias=bias,
        **options,
    )
    np.testing.assert_allclose(weights, expected_weights[:, 0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(out, expected_out[:, :, 0], rtol=2e-5, atol=5e-6)
    assert jax.eval_shape(module, query, key).shape == (3, 3, 6)


def test_parameter_counts_of_the_classical_forms():
    """d_s · d_h and d_a (d_s + d_h + 1), equal at d_a = 42.4 for 64 and 128; b is counted apart."""
    count = lambda make: {
        n: p.size for n, p in nnx.to_pure_dict(nnx.state(nnx.eval_shape(make))).items()
    }
    bilinear = count(lambda: attention.BilinearAttention(64, 128, rngs=nnx.Rngs(0)))
    assert bilinear == {"kernel": 64 * 128}
    for hidden in (16, 42, 43):
        additive = count(
            lambda h=hidden: attention.AdditiveAttention(64, 128, hidden_dim=h, rngs=nnx.Rngs(0))
        )
        assert additive.pop("bias") == hidden
        assert sum(additive.values()) == hidden * (64 + 128 + 1)
    assert round(64 * 128 / 193, 1) == 42.4
    assert attention.additive_hidden_dim(64, 128) == 42
    default = count(lambda: attention.AdditiveAttention(64, 128, rngs=nnx.Rngs(0)))
    assert default["v"] == 42
    # Per head in a DeiT: 64 · 64 against 32 · 129.
    assert attention.additive_hidden_dim(64, 64) == 32


def test_two_sequences_have_no_identity_map():
    with pytest.raises(ValueError, match="expected no identity map between two sequences"):
        attention.AdditiveAttention(4, 4, identity=True, rngs=nnx.Rngs(0))
