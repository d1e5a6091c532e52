"""The attention functions against float64 NumPy, and under every transformation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from adder_flax import attention
from tests.attention import reference

HEADS, DIM, HIDDEN = 2, 6, 5
NAMES = ("dot", "bilinear", "additive", "adder", "gaussian")
FUNCTIONS = dict(
    dot=attention.dot_product_attention,
    bilinear=attention.bilinear_attention,
    additive=attention.additive_attention,
    adder=attention.adder_attention,
    gaussian=attention.gaussian_attention,
)


def make_inputs(
    q_length, k_length, batch=(2,), heads=HEADS, kv_heads=HEADS, q_dim=DIM, k_dim=DIM, v_dim=DIM
):
    rng = np.random.default_rng(0)
    sizes = (q_length, heads, q_dim), (k_length, kv_heads, k_dim), (k_length, kv_heads, v_dim)
    return tuple(rng.normal(size=(*batch, *size)).astype(np.float32) for size in sizes)


def make_parameters(name, heads=HEADS, q_dim=DIM, k_dim=DIM, layer_norm=False):
    rng = np.random.default_rng(1)
    shapes = {}
    if name == "bilinear":
        shapes = dict(kernel=(heads, q_dim, k_dim))
    if name == "additive":
        shapes = dict(query_kernel=(heads, q_dim, HIDDEN), key_kernel=(heads, k_dim, HIDDEN))
        shapes |= dict(bias=(heads, HIDDEN), v=(heads, HIDDEN))
        if layer_norm:
            shapes["norm_scale"] = (heads, HIDDEN)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def make_options():
    """Of four heads of seven tokens; a query sees nothing."""
    rng = np.random.default_rng(2)
    mask = rng.random((2, 1, 7, 7)) < 0.6
    mask[0, 0, 3] = False
    bias, key_bias = (rng.normal(size=s).astype(np.float32) for s in ((4, 7, 7), (4, 7)))
    temperature = np.array([0.5, 3.0, 1.0, 2.0], np.float32)
    return dict(mask=mask, bias=bias, key_bias=key_bias, temperature=temperature)


def call(name, query, key, value, parameters, **options):
    parameters = {"hidden_bias" if n == "bias" else n: p for n, p in parameters.items()}
    return FUNCTIONS[name](query, key, value, **parameters, **options)


@functools.cache
def compiled(name, **options):
    return jax.jit(functools.partial(call, name, return_weights=True, **options))


def assert_as_reference(found, name, inputs, parameters, *, tolerances=(2e-5, 2e-6), **options):
    """Compares an output and its map with the formula in float64."""
    (out, weights), (rtol, atol) = found, tolerances
    expected_out, expected_weights = reference.attention(name, *inputs, parameters, **options)
    np.testing.assert_allclose(weights, expected_weights, rtol=rtol, atol=atol)
    np.testing.assert_allclose(out, expected_out, rtol=rtol, atol=max(atol, 5e-6))


@pytest.mark.cases(10)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("q_length", "k_length"), [(1, 1), (2, 2), (17, 17), (3, 5)])
def test_equals_the_formula(name, q_length, k_length):
    inputs, parameters = make_inputs(q_length, k_length), make_parameters(name)
    identity = name == "adder" and q_length == k_length
    run = compiled(name, identity=None if q_length == k_length else False)
    assert_as_reference(run(*inputs, parameters), name, inputs, parameters, identity=identity)


@pytest.mark.parametrize("name", NAMES)
def test_mask_bias_temperature_scale_and_grouped_heads_together(name):
    inputs, parameters = make_inputs(7, 7, heads=4, kv_heads=2), make_parameters(name, heads=4)
    arrays = make_options()
    run = functools.partial(call, name, scale=0.7, is_causal=True, identity=True)
    found = jax.jit(functools.partial(run, return_weights=True))(*inputs, parameters, **arrays)
    options = dict(
        scale=0.7,
        identity=True,
        temperature=arrays["temperature"][:, None, None],
        bias=arrays["bias"] + arrays["key_bias"][:, None],
        mask=arrays["mask"] & np.tril(np.ones((7, 7), bool)),
    )
    assert_as_reference(found, name, inputs, parameters, **options)


@pytest.mark.parametrize("forbid", ["mask", "bias", "key_bias"])
def test_fully_masked_rows_are_zero_and_have_finite_gradients(forbid):
    inputs = make_inputs(4, 4)
    blocked = dict(
        mask=jnp.zeros((2, 1, 4, 4), bool),
        bias=jnp.full((4, 4), -jnp.inf),
        key_bias=jnp.full((HEADS, 4), -jnp.inf),
    )

    def total(query, key, value):
        out, weights = attention.adder_attention(
            query, key, value, identity=False, return_weights=True, **{forbid: blocked[forbid]}
        )
        return jnp.sum(out), (out, weights)

    with jax.debug_nans(True):
        gradients, (out, weights) = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*inputs)
    assert not np.any(weights)
    assert not np.any(out)
    assert not any(np.any(g) for g in gradients)


def test_an_exported_program_may_leave_the_length_open():
    inputs = make_inputs(4, 4)
    like = jax.ShapeDtypeStruct((2, *export.symbolic_shape("length"), HEADS, DIM), "float32")
    attend = jax.jit(lambda x: attention.dot_product_attention(x, x, x))
    exported = export.export(attend)(like)
    np.testing.assert_allclose(exported.call(inputs[0]), attend(inputs[0]), rtol=1e-5, atol=1e-6)


def test_a_scale_per_head_multiplies_the_scores_of_that_head():
    inputs, scale = make_inputs(HEADS, HEADS), jnp.linspace(0.5, 2.0, HEADS)
    found = attention.adder_attention(*inputs, scale=scale)
    per_head = attention.adder_attention(*inputs, scale=1.0, temperature=1 / scale)
    np.testing.assert_allclose(found, per_head, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(key_bias=jnp.zeros((3, 4))), r"key_bias .* \(\*batch, heads, k_length\)"),
        (dict(key_bias=jnp.zeros((4, HEADS, 4))), "key_bias"),
        (dict(key_bias=jnp.zeros(3)), "key_bias"),
        (dict(query_position=-1), "at least 0"),
        (dict(query_position=np.array([0, -1])), "at least 0"),
        (dict(precision=("highest", "default")), "one precision"),
        (dict(dtype=jnp.int32), "floating dtype, got int32"),
    ],
)
def test_what_would_mean_something_else_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attention.dot_product_attention(*make_inputs(4, 4), **options)


@pytest.mark.parametrize("precision", [jax.lax.Precision.HIGHEST, "F32_F32_F32", None])
def test_precisions_of_jax_are_taken(precision):
    if precision == "F32_F32_F32":
        precision = jax.lax.DotAlgorithmPreset.F32_F32_F32
    found = attention.dot_product_attention(*make_inputs(4, 4), precision=precision)
    assert found.dtype == jnp.float32


@pytest.mark.parametrize("key_block", [None, 2])
def test_nan_in_a_bias_hides_no_key(key_block):
    bias = jnp.zeros((4, 4)).at[1, 2].set(jnp.nan)
    out = attention.dot_product_attention(*make_inputs(4, 4), bias=bias, key_block=key_block)
    assert np.isnan(out).any((0, 2, 3)).tolist() == [False, True, False, False]


@pytest.mark.parametrize("key_block", [None, 2])
def test_samples_may_stand_at_places_of_their_own_in_a_cache(key_block):
    query, key, value = make_inputs(2, 6, heads=4, kv_heads=2)
    attend = functools.partial(attention.adder_attention, is_causal=True, key_block=key_block)
    found = attend(query, key, value, query_position=jnp.array([1, 4]))
    for sample, place in enumerate((1, 4)):
        alone = (x[sample : sample + 1] for x in (query, key, value))
        expected = attend(*alone, query_position=place)[0]
        np.testing.assert_allclose(found[sample], expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"of shape \(2,\), got \(1,\)"):
        attend(query, key, value, query_position=jnp.array([1]))


@pytest.mark.parametrize(
    ("name", "layer_norm"), [("bilinear", False), ("additive", False), ("additive", True)]
)
def test_widths_of_query_key_and_value_may_differ(name, layer_norm):
    inputs = make_inputs(3, 5, q_dim=4, k_dim=7, v_dim=2)
    parameters = make_parameters(name, q_dim=4, k_dim=7, layer_norm=layer_norm)
    found = compiled(name)(*inputs, parameters)
    assert_as_reference(found, name, inputs, parameters, tolerances=(5e-5, 5e-6))


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.bfloat16, 0.04), (jnp.float16, 0.005), (jnp.float64, 1e-11)]
)
def test_outputs_are_of_the_inputs_dtype_and_maps_of_float32_or_wider(name, dtype, tolerance):
    with jax.enable_x64(dtype == jnp.float64):
        wide = jnp.promote_types(dtype, jnp.float32)
        inputs = [jnp.asarray(x, dtype) for x in make_inputs(17, 17)]
        parameters = {n: jnp.asarray(p, wide) for n, p in make_parameters(name).items()}
        out, weights = compiled(name)(*inputs, parameters)
        assert (out.dtype, weights.dtype) == (dtype, wide)
        expected, _ = reference.attention(name, *inputs, parameters, identity=name == "adder")
        np.testing.assert_allclose(np.float64(out), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_finite_differences(name):
    with jax.enable_x64(True):
        inputs = [jnp.asarray(x, jnp.float64) for x in make_inputs(3, 3, batch=())]
        parameters = {n: jnp.asarray(p, jnp.float64) for n, p in make_parameters(name).items()}
        direction = np.random.default_rng(3)

        @jax.jit
        def loss(arguments):
            *inputs, parameters = arguments
            return jnp.sum(jnp.sin(call(name, *inputs, parameters)))

        arguments = (*inputs, parameters)
        tangent = jax.tree.map(lambda x: jnp.asarray(direction.normal(size=x.shape)), arguments)
        gradient = jax.jit(jax.grad(loss))(arguments)
        slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, tangent)))
        moved = lambda step: loss(jax.tree.map(lambda x, t: x + step * t, arguments, tangent))
        np.testing.assert_allclose(slope, (moved(1e-6) - moved(-1e-6)) / 2e-6, rtol=1e-6)


def test_layer_norm_gradients_equal_those_of_the_broadcast_form():
    with jax.enable_x64(True):
        query, key, _ = (jnp.asarray(np.swapaxes(x, 1, 2), jnp.float64) for x in make_inputs(4, 5))
        p = jax.tree.map(np.float64, make_parameters("additive", layer_norm=True))

        def broadcast(query, key, p):
            query, key = query @ p["query_kernel"], key @ p["key_kernel"]
            hidden = query[..., :, None, :] + key[..., None, :, :]
            hidden = jax.nn.standardize(hidden, epsilon=1e-6) * p["norm_scale"][:, None, None]
            return jnp.sum(jnp.tanh(hidden + p["bias"][:, None, None]) * p["v"][:, None, None], -1)

        ours = lambda query, key, p: attention.additive_scores(query, key, **p)
        gradients = lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2)))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-10)
        jax.tree.map(close, gradients(ours)(query, key, p), gradients(broadcast)(query, key, p))


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_vmap_and_remat_change_nothing(name):
    inputs, parameters = make_inputs(5, 5), make_parameters(name)
    mask = jnp.asarray(np.random.default_rng(4).random((2, 1, 5, 5)) < 0.7)
    loss = lambda *a: jnp.sum(jnp.sin(call(name, *a[:3], parameters, mask=a[3])))
    of = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    expected = jax.jit(of(loss))(*inputs, mask)
    values, gradients = jax.jit(jax.vmap(of(loss)))(*inputs, mask)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, jax.jit(of(jax.checkpoint(loss)))(*inputs, mask), expected)
    jax.tree.map(close, (values.sum(), gradients), expected)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_samples_do_not_depend_on_the_batch(name):
    inputs, parameters = make_inputs(17, 17, batch=(5,)), make_parameters(name)
    run = jax.jit(functools.partial(call, name))
    together = run(*inputs, parameters)
    alone = run(*(x[3:4] for x in inputs), parameters)
    np.testing.assert_allclose(together[3:4], alone, rtol=1e-6, atol=1e-6)
    changed = [x.copy() for x in inputs]
    for x in changed:
        x[:3] = np.nan
    np.testing.assert_array_equal(run(*changed, parameters)[3:], together[3:])


def test_batch_axes_are_free():
    for batch in ((), (3, 2)):
        inputs = make_inputs(5, 5, batch=batch)
        assert_as_reference(compiled("adder")(*inputs, {}), "adder", inputs, {}, identity=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "q_length", "k_length"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_empty_batches_and_sequences(name, batch, q_length, k_length):
    inputs, parameters = make_inputs(q_length, k_length, batch=(batch,)), make_parameters(name)
    out, weights = compiled(name, identity=False)(*inputs, parameters)
    assert out.shape == (batch, q_length, HEADS, DIM)
    assert weights.shape == (batch, HEADS, q_length, k_length)
    assert not np.any(out) or k_length  # who has no key to look at gets zeros


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("dot", "bilinear")), *NAMES[2:]],
)
def test_blocks_of_keys_change_nothing(name):
    """All options at once, with grouped heads, blocks that do not divide the length, and a query
    that sees nothing."""
    inputs, parameters = make_inputs(7, 7, heads=4, kv_heads=2), make_parameters(name, heads=4)
    options = make_options() | dict(scale=0.7, is_causal=True, identity=True)
    options["key_bias"][:, 5] = -np.inf

    @functools.partial(jax.jit, static_argnums=0)
    def loss_and_gradients(key_block, *arguments):
        run = lambda inputs, p: call(name, *inputs, p, key_block=key_block, **options)
        return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(run(*a))), argnums=(0, 1))(*arguments)

    found, expected = (loss_and_gradients(block, inputs, parameters) for block in (3, None))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found, expected)


def test_blocks_of_keys_build_no_map():
    query, key, value = make_inputs(64, 64, batch=(), heads=1, kv_heads=1)
    run = functools.partial(attention.adder_attention, key_block=8)
    shapes = lambda **options: str(
        jax.make_jaxpr(functools.partial(run, **options))(query, key, value)
    )
    assert "64,64]" not in shapes()
    assert "64,64]" in shapes(return_weights=True)  # asked for, it is built
    with pytest.raises(ValueError, match="expects a dropout_rng"):
        run(query, key, value, dropout_rate=0.5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on CPUs these are long")
def test_long_sequences_build_no_map_unless_it_is_needed():
    def builds_map(tokens, score="adder", **options):
        x = jax.ShapeDtypeStruct((1, tokens, 1, 4), jnp.float32)
        jaxpr = jax.make_jaxpr(lambda x: attention.attend(x, x, x, score=score, **options))(x)
        return f"{tokens},{tokens}]" in str(jaxpr)

    assert builds_map(197)
    for score in ("dot", "adder", "gaussian"):
        assert not builds_map(600, score)
    assert builds_map(600, key_block=None)
    assert builds_map(600, return_weights=True)
    assert builds_map(600, dropout_rate=0.1, dropout_rng=jax.random.key(0))
    sigmoid = lambda scores, mask: jax.nn.sigmoid(scores)
    assert builds_map(600, dataclasses.replace(attention.get_score("dot"), normalize=sigmoid))


def test_dropout_keeps_the_mean_and_spares_the_identity_map():
    query, key, _ = make_inputs(3, 3, batch=(1,), heads=1, kv_heads=1)
    values = jnp.eye(3)[None, :, None, :]  # the output is then the map itself
    run = lambda rng: attention.adder_attention(
        query, key, values, dropout_rate=0.25, dropout_rng=rng
    )[0, :, 0]
    maps = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 20000))
    clean = attention.adder_attention(query, key, values)[0, :, 0]
    np.testing.assert_allclose(maps.mean(0), clean, atol=0.02)
    softmax = clean - jnp.eye(3)
    kept = np.isclose(maps - jnp.eye(3), softmax / 0.75, atol=1e-5)
    dropped = np.isclose(maps, np.eye(3), atol=1e-6)
    assert np.all(kept ^ dropped)
    np.testing.assert_allclose(dropped.mean(), 0.25, atol=0.01)


def test_broadcast_dropout_is_one_mask_for_all_samples_and_heads():
    query, key, _ = make_inputs(9, 9, batch=(3,))
    value = np.broadcast_to(np.eye(9, dtype=np.float32)[:, None], (3, 9, HEADS, 9))

    def dropped(**options):
        attend = functools.partial(attention.dot_product_attention, dropout_rate=0.5, **options)
        return np.asarray(jax.jit(attend)(query, key, value, dropout_rng=jax.random.key(1))) == 0

    shared, own = dropped(), dropped(broadcast_dropout=False)
    assert np.all(shared == shared[:1, :, :1])
    assert not np.all(own == own[:1, :, :1])
    assert not np.any(dropped(deterministic=True))


def test_matches_jax_and_its_causal_mask():
    inputs = make_inputs(5, 8)
    expected = jax.nn.dot_product_attention(*inputs, is_causal=True)
    found = attention.dot_product_attention(*inputs, is_causal=True, query_position=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(key=np.ones((2, 5, 2, 4))), "expect query and key of one head_dim, got 6 and 4"),
        (dict(key=np.ones((3, 5, 2, 6))), "equal batch axes, got query"),
        (dict(key=np.ones((2, 4, 2, 6))), "key and value of one length and number of heads"),
        (dict(query=np.ones((2, 5, 3, 6))), "multiple of that of key heads"),
        (dict(query=np.ones((2, 4, 2, 6))), "between two sequences identity=False"),
        (dict(scale="variance"), r"'sqrt_dim', 'variance_matched'\] or a number, got 'variance'"),
        (dict(temperature=0.0), "expected a positive temperature .*, got 0.0"),
        (dict(dropout_rate=0.5), "expects a dropout_rng, got None"),
        (dict(dropout_rate=1.0, dropout_rng=1), r"dropout_rate in \[0, 1\), got 1.0"),
    ],
)
def test_errors_say_what_was_expected(change, message):
    query, key, value = make_inputs(5, 5)
    arguments = dict(query=query, key=key, value=value) | change
    with pytest.raises(ValueError, match=message):
        attention.adder_attention(**arguments)


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="got 'temprature'"):
        attention.adder_attention(*make_inputs(2, 2), temprature=2.0)
    with pytest.raises(ValueError, match="'qk_attn_weights_einsum' at Flax's default"):
        attention.dot_product_attention(*make_inputs(2, 2), qk_attn_weights_einsum=jnp.einsum)


def test_few_bits_round_queries_and_keys_to_one_grid_with_the_gradient_of_the_distance():
    rng = np.random.default_rng(0)
    # 8 levels from -2 to 1.5, all within three deviations of both.
    query, key, value = (rng.choice([-2.0, -1.0, 0.5, 1.5], (2, 5, 3, 4)) for _ in range(3))
    moved = np.where(abs(key) < 1.2, key + rng.uniform(-0.2, 0.2, key.shape), key)
    query, key = np.float32(query), np.float32(moved)
    few = functools.partial(attention.adder_scores, bits=3)
    rounded = np.clip(-2 + 0.5 * np.round((key + 2) / 0.5), -2, 1.5)
    assert (rounded != key).any()
    expected = -np.abs(query[..., :, None, :] - rounded[..., None, :, :]).sum(-1)
    np.testing.assert_allclose(few(query, key), expected, atol=1e-5)
    slopes = jax.grad(lambda key: few(query, key).sum())(key)
    signs = np.sign(query[..., :, None, :] - rounded[..., None, :, :]).sum(-3)
    np.testing.assert_array_equal(slopes, signs)
    options = dict(score="adder", identity=False)
    got = attention.attend(query, key, value, **options, score_options={"bits": 3})
    np.testing.assert_allclose(got, attention.attend(query, rounded, value, **options), atol=1e-5)
