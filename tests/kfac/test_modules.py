"""Flax's models, untouched: every layer found, named by its parameters, and its product exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import kfac
from adder_flax.layers import AdderLinear
from tests.kfac.reference import (
    F64,
    WIDTH,
    attention_in_float64,
    check_exact_blocks,
    cross_entropy,
    normal,
)
from tests.modules import tiny_vit

pytestmark = pytest.mark.usefixtures("x64")

LABELS = jnp.arange(3)
ROWS, PIXELS = normal(0, 3, WIDTH), normal(0, 3, 4, 4, 1)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 5, (3, 3)))


def of_nnx(model):
    """A loss of the model's parameters, and them."""
    graphdef, state = nnx.split(model, nnx.Param)
    loss_fn = lambda params, x, y: cross_entropy(nnx.merge(graphdef, params)(x), y)
    return loss_fn, nnx.to_pure_dict(state)


def of_linen(model, x, collections=False):
    """The same of a model of Linen, or with all collections for parameters."""
    variables = model.init(jax.random.key(0), x)
    variables = jax.tree.map(lambda p: normal(p.size, *p.shape), variables)
    if collections:
        return lambda v, x, y: cross_entropy(model.apply(v, x), y), variables
    loss_fn = lambda p, x, y: cross_entropy(model.apply({"params": p}, x), y)
    return loss_fn, variables["params"]


# ---- NNX


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

    def __init__(self, block=Block):
        rngs = nnx.Rngs(0)
        self.patches = nnx.Conv(1, WIDTH, (2, 2), strides=2, **F64, rngs=rngs)
        self.blocks = nnx.List([block(rngs)])
        self.head = nnx.Linear(WIDTH, 3, **F64, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(len(x), -1, WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def stacked(count, outputs):
    """Layers that a ``vmap`` makes."""
    make = lambda rngs: nnx.Linear(WIDTH, outputs, **F64, rngs=rngs)
    return nnx.split_rngs(splits=count)(nnx.vmap(in_axes=0, out_axes=0)(make))(nnx.Rngs(0))


class Scanned(nnx.Module):
    """Two layers in one ``nnx.scan``."""

    def __init__(self):
        self.layers = stacked(2, WIDTH)
        self.head = nnx.Linear(WIDTH, 3, **F64, rngs=nnx.Rngs(1))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def apply(x, layer):
            return jnp.tanh(layer(x))

        return self.head(apply(x, self.layers))


class Experts(nnx.Module):
    """Three layers side by side in one ``nnx.vmap``."""

    def __init__(self):
        self.experts = stacked(3, 3)

    def __call__(self, x):
        return jnp.tanh(nnx.vmap(lambda e, x: e(x), in_axes=(0, None))(self.experts, x)).sum(0)


class Words(nnx.Module):
    """An embedding tied to the output, and one layer used twice."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(5, WIDTH, dtype=jnp.float64, **F64, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, (3, 2, 2), **F64, rngs=rngs)
        self.fc = nnx.Linear(WIDTH, WIDTH, **F64, rngs=rngs)

    def __call__(self, tokens):
        q, k, v = jnp.moveaxis(self.qkv(self.embed(tokens)), -3, 0)
        x = attention_in_float64(q, k, v).reshape(*tokens.shape, WIDTH)
        x = jnp.tanh(self.fc(jnp.tanh(self.fc(x))))
        return self.embed.attend(x.mean(1))


# ---- Linen


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(**F64, name="norm")(x)
        y = nn.MultiHeadDotProductAttention(
            2, attention_fn=attention_in_float64, **F64, name="attention"
        )(y)
        return x + jnp.tanh(nn.Dense(WIDTH, **F64, name="fc")(x + y))


class LinenImages(nn.Module):
    block: type = LinenBlock

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(WIDTH, (2, 2), strides=2, **F64, name="patches")(x).reshape(len(x), -1, WIDTH)
        x = self.block(name="block")(x)
        return nn.Dense(3, **F64, name="head")(x.mean(1))


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(WIDTH, **F64, name="fc")(x)), None


class LinenScanned(nn.Module):
    """Two layers in one ``nn.scan``, their parameters stacked along axis 0 or 1."""

    axis: int = 0

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            Step, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=2
        )
        x, _ = scan(name="layers")(x, None)
        return nn.Dense(3, **F64, name="head")(x)


class Recurrent(nn.Module):
    """One layer used at both steps of a scan."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Step, variable_broadcast="params", split_rngs={"params": False}, length=2)
        return scan(name="cell")(x, None)[0]


class LinenWords(nn.Module):
    """Tied embedding, fused query/key/value projection."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(5, WIDTH, dtype=jnp.float64, **F64, name="embed")
        qkv = nn.DenseGeneral((3, 2, 2), **F64, name="qkv")(embed(tokens))
        x = attention_in_float64(*jnp.moveaxis(qkv, -3, 0))
        x = nn.DenseGeneral(WIDTH, axis=(-2, -1), **F64, name="out")(x)
        return embed.attend(x.mean(1))


class Called(nn.Module):
    """Layers that are told more in the call than their input."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(**F64, name="norm")(mask=jnp.arange(4) < 3, x=x)
        return nn.Einsum((4, 3), **F64, name="einsum")(x, "ni,io->no")


def image_blocks(block):
    attention = [f"{block}/attention/{name}" for name in ("query", "key", "value", "out")]
    return dict.fromkeys(("patches", f"{block}/norm", *attention, f"{block}/fc", "head"), 1)


# Axes are contracted in their order in the input.
SWAPPED = nn.DenseGeneral(3, axis=(-1, -2), **F64)  # in their order in the input
IMAGE_BLOCKS, LINEN_BLOCKS = image_blocks("blocks/0"), image_blocks("block")


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("make", "x", "blocks"),
    [
        (lambda x: of_nnx(Images()), PIXELS, IMAGE_BLOCKS),
        (lambda x: of_nnx(Images(RematBlock)), PIXELS, IMAGE_BLOCKS),
        (lambda x: of_nnx(Scanned()), ROWS, {"layers": 2, "head": 1}),
        (lambda x: of_nnx(Experts()), ROWS, {"experts": 3}),
        (lambda x: of_linen(LinenScanned(1), x), ROWS, {"layers/fc": 2, "head": 1}),
        (lambda x: of_linen(LinenScanned(), x), ROWS, {"layers/fc": 2, "head": 1}),
        (lambda x: of_linen(LinenImages(), x), PIXELS, LINEN_BLOCKS),
        (lambda x: of_linen(SWAPPED, x), PIXELS[..., :3, 0], {"model": 1}),
        (lambda x: of_linen(LinenImages(nn.remat(LinenBlock)), x, True), PIXELS, LINEN_BLOCKS),
        (lambda x: of_linen(Called(), x), ROWS, {"norm": 1, "einsum": 1}),
    ],
)
def test_every_layer_is_found(make, x, blocks):
    layers = check_exact_blocks(*make(x), x, LABELS, blocks=blocks)
    assert layers.coverage == 1.0
    assert not layers.skipped


def test_steps_of_a_recurrent_layer_are_tokens_of_one_lane():
    layers = check_exact_blocks(*of_linen(Recurrent(), ROWS), ROWS, LABELS, blocks={"cell/fc": 1})
    assert layers.blocks["cell/fc"].uses[0].num_tokens == 2


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("make", "uses"),
    [
        (lambda: of_nnx(Words()), {"embed": 2, "qkv": 1, "fc": 2}),
        (lambda: of_linen(LinenWords(), TOKENS), {"embed": 2, "qkv": 1, "out": 1}),
    ],
)
def test_tied_weights_and_fused_projections(make, uses):
    layers = check_exact_blocks(*make(), TOKENS, LABELS, blocks=dict.fromkeys(uses, 1))
    for name, count in uses.items():
        names = [use.name for use in layers.blocks[name].uses]
        assert names == [name, f"{name}#2"][:count]


