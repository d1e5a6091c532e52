"""The vision transformer: published sizes, ways of running it, precision, errors."""

import dataclasses
import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from adder_flax import layers, models
from adder_flax.settings import VitSettings
from tests.modules import randomised, run
from tests.processes import run_code

TINY = dict(image_size=4, patch_size=2, channels=1, num_classes=3)
TINY |= dict(width=8, depth=3, num_heads=2, mlp_ratio=2.0)
ADDER = dict(score="adder", qkv_linear="adder", proj_linear="adder", mlp_linear="adder")


def make(**options):
    return randomised(lambda: models.VisionTransformer(**(TINY | options), rngs=nnx.Rngs(0)))


def images(count=4, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 4, 4, 1)).astype(np.float32)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("build", "published"),
    [
        (models.deit_tiny, 5_717_416),
        (models.deit_small, 22_050_664),
        (models.deit_base, 86_567_656),
    ],
)
def test_parameter_counts_are_the_published_ones(build, published):
    state = nnx.eval_shape(lambda: nnx.state(build(rngs=nnx.Rngs(0)), nnx.Param))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == published


def test_names_in_the_parameter_tree():
    tree = nnx.to_pure_dict(nnx.state(make(score="additive"), nnx.Param))
    assert set(tree) == {"patch_embed", "cls_token", "pos_embed", "blocks", "norm", "head"}
    assert set(tree["blocks"]) == {0, 1, 2}
    block = tree["blocks"][0]
    assert set(block) == {"norm1", "attention", "norm2", "mlp"}
    assert set(block["attention"]) == {"query", "key", "value", "out", "score"}
    assert set(block["attention"]["score"]) == {"query_kernel", "key_kernel", "bias", "v"}
    assert set(block["mlp"]) == {"fc1", "fc2"}
    assert tree["pos_embed"].shape == (1, 5, 8)
    mean = nnx.to_pure_dict(nnx.state(make(pooling="mean"), nnx.Param))
    assert "cls_token" not in mean
    assert mean["pos_embed"].shape == (1, 4, 8)


def loss_and_gradients(model, deterministic=True):
    """A function of a seed: jitted, functional, as the trainer does it."""
    graphdef, params = nnx.split(model, nnx.Param)

    def loss(params, key):
        options = dict(deterministic=deterministic, rngs=nnx.Rngs(dropout=key))
        return jnp.sum(jnp.sin(nnx.merge(graphdef, params)(images(), **options)))

    run = jax.jit(jax.value_and_grad(loss))
    return lambda seed: run(nnx.to_pure_dict(params), jax.random.key(seed))


BOTH = dict(scan_blocks=True, remat=True)
close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)


@pytest.mark.slow  # four compilations of a gradient
def test_loop_and_recomputation_change_nothing():
    options = dict(score="adder", mlp_linear="adder", depth=2)
    expected = loss_and_gradients(make(**options))(0)
    for way in (dict(scan_blocks=True), dict(remat=True), BOTH):
        jax.tree.map(close, loss_and_gradients(make(**options, **way))(0), expected)


@pytest.mark.slow
def test_the_loop_anneals_blocks_in_turn():
    """Of plain progress, too: shares that are no arrays would be the first block's in all."""
    options = dict(mlp_linear="adder", anneal_end=1.0, anneal_blocks="in_turn", depth=2)
    unrolled, looped = make(**options), make(**options, scan_blocks=True)
    for model in (unrolled, looped):
        model.anneal(0.5)
    close(looped(images()), unrolled(images()))


def test_every_layer_takes_the_rates_of_another_run():
    model = make(dropout_rate=0.1, attention_dropout_rate=0.1, drop_path_rate=0.4)
    np.testing.assert_allclose([block.drop_path.rate for block in model.blocks], [0.0, 0.2, 0.4])
    others = dict(dropout_rate=0.3, attention_dropout_rate=0.4, drop_path_rate=0.6)
    model.set_data(VitSettings(**others))
    of_kind = lambda kind: [layer for _, layer in nnx.iter_modules(model) if type(layer) is kind]
    assert [layer.rate for layer in of_kind(layers.Dropout)] == [0.3] * (1 + 2 * len(model.blocks))
    assert [block.attention.dropout_rate for block in model.blocks] == [0.4] * 3
    np.testing.assert_allclose(sorted(x.rate for x in of_kind(layers.DropPath)), [0.0, 0.3, 0.6])


