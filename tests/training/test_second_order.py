"""K-FAC and CG-FAC in the trainer: every mechanism, resuming, accumulation, several devices, and
what is refused."""

import jax
import numpy as np
import pytest

import kfac
from adder_flax.settings import CgFacSettings, KfacSettings
from adder_flax.training import Checkpoints, RunError, build_run
from adder_flax.training.step import step_keys
from tests.training.pieces import take_steps

FIELDS = {
    "optimizer.name": "kfac",
    "optimizer.kfac.step": "share",
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_epochs": 0.5,
    "model.width": 48,
    "model.num_heads": 3,
    "batch_size": 64,
    "num_epochs": 3.0,
    "task.resized_crop_scale": (),
}


def restored_as_saved(run, state, directory):
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(int(state["step"]), state)
        checkpoints.wait()
        restored = checkpoints.restore(run.abstract_state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    return restored


def test_adamw_keeps_norms_and_embeddings(tiny_config):
    """The table of parameters has one row for what all blocks share."""
    layers = build_run(tiny_config("multiplicative", **FIELDS, **{"model.depth": 2})).program.layers
    assert "blocks/*/mlp/fc1/kernel (2×)" in str(layers)
    left = {p for p in set(layers.shapes) - set(layers.block_of) if not p.startswith("blocks/")}
    assert left == {"cls_token", "pos_embed", "norm/scale", "norm/bias"}
    in_blocks = {p.split("/")[2] for p in layers.block_of if p.startswith("blocks/")}
    assert in_blocks == {"attention", "mlp"}


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["adder", "multiplicative", "additive"])
def test_every_mechanism_learns_and_resumes_with_the_same_bits(mechanism, tiny_config, tmp_path):
    # An additive one starts on a longer plateau, with AdamW as well.
    num_epochs = 6.0 if mechanism == "additive" else 3.0
    run = build_run(tiny_config(mechanism, **FIELDS | {"num_epochs": num_epochs}))
    half = run.num_steps // 2
    kinds = {block.uses[0].layer.kind for block in run.program.layers.blocks.values()}
    assert ("adder" in kinds) == (mechanism == "adder")
    assert run.program.layers.coverage > 0.7

    middle, rows = take_steps(run, run.init(), 0, half)
    restored = restored_as_saved(run, middle, tmp_path)
    complete, more = take_steps(run, middle, half, run.num_steps)
    resumed, again = take_steps(run, restored, half, run.num_steps)
    jax.tree.map(np.testing.assert_array_equal, (resumed, again), (complete, more))
    losses = [row["loss"] for row in (*rows, *more)]
    assert np.mean(losses[-5:]) < 0.9 * np.log(10)  # clearly better than not knowing the digit
    telemetry = kfac.telemetry(more[-1]["optimizer"])
    named = {"kfac/damping", "kfac/residual/head", "kfac/iterations/blocks/0/mlp/fc2"}
    assert named <= telemetry.keys()
    assert telemetry["kfac/iterations/head"] == run.settings.optimizer.kfac.iterations


@pytest.mark.slow
def test_a_state_without_residuals_and_with_narrow_inverses_is_saved(tiny_config, tmp_path):
    own = {"step": "rms", "iterations": 0, "product_dtype": "bfloat16"}
    fields = {f"optimizer.kfac.{name}": value for name, value in own.items()}
    run = build_run(tiny_config("multiplicative", **FIELDS | fields))
    restored_as_saved(run, take_steps(run, run.init(), 0, 1)[0], tmp_path)


