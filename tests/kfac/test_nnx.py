"""Flax NNX models, untouched: every layer found, named by its parameters, and its product exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kfac
from adder_flax.layers import AdderLinear
from tests.kfac.reference import (
    F64,
    WIDTH,
    attention_in_float64,
    check_exact_blocks,
    cross_entropy,
    dense_fisher,
    matrices,
    normal,
    per_example_gradients,
)
from tests.modules import tiny_vit

pytestmark = pytest.mark.usefixtures("x64")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, **F64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, WIDTH, decode=False, attention_fn=attention_in_float64, **F64, rngs=rngs
        )
        self.fc = nnx.Linear(WIDTH, WIDTH, **F64, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.fc(x + self.attention(self.norm(x))))


class RematBlock(Block):
    @nnx.remat
    def __call__(self, x):
        return Block.__call__(self, x)


class Images(nnx.Module):
    """Convolution, a list of blocks, head."""

    def __init__(self, rngs, block):
        self.patches = nnx.Conv(1, WIDTH, (2, 2), strides=2, **F64, rngs=rngs)
        self.blocks = nnx.List([block(rngs)])
        self.head = nnx.Linear(WIDTH, 3, **F64, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(len(x), -1, WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Scanned(nnx.Module):
    """Two layers in one ``nnx.scan``."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(WIDTH, WIDTH, **F64, rngs=rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(WIDTH, 3, **F64, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def apply(x, layer):
            return jnp.tanh(layer(x))

        return self.head(apply(x, self.layers))


class Experts(nnx.Module):
    """Three layers side by side in one ``nnx.vmap``."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(WIDTH, 3, **F64, rngs=rngs)

        self.experts = make(rngs)

    def __call__(self, x):
        return jnp.tanh(nnx.vmap(lambda e, x: e(x), in_axes=(0, None))(self.experts, x)).sum(0)


class Words(nnx.Module):
    """An embedding tied to the output, and one layer used twice."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(5, WIDTH, dtype=jnp.float64, **F64, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, (3, 2, 2), **F64, rngs=rngs)
        self.fc = nnx.Linear(WIDTH, WIDTH, **F64, rngs=rngs)

    def __call__(self, tokens):
        q, k, v = jnp.moveaxis(self.qkv(self.embed(tokens)), -3, 0)
        x = attention_in_float64(q, k, v).reshape(*tokens.shape, WIDTH)
        x = jnp.tanh(self.fc(jnp.tanh(self.fc(x))))
        return self.embed.attend(x.mean(1))


def loss_of(model):
    graphdef, state = nnx.split(model, nnx.Param)
    loss_fn = lambda params, x, y: cross_entropy(nnx.merge(graphdef, params)(x), y)
    return loss_fn, nnx.to_pure_dict(state)


BLOCK = (
    "blocks/0/norm",
    *(f"blocks/0/attention/{n}" for n in ("query", "key", "value", "out")),
    "blocks/0/fc",
)
IMAGE_BLOCKS = dict.fromkeys(("patches", *BLOCK, "head"), 1)
LABELS = jnp.arange(3) % 3


@pytest.mark.parametrize("block", [Block, pytest.param(RematBlock, marks=pytest.mark.slow)])
def test_attention_convolution_and_norm(block):
    loss_fn, params = loss_of(Images(nnx.Rngs(0), block))
    layers = check_exact_blocks(loss_fn, params, normal(0, 3, 4, 4, 1), LABELS, blocks=IMAGE_BLOCKS)
    assert layers.coverage == 1.0
    assert not layers.skipped


@pytest.mark.slow
def test_vmap_over_examples():
    graphdef, state = nnx.split(Images(nnx.Rngs(0), Block), nnx.Param)

    def loss_fn(params, x, y):
        return cross_entropy(jax.vmap(lambda x: nnx.merge(graphdef, params)(x[None])[0])(x), y)

    check_exact_blocks(
        loss_fn, nnx.to_pure_dict(state), normal(0, 3, 4, 4, 1), LABELS, blocks=IMAGE_BLOCKS
    )


@pytest.mark.parametrize("model", [Scanned, pytest.param(Experts, marks=pytest.mark.slow)])
def test_stacked_layers_are_lanes(model):
    loss_fn, params = loss_of(model(nnx.Rngs(0)))
    blocks = {"layers": 2, "head": 1} if model is Scanned else {"experts": 3}
    check_exact_blocks(loss_fn, params, normal(0, 3, WIDTH), LABELS, blocks=blocks)


def test_tied_weights_and_fused_projections():
    loss_fn, params = loss_of(Words(nnx.Rngs(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 5, (3, 3)))
    blocks = {"embed": 1, "qkv": 1, "fc": 1}
    layers = check_exact_blocks(loss_fn, params, tokens, LABELS, blocks=blocks)
    assert [use.name for use in layers.blocks["embed"].uses] == ["embed", "embed#2"]
    assert [use.name for use in layers.blocks["fc"].uses] == ["fc", "fc#2"]


def test_tree_mode():
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        loss_fn, params = loss_of(Images(nnx.Rngs(0), RematBlock))
        layers = kfac.find_layers(loss_fn, params, normal(0, 3, 4, 4, 1), LABELS)
    assert {name: block.lanes for name, block in layers.blocks.items()} == IMAGE_BLOCKS


def test_a_parameter_that_is_not_differentiated_has_no_block():
    model = Scanned(nnx.Rngs(0))
    graphdef, head, rest = nnx.split(model, lambda path, _: "head" in path, ...)
    frozen = nnx.to_pure_dict(rest)
    loss_fn = lambda p, x, y: cross_entropy(nnx.merge(graphdef, p, frozen)(x), y)
    layers = kfac.find_layers(loss_fn, nnx.to_pure_dict(head), normal(0, 3, WIDTH), LABELS)
    assert list(layers.blocks) == ["head"]
    assert "not an array of the differentiated tree" in str(layers.skipped)


def test_weights_stacked_inside_the_loss_are_refused_not_mistaken():
    graphdef, _ = nnx.split(nnx.Linear(WIDTH, WIDTH, **F64, rngs=nnx.Rngs(0)))
    params = {name: {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)} for name in "ab"}

    def loss_fn(params, x, y):
        stacked = jax.tree.map(lambda *p: jnp.stack(p), params["a"], params["b"])
        layer = lambda x, p: (nnx.merge(graphdef, p)(x), None)
        return cross_entropy(jax.lax.scan(layer, x, stacked)[0], y)

    layers = kfac.find_layers(loss_fn, params, normal(0, 3, WIDTH), LABELS)
    assert not layers.blocks
    assert "parameter 'bias' is computed inside the loss, by stack" in str(layers)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["full", "hardtanh"])
