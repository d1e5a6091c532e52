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


def tokens(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def of_flax(attention_fn=attention.adder_attention):
    options = dict(attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0))
    return nnx.MultiHeadAttention(HEADS, WIDTH, **options)


# Of tokens or of a map: what our functions give, and the float64 formula.
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-6)
# Of two sequences, the first of which ends before its length.
SEEN = np.arange(LENGTH) < np.array([[3], [5]])
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))


# --- Masks ---------------------------------------------------------------------------------------


def callers(mask):
    """Every way by which a mask goes in, of self-attention over three sequences."""
    x = tokens(3, LENGTH, HEADS, DIM)
    flat = x.reshape(3, LENGTH, WIDTH)
    flax = of_flax()
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
    added = np.where(CAUSAL, 0.0, -1e9).astype(np.float32)
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
    np.testing.assert_array_equal(run(CAUSAL.astype(np.int32)), run(CAUSAL))


@pytest.mark.unchecked
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_masks_of_flax_in_its_own_modules_are_floating_and_mean_what_they_say(api, traced):
    """Flax's make_attention_mask gives float32 ones and zeros by default."""
    x = tokens(2, LENGTH, WIDTH)
    fn = functools.partial(attention.adder_attention, identity=False)
    if api == "nnx":
        module = of_flax(fn)
    else:
        bound = nn.MultiHeadDotProductAttention(HEADS, attention_fn=fn)
        module = bound.bind(bound.init(jax.random.key(0), x))
    run = lambda seen: module(x, mask=nn.make_attention_mask(seen, seen))
    assert nn.make_attention_mask(SEEN, SEEN).dtype == jnp.float32
    out = (jax.jit(run) if traced else run)(jnp.asarray(SEEN))
    alone = module(x[:1, :3])
    np.testing.assert_allclose(out[0, :3], alone[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(out[1], module(x[1:])[0], rtol=1e-4, atol=1e-6)


def test_numbers_0_and_1_are_a_mask():
    x = tokens(1, LENGTH, HEADS, DIM)
    expected = attention.adder_attention(x, x, x, mask=CAUSAL)
    for dtype in (np.int32, np.uint8, np.float32):
        ones = ops.as_mask(CAUSAL.astype(dtype))
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
    x, mask = tokens(2, LENGTH, HEADS, DIM), SEEN[:, None, None, :]
    expected, _ = reference.attention("adder", x, x, x, mask=mask, identity=True)
    close(attention.adder_attention(x, x, x, mask=mask), expected)


def test_masks_of_the_classical_forms_say_how_they_go_in():
    in_linen = functools.partial(linen.AdditiveAttention().init, jax.random.key(0))
    for layer in (attention.AdditiveAttention(6, 8, rngs=nnx.Rngs(0)), in_linen):
        with pytest.raises(ValueError, match=r"\(3, 2, 5\), got \(3, 5\).*as mask\[:, None, :\]"):
            layer(tokens(3, 2, 6), tokens(3, LENGTH, 8), mask=np.ones((3, LENGTH), bool))


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
    options = dict(mask=mask, bias=bias, key_block=key_block)
    run = lambda x: attention.dot_product_attention(x, x, x, **options)
    seen = np.isfinite(bias) & (True if mask is None else mask)
    expected, _ = reference.attention("dot", x, x, x, mask=seen)
    close(run(x), expected)
    np.testing.assert_array_equal(run(x)[0, 2:4], 0.0)
    assert np.isfinite(jax.grad(lambda x: run(x).sum())(jnp.asarray(x))).all()


# --- Caches --------------------------------------------------------------------------------------


def assert_as_whole(step, x, whole):
    """Holds outputs token by token to those of the whole sequence."""
    outputs = [step(x[:, i : i + 1]) for i in range(LENGTH)]
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["dot_product", "adder", "gaussian"])
def test_decoding_token_by_token_gives_what_the_whole_sequence_does(name, is_causal):
    """pytorch#144858: a query beside a cache is not its first token. The identity map adds the
    value of the newest one."""
    x, module = tokens(2, LENGTH, WIDTH), of_flax(getattr(attention, f"{name}_attention"))
    whole = module(x, mask=CAUSAL)
    module.init_cache((2, 8, WIDTH))
    assert_as_whole(functools.partial(module, decode=True, is_causal=is_causal), x, whole)


def test_decoding_with_a_mask_that_hides_the_newest_key():
    """As of padding on the left: the identity map adds its value all the same, as in the whole
    sequence; compiled, in a cache with a past."""
    x, module = tokens(2, LENGTH, WIDTH), of_flax()
    seen = np.arange(LENGTH) >= np.array([[2], [0]])
    whole = module(x, mask=(seen[:, None, :] & CAUSAL)[:, None])
    module.init_cache((2, LENGTH, WIDTH))
    module.cached_key[...] = module.cached_value[...] = jnp.ones((2, LENGTH, HEADS, DIM))

    @nnx.jit
    def step(module, token):
        return module(token, decode=True, mask=jnp.asarray(seen)[:, None, None, :])

    assert_as_whole(functools.partial(step, module), x, whole)


def test_decoding_in_linen():
    x = tokens(2, LENGTH, WIDTH)
    make = functools.partial(nn.MultiHeadDotProductAttention, HEADS)
    module = make(decode=True, attention_fn=attention.adder_attention)
    variables = module.init(jax.random.key(0), x)
    whole = make(attention_fn=attention.adder_attention).apply(
        {"params": variables["params"]}, x, mask=CAUSAL
    )

    def step(token):
        output, changed = module.apply(variables, token, mutable=["cache"])
        variables.update(changed)
        return output

    assert_as_whole(step, x, whole)


@pytest.mark.cases(2)
@pytest.mark.parametrize("key_block", [None, 2])
@pytest.mark.parametrize("kv_heads", [HEADS, 1])
def test_several_queries_beside_a_cache(kv_heads, key_block):
    """pytorch#110144: two new tokens behind three old ones, in a cache with room for two more."""
    query = tokens(2, 7, HEADS, DIM)
    key, value = tokens(2, 7, kv_heads, DIM, seed=1), tokens(2, 7, kv_heads, DIM, seed=2)
    mask = np.tril(np.ones((7, 7), bool))
    whole, maps = reference.attention("adder", query, key, value, mask=mask, identity=True)
    run = functools.partial(attention.adder_attention, is_causal=True, key_block=key_block)
    out = jax.jit(lambda place: run(query[:, 3:5], key, value, query_position=place))(3)
    close(out, whole[:, 3:5])
    at_three = lambda q, **options: run(q, key, value, query_position=3, **options)
    _, shown = at_three(query[:, 3:5], return_weights=True)
    close(shown, maps[..., 3:5, :])
    (captured,) = attention.capture_attention(at_three, query[:, 3:5])
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
    draw = functools.partial(tokens, seed=1, dtype=np.float64)
    options = dict(bias=draw(LENGTH, LENGTH), key_bias=draw(HEADS, LENGTH), v=draw(HEADS, 3))
    options |= dict(temperature=np.array([0.5, 2.0]), scale=np.float64(0.3))
    kernel = tokens(HEADS, DIM, 3, seed=2, dtype=dtype)
    with jax.enable_x64(True):
        arrays = {wide: jnp.asarray(options[wide])}
        arrays.setdefault("v", jnp.ones((HEADS, 3), dtype))

        def sums(x, arrays, key_block):
            given = dict(query_kernel=kernel, key_kernel=kernel, key_block=key_block) | arrays
            return attention.additive_attention(x, x, x, **given).astype(jnp.float32).sum()

        run = functools.partial(jax.value_and_grad(sums, argnums=(0, 1)), jnp.asarray(x), arrays)
        blocks, whole = run(np.int64(2)), run(None)
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == np.float32 else dict(rtol=0.02, atol=0.02)
    for got, expected in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, **tolerance)
