"""A parameter tree moves between the NNX and the Linen modules unchanged, and the outputs agree."""

import functools

import flax.errors
import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import kfac
from adder_flax import attention, layers, linen, models
from tests.modules import randomised, run, run_with_map

ADDER = dict(qkv_linear="adder", proj_linear="adder", mlp_linear="adder")
TINY = dict(patch_size=2, num_classes=3, width=8, depth=2, num_heads=2, mlp_ratio=2.0)
VIT = TINY | dict(image_size=4, channels=1)


def rows(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tokens():
    return rows(3, 5, 8)


def images(side=4):
    return rows(3, side, 4, 1)


def pair(name, sizes, widths, make_inputs, **options):
    """Makers of both forms of a module: `sizes` are both's, `widths` what Linen sees."""
    in_nnx = getattr(attention if hasattr(attention, name) else layers, name)
    order = (*sizes, *widths) if name == "MultiHeadAttention" else (*widths, *sizes)
    return (
        lambda: in_nnx(*order, **options, rngs=nnx.Rngs(0)),
        lambda: getattr(linen, name)(*sizes, **options),
        make_inputs,
    )


def vit(**options):
    options = TINY | options
    size = dict(image_size=4, channels=1)
    return (
        lambda: models.VisionTransformer(**size, **options, rngs=nnx.Rngs(0)),
        lambda: linen.VisionTransformer(**options),
        images,
    )


def embed(patch, side, **stem):
    return (
        lambda: layers.PatchEmbed(patch, 1, 8, **stem, rngs=nnx.Rngs(0)),
        lambda: linen.PatchEmbed(patch, 8, **stem),
        lambda: images(side),
    )


LEARNED = dict(score_options={"layer_norm": True}, temperature="learned", key_bias_length=5)
LEARNED |= dict(score="additive", num_kv_heads=1, out_features=6)
STEM = dict(stem_channels=(3, 5), stem_strides=(2, 1), stem_linear=layers.AdderLinear)
POST = dict(qkv_linear="identity", norm_position="post", layer_scale=0.1)
NORMED = dict(score="adder", **ADDER, adder_options={"norm": "layernorm"})
MATCHED = dict(score="adder", scale="variance_matched")
PAIRS = dict(
    linear=pair("Linear", (6,), (8,), tokens),
    adder_linear=pair("AdderLinear", (6,), (8,), tokens),
    normed_linear=pair("NormedLinear", (6,), (8,), tokens),
    bare_adder_linear=pair("AdderLinear", (6,), (8,), tokens, norm=None),
    mlp=pair("Mlp", (12,), (8,), tokens),
    patch_embed=embed(2, 4),
    adder_patch_embed=embed(4, 8, **STEM),
    multi_head=pair("MultiHeadAttention", (2,), (8,), tokens, **LEARNED),
    adder_multi_head=pair("MultiHeadAttention", (2,), (8,), tokens, **MATCHED),
    block=pair("Block", (2,), (8,), tokens, **NORMED),
    post_norm_block=pair("Block", (1,), (8,), tokens, **POST),
    vit=vit(score=["dot", "bilinear"], pooling="mean"),
    conv_vit=vit(stem_channels=(3,), pooling="mean"),
    distilled_vit=vit(distilled=True, norm_epsilon=1e-3),
    registers_vit=vit(registers=2, fc_norm=True, pooling="mean"),
    adder_vit=vit(score="adder", **ADDER, key_block=3),
)


def shapes_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def assert_close(found, expected):
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, found, expected)


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", PAIRS)
def test_outputs_agree_for_one_parameter_tree(name):
    make_nnx, make_linen, make_inputs = PAIRS[name]
    graphdef, state = nnx.split(randomised(make_nnx))
    own, module, inputs = nnx.to_pure_dict(state), make_linen(), make_inputs()
    params = linen.from_nnx(own)
    initial = jax.eval_shape(module.init, jax.random.key(0), inputs)["params"]
    assert shapes_of(initial) == shapes_of(params)
    assert linen.to_nnx(params).keys() == own.keys()
    ours = jax.jit(lambda p, x: nnx.merge(graphdef, linen.to_nnx(p))(x))(params, inputs)
    theirs = jax.jit(lambda p, x: module.apply({"params": p}, x))(params, inputs)
    assert_close(theirs, ours)


