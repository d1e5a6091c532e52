"""Fused attention against the whole map, in float64: values, gradients, what may be seen,
memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import ops
from tests.ops import programs
from tests.ops.programs import BACKENDS, value_and_gradients

normal = functools.partial(programs.normal, dtype=np.float64)


def gaps(query, key):
    return query[..., :, None, :] - key[..., None, :, :]


def l1(query, key):
    return -jnp.abs(gaps(query, key)).sum(-1)


def additive(query, key, v):
    return (v[:, None, None] * jnp.tanh(gaps(query, -key))).sum(-1)


def gaussian(query, key):
    return -(gaps(query, key) ** 2).sum(-1) / 2


SCORES = {
    "l1": (ops.l1_scores, l1),
    "additive": (ops.additive_scores, additive),
    "gaussian": (gaussian, gaussian),
}


def whole_map(
    score, query, key, value, parameters=(), *, scale=1.0, bias=0.0, mask=True, identity=False
):
    """Attention as the formula says it."""
    logits = jnp.where(mask, score(query, key, *parameters) * scale + bias, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(-1, keepdims=True), -1e9))
    weights = jnp.exp(logits - top)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return weights @ value + (value if identity else 0.0)


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def assert_as_whole_map(name, g, arrays, *, mask=True, identity=False, **options):
    """Compares outputs and gradients by all arrays."""
    ours, formula = SCORES[name]
    fused = functools.partial(ops.fused_attention, ours, mask=mask, identity=identity, **options)
    truth = functools.partial(whole_map, formula, mask=mask, identity=identity)
    with jax.enable_x64(True), ops.use_backend("reference"):
        got, expected = (
            value_and_gradients(lambda arrays, run=run: run(**arrays), g, arrays)
            for run in (fused, truth)
        )
        assert_close(got, expected)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("tokens", "key_block"), [(1, 4), (17, 4), (17, 100), (24, 8)])
def test_every_score_with_every_operand_against_the_whole_map(name, tokens, key_block):
    query, key, value, g = normal(*[(2, 3, tokens, width) for width in (5, 5, 4, 4)])
    bias, v = normal((3, tokens, tokens), (3, 5), seed=1)
    scale = np.array([0.3, 0.5, 1.0])[:, None, None]
    mask = np.random.default_rng(1).random((2, 1, tokens, tokens)) < 0.7
    mask[0, 0, 0] = False  # a query that sees nothing
    arrays = dict(query=query, key=key, value=value, scale=scale, bias=bias)
    if name == "additive":
        arrays["parameters"] = (v,)
    assert_as_whole_map(name, g, arrays, mask=mask, identity=True, key_block=key_block)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(5, 13), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 7), (7, 1)))],
)
def test_cross_attention_with_axes_that_broadcast(queries, keys):
    query, key, value, bias, g = normal(
        (2, 1, queries, 3), (4, keys, 3), (4, keys, 6), (4, queries, 1), (2, 4, queries, 6)
    )
    arrays = dict(query=query, key=key, value=value, bias=bias)
    assert_as_whole_map("l1", g, arrays, key_block=5)


def test_causal():
    query, key, value, g = normal((13, 3), (13, 3), (13, 2), (13, 2))
    fused = functools.partial(ops.fused_attention, ops.l1_scores, is_causal=True, key_block=4)
    truth = functools.partial(whole_map, l1, mask=np.tril(np.ones((13, 13), bool)))
    with jax.enable_x64(True), ops.use_backend("reference"):
        got, expected = (value_and_gradients(f, g, query, key, value) for f in (fused, truth))
        assert_close(got, expected)


def test_dropout_keeps_the_mean_and_is_the_same_in_the_backward_pass():
    query, key, value, g = normal((6, 3), (9, 3), (9, 2), (6, 2))

    @jax.jit
    def dropped(query, value, seed):
        options = dict(dropout_rate=0.4, dropout_key=jax.random.key(seed), key_block=4)
        return ops.fused_attention(ops.l1_scores, query, key, value, scale=0.2, **options)

    with jax.enable_x64(True), ops.use_backend("reference"):
        draw = jax.vmap(lambda seed: dropped(query, value, seed))
        mean = jax.jit(lambda: draw(jnp.arange(4000)).mean(0))()
        truth = jax.jit(lambda: whole_map(l1, query, key, value, scale=0.2))()
        np.testing.assert_allclose(mean, truth, atol=0.05)
        output, d_query, d_value = value_and_gradients(
            lambda q, v: dropped(q, v, 3), g, query, value
        )
        # Linear in the values: a gradient by them with the same weights dropped gives the output.
        np.testing.assert_allclose((d_value * value).sum(), (output * g).sum(), rtol=1e-12)
        step = 1e-6 * normal((6, 3), seed=1)[0]
        change = dropped(query + step, value, 3) - dropped(query - step, value, 3)
        np.testing.assert_allclose((d_query * step).sum(), (g * change).sum() / 2, rtol=1e-5)


def test_each_block_of_keys_has_a_mask_of_its_own():
    queries = jnp.zeros((6, 3))
    keys, values = jnp.zeros((16, 3)), jnp.eye(16)  # so that weights are what comes out
    options = dict(dropout_rate=0.4, dropout_key=jax.random.key(0), key_block=8)
    weights = np.asarray(ops.fused_attention(ops.l1_scores, queries, keys, values, **options))
    np.testing.assert_allclose(weights[weights > 0], 1 / 16 / 0.6, rtol=1e-5)
    assert 0.2 < ((weights[:, :8] > 0) != (weights[:, 8:] > 0)).mean() < 0.8


def test_bfloat16_is_summed_in_float32():
    query, key, value = (jnp.asarray(a, jnp.bfloat16) for a in normal((40, 16), (40, 16), (40, 8)))
    output = ops.fused_attention(ops.l1_scores, query, key, value, scale=0.25, key_block=16)
    assert output.dtype == jnp.bfloat16
    wide = [np.asarray(a, np.float64) for a in (query, key, value)]
    expected = whole_map(l1, *wide, scale=0.25)
    np.testing.assert_allclose(output.astype(jnp.float32), expected, rtol=2**-8, atol=2**-9)


@pytest.mark.parametrize("hidden", [False, True])
def test_second_derivatives_are_finite_and_those_of_the_whole_map(hidden):
    query, key, value, direction = normal((9, 4), (9, 4), (9, 3), (9, 4))
    mask = np.ones((9, 9), bool)
    if hidden:
        key[8] *= 1e4  # whose scores would overflow, if they were seen
        mask[:, 8], mask[2] = False, False  # and a query that sees nothing
    score = lambda query, key: query @ jnp.swapaxes(key, -1, -2)

    @functools.partial(jax.jit, static_argnums=0)
    def curvature(attention, query):
        loss = lambda query: jnp.sin(
            attention(score, query, key, value, mask=mask, scale=0.5)
        ).sum()
        slope = lambda query: jnp.square(jax.grad(loss)(query)).sum()
        return jax.jvp(jax.grad(loss), (query,), (direction,))[1], jax.grad(slope)(query)

    with jax.enable_x64(True):
        expected = curvature(whole_map, query)
        assert_close(
            curvature(functools.partial(ops.fused_attention, key_block=4), query), expected
        )
    assert all(map(np.any, expected))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of CPUs")
def test_blocks_are_preferred_for_long_sequences_alone():
    preferred = [ops.preferred_key_block(n) for n in (0, 1, 65, 197, 512, 4096)]
    assert preferred == [None] * 4 + [256] * 2
    with ops.use_backend("pallas_tpu"):  # of the platform that is compiled for, not of this one
        assert [ops.preferred_key_block(n) for n in (512, 4096)] == [None, 256]
    with ops.use_backend("xla"):
        assert ops.preferred_key_block(512) == 256


def test_no_keys_give_zeros():
    output = ops.fused_attention(
        ops.l1_scores, jnp.ones((3, 4)), jnp.ones((0, 4)), jnp.ones((0, 2))
    )
    np.testing.assert_array_equal(output, np.zeros((3, 2)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_memory_grows_with_the_tokens_and_not_with_their_square(backend):
    def megabytes(attention, tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 16), jnp.float32)
        gradient = jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2))
        return jax.jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes / 1e6

    attention = functools.partial(ops.fused_attention, ops.l1_scores, key_block=64)
    fused = [megabytes(attention, tokens) for tokens in (1024, 4096)]
    whole = megabytes(lambda q, k, v: jax.nn.softmax(ops.l1_scores(q, k)) @ v, 4096)
    assert fused[1] < 4.5 * fused[0]
    assert fused[1] < whole / 8


def test_errors_say_what_was_expected():
    x, y = jnp.ones((4, 3)), jnp.ones((5, 3))
    with pytest.raises(ValueError, match="as many queries as keys"):
        ops.fused_attention(ops.l1_scores, x, y, y, identity=True)
    with pytest.raises(ValueError, match="dropout_key"):
        ops.fused_attention(ops.l1_scores, x, y, y, dropout_rate=0.1)
    with pytest.raises(ValueError, match="key_block"):
        ops.fused_attention(ops.l1_scores, x, y, y, key_block=0)


def test_values_in_whole_numbers_are_refused():
    x = jnp.ones((1, 4, 3))
    with pytest.raises(TypeError, match="expected `value` in bfloat16, .*; got int32"):
        ops.fused_attention(ops.l1_scores, x, x, jnp.ones((1, 4, 2), jnp.int32))
