"""Linear and adder layers, MLP, patches, stochastic depth and blocks against NumPy."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import kfac
from adder_flax import layers, linen, ops
from adder_flax.parameters import Facts, parameter_facts
from tests.modules import parameters, randomised, run
from tests.ops.programs import l1, l1_gradients

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def rows(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def layer_norm(x, p):
    deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return (x - x.mean(-1, keepdims=True)) / deviation * p["scale"] + p["bias"]


def adder(x, kernel):
    return -np.abs(x[..., :, None] - kernel).sum(-2)


def gelu(x):
    return x * (1 + scipy.special.erf(x / np.sqrt(2))) / 2


@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 17, 7), (2, 3, 4, 7)])
def test_linear_equals_the_formula_on_any_leading_axes(shape):
    module = randomised(lambda: layers.Linear(7, 5, rngs=nnx.Rngs(0)))
    p, x = parameters(module), rows(*shape)
    close(run(module, x), x @ p["kernel"] + p["bias"], atol=1e-6)


def test_linear_starts_as_deit_does():
    kernel = layers.Linear(200, 300, rngs=nnx.Rngs(0)).kernel[...]
    np.testing.assert_allclose(kernel.std(), 0.02, rtol=0.02)
    assert layers.AdderLinear(200, 300, rngs=nnx.Rngs(0)).kernel[...].std() > 0.98


@pytest.mark.parametrize("norm", ["layernorm", None])
@pytest.mark.parametrize("use_bias", [True, False])
def test_adder_linear_equals_the_formula(norm, use_bias):
    options = dict(norm=norm, use_bias=use_bias)
    module = randomised(lambda: layers.AdderLinear(65, 17, **options, rngs=nnx.Rngs(0)))
    p = parameters(module)
    assert set(p) == {"kernel"} | ({"norm"} if norm else {"bias"} if use_bias else set())
    sums = adder(rows(2, 3, 65), p["kernel"])
    expected = layer_norm(sums, {"bias": 0.0} | p["norm"]) if norm else sums + p.get("bias", 0.0)
    np.testing.assert_allclose(run(module, rows(2, 3, 65)), expected, rtol=2e-5, atol=2e-5)


def test_normed_linear_is_an_adder_layer_with_products_in_place_of_distances():
    module = randomised(lambda: layers.NormedLinear(65, 17, rngs=nnx.Rngs(0)))
    p, x = parameters(module), rows(2, 3, 65)
    close(run(module, x), layer_norm(x @ p["kernel"], p["norm"]), rtol=2e-5, atol=2e-5)
    kinds = layers.NormedLinear, layers.AdderLinear
    fresh, adder_layer = (kind(65, 17, rngs=nnx.Rngs(0)) for kind in kinds)
    np.testing.assert_array_equal(fresh.kernel[...], adder_layer.kernel[...])
    paths = [set(nnx.to_flat_state(nnx.state(m)).paths) for m in (fresh, adder_layer)]
    assert paths[0] == paths[1]
    assert parameter_facts(fresh)["kernel"] == Facts(role="weight")


def assert_has_curvature(loss, params):
    report = kfac.verify(loss, params, jnp.asarray(rows(3, 5, 8), jnp.float64))
    assert report.layers.coverage == 1.0
    assert max(max(row.capture_error, row.product_error) for row in report.rows) < 1e-10


@pytest.mark.cases(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_normed_linear_has_curvature(framework):
    if framework == "nnx":
        module = layers.NormedLinear(8, 6, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(module)
        params, apply = nnx.to_pure_dict(state), lambda p, x: nnx.merge(graphdef, p)(x)
    else:
        module = linen.NormedLinear(6, param_dtype=jnp.float64)
        params = module.init(jax.random.key(0), jnp.ones((1, 8), jnp.float64))["params"]
        apply = lambda p, x: module.apply({"params": p}, x)
    assert_has_curvature(lambda params, x: (apply(params, x) ** 4).sum((1, 2)).mean(), params)


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_adder_linear_starts_at_its_scale(scale):
    model = layers.AdderLinear(100, 200, initial_scale=scale, rngs=nnx.Rngs(0))
    of_linen = linen.AdderLinear(200, initial_scale=scale)
    variables = of_linen.init(jax.random.key(0), jnp.ones((1, 100)))
    for kernel in (model.kernel[...], variables["params"]["kernel"]):
        assert kernel.std() == pytest.approx(scale, rel=0.02)


@pytest.mark.parametrize(
    ("x_gradient", "w_gradient", "slope"),
    [("hardtanh", "full", 1.0), ("hardtanh", "full", 4.0), ("sign", "sign", 1.0)],
)
def test_adder_linear_passes_its_gradient_rules_on(x_gradient, w_gradient, slope):
    options = dict(x_gradient=x_gradient, w_gradient=w_gradient, hardtanh_slope=slope)
    options |= dict(norm=None, use_bias=False)
    module = randomised(lambda: layers.AdderLinear(6, 4, **options, rngs=nnx.Rngs(0)))
    x, g = rows(3, 6), rows(3, 4, seed=1)
    graphdef, state = nnx.split(module)
    loss = lambda state, x: jnp.sum(nnx.merge(graphdef, state)(x) * g)
    dw, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(nnx.to_pure_dict(state), x)
    kernel = parameters(module)["kernel"]
    by_x, by_w = l1_gradients(x, kernel.T, g, x_gradient, w_gradient, slope)
    close(dx, by_x)
    close(dw["kernel"], by_w.T)


@pytest.mark.parametrize("make", ["nnx", "linen"])
def test_few_bits_round_inputs_and_weights_to_one_grid_straight_through(make):
    x, g = rows(30, 6), rows(30, 4, seed=1)
    options = dict(bits=3, x_gradient="full", norm=None, use_bias=False)
    if make == "nnx":
        layer = layers.AdderLinear(6, 4, **options, rngs=nnx.Rngs(0))
        kernel, graphdef = layer.kernel[...], nnx.split(layer)[0]
        apply = lambda kernel, x: nnx.merge(graphdef, {"kernel": kernel})(x)
    else:
        layer = linen.AdderLinear(4, **options)
        kernel = layer.init(jax.random.key(0), x)["params"]["kernel"]
        apply = lambda kernel, x: layer.apply({"params": {"kernel": kernel}}, x)
    got, pull = jax.vjp(apply, kernel, x)
    a, b = (np.asarray(array, np.float64) for array in (x, kernel))
    lowest = max(max(z.min(), z.mean() - 3 * z.std()) for z in (a, b))
    highest = min(min(z.max(), z.mean() + 3 * z.std()) for z in (a, b))
    grid = np.linspace(lowest, highest, 8)
    nearest = lambda z: grid[np.abs(z[..., None] - grid).argmin(-1)]
    a, b = (np.where((z > lowest) & (z < highest), nearest(z), z) for z in (a, b))
    assert 0.02 < (a != nearest(a)).mean() < 0.5  # some lie beyond
    np.testing.assert_allclose(got, l1(a, b.T), rtol=1e-5)
    dw, dx = pull(jnp.asarray(g))
    by_x, by_w = l1_gradients(a, b.T, g, "full", "full")
    np.testing.assert_allclose(dx, by_x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, by_w.T, rtol=1e-4, atol=1e-4)


def test_adder_linear_normalises_before_it_rounds():
    """At K = 768 the sums lie near -866, where bfloat16 has a spacing of 4: rounding them first
    loses the signal."""
    make = lambda **options: randomised(
        lambda: layers.AdderLinear(768, 64, **options, rngs=nnx.Rngs(0))
    )
    # So that only the layer's rounding is seen.
    exact = lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32)
    half, wide, raw = make(dtype=jnp.bfloat16), make(), make(norm=None, dtype=jnp.bfloat16)
    for module in (half, wide):
        nnx.update(module, jax.tree.map(exact, nnx.state(module)))
    x = jnp.asarray(rows(16, 768), jnp.bfloat16)
    out, truth = run(half, x), run(wide, x.astype(jnp.float32))
    assert out.dtype == jnp.bfloat16
    # bfloat16 has 8 bits; were the sums rounded first, errors of 2 would meet a standard deviation
    # of about 15.
    np.testing.assert_allclose(np.asarray(out, np.float32), truth, rtol=2**-8, atol=2**-8)
    assert run(raw, x).dtype == jnp.float32


def test_adder_linear_is_exact_far_from_its_prototypes():
    """Where the sums' mean is thousands of their deviations, E[y²] - E[y]² would be rounding."""
    module = randomised(lambda: layers.AdderLinear(64, 32, rngs=nnx.Rngs(0)))
    p, x = parameters(module), 300 + rows(5, 64).astype(np.float64)
    with ops.use_backend("xla"):
        found = run(module, x.astype(np.float32))
    expected = layer_norm(adder(x, p["kernel"].astype(np.float64)), p["norm"])
    np.testing.assert_allclose(found, expected, atol=5e-3)


