"""Cases from public trackers for what trains a run.

Parts of a batch that are not alike, models of Flax's own layers, starts under other settings.
"""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

import kfac
from adder_flax import training
from adder_flax.errors import RunError
from adder_flax.experiments import common
from adder_flax.models import MODELS, register_model
from adder_flax.settings import MODEL_SETTINGS, ClassificationSettings, defaults, setting
from adder_flax.tasks import Classification, Outcome
from adder_flax.training import evaluation_params, make_eval_step, make_train_step
from adder_flax.training.estimate import step_operations
from adder_flax.training.optimizers import CurvatureOptimizer, find_layers
from adder_flax.training.program import _built_from
from adder_flax.training.step import Parts, init_state, joined, make_loss_fn, take_apart
from adder_flax.training.workdir import check_jax_settings, write_jax_settings
from tests.processes import run_code
from tests.training.pieces import BATCH, FACTS, Net, make_step, take_steps
from tests.training.tiny import TINY


def close(a, b, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


LENGTHS = np.array([5, 1, 2, 1, 4, 1, 3, 1])  # real positions of eight rows: even rows are long
_RNG = np.random.default_rng(0)
SEQUENCES = {
    "rows": _RNG.normal(size=(8, 5, 3)).astype(np.float32),
    "wanted": _RNG.normal(size=(8, 5)).astype(np.float32),
    "real": np.arange(5) < LENGTHS[:, None],
}


def masked_loss(params, examples, key, model_state=None):
    del key, model_state
    made = kfac.tap(kfac.Dense(), params, examples["rows"], path="")
    real = examples["real"]
    mean = lambda values: (values * real).sum() / real.sum()
    errors = 0.5 * (made[..., 0] - examples["wanted"]) ** 2
    large = mean(errors > 0.5)
    return Outcome(mean(errors), made, {"large": large}, weights=real, model_state={})


def layers_of(params, stride):
    """The layer of every so manieth of the sequences."""
    examples = jax.tree.map(lambda x: x[::stride], SEQUENCES)
    loss = lambda *args: (masked_loss(*args).loss, masked_loss(*args).outputs)
    return kfac.find_layers(loss, params, examples, jax.random.key(0))


def told(found):
    """An optimizer that moves nothing and hands on what it is given."""

    def update(grads, state, params, *, value, value_fn=None, sound=True, **_):
        del state, sound
        again = value if value_fn is None else value_fn(params)
        return jax.tree.map(jnp.zeros_like, grads), {"grads": grads, "value": value, "again": again}

    def init(params):
        return {"grads": params, "value": jnp.zeros(()), "again": jnp.zeros(())}

    if found is None:
        return optax.GradientTransformationExtraArgs(init, update)
    layers, stride = found
    return CurvatureOptimizer(init, update, layers, "mc", 1, stride)


def step_of(params, optimizer, **options):
    """One step of that loss."""
    rate, examples = (lambda step: 0.0), (lambda key, batch: batch)
    parts = Parts(0, examples, masked_loss, optimizer, rate, likelihood="gaussian")
    step = make_train_step(lambda hyper: parts, **options)
    return step(init_state(params, optimizer=optimizer, ema=False), SEQUENCES, {})


@pytest.mark.cases(5)
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("stride", [None, 1, 2])
def test_parts_with_unequal_numbers_of_positions_are_the_whole_batch(count, stride):
    """torchtune#1875: parts of a batch averaged as equals are not its mean."""
    params = {"kernel": jnp.asarray(np.random.default_rng(1).normal(size=(3, 1)), jnp.float32)}
    if stride is not None and count * stride > 8:
        return
    found = stride and (layers_of(params, count * stride), stride)
    step = jax.jit(lambda params: step_of(params, told(found), accumulation_steps=count))
    new, metrics = step(params)
    kept = SEQUENCES["real"]
    rows = SEQUENCES["rows"][kept].astype(np.float64)
    error = (rows @ wide(params["kernel"]))[:, 0] - SEQUENCES["wanted"][kept]
    loss, large = (0.5 * error**2).mean(), (0.5 * error**2 > 0.5).mean()
    gradient = rows.T @ error[:, None] / len(rows)
    found = [metrics["loss"], metrics["task"]["large"], metrics["grad_norm"]]
    close(found, [loss, large, np.linalg.norm(gradient)], 1e-5, 1e-6)
    given = new["opt_state"]
    close(given["grads"]["kernel"], gradient, 1e-5, 1e-6)
    # The value is that of what value_fn computes, here of the same parameters.
    close(given["value"], given["again"], 1e-5, 1e-6)
    if stride != 1:
        close(given["value"], loss, 1e-5, 1e-6)


@pytest.mark.parametrize("stride", [1, 2])
def test_curvature_is_that_of_the_real_positions(stride):
    """f-dangel/curvlinops#107: a mean over real positions has a Fisher matrix over these.

    Of a Gaussian likelihood of unit variance it is the mean of x xᵀ over them, whatever is drawn.
    """
    params, found = {"kernel": jnp.zeros((3, 1))}, {}

    def update(grads, state, params, *, curvature, **_):
        (captured,) = curvature.captured.values()
        found.update(captured=captured, examples=curvature.num_examples)
        return jax.tree.map(jnp.zeros_like, grads), state

    layers = layers_of(params, stride)
    step_of(params, CurvatureOptimizer(lambda params: (), update, layers, "ggn", 1, stride))
    x, cotangents = wide(found["captured"])
    # Signs are drawn: squares of cotangents are not random.
    weights = (cotangents**2).sum((0, -1)).reshape(-1)
    rows = x.reshape(-1, 3)
    fisher = (rows * weights[:, None]).T @ rows / found["examples"]
    kept = SEQUENCES["rows"][::stride][SEQUENCES["real"][::stride]].astype(np.float64)
    close(fisher, kept.T @ kept / len(kept), 1e-5, 1e-7)


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def mix(share, old, new):
    return jax.tree.map(lambda old, new: share * old + (1 - share) * new, old, new)


def rolled(i):
    return {**BATCH, "image": np.roll(BATCH["image"], i, axis=1)}


def normed(x, mean, variance):
    return (x - mean) / np.sqrt(variance + 1e-5)


def numpy_step(params, batch, rate):
    """One step of gradient descent of `Net` in float64, and its batch's statistics."""
    x = batch["image"].reshape(len(batch["image"]), 6) / 255.0
    z = x @ params["first"]["kernel"] + params["first"]["bias"]
    mean, variance = z.mean(0), z.var(0)
    n = normed(z, mean, variance)
    h = n * params["norm"]["scale"] + params["norm"]["bias"]
    logits = h @ params["head"]["kernel"] + params["head"]["bias"]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    error = (p - np.eye(4)[batch["label"]]) / len(x)
    dh = error @ params["head"]["kernel"].T
    dn = dh * params["norm"]["scale"]
    dz = (dn - dn.mean(0) - n * (dn * n).mean(0)) / np.sqrt(variance + 1e-5)
    gradient = {
        "first": {"kernel": x.T @ dz, "bias": dz.sum(0)},
        "norm": {"scale": (dh * n).sum(0), "bias": dh.sum(0)},
        "head": {"kernel": h.T @ error, "bias": error.sum(0)},
    }
    return jax.tree.map(lambda w, g: w - rate * g, params, gradient), {
        "mean": mean,
        "var": variance,
    }


def test_batch_norm_is_trained_and_evaluated_as_its_formula():
    """HomericIntelligence/Odyssey#5532: evaluation by statistics that no step has moved."""
    skeleton, step, state = make_step(optax.sgd(0.5), ema_decay=0.4)
    params, running = wide(state["params"]), {"mean": np.zeros(5), "var": np.ones(5)}
    averages = params, running
    for i in range(3):
        state, _ = step(state, rolled(i))
        params, new = numpy_step(params, rolled(i), 0.5)
        running = mix(0.8, running, new)
        averages = mix(min(0.4, (1 + i) / (10 + i)), averages, (params, running))
    close(state["params"], params)
    close(state["model_state"], {"norm": running})
    ema, statistics = averages
    close(state["ema_params"], ema)
    close(state["ema_model_state"], {"norm": statistics})
    # Evaluation takes the running averages, of parameters and of statistics, and what is real.
    evaluate = make_eval_step(skeleton, lambda hyper: Classification(None, FACTS))
    sums = evaluate(evaluation_params(state), {**BATCH, "mask": np.arange(8) < 6}, {})
    z = BATCH["image"].reshape(8, 6) / 255.0 @ ema["first"]["kernel"] + ema["first"]["bias"]
    h = normed(z, *statistics.values()) * ema["norm"]["scale"] + ema["norm"]["bias"]
    logits = h @ ema["head"]["kernel"] + ema["head"]["bias"]
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(8), BATCH["label"]]
    close(sums["loss"], losses[:6].sum())


