"""What users of other attention functions ran into: masks, caches, mixed dtypes."""

import functools

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import attention, linen, ops
from tests.attention import reference

HEADS, DIM, LENGTH = 2, 4, 5
WIDTH = HEADS * DIM
ALIASES = {"dot": "dot_product"}


def tokens(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def function(name):
    return getattr(attention, f"{ALIASES.get(name, name)}_attention")


# --- Masks ---------------------------------------------------------------------------------------


def callers(mask):
    """Every way by which a mask goes in, of self-attention over three sequences."""
    x = tokens(3, LENGTH, HEADS, DIM)
    flat = x.reshape(3, LENGTH, WIDTH)
    flax = nnx.MultiHeadAttention(
        HEADS, WIDTH, attention_fn=attention.adder_attention, decode=False, rngs=nnx.Rngs(0)
    )
    module = attention.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0))
    of_linen = linen.MultiHeadAttention(HEADS)
    return {
        "function": lambda: attention.adder_attention(x, x, x, mask=mask),
        "blocks": lambda: attention.dot_product_attention(x, x, x, mask=mask, key_block=2),
        "fused": lambda: ops.fused_attention(ops.l1_scores, x[0, 0], x[0, 0], x[0, 0], mask=mask),
        "softmax": lambda: attention.masked_softmax(jnp.ones((3, HEADS, LENGTH, LENGTH)), mask),
        "flax": lambda: flax(flat, mask=mask),
        "nnx": lambda: module(flat, mask=mask),
        "linen": lambda: of_linen.init_with_output(jax.random.key(0), flat, mask=mask)[0],
    }


@pytest.mark.unchecked
@pytest.mark.parametrize("name", callers(None))
def test_a_mask_of_what_is_added_to_scores_is_refused(name):
    """pytorch#107084: 0 for a key that is seen and -1e9 for one that is not is the opposite of
    true and false."""
    added = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), 0.0, -1e9).astype(np.float32)
    for mask in (added, np.zeros_like(added), jnp.asarray(added, jnp.bfloat16), added.astype(int)):
        if name == "fused":
            mask = mask[:HEADS, :HEADS]
        with pytest.raises(ValueError, match="expected a mask that is True.* as bias"):
            callers(mask)[name]()


@pytest.mark.unchecked
def test_a_floating_mask_is_refused_while_traced_too():
    """pytorch#107084; its values are not known there."""
    x = tokens(1, LENGTH, HEADS, DIM)
    run = jax.jit(lambda mask: attention.adder_attention(x, x, x, mask=mask))
    with pytest.raises(ValueError, match="got float32 numbers; pass what is added .* as bias"):
        run(np.zeros((LENGTH, LENGTH), np.float32))
    whole = np.tril(np.ones((LENGTH, LENGTH), np.int32))
    np.testing.assert_array_equal(run(whole), run(whole.astype(bool)))