def convolve(images, kernel, stride):
    options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest")
    return jax.lax.conv_general_dilated(images, kernel, (stride, stride), "VALID", **options)


def test_patches_equal_a_strided_convolution():
    images = rows(2, 6, 9, 2)
    module = randomised(lambda: layers.PatchEmbed(3, 2, 5, rngs=nnx.Rngs(0)))
    convolved = convolve(images, module.proj.kernel[...].reshape(3, 3, 2, 5), 3)
    close(run(module, images), convolved.reshape(2, 6, 5) + module.proj.bias[...])
    patches = layers.image_to_patches(jnp.arange(36).reshape(1, 6, 6, 1), 3)
    np.testing.assert_array_equal(patches[0, 1], [3, 4, 5, 9, 10, 11, 15, 16, 17])


def test_squared_distances_take_a_product_in_full_precision_on_accelerators_too():
    arrays = jnp.ones((2, 3)), jnp.ones((3, 4))
    program = jax.make_jaxpr(layers.half_squared_distances)(*arrays)
    products = [e for e in program.eqns if e.primitive.name == "dot_general"]
    highest = jax.lax.Precision.HIGHEST
    assert [e.params["precision"] for e in products] == [(highest, highest)]


@pytest.mark.parametrize("strides", [(), (1, 2)])
@pytest.mark.parametrize("kind", ["dense", "adder", "bare adder"])
def test_a_stem_equals_strided_convolutions(kind, strides):
    """Of the image continued at its edges: one product per window, or one distance."""
    linear = layers.linear_class(*(("adder", {"norm": None}) if kind == "bare adder" else (kind,)))
    options = dict(stem_channels=(3, 4), stem_strides=strides, stem_linear=linear)
    module = randomised(lambda: layers.PatchEmbed(8, 2, 5, **options, rngs=nnx.Rngs(0)))
    p, images = parameters(module), rows(2, 8, 16, 2)
    x = images.astype(np.float64)
    for stage, stride in zip((p["stem"][i] for i in range(2)), strides or (2, 2), strict=True):
        kernel = stage["linear"]["kernel"].astype(np.float64)
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
        windows = np.moveaxis(windows[:, ::stride, ::stride], 3, -1)  # row, column, channel
        windows = windows.reshape(*windows.shape[:3], -1)
        if kind == "dense":
            kernel = np.float32(kernel.reshape(3, 3, x.shape[-1], -1))
            sums = convolve(np.float32(padded), kernel, stride) + stage["linear"]["bias"]
        else:
            sums = adder(windows, kernel) + stage["linear"].get("bias", 0.0)
        x = gelu(layer_norm(sums, stage["linear"]["norm"] if kind == "adder" else stage["norm"]))
    patches = np.stack([half.reshape(2, -1) for half in np.split(x, 2, axis=2)], axis=1)
    expected = patches @ p["proj"]["kernel"] + p["proj"]["bias"]
    np.testing.assert_allclose(run(module, images), expected, rtol=1e-3, atol=1e-4)


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    module = layers.DropPath(0.25)
    out = module(jnp.ones((4000, 2, 3)), deterministic=False, rngs=nnx.Rngs(dropout=0))
    per_sample = out.reshape(4000, 6)
    assert np.all(per_sample == per_sample[:, :1])
    assert set(np.unique(out)) == {0.0, np.float32(1 / 0.75)}
    assert abs((out == 0).mean() - 0.25) < 0.03
    given = module(jnp.ones((3, 2)), deterministic=False, factors=jnp.array([0.0, 2.0, 1.0]))
    np.testing.assert_array_equal(given, [[0, 0], [2, 2], [1, 1]])


