"""Flax Linen models: every layer found by interception, and its product exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import kfac
from tests.kfac.reference import (
    F64,
    WIDTH,
    attention_in_float64,
    check_exact_blocks,
    cross_entropy,
    normal,
)

pytestmark = pytest.mark.usefixtures("x64")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(**F64, name="norm")(x)
        y = nn.MultiHeadDotProductAttention(
            2, attention_fn=attention_in_float64, **F64, name="attention"
        )(y)
        return x + jnp.tanh(nn.Dense(WIDTH, **F64, name="fc")(x + y))


class Images(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(WIDTH, (2, 2), strides=2, **F64, name="patches")(x).reshape(len(x), -1, WIDTH)
        x = (nn.remat(Block) if self.remat else Block)(name="block")(x)
        return nn.Dense(3, **F64, name="head")(x.mean(1))


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(WIDTH, **F64, name="fc")(x)), None


class Scanned(nn.Module):
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


class Words(nn.Module):
    """Tied embedding, fused query/key/value projection."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(5, WIDTH, dtype=jnp.float64, **F64, name="embed")
        qkv = nn.DenseGeneral((3, 2, 2), **F64, name="qkv")(embed(tokens))
        x = attention_in_float64(*jnp.moveaxis(qkv, -3, 0))
        x = nn.DenseGeneral(WIDTH, axis=(-2, -1), **F64, name="out")(x)
        return embed.attend(x.mean(1))


def check(model, x, blocks, collections=False):
    variables = model.init(jax.random.key(0), x)
    variables = jax.tree.map(lambda p: normal(p.size, *p.shape), variables)
    if collections:
        return check_exact_blocks(
            lambda v, x, y: cross_entropy(model.apply(v, x), y), variables, x, LABELS, blocks=blocks
        )
    loss_fn = lambda p, x, y: cross_entropy(model.apply({"params": p}, x), y)
    return check_exact_blocks(loss_fn, variables["params"], x, LABELS, blocks=blocks)


LABELS = jnp.arange(3)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_attention_convolution_and_norm(remat):
    attention = [f"block/attention/{name}" for name in ("query", "key", "value", "out")]
    blocks = dict.fromkeys(("patches", "block/norm", *attention, "block/fc", "head"), 1)
    assert check(Images(remat), normal(0, 3, 4, 4, 1), blocks, collections=remat).coverage == 1.0


@pytest.mark.parametrize("axis", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_scanned_layers_are_lanes(axis):
    check(Scanned(axis), normal(0, 3, WIDTH), {"layers/fc": 2, "head": 1})


def test_steps_of_a_recurrent_layer_are_tokens_of_one_lane():
    layers = check(Recurrent(), normal(0, 3, WIDTH), {"cell/fc": 1})
    assert layers.blocks["cell/fc"].uses[0].num_tokens == 2


@pytest.mark.slow
def test_tied_weights_and_fused_projections():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 5, (3, 3)))
    layers = check(Words(), tokens, {"embed": 1, "qkv": 1, "out": 1})
    assert len(layers.blocks["embed"].uses) == 2


def test_axes_are_contracted_in_their_order_in_the_input():
    check(nn.DenseGeneral(3, axis=(-1, -2), **F64), normal(0, 3, 2, 4), {"model": 1})


def test_a_convolution_with_a_mask_says_why_it_has_no_block():
    model = nn.Conv(3, (3,), mask=jnp.tril(jnp.ones((3, 2, 3))))
    params = model.init(jax.random.key(0), jnp.ones((5, 4, 2)))
    with pytest.warns(UserWarning, match="it holds state"):
        layers = kfac.find_layers(
            lambda p, x: model.apply(p, x).mean(), params, jnp.ones((5, 4, 2))
        )
    assert not layers.blocks


def test_partitioned_parameters_are_found():
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.normal(1.0), (None, "model"))
            return nn.Dense(3, kernel_init=init, **F64)(x)

    model, x = Boxed(), normal(0, 3, WIDTH)
    variables = model.init(jax.random.key(0), x)
    layers = kfac.find_layers(
        lambda v, x, y: cross_entropy(model.apply(v, x), y), variables, x, LABELS
    )
    assert layers.coverage == 1.0


def test_layers_of_equal_form_share_a_program():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm(**F64)(jnp.tanh(nn.LayerNorm(**F64)(x)))

    model, x = Two(), normal(0, 3, WIDTH)
    params = model.init(jax.random.key(0), x)["params"]
    loss_fn = lambda p, x, y: cross_entropy(model.apply({"params": p}, x), y)
    first, second = kfac.find_layers(loss_fn, params, x, LABELS).blocks.values()
    assert first.program == second.program


class Called(nn.Module):
    """Layers that are told more in the call than their input."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(**F64, name="norm")(mask=jnp.arange(4) < 3, x=x)
        return nn.Einsum((4, 3), **F64, name="einsum")(x, "ni,io->no")


def test_layers_that_are_called_with_more_than_their_input():
    model, x = Called(), normal(0, 5, 4)
    params = model.init(jax.random.key(0), x)
    loss_fn = lambda p, x, y: cross_entropy(model.apply(p, x), y)
    blocks = {"norm": 1, "einsum": 1}
    check_exact_blocks(loss_fn, params, x, jnp.arange(5) % 3, blocks=blocks)
