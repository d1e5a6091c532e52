"""Diagnostics against NumPy, against the step's own gradient, and in the files of a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from adder_flax import attention, layers, measures, report, training
from adder_flax.models import VisionTransformer
from adder_flax.training import Trainer, build_run, read_metrics
from adder_flax.training.attention_diagnostics import make_attention_diagnostics
from adder_flax.training.skeleton import Skeleton
from adder_flax.training.step import init_state, make_train_step
from tests.training.pieces import make_parts

SIZES = dict(image_size=8, patch_size=4, channels=1, num_classes=4, width=16, depth=1, num_heads=2)
ADDER = dict.fromkeys(("score", "qkv_linear", "proj_linear", "mlp_linear"), "adder")
ADDER |= {"mlp_ratio": 1.0}
near = functools.partial(pytest.approx, rel=1e-4)


def augment(key, images, labels):
    noise = jax.random.normal(key, images.shape)
    return images.astype(jnp.float32) / 255 + 0.1 * noise, jax.nn.one_hot(labels, 4)


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 8, 8, 1), dtype=np.uint8)
    return {"image": images, "label": rng.integers(0, 4, 12).astype(np.int32)}


def diagnose(model, batch, **options):
    graphdef, params = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(params)
    diagnostics = jax.jit(
        make_attention_diagnostics(Skeleton(graphdef), make_parts(graphdef, augment), **options)
    )
    numbers = {name: float(value) for name, value in diagnostics(params, batch, 5, {}).items()}
    return numbers, graphdef, params


def images_of(batch, step=5):
    return augment(training.step.step_keys(3, step)[0], batch["image"], batch["label"])[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"score": "additive", "temperature": "learned"}, {"score": "adder", "scale": 0.3}]
)
def test_map_numbers_are_those_of_the_measures(options, batch):
    model = VisionTransformer(rngs=nnx.Rngs(0), **SIZES, **options)
    numbers, _, _ = diagnose(model, batch, num_examples=5)
    [block] = report.capture(model, images_of(batch)[:5]).blocks
    walk = measures.stochastic_part(block.map)
    assert numbers["attention_entropy/block_01"] == near(measures.entropy(walk).mean())
    rank = measures.equivalent_rank(measures.singular_values(walk)).mean()
    assert numbers["attention_rank/block_01"] == pytest.approx(
        rank, abs=0.2
    )  # 0.9 may fall on a boundary
    # The softmax knows logits up to a constant for each row; their spread is what it was made from.
    assert numbers["attention_logit_std/block_01"] == pytest.approx(
        np.log(walk).std(-1).mean(), rel=1e-3
    )
    if options["score"] == "adder":
        logits = 0.3 * measures.pair_scores(block.query, block.key, "adder")
        assert numbers["attention_max_logit/block_01"] == near(logits.max())


class Pixels(nnx.Module):
    """A model with attention and adder layers, and without blocks."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attend = nnx.MultiHeadAttention(
            2, 8, attention_fn=attention.adder_attention, decode=False, rngs=rngs
        )
        self.read = layers.AdderLinear(64, 4, rngs=rngs)

    def __call__(self, images, deterministic=True, rngs=None):
        del deterministic, rngs
        return self.read(self.attend(images[..., 0]).reshape(len(images), -1))