def block_formula(block, tokens):
    """x + out(heads(softmax(-‖q - k‖₁/√d) + I) v), then x + mlp, pre-LayerNorm, adder layers
    throughout."""
    p = parameters(block)
    linear = lambda x, part: layer_norm(adder(x, part["kernel"]), part["norm"])
    x = layer_norm(tokens.astype(np.float64), p["norm1"])
    heads = lambda name: (
        linear(x, p["attention"][name]).reshape(*x.shape[:-1], 2, -1).swapaxes(1, 2)
    )
    query, key, value = heads("query"), heads("key"), heads("value")
    logits = l1(query, key) / np.sqrt(query.shape[-1])
    weights = scipy.special.softmax(logits, axis=-1) + np.eye(x.shape[1])
    attended = (weights @ value).swapaxes(1, 2).reshape(x.shape)
    tokens = tokens + linear(attended, p["attention"]["out"])
    hidden = gelu(linear(layer_norm(tokens, p["norm2"]), p["mlp"]["fc1"]))
    return tokens + linear(hidden, p["mlp"]["fc2"])


def test_adder_block_equals_the_formula():
    options = dict(score="adder", qkv_linear="adder", proj_linear="adder", mlp_linear="adder")
    block = randomised(lambda: layers.Block(8, 2, mlp_ratio=2.0, **options, rngs=nnx.Rngs(0)))
    x = rows(3, 5, 8)
    np.testing.assert_allclose(run(block, x), block_formula(block, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_block_without_projections_equals_the_papers_formula(position):
    """softmax(X Xᵀ/√d) X with X = LN(tokens), section 3.2 of the Brownian paper; or LayerNorm
    behind the sums.

    Each branch times its LayerScale.
    """
    options = dict(
        qkv_linear="identity", proj_linear="identity", norm_position=position, layer_scale=0.1
    )
    block = randomised(lambda: layers.Block(8, 1, mlp_ratio=2.0, **options, rngs=nnx.Rngs(0)))
    p, tokens = parameters(block), rows(3, 5, 8).astype(np.float64)
    norms = [lambda x, name=name: layer_norm(x, p[name]) for name in ("norm1", "norm2")]
    same = lambda x: x
    (before1, before2), (behind1, behind2) = (
        (norms, (same, same)) if position == "pre" else ((same, same), norms)
    )
    x = before1(tokens)
    weights = np.exp(x @ x.swapaxes(1, 2) / np.sqrt(8))
    scale1, scale2 = (p[name]["scale"] for name in ("layer_scale1", "layer_scale2"))
    between = behind1(tokens + weights / weights.sum(-1, keepdims=True) @ x * scale1)
    fc1, fc2 = p["mlp"]["fc1"], p["mlp"]["fc2"]
    hidden = gelu(before2(between) @ fc1["kernel"] + fc1["bias"])
    expected = behind2(between + (hidden @ fc2["kernel"] + fc2["bias"]) * scale2)
    np.testing.assert_allclose(run(block, rows(3, 5, 8)), expected, rtol=1e-4, atol=1e-4)
    assert not nnx.to_pure_dict(nnx.state(block.attention, nnx.Param))


def test_layer_scale_begins_small_is_not_decayed_and_has_curvature():
    block = layers.Block(8, 2, layer_scale=1e-4, rngs=nnx.Rngs(0))
    for scale in (block.layer_scale1.scale, block.layer_scale2.scale):
        np.testing.assert_allclose(scale[...], np.full(8, 1e-4, np.float32))
    facts = parameter_facts(block)
    for name in ("layer_scale1", "layer_scale2"):
        assert not facts[name]["scale"].decay
    assert not jax.tree.leaves(nnx.state(layers.LayerScale(8, None)))
    with jax.enable_x64(True):
        graphdef, state = nnx.split(layers.LayerScale(8, 0.3, param_dtype=jnp.float64))
        loss = lambda params, x: (nnx.merge(graphdef, params)(x) ** 2).sum((1, 2)).mean()
        assert_has_curvature(loss, nnx.to_pure_dict(state))


def test_each_branch_of_a_block_has_factors_of_its_own():
    block = randomised(lambda: layers.Block(8, 2, drop_path_rate=0.5, rngs=nnx.Rngs(0)))
    x, factors = rows(2, 5, 8), jnp.array([[2.0, 0.0], [0.0, 3.0]])
    random = dict(deterministic=False, rngs=nnx.Rngs(dropout=0))
    found = block(x, drop_path_factors=factors, **random)
    attended, transformed = block.attention(block.norm1(x)), block.mlp(block.norm2(x))
    close(found[0], x[0] + 2 * attended[0])
    close(found[1], x[1] + 3 * transformed[1])


@pytest.mark.slow
def test_block_drops_its_branches():
    options, x = dict(drop_path_rate=0.5, dropout_rate=0.1), rows(64, 5, 8)
    block = randomised(lambda: layers.Block(8, 2, **options, rngs=nnx.Rngs(0)))

    def untouched(factors):
        random = dict(deterministic=False, rngs=nnx.Rngs(dropout=0))
        return (block(x, drop_path_factors=factors, **random) == x).all((1, 2))

    assert 0.1 < untouched(None).mean() < 0.4  # both branches dropped: a quarter
    assert untouched(jnp.zeros((2, 64))).all()
    assert not untouched(jnp.stack([jnp.ones(64), jnp.zeros(64)])).any()


def test_kinds_of_linear_layers_are_chosen_apart():
    options = dict(proj_linear="adder", adder_options={"norm": None})
    block = nnx.eval_shape(lambda: layers.Block(8, 2, **options, rngs=nnx.Rngs(0)))
    assert isinstance(block.attention.query, layers.Linear)
    assert isinstance(block.attention.out, layers.AdderLinear)
    assert block.attention.out.norm is None
    assert isinstance(block.mlp.fc1, layers.Linear)


RNGS, ODD = nnx.Rngs(0), np.ones((1, 8, 9, 1), np.float32)
stem = functools.partial(layers.PatchEmbed, 6, 3, 8, stem_channels=(4, 4), rngs=RNGS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: layers.linear_class("sparse"),
            "expected a linear layer 'dense', 'normed_dense', 'adder' or 'identity', got 'sparse'",
        ),
        (lambda: layers.Identity(2, 3), "behind the identity as in front of it, got 2 and 3"),
        (lambda: layers.Block(8, 2, norm_position="mid", rngs=RNGS), "'pre' or 'post', got 'mid'"),
        (lambda: layers.AdderLinear(2, 3, norm="batch", rngs=RNGS), "or None, got 'batch'"),
        (
            lambda: layers.AdderLinear(2, 3, rngs=RNGS)(jnp.ones((1, 4))),
            r"with 2 features, got shape \(1, 4\)",
        ),
        (lambda: layers.DropPath(1.0), r"drop path rate in \[0, 1\), got 1.0"),
        (
            lambda: layers.DropPath(0.5)(jnp.ones(2), deterministic=False),
            "expects rngs with a 'dropout' stream",
        ),
        (lambda: layers.image_to_patches(ODD, 4), "multiples of patch_size 4, got 8 x 9"),
        (lambda: layers.neighbourhoods(ODD), "even sides to halve, got 8 x 9"),
        (stem, "patch_size that strides 2, 2 divide, got 6"),
        (lambda: stem(stem_strides=(1,)), "a stride for each of 2 convolutions, or none, got 1"),
    ],
)
def test_errors_say_what_was_expected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.cases(2)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_the_squared_distance(share, traced):
    """Sums and their derivatives by the weights in float64; those of the L1 part are AdderNet's, x
    − w."""
    x, g = rows(5, 7), rows(5, 3, seed=1)
    layer = layers.AdderLinear(7, 3, norm=None, use_bias=False, rngs=nnx.Rngs(0))
    layer.set_squared_share(jnp.float32(share) if traced else share)
    gaps = x[:, :, None].astype(np.float64) - np.asarray(layer.kernel[...], np.float64)
    expected = -(1 - share) * np.abs(gaps).sum(1) - share * (gaps**2).sum(1) / 2
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5)
    loss = lambda layer: (layer(x) * g).sum()
    gradient = (nnx.jit(nnx.grad(loss)) if traced else nnx.grad(loss))(layer)
    np.testing.assert_allclose(
        gradient["kernel"][...], (gaps * g[:, None]).sum(0), rtol=1e-4, atol=1e-5
    )