def test_schedule_free_weights_are_evaluated_with_the_statistics_of_training():
    """The average x of Defazio et al., 2024, beside what BatchNorm saw of y, which is trained."""
    _, step, state = make_step(optax.contrib.schedule_free(optax.sgd(0.5), 0.5, b1=0.8))
    x = z = y = wide(state["params"])
    running = {"mean": np.zeros(5), "var": np.ones(5)}
    for i in range(3):
        state, _ = step(state, rolled(i))
        moved, new = numpy_step(y, rolled(i), 0.5)
        z = jax.tree.map(lambda z, m, y: z + m - y, z, moved, y)
        x, running = mix(i / (i + 1), x, z), mix(0.8, running, new)
        y = mix(0.8, x, z)
    close(evaluation_params(state), joined(x, {"norm": running}))


def test_statistics_of_parts_follow_one_another():
    """As in PyTorch, each part moves the running statistics once."""
    _, step, state = make_step(optax.sgd(0.0), accumulation_steps=2)
    new, _ = step(state, BATCH)
    first = wide(state["params"]["first"])
    hidden = BATCH["image"].reshape(8, 6) / 255.0 @ first["kernel"] + first["bias"]
    mean = 0.2 * (0.8 * hidden[::2].mean(0) + hidden[1::2].mean(0))
    close(new["model_state"]["norm"]["mean"], mean, 1e-5, 1e-6)


