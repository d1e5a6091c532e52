"""The autoencoder: its formula, its first weights, adder layers, who is refused."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax.errors import RunError
from adder_flax.layers import AdderLinear, Linear
from adder_flax.models import Autoencoder, AutoencoderSettings, Example, build_autoencoder
from adder_flax.settings import defaults, read
from tests.modules import parameters, randomised, run

SHAPE = (4, 3, 2)
IMAGES = np.random.default_rng(0).uniform(size=(5, *SHAPE)).astype(np.float32)


def make(**options):
    return Autoencoder((7, 5, 2), image_shape=SHAPE, **options, rngs=nnx.Rngs(0))


def test_it_is_its_formula():
    model = randomised(make)
    layers = parameters(model)
    apply = lambda layer, x: x @ layer["kernel"] + layer["bias"]
    down, up = ([layers[part][i] for i in range(3)] for part in ("encoder", "decoder"))
    x = IMAGES.reshape(5, -1).astype(np.float64)
    code = apply(down[2], np.tanh(apply(down[1], np.tanh(apply(down[0], x)))))
    logits = apply(up[2], np.tanh(apply(up[1], np.tanh(apply(up[0], code)))))
    np.testing.assert_allclose(model.encode(IMAGES), code, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run(model, IMAGES), logits.reshape(5, *SHAPE), rtol=1e-4, atol=1e-4)


def test_first_weights_have_the_scale_of_their_fan_in():
    model = Autoencoder((300, 200), image_shape=(20, 20, 1), rngs=nnx.Rngs(0))
    layers = [*model.encoder, *model.decoder]
    shapes = [(400, 300), (300, 200), (200, 300), (300, 400)]
    assert [layer.kernel.shape for layer in layers] == shapes
    for layer in layers:
        scaled = np.asarray(layer.kernel[...]) * layer.in_features**0.5
        assert np.std(scaled) == pytest.approx(1, abs=0.02)
        assert np.abs(scaled).max() > 3.5  # not cut off
        assert not np.asarray(layer.bias[...]).any()


def test_all_layers_but_the_last_can_be_adder_layers():
    model = make(linear="adder", adder_options={"hardtanh_slope": 4.0})
    kinds = [type(layer) for layer in (*model.encoder, *model.decoder)]
    assert kinds == [AdderLinear] * 5 + [Linear]
    assert {layer.hardtanh_slope for layer in model.encoder} == {4.0}
    assert np.isfinite(run(model, IMAGES)).all()


def test_logits_of_narrow_layers_are_wide():
    model = make(dtype=jnp.bfloat16)
    assert run(model, IMAGES).dtype == jnp.float32
    assert model.encode(IMAGES).dtype == jnp.bfloat16


IMAGE = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)
ROW = jax.ShapeDtypeStruct((1, 8), jnp.int32)


@pytest.mark.parametrize(
    ("inputs", "sizes"),
    [((IMAGE,), {"classes": 10}), ((ROW,), {"logits": 8}), ((IMAGE, ROW), {"logits": 64})],
)
def test_what_is_no_image_to_be_told_is_refused(inputs, sizes):
    example = Example(inputs, sizes)
    with pytest.raises(ValueError, match=r"expected images whose values .*; set --config\.model"):
        build_autoencoder(AutoencoderSettings(), example, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("widths", ["", "8,", "-3", "8;4", "8.5", "8,65537", "1," * 16 + "1", 8])
def test_widths_that_are_none_are_refused(widths):
    with pytest.raises(RunError, match=r"^config\.widths: expected "):
        read(AutoencoderSettings, defaults(AutoencoderSettings) | {"widths": widths})