@pytest.mark.slow
def test_a_step_that_is_refused_leaves_curvature_as_it_was(tiny_config):
    run = build_run(tiny_config("multiplicative", **FIELDS | {"optimizer.kfac.step": "rms"}))
    state, _ = take_steps(run, run.init(), 0, 5)  # at the next step inverses are due
    state = jax.device_get(state)
    params = {**state["params"], "cls_token": np.full_like(state["params"]["cls_token"], np.nan)}
    # One whose gradient is not finite, and a sound one behind such a step.
    for of in ({"params": params}, {"skipped": np.ones_like(state["skipped"])}):
        refused = state | of
        after, _ = take_steps(run, refused, 5, 6)
        jax.tree.map(np.testing.assert_array_equal, after["opt_state"], refused["opt_state"])
    after, _ = take_steps(run, state, 5, 6)
    for kind in ("factors", "inverses"):
        averages = (kfac.find_state(s["opt_state"]).averages for s in (after, state))
        new, old = (jax.tree.leaves(getattr(a, kind)) for a in averages)
        assert all((n != o).any() for n, o in zip(new, old, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_sample_gives_the_curvature_and_the_batch_the_gradient(accumulation, tiny_config):
    stride, fields = 4, FIELDS | {"model.depth": 1, "accumulation_steps": accumulation}
    rows, states = [], []
    for taken in (1, stride):
        chosen = {"optimizer.kfac.curvature_stride": taken}
        run = build_run(tiny_config("multiplicative", **fields, **chosen))
        state, metrics = take_steps(run, run.init(), 0, 1)
        rows.append(metrics[0])
        states.append(kfac.find_state(state["opt_state"]))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(rows[1][name], rows[0][name], rtol=1e-5)

    augment_key, _ = step_keys(run.config.seed, 0)
    images, _ = run.task.examples(augment_key, run.batches()[0])
    sample = np.asarray(images, np.float64)[:: stride * accumulation]
    size = run.settings.model.patch_size
    n, height, width, _ = sample.shape
    patches = sample.reshape(n, height // size, size, width // size, size).transpose(0, 1, 3, 2, 4)
    inputs = np.pad(patches.reshape(-1, size * size), ((0, 0), (0, 1)), constant_values=1)
    moment = np.asarray(states[1].averages.factors["patch_embed/proj"][0], np.float64).squeeze()
    # Of the constant input it is the weight of the average.
    np.testing.assert_allclose(moment / moment[-1, -1], inputs.T @ inputs / len(inputs), atol=1e-5)


@pytest.mark.slow
def test_the_sample_is_taken_anew_now_and_then(tiny_config):
    fields = FIELDS | {"model.depth": 1, "optimizer.kfac.curvature_interval": 3}
    run = build_run(tiny_config("adder", **fields, **{"optimizer.kfac.curvature_stride": 8}))
    weights, state = [], run.init()
    for step in range(4):
        state, _ = take_steps(run, state, step, step + 1)
        weights.append(float(kfac.find_state(state["opt_state"]).averages.weight))
    np.testing.assert_allclose(weights, [0.05] * 3 + [0.95 * 0.05 + 0.05], rtol=1e-5)


@pytest.mark.slow
def test_steps_of_a_root_mean_square_are_a_fifth_of_the_rate(tiny_config):
    """As Muon's, so that one rate suits all parameters."""
    chosen = {"learning_rate": 0.04, "warmup_epochs": 0.0, "weight_decay": 0.0, "kfac.step": "rms"}
    fields = FIELDS | {"model.depth": 1} | {f"optimizer.{n}": value for n, value in chosen.items()}
    run = build_run(tiny_config("multiplicative", **fields))
    before = jax.device_get(run.init())
    after, _ = take_steps(run, run.init(), 0, 1)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, after["params"], before["params"])
    for layer in (moved["blocks"][0]["mlp"]["fc1"], moved["head"]):
        steps = np.concatenate([layer["kernel"].ravel(), layer["bias"].ravel()])
        np.testing.assert_allclose(np.sqrt(np.mean(steps**2)), 0.2 * 0.04, rtol=1e-3)


def test_how_often_curvature_is_renewed_says_how_many_examples_it_asks(tiny_config, monkeypatch):
    asked = []
    stride = lambda layers, examples, interval: asked.append(interval) or 1
    monkeypatch.setattr(kfac, "curvature_stride", stride)
    # Of a width that no other test has: programs are kept by their shape.
    fields = {"model.depth": 1, "model.width": 42, "optimizer.kfac.curvature_interval": 3}
    jax.eval_shape(build_run(tiny_config("multiplicative", **FIELDS | fields)).init)
    assert asked == [3]


_DIVISIBLE = "batch_size = 32 divisible by 1 parts × config.optimizer"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kfac.kl_clip": 0.01}, r"kl_clip: expected 0.003 with step='rms'.*got 0.01;.*'clip'"),
        ({"kfac.curvature_stride": 5}, rf"{_DIVISIBLE}.kfac.curvature_stride.*5"),
        (
            {"name": "cg_fac", "cg_fac.curvature_stride": 5},
            rf"{_DIVISIBLE}.cg_fac.curvature_stride.*5",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_any_compute(fields, message, tiny_config):
    fields = {f"optimizer.{name}": value for name, value in fields.items()}
    with pytest.raises(RunError, match=message):
        build_run(tiny_config("multiplicative", **{"optimizer.name": "kfac"} | fields))


def test_defaults_of_the_settings_are_the_librarys():
    for settings, options in ((KfacSettings, kfac.KfacOptions), (CgFacSettings, kfac.CgFacOptions)):
        assert settings().step == options().step
        for step, preset in options.PRESETS.items():
            own = vars(settings(step=step))
            differ = {"learning_rate"} if step == "rms" else set()
            shared = {n: v for n, v in vars(options(step=step)).items() if n in own}
            same = {n: v for n, v in preset.items() if n in own and n not in differ}
            assert {n: own[n] for n in same} == same
            assert own["kl_clip"] == shared["kl_clip"]


def test_algorithm_1_is_a_setting_of_cg_fac(tiny_config):
    fields = FIELDS | {"optimizer.name": "cg_fac", "optimizer.cg_fac.step": "algorithm_1"}
    run = build_run(tiny_config("multiplicative", **fields, **{"model.depth": 1}))
    assert run.settings.optimizer.cg_fac.fisher == "empirical"
    state, _ = take_steps(run, run.init(), 0, 2)
    # γ is no share of a layer's eigenvalues, of which nothing is kept then.
    assert not kfac.find_state(state["opt_state"]).averages.traces
    assert kfac.find_stats(state["opt_state"])[0].damping == pytest.approx(0.1)