def test_streams_of_a_model_follow_from_seed_and_step():
    """AI-Hypercomputer/maxtext#276: random numbers that a resumed run does not draw again.

    Here nothing of them is stored: a step taken again draws the same, another step something else.
    """
    model = Net(nnx.Rngs(1), rate=0.5)
    skeleton, step, state = make_step(optax.sgd(0.0), model)
    assert "rngs" not in str(jax.tree.structure(state))
    losses = [float(step({**state, "step": jnp.int32(i)}, BATCH)[1]["loss"]) for i in (0, 1, 2, 1)]
    assert len(set(losses[:3])) == 3
    assert losses[1] == losses[3]
    # Two layers draw two masks, and two parts of a batch others.
    variables = evaluation_params(state)
    ones, masks = jnp.ones((1, 64)), set()
    for seed in (0, 1):
        merged = skeleton.merge(variables, jax.random.key(seed))
        masks |= {np.asarray(layer(ones)).tobytes() for layer in (merged.dropout, merged.again)}
    assert len(masks) == 4
    # Evaluation has none.
    same_bits(skeleton.merge(variables).dropout(ones), ones)


@dataclasses.dataclass(frozen=True)
class NetSettings:
    """The settings of `Net`."""

    name: str = setting("field_net", "the model")


@pytest.fixture
def net_config():
    """The configuration of a run of `Net` on the handwritten digits, eight steps long."""

    def build(settings, example, *, rngs):
        (shape,) = (x.shape for x in example.inputs)
        net = Net(rngs, rate=0.3)
        net.first = nnx.Linear(math.prod(shape[1:]), 5, rngs=rngs)
        net.head = nnx.Linear(5, example.sizes["classes"], rngs=rngs)
        return net

    with MODELS.temporary(), MODEL_SETTINGS.temporary():
        register_model("field_net", NetSettings)(build)
        config = common.deit("multiplicative", "tiny")
        fields = {name: value for name, value in TINY.items() if not name.startswith("model.")}
        config.update_from_flattened_dict(fields | {"ema_decay": 0.5})
        config.model = ConfigDict(defaults(NetSettings))
        yield config


def test_a_model_of_flax_s_layers_is_trained_saved_and_resumed_with_the_same_bits(
    net_config, tmp_path
):
    run = training.build_run(net_config)
    whole = training.Trainer(run, tmp_path / "whole").fit()
    state = run.init()
    # The statistics begin as the layer's own.
    same_bits(state["model_state"], {"norm": {"mean": np.zeros(5), "var": np.ones(5)}})
    state, _ = take_steps(run, state, 0, 4)
    place = tmp_path / "broken" / "checkpoints"
    with training.Checkpoints(place, of=training.fingerprint(net_config)) as checkpoints:
        checkpoints.save(4, state)
    resumed = training.Trainer(run, tmp_path / "broken").fit()
    assert (whole.step, resumed.step) == (run.num_steps, run.num_steps)
    same_bits(resumed.state, whole.state)
    assert resumed.evaluation == whole.evaluation
    # What is evaluated is what the model says by its averages.
    model = run.model(evaluation_params(whole.state))
    same_bits(model.norm.mean[...], whole.state["ema_model_state"]["norm"]["mean"])
    batch = run.eval_source.first(len(run.eval_source))
    right = np.asarray(model(*run.task.inputs(batch))).argmax(-1) == batch["label"]
    close(whole.evaluation["eval/accuracy"], right.mean(), 0, 1e-9)