@pytest.mark.unchecked
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_masks_of_flax_in_its_own_modules_are_floating_and_mean_what_they_say(api, traced):
    """Flax's make_attention_mask gives float32 ones and zeros by default."""
    x = tokens(2, LENGTH, WIDTH)
    seen = np.arange(LENGTH) < np.array([[3], [5]])
    fn = functools.partial(attention.adder_attention, identity=False)
    if api == "nnx":
        options = dict(decode=False, rngs=nnx.Rngs(0))
        module = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=fn, **options)
    else:
        bound = nn.MultiHeadDotProductAttention(HEADS, attention_fn=fn)
        module = bound.bind(bound.init(jax.random.key(0), x))
    run = lambda seen: module(x, mask=nn.make_attention_mask(seen, seen))
    assert nn.make_attention_mask(seen, seen).dtype == jnp.float32
    out = (jax.jit(run) if traced else run)(jnp.asarray(seen))
    alone = module(x[:1, :3])
    np.testing.assert_allclose(out[0, :3], alone[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(out[1], module(x[1:])[0], rtol=1e-4, atol=1e-6)


def test_numbers_0_and_1_are_a_mask():
    x = tokens(1, LENGTH, HEADS, DIM)
    mask = np.tril(np.ones((LENGTH, LENGTH), bool))
    expected = attention.adder_attention(x, x, x, mask=mask)
    for dtype in (np.int32, np.uint8, np.float32):
        ones = ops.as_mask(mask.astype(dtype))
        np.testing.assert_array_equal(attention.adder_attention(x, x, x, mask=ones), expected)


@pytest.mark.unchecked
def test_a_bias_of_booleans_is_refused():
    x = tokens(1, LENGTH, HEADS, DIM)
    with pytest.raises(ValueError, match="got booleans; pass them as mask"):
        attention.adder_attention(x, x, x, bias=np.ones((LENGTH, LENGTH), bool))


@pytest.mark.unchecked
@pytest.mark.parametrize("shape", [(3, LENGTH), (3, LENGTH, LENGTH), (4, 3, 1, 1, LENGTH)])
@pytest.mark.parametrize("name", ["function", "blocks", "flax", "nnx", "linen"])
def test_a_mask_of_keys_says_how_it_goes_in(name, shape):
    """phlippe/uvadlc_notebooks#67: (batch, length) is what data sets have."""
    with pytest.raises(ValueError, match=r"mask\[:, None, None, :\].*as mask\[:, None\]"):
        callers(np.ones(shape, bool))[name]()


def test_a_mask_of_keys_goes_in_as_the_message_says():
    x, seen = tokens(2, LENGTH, HEADS, DIM), np.arange(LENGTH) < np.array([[3], [5]])
    out = attention.adder_attention(x, x, x, mask=seen[:, None, None, :])
    expected, _ = reference.attention("adder", x, x, x, mask=seen[:, None, None], identity=True)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=5e-6)


def test_masks_of_the_classical_forms_say_how_they_go_in():
    layer = attention.AdditiveAttention(6, 8, rngs=nnx.Rngs(0))
    query, key = tokens(3, 2, 6), tokens(3, LENGTH, 8)
    with pytest.raises(ValueError, match=r"\(3, 2, 5\), got \(3, 5\).*as mask\[:, None, :\]"):
        layer(query, key, mask=np.ones((3, LENGTH), bool))
    of_linen = linen.AdditiveAttention()
    with pytest.raises(ValueError, match=r"\(3, 2, 5\), got \(3, 5\).*as mask\[:, None, :\]"):
        of_linen.init(jax.random.key(0), query, key, mask=np.ones((3, LENGTH), bool))


# --- Infinite biases -----------------------------------------------------------------------------


@pytest.mark.parametrize("key_block", [None, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_minus_infinity_in_a_bias_masks_beside_a_mask(key_block, masked):
    """A query whose keys are hidden by one or by the other sees none: zeros, not NaN, and finite
    gradients (pytorch#41508)."""
    x = tokens(1, LENGTH, HEADS, DIM)
    mask = np.ones((LENGTH, LENGTH), bool)
    bias = np.zeros((LENGTH, LENGTH), np.float32)
    mask[2, :3] = mask[4, 0] = False
    bias[2, 3:] = bias[1, 1] = bias[3] = -np.inf
    if not masked:
        bias[~mask], mask = -np.inf, None
    run = lambda x: attention.dot_product_attention(
        x, x, x, mask=mask, bias=bias, key_block=key_block
    )
    seen = np.isfinite(bias) & (True if mask is None else mask)
    expected, _ = reference.attention("dot", x, x, x, mask=seen)
    np.testing.assert_allclose(run(x), expected, rtol=2e-5, atol=5e-6)
    np.testing.assert_array_equal(run(x)[0, 2:4], 0.0)
    assert np.isfinite(jax.grad(lambda x: run(x).sum())(jnp.asarray(x))).all()


# --- Caches --------------------------------------------------------------------------------------


def decoded(module, x, **options):
    """The outputs of Flax NNX's module, token by token."""
    module.init_cache((x.shape[0], 8, WIDTH))
    return np.concatenate(
        [module(x[:, i : i + 1], decode=True, **options) for i in range(x.shape[1])], axis=1
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["dot", "adder", "gaussian"])
def test_decoding_token_by_token_gives_what_the_whole_sequence_does(name, is_causal):
    """pytorch#144858: a query beside a cache is not its first token. The identity map adds the
    value of the newest one."""
    x = tokens(2, LENGTH, WIDTH)
    options = dict(decode=False, rngs=nnx.Rngs(0), attention_fn=function(name))
    module = nnx.MultiHeadAttention(HEADS, WIDTH, **options)
    whole = module(x, mask=nn.make_causal_mask(x[..., 0], dtype=bool))
    stepwise = decoded(module, x, is_causal=is_causal)
    np.testing.assert_allclose(stepwise, whole, rtol=2e-4, atol=2e-5)


def test_decoding_with_a_mask_that_hides_the_newest_key():
    """As of padding on the left: the identity map adds its value all the same, as in the whole
    sequence; compiled, in a cache with a past."""
    x = tokens(2, LENGTH, WIDTH)
    seen = np.arange(LENGTH) >= np.array([[2], [0]])
    options = dict(decode=False, rngs=nnx.Rngs(0), attention_fn=attention.adder_attention)
    module = nnx.MultiHeadAttention(HEADS, WIDTH, **options)
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    whole = module(x, mask=(seen[:, None, :] & causal)[:, None])
    module.init_cache((2, LENGTH, WIDTH))
    module.cached_key[...] = module.cached_value[...] = jnp.ones((2, LENGTH, HEADS, DIM))

    @nnx.jit
    def step(module, token):
        return module(token, decode=True, mask=jnp.asarray(seen)[:, None, None, :])

    stepwise = np.concatenate([step(module, x[:, i : i + 1]) for i in range(LENGTH)], axis=1)
    np.testing.assert_allclose(stepwise, whole, rtol=2e-4, atol=2e-5)


def test_decoding_in_linen():
    x = tokens(2, LENGTH, WIDTH)
    make = functools.partial(
        nn.MultiHeadDotProductAttention, HEADS, attention_fn=attention.adder_attention
    )
    variables = make(decode=True).init(jax.random.key(0), x)
    whole = make().apply(
        {"params": variables["params"]}, x, mask=nn.make_causal_mask(x[..., 0], dtype=bool)
    )
    outputs, cache = [], variables["cache"]
    for i in range(LENGTH):
        out, state = make(decode=True).apply(
            {"params": variables["params"], "cache": cache}, x[:, i : i + 1], mutable=["cache"]
        )
        outputs.append(out)
        cache = state["cache"]
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole, rtol=2e-4, atol=2e-5)


@pytest.mark.cases(2)
@pytest.mark.parametrize("key_block", [None, 2])
@pytest.mark.parametrize("kv_heads", [HEADS, 1])
def test_several_queries_beside_a_cache(kv_heads, key_block):
    """pytorch#110144: two new tokens behind three old ones, in a cache with room for two more."""
    query = tokens(2, 7, HEADS, DIM)
    key, value = tokens(2, 7, kv_heads, DIM, seed=1), tokens(2, 7, kv_heads, DIM, seed=2)
    whole, maps = reference.attention(
        "adder", query, key, value, mask=np.tril(np.ones((7, 7), bool)), identity=True
    )
    run = functools.partial(attention.adder_attention, is_causal=True, key_block=key_block)
    out = jax.jit(lambda place: run(query[:, 3:5], key, value, query_position=place))(3)
    np.testing.assert_allclose(out, whole[:, 3:5], rtol=2e-5, atol=5e-6)
    _, shown = run(query[:, 3:5], key, value, query_position=3, return_weights=True)
    np.testing.assert_allclose(shown, maps[..., 3:5, :], rtol=2e-5, atol=5e-6)
    (captured,) = attention.capture_attention(
        lambda q: run(q, key, value, query_position=3), query[:, 3:5]
    )
    np.testing.assert_array_equal(captured, shown)


def test_what_is_a_querys_own_key_has_to_be_known():
    """pytorch#108108: which corner the triangle begins at is nobody's guess."""
    query, key = tokens(1, 2, HEADS, DIM), tokens(1, LENGTH, HEADS, DIM)
    for options in (dict(identity=True), dict(identity=False, is_causal=True)):
        with pytest.raises(ValueError, match="2 and 5; where keys come from a cache, .*position"):
            attention.adder_attention(query, key, key, **options)
    with pytest.raises(ValueError, match="as many queries as keys for is_causal; got 2 and 5"):
        ops.fused_attention(ops.l1_scores, query[0, 0], key[0, :, 0], key[0, :, 0], is_causal=True)
    beyond = attention.adder_attention(query, key, key, query_position=LENGTH - 1)
    assert np.isfinite(beyond[0, 0]).all()
    assert np.isnan(beyond[0, 1]).all()


# --- Dtypes --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("wide", ["bias", "key_bias", "temperature", "scale", "v"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_double_precision_beside_narrower_tokens_in_blocks(dtype, wide):
    """openxla/tokamax#1349: with JAX_ENABLE_X64, arrays that NumPy made are float64."""
    x = tokens(1, LENGTH, HEADS, DIM, dtype=dtype)
    options = {
        "bias": tokens(LENGTH, LENGTH, seed=1, dtype=np.float64),
        "key_bias": tokens(HEADS, LENGTH, seed=1, dtype=np.float64),
        "temperature": np.array([0.5, 2.0]),
        "scale": np.float64(0.3),
        "v": tokens(HEADS, 3, seed=1, dtype=np.float64),
    }
    kernel = tokens(HEADS, DIM, 3, seed=2, dtype=dtype)
    with jax.enable_x64(True):
        arrays = {wide: jnp.asarray(options[wide])}
        arrays.setdefault("v", jnp.ones((HEADS, 3), dtype))

        def run(x, arrays, key_block):
            return attention.additive_attention(
                x, x, x, query_kernel=kernel, key_kernel=kernel, key_block=key_block, **arrays
            )

        sums = lambda key_block: jax.value_and_grad(
            lambda *a: run(*a, key_block).astype(jnp.float32).sum(), argnums=(0, 1)
        )(jnp.asarray(x), arrays)
        blocks, whole = sums(np.int64(2)), sums(None)
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == np.float32 else dict(rtol=0.02, atol=0.02)
    for got, expected in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, **tolerance)