@pytest.mark.cases(2)
@pytest.mark.parametrize("score", attention.SCORES)
def test_cross_attention_with_all_options_agrees(score):
    size = dict(score=score, qkv_features=12, out_features=6, num_kv_heads=1)
    size |= dict(identity=False, temperature=0.7)
    own = dict(size, in_kv_features=6)
    ours = randomised(lambda: attention.MultiHeadAttention(2, 8, **own, rngs=nnx.Rngs(0)))
    module, params = linen.MultiHeadAttention(2, **size), nnx.to_pure_dict(nnx.state(ours))
    inputs = rows(3, 4, 8), rows(3, 7, 6, seed=1), rows(3, 7, 6, seed=2)
    mask = np.random.default_rng(3).random((3, 1, 4, 7)) < 0.6
    mask[0, 0, 1] = False  # a query that sees nothing
    options = dict(mask=jnp.asarray(mask), bias=rows(2, 4, 7, seed=4))
    apply = lambda p, *inputs: module.apply({"params": p}, *inputs, **options)
    found = run_with_map(apply, params, *inputs)
    assert np.all(np.isfinite(found[0]))
    assert not np.any(found[1][0, :, 1])
    assert_close(found, run_with_map(ours, *inputs, **options))


def _distance(tree, truth):
    """Norm of the difference over the norm of the truth, of all leaves together."""
    wide = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
    (found, _), (expected, _) = (ravel_pytree(wide(t)) for t in (tree, truth))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_in_both():
    """As a whole: the gradient of a key's bias under softmax, for one, is rounding alone."""
    options = dict(score="adder", mlp_linear="adder")
    make = lambda **dtype: layers.Block(8, 2, **options, **dtype, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(randomised(make)))

    def outputs_and_gradients(apply):
        loss = lambda p: (lambda y: (jnp.sum(jnp.sin(y)), y))(apply(p).astype(jnp.float32))
        gradients, outputs = jax.jit(jax.grad(loss, has_aux=True))(params)
        return outputs, gradients

    x = jnp.asarray(tokens())
    graphdefs = [nnx.split(make(dtype=dtype))[0] for dtype in (jnp.float32, jnp.bfloat16)]
    truth, ours = (outputs_and_gradients(lambda p, g=g: nnx.merge(g, p)(x)) for g in graphdefs)
    module = linen.Block(2, **options, dtype=jnp.bfloat16)
    theirs = outputs_and_gradients(lambda p: module.apply({"params": p}, x))
    # Of one operation; some ten follow one another in a block, twice as many backwards.
    rounding = 2.0**-9
    for outputs, gradients in (ours, theirs):
        assert 0 < _distance(outputs, truth[0]) < 10 * rounding
        assert 0 < _distance(gradients, truth[1]) < 20 * rounding


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16])
def test_the_norm_is_that_of_flax_linen(given, dtype):
    x = (1000 + 10 * rows(3, 8)).astype(given)  # of which bfloat16 keeps two digits
    params = {"scale": rows(8), "bias": rows(8, seed=1)}
    found, expected = (
        norm(dtype=dtype, use_fast_variance=False).apply({"params": params}, x)
        for norm in (linen.LayerNorm, nn.LayerNorm)
    )
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(
        found.astype(float), expected.astype(float), rtol=2e-2 if dtype else 1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdditiveAttention", dict(layer_norm=True, temperature="learned")),
        ("BilinearAttention", {}),
    ],
)
def test_classical_forms_agree(name, options):
    query, key = rows(2, 3, 4), rows(2, 7, 6, seed=2)
    mask = jnp.asarray(np.random.default_rng(3).random((2, 3, 7)) < 0.5)
    ours = randomised(lambda: getattr(attention, name)(4, 6, **options, rngs=nnx.Rngs(0)))
    module = getattr(linen, name)(**options)
    params = nnx.to_pure_dict(nnx.state(ours))
    initial = jax.eval_shape(module.init, jax.random.key(0), query, key)["params"]
    assert shapes_of(initial) == shapes_of(params)
    options = dict(mask=mask, return_weights=True)
    found = jax.jit(lambda p: module.apply({"params": p}, query, key, **options))(params)
    assert_close(found, run(ours, query, key, **options))


@pytest.mark.parametrize(
    ("made", "inputs"),
    [
        pytest.param(vit(width=64, score="additive"), (4, 4, 1), marks=pytest.mark.slow),
        (pair("MultiHeadAttention", (2,), (64,), None, score="bilinear"), (5, 64)),
    ],
)
def test_initial_values_have_the_same_spread(made, inputs):
    make_nnx, make_linen, _ = made
    ours = linen.from_nnx(nnx.to_pure_dict(nnx.state(make_nnx())))
    theirs = jax.jit(make_linen().init)(jax.random.key(1), rows(1, *inputs))["params"]
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        tolerance = 5 / np.sqrt(a.size)
        close = dict(rtol=tolerance, atol=1e-6, err_msg=jax.tree_util.keystr(path))
        np.testing.assert_allclose(a.std(), b.std(), **close)
        np.testing.assert_allclose(a.mean(), b.mean(), atol=tolerance * max(float(a.std()), 1e-6))