@pytest.mark.parametrize("init", ["sequence", "path"])
def test_parameters_of_a_model_with_streams_follow_from_the_seed(net_config, init):
    net_config.init = init
    first, again = (training.build_run(net_config).init()["params"] for _ in range(2))
    same_bits(first, again)
    net_config.seed = 1
    other = training.build_run(net_config).init()["params"]
    assert (other["first"]["kernel"] != first["first"]["kernel"]).all()


_ON_DEVICES = """
import json, sys
import jax
from adder_flax import training
from tests.field.test_training import net_config
from tests.training.pieces import take_steps

made = net_config.__wrapped__()  # which forgets the model at its end
config = next(made)
# Not AdamW: a bias before BatchNorm has no gradient but rounding, which that divides by its size.
config.optimizer.name = "sgd"
for sizes in json.loads(sys.argv[1]):
    config.mesh.update(dict(zip(("data", "fsdp", "tensor"), sizes)))
    size = sizes[0] * sizes[1] * sizes[2]
    run = training.build_run(config, devices=jax.devices()[:size])
    state, rows = take_steps(run, run.init(), 0, 3)
    numbers = [float(row["loss"]) for row in rows]
    score = training.Evaluator(run)(training.evaluation_params(state))["eval/loss"]
    held = {name: state[name]["norm"] for name in ("model_state", "ema_model_state")}
    print(json.dumps([numbers, score, jax.tree.map(lambda x: x.tolist(), held)]))
"""


@pytest.mark.slow
def test_statistics_and_streams_are_those_of_one_device_on_eight():
    meshes = [(1, 1, 1), (8, 1, 1), (2, 4, 1), (2, 2, 2)]
    printed = run_code(_ON_DEVICES, json.dumps(meshes), devices=8)
    one, *others = map(json.loads, printed.splitlines())
    assert len(others) == 3
    for other in others:
        close(other, one, 2e-5, 1e-6)


JAX_SETTINGS = {
    "jax_threefry_partitionable": False,
    "jax_default_prng_impl": "rbg",
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "bfloat16",
    "jax_random_seed_offset": 1,
}


@pytest.mark.parametrize("name", JAX_SETTINGS)
def test_a_run_is_not_resumed_under_settings_of_jax_that_draw_or_round_otherwise(
    name, net_config, tmp_path
):
    """jax-ml/jax#13346: the same seed, other random numbers since a default changed."""
    before = jax.config.values[name]
    write_jax_settings(tmp_path)
    check_jax_settings(tmp_path)
    jax.config.update(name, JAX_SETTINGS[name])
    try:
        with pytest.raises(RunError) as caught:
            check_jax_settings(tmp_path)
        place = training.open_workdir(tmp_path, net_config) / "checkpoints"
        if name == "jax_random_seed_offset":  # once through the trainer, for all
            (place / "4").mkdir(parents=True)
            with pytest.raises(RunError, match="jax_random_seed_offset: 0 there, 1 now"):
                training.Trainer(training.build_run(net_config), tmp_path).fit()
    finally:
        jax.config.update(name, before)
    assert f"\n  {name}: {before} there, {JAX_SETTINGS[name]} now\n" in str(caught.value)
    assert (f"({name.upper()}={before})" in str(caught.value)) == bool(before)
    check_jax_settings(tmp_path)


def test_a_run_from_before_settings_of_jax_were_kept_goes_on(tmp_path):
    check_jax_settings(tmp_path)
    (tmp_path / "jax.json").write_text("[")
    check_jax_settings(tmp_path)


@pytest.mark.parametrize(
    ("train", "evaluated", "told"),
    [
        ("train[:50%]", "train[40%:]", "143 of the 862 records of train[40%:100%]"),
        ("train[:50%]", "train[50%:]", None),
        ("train", "train", "1437 of the 1437 records of train"),
        ("train", "eval", None),
    ],
)
def test_scores_on_records_that_are_trained_on_are_said(train, evaluated, told, net_config, caplog):
    """marin-community/marin#2700: the two parts of one split overlapped."""
    net_config.data.update(train_split=train, eval_split=evaluated)
    training.build_run(net_config)
    said = [record.getMessage() for record in caplog.records if "trained on" in record.getMessage()]
    assert len(said) == (told is not None)
    assert told is None or said[0].startswith(told)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stride", [1, 2])