@pytest.mark.slow
def test_any_model_that_attends_is_diagnosed(batch):
    model = Pixels()
    numbers, _, params = diagnose(model, batch, num_examples=5)
    kinds = ("attention_entropy", "attention_logit_std", "attention_max_logit", "attention_rank")
    adder = ("adder_output_mean", "adder_output_std", "hardtanh_saturation")
    expected = {f"{kind}/attend" for kind in kinds} | {f"{kind}/read" for kind in adder}
    assert set(numbers) == expected | {"gradient_norm/attend", "gradient_norm/read"}
    (found,) = attention.capture_attention(model, images_of(batch)[:5])
    assert numbers["attention_entropy/attend"] == near(measures.entropy(found).mean())
    inputs = np.asarray(model.attend(images_of(batch)[:5, ..., 0])).reshape(5, -1)
    sums = -np.abs(inputs[..., None] - np.asarray(params["read"]["kernel"])).sum(1)
    assert numbers["adder_output_mean/read"] == near(sums.mean() / 64)
    assert numbers["adder_output_std/read"] == near(sums.std(-1).mean() / 8)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_gradient_norms_are_those_of_the_step(accumulation_steps, batch):
    model = VisionTransformer(rngs=nnx.Rngs(0), **SIZES, dropout_rate=0.2)
    numbers, graphdef, params = diagnose(model, batch, accumulation_steps=accumulation_steps)
    norms = np.array([x for name, x in numbers.items() if name.startswith("gradient_norm/")])
    assert {f"gradient_norm/block_01.{branch}" for branch in ("attention", "mlp")} <= set(numbers)
    if accumulation_steps == 1:
        state = init_state(params, optimizer=optax.sgd(0.1), ema=False) | {"step": jnp.int32(5)}
        step = make_train_step(make_parts(graphdef, augment, optax.sgd(0.1)))
        _, metrics = jax.jit(step)(state, batch, {})
        expected = float(metrics["grad_norm"])
    else:
        key = jax.random.split(training.step.step_keys(3, 5)[1], 3)[0]
        first = (images_of(batch)[::3], jax.nn.one_hot(batch["label"], 4)[::3])
        loss = lambda params: make_parts(graphdef, augment)({}).loss(params, first, key).loss
        expected = float(optax.tree.norm(jax.jit(jax.grad(loss))(params)))
    assert np.sqrt(np.sum(norms**2)) == near(expected)


@pytest.mark.parametrize("slope", [0.5, 1.0, 4.0])
def test_saturation_against_all_differences(slope):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((17, 9)), 1.5 * rng.standard_normal((9, 33))
    expected = np.mean(np.abs(slope * (w[None] - x[:, :, None])) >= 1)
    found = measures.hardtanh_saturation(jnp.asarray(x), jnp.asarray(w), slope)
    assert float(found) == pytest.approx(expected, abs=1e-6)


def test_differences_on_the_edge_are_saturated():
    x, w = jnp.zeros((1, 1)), jnp.array([[-1.0, -0.999, 0.999, 1.0]])
    assert float(measures.hardtanh_saturation(x, w)) == 0.5


@pytest.mark.slow
def test_adder_outputs_of_unit_normal_inputs_are_where_theory_has_them(batch):
    numbers, _, _ = diagnose(
        VisionTransformer(rngs=nnx.Rngs(0), **SIZES | {"width": 256}, **ADDER), batch
    )
    # The inputs of query, key and value are unit-normal after LayerNorm: E|x − w| = 2/√π, Var|x −
    # w| = 2 − 4/π.
    assert numbers["adder_output_mean/block_01.attention"] == pytest.approx(
        -2 / np.sqrt(np.pi), rel=0.1
    )
    assert numbers["adder_output_std/block_01.attention"] == pytest.approx(
        np.sqrt(2 - 4 / np.pi), rel=0.25
    )
    assert 0 < numbers["hardtanh_saturation/block_01.mlp"] < 1


def test_a_run_writes_them_at_logging_steps_and_trains_the_same(tiny_config, tmp_path):
    states = []
    for on in (False, True):
        config = tiny_config("multiplicative", attention_diagnostics=on, log_every_steps=4)
        run = build_run(config)
        states.append(Trainer(run, training.open_workdir(tmp_path / str(on), config)).fit().state)
    jax.tree.map(np.testing.assert_array_equal, *states)
    rows = [row for row in read_metrics(tmp_path / "True") if "train/loss" in row]
    assert [row["step"] for row in rows] == [4, 8, 9]
    for row in rows:
        assert 0 < row["attention_entropy/block_01"] <= np.log(17) + 1e-4
        assert row["gradient_norm/block_01.mlp"] > 0
        assert not any(name.startswith(("adder_", "hardtanh_")) for name in row)
    assert not any(
        name.startswith("attention_") for row in read_metrics(tmp_path / "False") for name in row
    )


@pytest.mark.slow
def test_it_works_where_blocks_are_scanned_and_recomputed(batch):
    sizes = SIZES | {"depth": 2}
    model = VisionTransformer(rngs=nnx.Rngs(0), **sizes, scan_blocks=True, remat=True)
    plain = VisionTransformer(rngs=nnx.Rngs(0), **sizes)
    numbers, expected = diagnose(model, batch)[0], diagnose(plain, batch)[0]
    assert numbers.keys() == expected.keys()
    np.testing.assert_allclose(list(numbers.values()), list(expected.values()), rtol=1e-2)