@pytest.mark.slow
def test_the_loop_draws_the_same_random_numbers():
    options = dict(depth=2, drop_path_rate=0.3, dropout_rate=0.1, attention_dropout_rate=0.1)
    run = functools.partial(loss_and_gradients, deterministic=False)
    unrolled, looped = run(make(**options)), run(make(**options, **BOTH))
    jax.tree.map(close, looped(0), unrolled(0))
    assert unrolled(1)[0] != unrolled(0)[0]


ON_EXPLICIT_AXES = """
import jax, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from adder_flax import models, quantized

sizes = dict(image_size=8, patch_size=2, channels=1, width=16, depth=1, num_heads=2)
kinds = dict(score="adder", qkv_linear="adder", mlp_linear="adder")
model = models.VisionTransformer(**sizes, **kinds, num_classes=3, rngs=nnx.Rngs(0))
images = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32)
few = quantized.quantize_model(model, images)
loss = lambda model, x: (model(x) ** 2).sum()
ways = [lambda x: model(x), lambda x: nnx.grad(loss)(model, x), lambda x: few(x)]
expected = [way(images) for way in ways]
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(mesh):
    split = jax.device_put(images, NamedSharding(mesh, P("data")))
    got = [way(split) for way in ways]
    assert got[0].sharding.spec[0] == got[2].sharding.spec[0] == "data"
close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
jax.tree.map(close, got, expected)
"""


@pytest.mark.slow
def test_images_may_be_split_over_explicit_axes():
    run_code(ON_EXPLICIT_AXES, devices=4)