def test_adder_vision_transformer(rule):
    adders = dict.fromkeys(("score", "qkv_linear", "proj_linear", "mlp_linear"), "adder")
    model = tiny_vit(
        width=WIDTH,
        depth=1,
        mlp_ratio=1.0,
        adder_options={"w_gradient": rule},
        param_dtype=jnp.float64,
        **adders,
    )
    loss_fn, params = loss_of(model)
    layers = check_exact_blocks(loss_fn, params, normal(0, 3, 4, 4, 1), LABELS)
    assert set(layers.block_of) == set(layers.shapes)
    kinds = {block.uses[0].layer.kind for block in layers.blocks.values()}
    assert ("adder" in kinds) == (rule == "full")


class Gate(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, **F64, rngs=rngs)
        self.slope = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return jnp.tanh(self.inner(x)) * self.slope[...]


def test_a_registered_module_is_one_layer():
    kfac.register_layer(Gate)
    loss_fn, params = loss_of(Gate(nnx.Rngs(0)))
    layers = check_exact_blocks(loss_fn, params, normal(0, 3, WIDTH), LABELS)
    (block,) = layers.blocks.values()
    assert sorted(p.path for p in block.params) == ["inner/bias", "inner/kernel", "slope"]
    with pytest.raises(ValueError, match="expected a method that Gate defines"):
        kfac.register_layer(Gate, "missing")


def test_layers_of_equal_form_share_a_program():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.norms = nnx.List([nnx.LayerNorm(WIDTH, **F64, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            return self.norms[1](jnp.tanh(self.norms[0](x)))

    loss_fn, params = loss_of(Two(nnx.Rngs(0)))
    first, second = kfac.find_layers(loss_fn, params, normal(0, 3, WIDTH), LABELS).blocks.values()
    assert first.program == second.program


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("make_norm", "kind"),
    [
        (lambda rngs: nnx.LayerNorm(WIDTH, **F64, rngs=rngs), "norm"),
        (lambda rngs: nnx.RMSNorm(WIDTH, **F64, rngs=rngs), "norm"),
        (lambda rngs: nnx.GroupNorm(WIDTH, num_groups=2, **F64, rngs=rngs), "norm"),
        # Scales rows: no diagonal matrix on the last axis.
        (lambda rngs: nnx.LayerNorm(WIDTH, feature_axes=-2, **F64, rngs=rngs), "generic LayerNorm"),
    ],
)
def test_norms(make_norm, kind):
    loss_fn, params = loss_of(
        nnx.Sequential(make_norm(nnx.Rngs(0)), jnp.tanh, lambda x: x.reshape(len(x), -1))
    )
    x = normal(0, 3, WIDTH, WIDTH)
    (block,) = kfac.find_layers(loss_fn, params, x, LABELS).blocks.values()
    assert block.uses[0].layer.kind == kind
    (found,), _ = matrices(loss_fn, params, x, LABELS, [(block.name, "exact")])
    expected = np.asarray(dense_fisher(block, per_example_gradients(loss_fn, params, x, LABELS)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_adder_layer_without_a_normaliser_covers_its_offset():
    loss_fn, params = loss_of(AdderLinear(WIDTH, 3, norm=None, rngs=nnx.Rngs(0), **F64))
    (block,) = check_exact_blocks(loss_fn, params, normal(0, 3, WIDTH), LABELS).blocks.values()
    assert sorted(p.path for p in block.params) == ["bias", "kernel"]


def test_a_convolution_with_a_mask_says_why_it_has_no_block():
    model = nnx.Conv(2, 3, (3,), mask=jnp.tril(jnp.ones((3, 2, 3))), rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match="it holds state"):
        layers = kfac.find_layers(lambda model, x: model(x).mean(), model, jnp.ones((5, 4, 2)))
    assert not layers.blocks


class Power(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(normal(0, WIDTH))

    def __call__(self, x, power=1, shift=None):
        return x**power * self.scale + (0 if shift is None else shift)


@pytest.mark.parametrize("shift", [None, 0.5])
def test_a_layer_that_is_called_with_more_than_its_input(shift):
    kfac.register_layer(Power)
    graphdef, params = nnx.split(Power(), nnx.Param)
    shift = shift and jnp.asarray(shift)
    loss_fn = lambda p, x, y: cross_entropy(nnx.merge(graphdef, p)(x, 2, shift=shift), y)
    args = nnx.to_pure_dict(params), normal(1, 3, WIDTH), LABELS
    if shift is None:
        check_exact_blocks(loss_fn, *args, blocks={"model": 1})
    else:
        layers = kfac.find_layers(loss_fn, *args)
        assert "beside its input: power, shift" in layers.reasons["scale"]
