"""Adder layers in few bits: what clamping leaves exact, and what rounding costs."""

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import layers, quantized
from adder_flax.quantized import Grid, adder_linear, calibrate, quantize, quantize_weights

GRID = Grid(lowest=-2.0, scale=0.25, bits=4)  # -2 to 1.75
WIDTH, OUTPUTS = 24, 10


def distances(x, w):
    """-Σ|x - w| in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    return -np.abs(x[..., None] - w).sum(-2)


def on_grid(seed, *shape):
    rng = np.random.default_rng(seed)
    return (-2 + 0.25 * rng.integers(0, 16, shape)).astype(np.float32)


def beyond(seed, *shape):
    """Numbers of a grid with some far beyond either end, by fractions that float32 sums exactly."""
    rng = np.random.default_rng(seed)
    far = rng.choice([-1, 1], shape) * (3 + rng.integers(0, 4096, shape) / 1024)
    return np.where(rng.random(shape) < 0.3, far, on_grid(seed, *shape)).astype(np.float32)


def trained_like(seed=0, rows=300, spread=1.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    return x, (spread * rng.normal(size=(WIDTH, OUTPUTS))).astype(np.float32)


def error(x, w, grid):
    wrong = adder_linear(x, quantize_weights(w, grid)) - distances(x, w)
    return float(np.sqrt(np.mean(wrong**2)))


@pytest.mark.parametrize("clamped", ["weights", "inputs"])
def test_clamping_one_operand_loses_nothing(clamped):
    x, w = beyond(1, 50, WIDTH), on_grid(2, WIDTH, OUTPUTS)
    if clamped == "weights":
        x, w = on_grid(1, 50, WIDTH), beyond(2, WIDTH, OUTPUTS)
    weights = quantize_weights(w, GRID)
    np.testing.assert_array_equal(adder_linear(x, weights), distances(x, w))
    difference = np.asarray(adder_linear(quantize(x, GRID), weights) - distances(x, w))
    # Bytes of an input lose what lies beyond: one number a row.
    np.testing.assert_array_equal(difference, np.broadcast_to(difference[:, :1], difference.shape))
    assert difference.any() == (clamped == "inputs")


def test_pairs_beyond_the_same_end_are_told_by_the_formula():
    x, w = beyond(1, 50, WIDTH), beyond(2, WIDTH, OUTPUTS)
    near_x, near_w = np.clip(x, -2, 1.75), np.clip(w, -2, 1.75)
    expected = distances(near_x, near_w) - np.abs(w - near_w).sum(0)
    expected = expected - np.abs(x - near_x).sum(-1, keepdims=True)
    np.testing.assert_array_equal(adder_linear(x, quantize_weights(w, GRID)), expected)
    assert (expected < distances(x, w)).any()


@pytest.mark.parametrize("spread", [0.02, 1.0, 30.0])
def test_more_bits_err_less(spread):
    x, w = trained_like(spread=spread)
    errors = [error(x, w, calibrate(x, w, bits=bits)) for bits in (2, 4, 6, 8)]
    assert errors == sorted(errors, reverse=True)
    # A rounding error of each operand, independent, of a width of at most twice the narrower one's.
    step = 9 * min(spread, 1) / 255
    assert errors[-1] < 1.5 * np.sqrt(WIDTH / 6) * step


def test_the_grid_is_the_one_of_the_tried_that_errs_least():
    x, w = trained_like()
    x[0, 0], x[1, 1], w[3, 3], w[4, 4] = 90.0, -80.0, 70.0, -60.0  # the maximum would be 70
    chosen = calibrate(x, w, bits=4)
    tried = [calibrate(x, w, bits=4, clamped_shares=[share]) for share in (0, 1e-3, 1e-2)]
    errors = [error(x, w, grid) for grid in tried]
    assert error(x, w, chosen) <= min(errors)
    assert error(x, w, chosen) < 0.2 * errors[0]


def test_operands_that_do_not_meet_are_all_excess():
    x, w = on_grid(1, 20, WIDTH) + 50, on_grid(2, WIDTH, OUTPUTS)
    weights = quantize_weights(w, calibrate(x, w))
    np.testing.assert_allclose(adder_linear(x, weights), distances(x, w), rtol=1e-6)


@pytest.fixture(params=["layernorm", None])
def layer(request):
    layer = layers.AdderLinear(WIDTH, OUTPUTS, norm=request.param, rngs=nnx.Rngs(3))
    offset = np.random.default_rng(4).normal(size=OUTPUTS)
    (layer.bias if layer.norm is None else layer.norm.bias)[...] = jnp.asarray(offset, jnp.float32)
    return layer


def test_a_layer_in_few_bits_stands_in_for_the_layer(layer):
    x, _ = trained_like(5)
    x = x.reshape(3, 100, WIDTH)
    expected, errors = layer(x), []
    for bits in (4, 6, 8):
        few = quantized.AdderLinear.from_layer(layer, x, bits=bits)
        got = nnx.jit(lambda few, x: few(x))(few, x)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        errors.append(float(jnp.abs(got - expected).mean() / expected.std()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02
    np.testing.assert_array_equal(layer(x), expected)


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_outputs_have_the_dtype_that_the_layer_s_have(given):
    layer = layers.AdderLinear(WIDTH, OUTPUTS, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(3))
    x = jnp.asarray(trained_like()[0], given)
    few = quantized.AdderLinear.from_layer(layer, x)
    assert few(x).dtype == layer(x).dtype == given
    of_bytes = few(quantize(x, few.weights.grid))  # of the layer before
    assert of_bytes.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(of_bytes), np.float32(few(x)), atol=0.02)


def test_weights_are_bytes_that_the_state_holds():
    layer = layers.AdderLinear(WIDTH, OUTPUTS, rngs=nnx.Rngs(3))
    few = quantized.AdderLinear.from_layer(layer, trained_like()[0], bits=6)
    graph, state = nnx.split(few)
    packed, x = few.weights.packed.columns, trained_like()[0]
    assert (packed.dtype, packed.nbytes, int(packed.max())) == (jnp.uint8, WIDTH * OUTPUTS, 63)
    np.testing.assert_array_equal(nnx.merge(graph, state)(x), few(x))


@pytest.mark.unchecked
def test_what_is_refused_says_why():
    x, w = trained_like()
    with pytest.raises(ValueError, match="from 1 to 8 bits, got 9"):
        calibrate(x, w, bits=9)
    with pytest.raises(ValueError, match=r"shape \(..., 24\).*got \(300, 23\)"):
        calibrate(x[:, 1:], w)
    layer = layers.AdderLinear(WIDTH, OUTPUTS, rngs=nnx.Rngs(3))
    layer.set_squared_share(0.5)
    with pytest.raises(ValueError, match="squared_share 0.5"):
        quantized.AdderLinear.from_layer(layer, x)
