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


def make(**options):
    return randomised(
        lambda: attention.MultiHeadAttention(HEADS, WIDTH, **options, rngs=nnx.Rngs(0))
    )


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


def assert_close(found, truth):
    for got, exact, atol in zip(found, truth, (1e-5, 5e-6), strict=True):  # output and map
        np.testing.assert_allclose(got, exact, rtol=5e-5, atol=atol)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_formula(name):
    module = make(score=name, temperature="learned", key_bias_length=5, identity=True)
    mask = np.random.default_rng(2).random((3, 1, 5, 5)) < 0.7
    found = run_with_map(module, tokens(), mask=jnp.asarray(mask))
    truth = expected(module, name, tokens(), tokens(), mask=mask, identity=True)
    assert_close(found, truth)


def test_cross_attention_with_other_widths_and_grouped_heads():
    score = dict(score="additive", score_options={"layer_norm": True, "hidden_dim": 3})
    module = make(**score, qkv_features=12, out_features=7, in_kv_features=6, num_kv_heads=1)
    inputs = tokens(4), tokens(7, width=6, seed=3)
    out, weights = run_with_map(module, *inputs)
    assert out.shape == (3, 4, 7)
    assert_close((out, weights), expected(module, "additive", *inputs))


def test_parameter_names_and_two_dimensional_kernels_are_flax_own():
    options = dict(decode=False, keep_rngs=False)
    flax = randomised(lambda: nnx.MultiHeadAttention(HEADS, WIDTH, **options, rngs=nnx.Rngs(0)))
    ours = make()
    params, own = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (flax, ours))
    nnx.update(ours, jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), params, own))
    np.testing.assert_allclose(run(ours, tokens()), run(flax, tokens()), rtol=1e-5, atol=1e-6)


def test_injected_projections_are_used():
    module = make(score="adder", qkv_linear=functools.partial(AdderLinear, hardtanh_slope=4.0))
    assert isinstance(module.key, AdderLinear)
    assert module.key.hardtanh_slope == 4.0
    assert type(module.out) is nnx.Linear
    assert run(module, tokens()).shape == (3, 5, WIDTH)


def test_nnx_tabulate_shows_a_score_with_parameters():
    module = attention.MultiHeadAttention(2, 8, score="bilinear", rngs=nnx.Rngs(0))
    assert "Total Parameters: 320" in nnx.tabulate(module, jnp.ones((2, 5, 8)))  # 4 · 72 + 2 · 16


def test_dropout_takes_its_key_at_the_call():
    module = make(dropout_rate=0.5)
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
    module = make(score="adder", dtype=dtype)
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
            "positive temperature or 'learned', got 'learnt'",
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


ADDITIVE = dict(hidden_dim=5, temperature="learned")


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("additive", attention.AdditiveAttention, ADDITIVE | {"layer_norm": False}),
        ("additive", attention.AdditiveAttention, ADDITIVE | {"layer_norm": True}),
        ("bilinear", attention.BilinearAttention, {}),
    ],
)
def test_the_classical_forms_equal_the_formula(name, kind, options):
    module = randomised(lambda: kind(4, 6, **options, rngs=nnx.Rngs(0)))
    query, key, value = tokens(3, width=4), tokens(7, width=6, seed=4), tokens(7, width=2, seed=5)
    mask = np.random.default_rng(6).random((3, 3, 7)) < 0.7
    bias = np.random.default_rng(7).normal(size=(1, 7)).astype(np.float32)
    options = dict(mask=jnp.asarray(mask), bias=jnp.asarray(bias), return_weights=True)
    found = run(module, query, key, value, **options)
    p = {n: x[None] for n, x in parameters(module).items()}  # of one head
    options = dict(mask=mask[:, None], bias=bias, temperature=np.exp(p.pop("log_temperature", 0)))
    one_head = (x[:, :, None] for x in (query, key, value))
    out, weights = reference.attention(name, *one_head, p, **options)
    assert_close(found, (out[:, :, 0], weights[:, 0]))
    assert jax.eval_shape(module, query, key).shape == (3, 3, 6)


def test_parameter_counts_of_the_classical_forms():
    """d_s · d_h and d_a (d_s + d_h + 1), equal at d_a = 42.4 for 64 and 128; b is counted apart."""

    def count(kind, **options):
        module = nnx.eval_shape(lambda: kind(64, 128, **options, rngs=nnx.Rngs(0)))
        return {n: p.size for n, p in nnx.to_pure_dict(nnx.state(module)).items()}

    assert count(attention.BilinearAttention) == {"kernel": 64 * 128}
    for hidden in (16, 42, 43):
        additive = count(attention.AdditiveAttention, hidden_dim=hidden)
        assert additive.pop("bias") == hidden
        assert sum(additive.values()) == hidden * (64 + 128 + 1)
    assert round(64 * 128 / 193, 1) == 42.4
    assert attention.additive_hidden_dim(64, 128) == 42
    assert count(attention.AdditiveAttention)["v"] == 42
    # Per head in a DeiT: 64 · 64 against 32 · 129.
    assert attention.additive_hidden_dim(64, 64) == 32


def test_two_sequences_have_no_identity_map():
    with pytest.raises(ValueError, match="expected no identity map between two sequences"):
        attention.AdditiveAttention(4, 4, identity=True, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("form", [attention.AdditiveAttention, attention.BilinearAttention])
def test_a_mask_of_keys_alone_is_that_of_all_queries(form):
    module, rng = form(4, 6, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    query, key = (rng.normal(size=s).astype(np.float32) for s in ((2, 5, 4), (2, 7, 6)))
    seen, bias = jnp.arange(7) < 3, jnp.linspace(0.0, 1.0, 7)
    found = module(query, key, mask=seen, bias=bias)
    whole = [jnp.broadcast_to(array, (2, 5, 7)) for array in (seen, bias)]
    np.testing.assert_allclose(found, module(query, key, mask=whole[0], bias=whole[1]), rtol=1e-5)