@pytest.mark.slow
def test_randomness_comes_from_the_dropout_stream():
    rates = dict(dropout_rate=0.1, attention_dropout_rate=0.1, drop_path_rate=0.5)
    model = linen.VisionTransformer(**TINY, score="adder", **rates)
    call = jax.jit(functools.partial(model.apply, deterministic=False))
    variables = model.init(jax.random.key(0), images())
    first, again, other = (
        call(variables, images(), rngs={"dropout": jax.random.key(seed)}) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_samples_that_are_the_same_drop_other_weights():
    attend, x = linen.MultiHeadAttention(2, dropout_rate=0.5), jnp.repeat(rows(1, 5, 8), 2, axis=0)
    variables = attend.init(jax.random.key(0), x)
    dropped = attend.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(1)})
    assert not np.allclose(dropped[0], dropped[1])


@pytest.mark.slow
def test_parameters_of_whole_networks_are_looked_up_and_never_drawn():
    """Linen's own errors for one that is missing or has another shape."""
    block, x = linen.Block(2, score="additive"), rows(1, 4, 8)
    variables = block.init(jax.random.key(0), x)
    assert "random" not in str(jax.make_jaxpr(block.apply)(variables, x))
    missing = jax.tree.map(lambda leaf: leaf, variables)
    del missing["params"]["attention"]["score"]["v"]
    with pytest.raises(flax.errors.ScopeParamNotFoundError, match='"v" .*"/attention/score"'):
        block.apply(missing, x)
    other = jax.tree.map(lambda leaf: leaf[..., :1], variables)
    with pytest.raises(flax.errors.ScopeParamShapeError):
        block.apply(other, x)


def test_a_network_inside_of_a_users_module_and_called_twice():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = linen.Block(2, name="shared")
            return block(block(x))

    x = rows(1, 4, 8)
    variables = Twice().init(jax.random.key(0), x)
    block = linen.Block(2)
    once = lambda x: block.apply({"params": variables["params"]["shared"]}, x)
    np.testing.assert_allclose(Twice().apply(variables, x), once(once(x)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("made", "whole"),
    [
        pytest.param(vit(score="adder", mlp_linear="adder"), False, marks=pytest.mark.slow),
        *(
            (pair("AdderLinear", (6,), (8,), tokens, norm=norm, w_gradient=rule), True)
            for norm in ("layernorm", None)
            for rule in ("full", "sign")
        ),
    ],
)
def test_the_curvature_of_a_module_is_that_of_its_nnx_form(made, whole):
    make_nnx, make_linen, make_inputs = made
    graphdef, state = nnx.split(make_nnx())
    own, module, inputs = nnx.to_pure_dict(state), make_linen(), make_inputs()
    square = lambda y: (jnp.square(y).mean(), y)
    of_linen = lambda p, x: square(module.apply({"params": p}, x))
    found = kfac.find_layers(of_linen, linen.from_nnx(own), inputs)
    expected = kfac.find_layers(lambda p, x: square(nnx.merge(graphdef, p)(x)), own, inputs)
    kinds = lambda layers: sorted(block.uses[0].layer.kind for block in layers.blocks.values())
    assert kinds(found) == kinds(expected)
    assert found.coverage == expected.coverage
    assert not whole or found.coverage == 1.0


def test_images_of_another_size_have_resized_positions():
    ours = randomised(lambda: models.VisionTransformer(**VIT, rngs=nnx.Rngs(0)))
    params = linen.from_nnx(nnx.to_pure_dict(nnx.state(ours)))
    module, larger = linen.VisionTransformer(**TINY, image_size=4), rows(3, 4, 8, 1)
    found = module.apply({"params": params}, larger)
    np.testing.assert_allclose(found, ours(larger), rtol=1e-6, atol=1e-6)


def test_rectangles_need_the_size_that_positions_are_of():
    """A turned one has as many patches, and the positions of others."""
    module, wide = linen.VisionTransformer(**TINY), rows(3, 4, 8, 1)
    with pytest.raises(ValueError, match=r"got none and images of 4 × 8; give image_size=\(4, 8\)"):
        jax.eval_shape(module.init, jax.random.key(0), wide)
    module = linen.VisionTransformer(**TINY, image_size=(4, 8))
    params = module.init(jax.random.key(0), wide)["params"]
    ours = models.VisionTransformer(**TINY, image_size=(4, 8), channels=1, rngs=nnx.Rngs(0))
    nnx.update(ours, linen.to_nnx(params))
    for images in (wide, rows(3, 8, 4, 1)):
        np.testing.assert_allclose(
            module.apply({"params": params}, images), ours(images), atol=1e-6
        )


def test_errors_say_what_was_expected():
    for options, message in (
        (dict(num_heads=3), "width divisible by num_heads, got width 8 and 3"),
        (dict(score="laplace"), "expected a score among"),
        (dict(norm_position="mid"), "'pre' or 'post', got 'mid'"),
        (dict(qkv_linear="identity", proj_linear="sparse"), "'identity', got 'sparse'"),
        (dict(pooling="max"), "'cls' or 'mean', got 'max'"),
    ):
        module = linen.VisionTransformer(**TINY | options)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(module.init, jax.random.key(0), images())
