"""Whole models in few bits: what is exchanged, what stays, and how close it comes."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import layers, quantized
from adder_flax.attention import MultiHeadAttention, attend, capture_attention
from adder_flax.models import Autoencoder, Seq2Seq, VisionTransformer
from adder_flax.quantized import byte_score, byte_scores, calibrate_scores

ADDER = dict(score="adder", qkv_linear="adder", proj_linear="adder", mlp_linear="adder")
SIZES = dict(image_size=8, patch_size=4, channels=1, width=16, depth=2, num_heads=2, num_classes=5)


def transformer(**options):
    return VisionTransformer(**SIZES | ADDER | options, rngs=nnx.Rngs(0))


def images(count=40):
    return nnx.Rngs(1).normal((count, 8, 8, 1))


def error(few, model, *inputs):
    expected = model(*inputs)
    return float(jnp.abs(few(*inputs) - expected).mean() / expected.std())


def test_scores_of_numbers_on_the_grid_are_their_distances_to_a_number_for_each_query():
    rng = np.random.default_rng(0)
    lowest, step = np.array([-2.0, 1.0]), np.array([0.25, 0.5])
    codes = (rng.integers(0, 16, (3, 2, n, 6)) for n in (4, 5))
    column = lambda x: x[:, None, None]
    heads = [np.float32(column(lowest) + column(step) * code) for code in codes]
    heads[1][:, :, 0] += 64  # keys beyond the grid lose nothing
    got = byte_scores(*heads, lowest=lowest, step=step, bits=4)
    expected = -np.abs(heads[0][..., None, :] - heads[1][..., None, :, :]).sum(-1)
    np.testing.assert_array_equal(got, expected)
    heads[0][:, :, 0] += 64
    difference = got - byte_scores(*heads, lowest=lowest, step=step, bits=4)
    assert np.ptp(difference[:, :, 1:], axis=-1).max() == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"identity": True, "temperature": np.float32([0.5, 2.0])},
        {"log_temperature": np.float32([0.3, -0.3]), "scale": 0.7},
        {"mask": np.arange(6) > 1},
        {"bias": np.float32([3, 0, 0, 0, 0, -3])},
        {"is_causal": True},
        {"key_block": 2},
        {"identity": True, "query_position": 4},  # one query among cached keys
    ],
    ids=str,
)
def test_attention_at_once_is_that_by_its_map(options):
    rng = np.random.default_rng(0)
    heads = [rng.normal(size=(3, 6, 2, 8)).astype(np.float32) for _ in range(3)]
    if "query_position" in options:
        heads[0] = heads[0][:, :1]
    grid = {"lowest": jnp.float32([-1.5, -2.0]), "step": jnp.float32([0.1, 0.2])}
    how = dict(score=byte_score(4), parameters=grid, identity=False) | options
    expected, weights = attend(*heads, **how, return_weights=True)
    got = jax.jit(lambda *heads: attend(*heads, **how))(*heads)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    mixed = np.einsum("bhqk,bkhv->bqhv", weights, np.float64(heads[2]))
    np.testing.assert_allclose(got, mixed, atol=1e-5)


@pytest.mark.slow
def test_between_the_layers_of_an_mlp_stand_bytes_alone():
    few = quantized.quantize_model(transformer(), images())
    mlp, x = few.blocks[0].mlp, nnx.Rngs(2).normal((3, 5, 16))
    hidden = quantized.quantize(layers.gelu(mlp.fc1(x)), mlp.fc2.weights.grid)
    np.testing.assert_allclose(mlp(x), mlp.fc2(hidden), atol=0.05)
    program = str(jax.make_jaxpr(few)(images(2)))
    assert program.count("method=sad_norm") == 6 * SIZES["depth"]
    assert program.count("method=sad_attention") == SIZES["depth"]
    assert not [name for name in ("erf", "softmax", "exp ") if name in program]


def test_maps_of_a_model_in_few_bits_are_captured_and_near():
    model = transformer()
    few = quantized.quantize_model(model, images())
    for got, expected in zip(*(capture_attention(m, images(3)) for m in (few, model)), strict=True):
        np.testing.assert_allclose(got.sum(-1), 2.0, atol=1e-5)  # with the identity map
        np.testing.assert_allclose(got, expected, atol=0.05)


def test_a_head_s_grid_is_its_own_and_errs_least_of_the_tried():
    rng = np.random.default_rng(0)
    query = (rng.normal(size=(4, 4, 6, 8)) * np.array([1, 1, 9, 9])[:, None, None]).astype("f")
    key = (rng.normal(size=(4, 2, 6, 8)) * np.array([1, 9])[:, None, None]).astype("f")
    query[0, 0, 0, 0] = key[0, 0, 0, 0] = 80.0
    truth = -np.abs(query[..., None, :] - np.repeat(key, 2, 1)[..., None, :, :]).sum(-1)

    def errors(grid):
        ends = dict(lowest=np.repeat(grid.lowest, 2), step=np.repeat(grid.scale, 2))
        wrong = byte_scores(query, np.repeat(key, 2, 1), **ends, bits=4) - truth
        wrong = wrong - wrong.mean(-1, keepdims=True)
        return np.square(wrong).reshape(4, 2, -1).mean((0, 2))

    chosen = errors(calibrate_scores(query, key, bits=4))
    widest, narrower = (
        errors(calibrate_scores(query, key, bits=4, clamped_shares=[s])) for s in (0.0, 1e-2)
    )
    assert (chosen <= np.minimum(widest, narrower)).all()
    assert chosen[0] < 0.5 * widest[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scan_blocks": True},
        {"score": ("dot", "adder"), "mlp_linear": ("adder", "dense"), "proj_linear": "dense"},
        {"stem_channels": (8,), "stem_linear": "adder", "pooling": "mean"},
    ],
    ids=["all", "scanned", "some", "stem"],
)
def test_all_adder_layers_and_scores_of_a_transformer_are_exchanged(options):
    model = transformer(**options)
    before, errors = model(images()), []
    for bits in (3, 5, 8):
        few = quantized.quantize_model(model, images(), bits=bits)
        errors.append(error(few, model, images()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1
    assert not layers._linear.adder_layers(few)
    wanted = sum(isinstance(m, layers.AdderLinear) for _, m in nnx.iter_modules(model))
    assert wanted == sum(isinstance(m, quantized.AdderLinear) for _, m in nnx.iter_modules(few))
    for old, new in zip(model.blocks, few.blocks, strict=True):
        kept = new.attention.settings.score == old.attention.settings.score
        assert kept == (old.attention.settings.score == "dot")
    np.testing.assert_array_equal(model(images()), before)


@pytest.mark.slow
def test_grouped_heads_and_other_models():
    attention = MultiHeadAttention(4, 16, num_kv_heads=2, score="adder", rngs=nnx.Rngs(0))
    tokens = nnx.Rngs(1).normal((10, 6, 16))
    few = quantized.quantize_model(attention, tokens)
    assert few.score["lowest"].shape == (4,)
    assert error(few, attention, tokens) < 0.05
    sizes = dict(image_shape=(4, 4, 1), linear="adder")
    autoencoder, small = Autoencoder((12, 8), **sizes, rngs=nnx.Rngs(0)), images()[:, :4, :4]
    assert error(quantized.quantize_model(autoencoder, small), autoencoder, small) < 0.1
    sizes = dict(source_symbols=7, target_symbols=9, width=16, score="adder")
    speller, rng = Seq2Seq(**sizes, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    words = [rng.integers(1, symbols, (20, 6)) for symbols in (7, 9)]
    assert error(quantized.quantize_model(speller, *words), speller, *words) < 0.05


class Calls(nnx.Module):
    """Calls of one module with inputs of other sizes and lengths."""

    def __init__(self, called):
        self.called = called

    def __call__(self, *inputs):
        return jnp.concatenate([self.called(x) for x in inputs], axis=-2)


@pytest.mark.parametrize("kind", ["layer", "scores"])
def test_a_grid_reaches_as_far_as_all_calls(kind):
    near = nnx.Rngs(1).normal((20, 6, 8))
    called, far = layers.AdderLinear(8, 8, norm=None, rngs=nnx.Rngs(0)), 30 + near[:, :4]
    if kind == "scores":
        called, far = MultiHeadAttention(2, 8, score="adder", rngs=nnx.Rngs(0)), 10 * near[:, :4]
    for inputs in (near, far), (far, near):
        model = Calls(called)
        assert error(quantized.quantize_model(model, *inputs), model, *inputs) < 0.05


@pytest.mark.parametrize("count", [64, 500])
def test_a_grid_is_chosen_by_all_tokens_of_many_examples(count):
    """Of a grid of patches whose first and last columns are blank."""
    tokens = nnx.Rngs(1).normal((count, 8, 8, 8)).at[:, :, ::7].set(0).reshape(count, 64, 8)
    model = Calls(layers.AdderLinear(8, 8, rngs=nnx.Rngs(0)))
    assert error(quantized.quantize_model(model, tokens), model, tokens) < 0.05


def test_a_layer_that_learned_in_few_bits_has_the_grid_of_all_its_inputs():
    """As many as no grid is chosen by; but for halves, its integers then say what it says."""
    inputs = nnx.Rngs(1).normal((5000, 8)).at[1::2].multiply(0.3).at[::50].multiply(2)
    model = Calls(layers.AdderLinear(8, 8, bits=4, norm=None, rngs=nnx.Rngs(0)))
    few = quantized.quantize_model(model, inputs, bits=4)
    assert np.isclose(few(inputs), model(inputs), atol=1e-4).mean() > 0.99


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("make", [layers.AdderLinear, layers.Mlp])
def test_inputs_that_are_no_numbers_give_none_as_they_do_before(make, number):
    how = {} if make is layers.AdderLinear else {"linear": layers.AdderLinear}
    model, inputs = Calls(make(8, 8, rngs=nnx.Rngs(0), **how)), nnx.Rngs(1).normal((50, 8))
    few, wrong = quantized.quantize_model(model, inputs), inputs.at[3, 2].set(number)
    np.testing.assert_array_equal(np.isnan(few(wrong)), np.isnan(model(wrong)))
    np.testing.assert_array_equal(few(wrong)[4:], few(inputs)[4:])


def test_layers_in_lists_and_dictionaries_are_exchanged():
    class Holder(nnx.Module):
        def __init__(self):
            made = [layers.AdderLinear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(2)]
            mlp = layers.Mlp(8, 8, linear=layers.AdderLinear, rngs=nnx.Rngs(2))
            self.held = nnx.data({"values": made, "mlps": [mlp]})

        def __call__(self, x):
            return self.held["mlps"][0](self.held["values"][1](self.held["values"][0](x)))

    few = near_in_few_bits(Holder(), most=0.1)
    assert not layers.adder_layers(few)
    assert isinstance(few.held["mlps"][0], quantized.Mlp)


def near_in_few_bits(model, most=0.05):
    x = nnx.Rngs(1).normal((50, 8))
    few = quantized.quantize_model(model, x)
    assert error(few, model, x) < most
    return few


class Rectified(layers.Mlp):
    def __call__(self, inputs, **_):
        return self.fc2(jax.nn.relu(self.fc1(inputs)))


class Doubled(layers.AdderLinear):
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


def test_layers_of_another_kind_keep_their_own_formula():
    near_in_few_bits(Calls(Rectified(8, 8, linear=layers.AdderLinear, rngs=nnx.Rngs(2))))
    kinds = Doubled, layers.AdderLinear
    few = near_in_few_bits(nnx.Sequential(*(kind(8, 8, rngs=nnx.Rngs(0)) for kind in kinds)))
    assert [type(layer) for layer in few.layers] == [Doubled, quantized.AdderLinear]


@pytest.mark.parametrize("norm", [nnx.BatchNorm, nnx.RMSNorm])
def test_another_norm_behind_the_sums_is_that_norm(norm):
    model = layers.Mlp(8, 8, linear=layers.AdderLinear, rngs=nnx.Rngs(0))
    model.fc1.norm = norm(8, rngs=nnx.Rngs(0))
    if norm is nnx.BatchNorm:
        model.fc1.norm.use_running_average = True
        model.fc1.norm.mean[...], model.fc1.norm.var[...] = jnp.full(8, -9.0), jnp.full(8, 4.0)
    near_in_few_bits(Calls(model))


def test_a_layer_with_two_names_stays_one():
    class Tied(nnx.Module):
        def __init__(self):
            self.first = self.second = layers.AdderLinear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.second(self.first(x))

    few = near_in_few_bits(Tied())
    assert few.first is few.second
    assert isinstance(few.second, quantized.AdderLinear)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize(
    "make",
    [layers.AdderLinear, functools.partial(MultiHeadAttention, score="adder")],
    ids=["layer", "scores"],
)
def test_examples_that_are_no_numbers_are_refused(make, number):
    model = make(8, 8, rngs=nnx.Rngs(0))
    x = nnx.Rngs(1).normal((10, 6, 8)).at[3, 2, 1].set(number)
    with pytest.raises(ValueError, match="expected finite numbers to choose a grid by"):
        quantized.quantize_model(model, x)


@pytest.mark.slow
def test_what_learned_in_few_bits_keeps_its_grid():
    """The rounded network and the one of integers agree closer than either with the float one."""
    learned = dict(adder_options={"bits": 3}, score_options={"bits": 3})
    rounded, model = transformer(**learned), transformer()
    few = quantized.quantize_model(rounded, images(), bits=3)
    assert error(few, rounded, images()) < 0.3 * error(rounded, model, images())
    assert np.ptp(few.blocks[0].attention.score["step"][...]) == 0
    again = quantized.quantize_model(rounded, images(), bits=8)
    assert error(again, model, images()) < error(few, model, images())


def test_what_is_refused_says_why():
    with pytest.raises(ValueError, match="adder layers or adder scores, got one without"):
        quantized.quantize_model(VisionTransformer(**SIZES, rngs=nnx.Rngs(0)), images())

    class Half(nnx.Module):
        def __init__(self):
            self.used, self.unused = (layers.AdderLinear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2))

        def __call__(self, x):
            return self.used(x)

    attention, x = MultiHeadAttention(2, 8, score="adder", rngs=nnx.Rngs(0)), jnp.ones((2, 3, 8))
    with pytest.raises(ValueError, match="adder layers or adder scores, got one without"):
        quantized.quantize_model(quantized.quantize_model(attention, x), x, bits=4)
    with pytest.raises(ValueError, match="reach every adder layer and score, got none at 'unused'"):
        quantized.quantize_model(Half(), jnp.ones((2, 8)))


def test_empty_like_has_the_shapes_without_an_array():
    model = transformer()
    few = quantized.quantize_model(model, images(), bits=6)
    graphdef, state = quantized.empty_like(nnx.eval_shape(transformer), 6)
    own = nnx.split(few)[1]
    shapes = lambda state: jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(state))
    assert shapes(own) == shapes(state)
    np.testing.assert_array_equal(nnx.merge(graphdef, own)(images()), few(images()))