@pytest.mark.slow
def test_vmap_over_examples():
    graphdef, state = nnx.split(Images(), nnx.Param)

    def loss_fn(params, x, y):
        return cross_entropy(jax.vmap(lambda x: nnx.merge(graphdef, params)(x[None])[0])(x), y)

    check_exact_blocks(loss_fn, nnx.to_pure_dict(state), PIXELS, LABELS, blocks=IMAGE_BLOCKS)


def test_tree_mode():
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        layers = kfac.find_layers(*of_nnx(Images(RematBlock)), PIXELS, LABELS)
    assert {name: block.lanes for name, block in layers.blocks.items()} == IMAGE_BLOCKS


def test_a_parameter_that_is_not_differentiated_has_no_block():
    graphdef, head, rest = nnx.split(Scanned(), lambda path, _: "head" in path, ...)
    frozen = nnx.to_pure_dict(rest)
    loss_fn = lambda p, x, y: cross_entropy(nnx.merge(graphdef, p, frozen)(x), y)
    layers = kfac.find_layers(loss_fn, nnx.to_pure_dict(head), ROWS, LABELS)
    assert list(layers.blocks) == ["head"]
    assert "not an array of the differentiated tree" in str(layers.skipped)


def test_weights_stacked_inside_the_loss_are_refused_not_mistaken():
    graphdef, _ = nnx.split(nnx.Linear(WIDTH, WIDTH, **F64, rngs=nnx.Rngs(0)))
    params = {name: {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)} for name in "ab"}

    def loss_fn(params, x, y):
        stacked = jax.tree.map(lambda *p: jnp.stack(p), params["a"], params["b"])
        layer = lambda x, p: (nnx.merge(graphdef, p)(x), None)
        return cross_entropy(jax.lax.scan(layer, x, stacked)[0], y)

    layers = kfac.find_layers(loss_fn, params, ROWS, LABELS)
    assert not layers.blocks
    assert "parameter 'bias' is computed inside the loss, by stack" in str(layers)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["full", "hardtanh"])