class Counting(nnx.Module):
    """In the place of an MLP, with a statistic and random numbers of its own."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens, *, deterministic=True, rngs=None):
        dropped = self.dropout(tokens, deterministic=deterministic)
        return self.norm(dropped, use_running_average=deterministic)


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", [{}, dict(remat=True), BOTH])
def test_blocks_keep_what_is_no_parameter(way):
    model = make(depth=2, **way)
    for block in model.blocks:
        block.mlp = Counting(nnx.Rngs(0))
    first, second = (model(images(), deterministic=False) for _ in range(2))
    assert not np.allclose(first, second)
    for block in model.blocks:
        assert block.mlp.dropout.rngs.count[...] == 2
        assert np.any(block.mlp.norm.mean[...] != 0.0)


@pytest.mark.slow
def test_the_loop_leaves_blocks_that_were_changed_as_they_are():
    unrolled, looped = (make(score="adder", depth=2, scan_blocks=on) for on in (False, True))
    before = looped(images())
    for model in (unrolled, looped):
        attention = model.blocks[1].attention
        attention.settings = dataclasses.replace(attention.settings, identity=False)
    close(looped(images()), unrolled(images()))
    assert not np.allclose(looped(images()), before)


@pytest.mark.parametrize("graph", [pytest.param(True, marks=pytest.mark.slow), False])
def test_training_reaches_every_parameter(graph):
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        model = make(score=["dot", "bilinear", "additive"], mlp_linear="adder")
        _, gradients = loss_and_gradients(model)(0)
    dead = [path for path, g in jax.tree.leaves_with_path(gradients) if not np.any(g)]
    # A constant added to all keys shifts every row of dot and bilinear logits by a constant:
    # softmax ignores it.
    names = {jax.tree_util.keystr(path) for path in dead}
    assert not names - {f"['blocks'][{i}]['attention']['key']['bias']" for i in (0, 1)}


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_samples_do_not_depend_on_the_batch(pooling):
    model = make(**ADDER, pooling=pooling)
    together = run(model, images(5))
    np.testing.assert_allclose(run(model, images(5)[3:4]), together[3:4], rtol=1e-5, atol=1e-5)


def test_pooling_and_position_embedding_matter():
    """A mean-pooled transformer sees the order of the patches by positions alone."""
    model = make(pooling="mean")
    shuffled = np.concatenate([images()[:, 2:], images()[:, :2]], axis=1)  # swaps rows of patches
    assert not np.allclose(run(model, images()), run(model, shuffled), atol=1e-2)
    model.pos_embed[...] = jnp.zeros_like(model.pos_embed[...])
    np.testing.assert_allclose(run(model, images()), run(model, shuffled), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_computation_keeps_float32_parameters_and_logits():
    half, wide = make(**ADDER, dtype=jnp.bfloat16), make(**ADDER)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(half)))
    logits = run(half, images())
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, run(wide, images()), rtol=0.1, atol=0.1)
    graphdef, params = nnx.split(half, nnx.Param)
    gradient = jax.grad(lambda params: nnx.merge(graphdef, params)(images()).sum())
    gradients = jax.eval_shape(gradient, params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients))


def test_score_per_block_and_identity():
    options = [None, {"gradient": "full"}, {"hidden_dim": 3}]
    scores = ["dot", "adder", "additive"]
    model = make(score=scores, score_options=options, identity=False)
    assert [block.attention.settings.score for block in model.blocks] == scores
    assert model.blocks[2].attention.score["v"].shape == (2, 3)
    assert [block.attention.settings.identity for block in model.blocks] == [False] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_heads=3), "width divisible by num_heads, got width 8 and 3 heads"),
        (dict(patch_size=3), "divisible by patch_size, got 4 x 4 pixels and patches of 3"),
        (dict(score="laplace"), "expected a score among .*gaussian.*, got 'laplace'"),
        (dict(score=["dot", "adder"]), "one setting or a list of depth = 3, got a list of 2"),
        (dict(pooling="max"), "pooling 'cls' or 'mean', got 'max'"),
        (dict(score=["dot", "dot", "adder"], scan_blocks=True), "expects blocks that are alike"),
        (dict(depth=0), "depth of at least 1, got 0"),
    ],
)
def test_errors_say_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.unchecked
def test_wrong_images_are_refused():
    model = make()
    for shape in ((2, 4, 4, 3), (2, 4, 5, 1), (2, 0, 4, 1), (4, 4, 1)):
        with pytest.raises(ValueError, match=r"\(batch, height, width, 1\) .* multiples of 2, got"):
            model(jnp.ones(shape))


def test_features_are_what_each_block_makes():
    """Of a stack whose every block runs once, whatever is asked for."""
    model, x = make(registers=2, depth=4), images()
    tokens = model.embed_positions(model.patch_embed(x))
    expected = []
    for block in model.blocks:
        tokens = block(tokens)
        expected.append(tokens)
    found = model.features(x, blocks=(2, 0, -1, 2))
    assert found[0].shape == (4, 1 + 2 + 4, 8)
    for got, number in zip(found, (2, 0, 3, 2), strict=True):
        np.testing.assert_allclose(got, expected[number], rtol=1e-5, atol=1e-5)
    (normalised,) = model.features(x, normalised=True)
    np.testing.assert_allclose(model(x), model.head(normalised[:, 0]), rtol=1e-5, atol=1e-5)
    flops = lambda blocks: sum(
        equation.primitive.name == "dot_general"
        for equation in jax.make_jaxpr(lambda x: model.features(x, blocks=blocks))(x).eqns
    )
    assert flops((0, 1)) < flops((0, 3))


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, dict(blocks=(3,)), "blocks from -3 to 2, one at least, got"),
        ({}, dict(blocks=()), "one at least, got"),
        (dict(fc_norm=True), dict(normalised=True), "got fc_norm, which is one of their mean"),
    ],
)
def test_features_that_there_are_not_are_refused(options, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**options).features(images(), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_images_of_another_size_have_gradients_of_all_positions(dtype):
    model = make(registers=1, dtype=jnp.dtype(dtype))
    x = jnp.ones((2, 6, 8, 1))
    assert run(model, x).dtype == jnp.float32
    graphdef, params = nnx.split(model, nnx.Param)
    slopes = jax.grad(lambda p: (nnx.merge(graphdef, p)(x) ** 2).sum())(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slopes.pos_embed))
    assert slopes.pos_embed[...].shape == (1, 6, 8)
    assert (np.abs(slopes.pos_embed[...]).max(-1) > 0).all()


def test_a_stem_goes_to_l1_distances_with_the_first_block():
    stem = dict(stem_channels=(4,), stem_strides=(2,), stem_linear="adder", patch_size=2)
    anneal = dict(anneal_start=0.2, anneal_end=0.8, anneal_blocks="in_turn", image_size=8)
    model = make(**ADDER | stem | anneal)
    model.anneal(0.3)  # of a training in which each of three blocks takes a fifth
    first, *others = [
        {float(layer.squared_share) for layer in layers.adder_layers(part)}
        for part in (model.patch_embed, *model.blocks)
    ]
    (share,) = first
    assert 0 < share < 1
    assert others == [first, {1.0}, {1.0}]


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_an_exported_program_may_leave_the_number_of_images_open(pooling):
    network, given = make(pooling=pooling), images(3)
    like = jax.ShapeDtypeStruct((*export.symbolic_shape("batch"), *given.shape[1:]), "float32")
    exported = export.export(jax.jit(network))(like)
    np.testing.assert_allclose(exported.call(given), network(given), rtol=1e-4, atol=1e-5)