def test_curvature_is_taken_of_a_model_that_carries_statistics(stride):
    """Statistics have no axis of examples, and move by the gradient's pass alone."""
    skeleton, step, state = make_step(optax.sgd(0.0))
    expected, _ = step(state, BATCH)
    loss = make_loss_fn(skeleton, Classification(ClassificationSettings(), None))
    examples = (jnp.zeros((8 // stride, 2, 3, 1)), jnp.zeros((8 // stride, 4)))
    found = find_layers(loss, state["params"], examples, state["model_state"])
    assert any(block.params for block in found.blocks.values())
    _, step, state = make_step(told((found, stride)))
    new, _ = step(state, BATCH)
    same_bits(new["model_state"], expected["model_state"])


class Noisy(nnx.Module):
    """A model that keeps all of its random streams."""

    def __init__(self, rngs):
        self.rngs = rngs
        self.head = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(x) + jax.random.normal(self.rngs.noise(), x.shape)


def test_streams_that_a_model_keeps_draw_by_the_step_s_key():
    made = lambda: _built_from(Noisy, itertools.repeat(jax.random.key(0)))
    skeleton, _ = take_apart(nnx.eval_shape(made))
    _, variables = take_apart(made())
    said = lambda model: np.asarray(model(jnp.ones((1, 2))))
    drawn = [said(skeleton.merge(variables, jax.random.key(i))) for i in (0, 1, 0)]
    assert (drawn[0] != drawn[1]).all()
    same_bits(drawn[0], drawn[2])
    twice = skeleton.merge(variables, jax.random.key(0))
    assert (said(twice) != said(twice)).all()


@dataclasses.dataclass(frozen=True)
class RateSettings:
    name: str = setting("field_net", "the model")
    rate: float = setting(0.3, "of dropout", data="if on")


def test_a_number_of_the_compiled_step_needs_a_model_that_takes_it(net_config):
    """Else all runs of a process would have the first one's."""
    register_model("of_rates", RateSettings)(MODELS.get("field_net"))
    net_config.model = ConfigDict(defaults(RateSettings) | {"name": "of_rates"})
    with pytest.raises(training.RunError, match="set_data of Net, whose settings declare rate"):
        training.build_run(net_config)


def test_layers_may_have_the_names_of_methods_of_this_project(net_config):
    def build(settings, example, *, rngs):
        net = MODELS.get("field_net")(settings, example, rngs=rngs)
        net.stages, net.anneal = nnx.List([]), nnx.List([])
        return net

    register_model("staged", NetSettings)(build)
    net_config.model.name = "staged"
    assert step_operations(training.build_run(net_config)).multiplications > 0


class Normed(nnx.Module):
    """A layer of Flax with arrays that are no variables, under keys that are no words."""

    def __init__(self, rngs):
        self.first = nnx.WeightNorm(nnx.Linear(64, 4, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(4, 10, rngs=rngs)

    def __call__(self, images):
        return self.head(self.first(images.reshape(len(images), -1)))


def test_arrays_that_are_no_variables_are_carried(net_config):
    """`nnx.eval_shape` of Flax 0.12.8 drops the scales of `nnx.WeightNorm`; 0.12.12 trains them."""
    register_model("normed", NetSettings)(lambda settings, example, *, rngs: Normed(rngs))
    net_config.model.name = "normed"
    run = training.build_run(net_config)
    state = run.init()
    if "scales" in state["params"]["first"]:
        pytest.skip("this Flax has made parameters of them")
    same_bits(state["model_state"], {"first": {"scales": {("kernel",): np.ones(4)}}})
    state["model_state"]["first"]["scales"]["kernel",] = jnp.arange(1.0, 5.0)
    images = np.random.default_rng(0).normal(size=(3, 8, 8, 1))
    found = run.model(joined(state["params"], state["model_state"]))
    first, head = wide((state["params"]["first"]["layer_instance"], state["params"]["head"]))
    kernel = first["kernel"] / np.linalg.norm(first["kernel"], axis=0) * np.arange(1, 5)
    hidden = images.reshape(3, -1) @ kernel + first["bias"]
    close(found(images.astype(np.float32)), hidden @ head["kernel"] + head["bias"])