def test_adder_vision_transformer(rule):
    options = dict.fromkeys(("score", "qkv_linear", "proj_linear", "mlp_linear"), "adder")
    options |= dict(width=WIDTH, depth=1, mlp_ratio=1.0, param_dtype=jnp.float64)
    model = tiny_vit(adder_options={"w_gradient": rule}, **options)
    layers = check_exact_blocks(*of_nnx(model), PIXELS, LABELS)
    assert set(layers.block_of) == set(layers.shapes)
    kinds = {block.uses[0].layer.kind for block in layers.blocks.values()}
    assert ("adder" in kinds) == (rule == "full")


class Gate(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(WIDTH, WIDTH, **F64, rngs=nnx.Rngs(0))
        self.slope = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return jnp.tanh(self.inner(x)) * self.slope[...]


def test_a_registered_module_is_one_layer():
    kfac.register_layer(Gate)
    (block,) = check_exact_blocks(*of_nnx(Gate()), ROWS, LABELS).blocks.values()
    assert sorted(p.path for p in block.params) == ["inner/bias", "inner/kernel", "slope"]
    with pytest.raises(ValueError, match="expected a method that Gate defines"):
        kfac.register_layer(Gate, "missing")


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_layers_of_equal_form_share_a_program(framework):
    if framework == "nnx":
        norms = [nnx.LayerNorm(WIDTH, **F64, rngs=nnx.Rngs(0)) for _ in range(2)]
        made = of_nnx(nnx.Sequential(norms[0], jnp.tanh, norms[1]))
    else:
        made = of_linen(nn.Sequential([nn.LayerNorm(**F64), jnp.tanh, nn.LayerNorm(**F64)]), ROWS)
    first, second = kfac.find_layers(*made, ROWS, LABELS).blocks.values()
    assert first.program == second.program


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (nnx.LayerNorm, "norm"),
        (nnx.RMSNorm, "norm"),
        (functools.partial(nnx.GroupNorm, num_groups=2), "norm"),
        # Scales rows: no diagonal matrix on the last axis.
        (functools.partial(nnx.LayerNorm, feature_axes=-2), "generic LayerNorm"),
    ],
)
def test_norms(norm, kind):
    norm = norm(WIDTH, **F64, rngs=nnx.Rngs(0))
    model = nnx.Sequential(norm, jnp.tanh, lambda x: x.reshape(len(x), -1))
    x = normal(0, 3, WIDTH, WIDTH)
    (block,) = check_exact_blocks(*of_nnx(model), x, LABELS).blocks.values()
    assert block.uses[0].layer.kind == kind


def test_adder_layer_without_a_normaliser_covers_its_offset():
    model = AdderLinear(WIDTH, 3, norm=None, rngs=nnx.Rngs(0), **F64)
    (block,) = check_exact_blocks(*of_nnx(model), ROWS, LABELS).blocks.values()
    assert sorted(p.path for p in block.params) == ["bias", "kernel"]


MASK, SEQUENCES = jnp.tril(jnp.ones((3, 2, 3))), jnp.ones((5, 4, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: of_nnx_itself(nnx.Conv(2, 3, (3,), mask=MASK, rngs=nnx.Rngs(0))),
        lambda: of_nnx_itself(nnx.BatchNorm(4, axis=1, rngs=nnx.Rngs(0))),  # not along the last
        lambda: of_linen(nn.Conv(3, (3,), mask=MASK), SEQUENCES),
    ],
    ids=["convolution with a mask", "batch norm", "linen convolution with a mask"],
)
def test_a_layer_that_holds_state_says_why_it_has_no_block(make):
    with pytest.warns(UserWarning, match="it holds state"):
        layers = kfac.find_layers(*make(), SEQUENCES, jnp.zeros((5, 4), int))
    assert not layers.blocks
    assert "fallback (it holds state" in str(layers)


def of_nnx_itself(model):
    return lambda model, x, y: cross_entropy(model(x), y), model


def test_partitioned_parameters_are_found():
    init = nn.with_partitioning(nn.initializers.normal(1.0), (None, "model"))
    model = nn.Dense(3, kernel_init=init, **F64)
    variables = model.init(jax.random.key(0), ROWS)
    loss_fn = lambda v, x, y: cross_entropy(model.apply(v, x), y)
    assert kfac.find_layers(loss_fn, variables, ROWS, LABELS).coverage == 1.0


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
    args = nnx.to_pure_dict(params), ROWS, LABELS
    if shift is None:
        check_exact_blocks(loss_fn, *args, blocks={"model": 1})
    else:
        layers = kfac.find_layers(loss_fn, *args)
        assert "beside its input: power, shift" in layers.reasons["scale"]
