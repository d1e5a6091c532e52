"""Swapping and healing: fits and losses against NumPy in float64, a run that begins as its
teacher."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import scipy.special
from flax import nnx
from ml_collections import ConfigDict

from adder_flax import layers, models, recorder, report, settings, tasks, training
from adder_flax.experiments import common
from adder_flax.report.families.alignments import with_uniform_maps
from adder_flax.tasks import _swap
from tests.modules import moved
from tests.training.tiny import TINY

SIZES = dict(image_size=8, patch_size=4, channels=1, num_classes=10, width=8, depth=2, num_heads=2)
ADDER = dict(score="adder", identity=False)
ADDER |= dict.fromkeys(("qkv_linear", "proj_linear", "mlp_linear"), "adder")
softmax = functools.partial(scipy.special.softmax, axis=-1)


def make(seed=0, **options):
    """A transformer all of whose parameters are random."""
    model = models.VisionTransformer(**SIZES | options, rngs=nnx.Rngs(seed))
    return moved(model, seed, scale=0.3)


def images(count=6):
    return np.random.default_rng(1).normal(size=(count, 8, 8, 1)).astype(np.float32)


def watch(model, seen=None):
    wanted = {"attention": ["query", "key", "weights"], "block": ["output"]}
    _, records = recorder.record(wanted, model, images() if seen is None else seen)
    wide = lambda r: {name: np.asarray(array, np.float64) for name, array in r.arrays.items()}
    return [[wide(r) for r in records if r.kind == kind] for kind in ("attention", "block")]


@pytest.mark.slow
def test_a_swapped_head_has_the_closest_maps_of_all_that_were_tried():
    """Every factor and ratio again in NumPy, from the teacher's queries and keys; the best one is
    the student's map."""
    teacher = make()
    student = tasks.swap(teacher, make(seed=1, score="adder", identity=False), images())
    # The first block sees the same in both.
    before, after = (watch(model)[0][0] for model in (teacher, student))
    query, key, maps = before["query"], before["key"], before["weights"]
    key = key - key.mean((0, 2), keepdims=True)
    best = np.full(2, np.inf)
    for ratio in _swap._RATIOS:
        distances = np.abs(query[..., :, None, :] - ratio * key[..., None, :, :]).sum(-1)
        for factor in _swap._FACTORS:
            tried = softmax(-factor * distances / 2)  # 1/√4, the width of a head
            with np.errstate(divide="ignore"):
                best = np.minimum(best, (maps * np.log(maps / tried)).sum(-1).mean((0, 2)))
    own = (maps * np.log(maps / after["weights"])).sum(-1).mean((0, 2))
    np.testing.assert_allclose(own, best, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_what_both_have_alike_is_copied():
    teacher = make()
    kinds = dict(score=["dot", "adder"], mlp_linear=["dense", "adder"])
    student = tasks.swap(teacher, make(seed=1, **kinds), images())
    flat = lambda model: dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    old, new = flat(teacher), flat(student)
    differs = lambda path: path in new and not np.array_equal(old[path][...], new[path][...])
    changed = {".".join(map(str, path)) for path in old if differs(path)}
    both = ("kernel", "bias")
    expected = {f"blocks.1.attention.{name}.{part}" for name in ("query", "key") for part in both}
    assert changed == expected | {f"blocks.1.mlp.{name}.kernel" for name in ("fc1", "fc2")}


normed = lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(("squared", "dark"), [(True, False), (False, False), (False, True)])
def test_a_fitted_adder_layer_leaves_what_no_scale_and_offset_explain(squared, dark):
    """The residual of least squares: no mean, and no part along what the layer sums up; most is
    explained. Of all columns of images, not of every eighth row alone, their dark edge."""
    rng = np.random.default_rng(0)
    rows = rng.normal(1.0, 0.5, (8192 if dark else 200, 24)).astype("f")
    if dark:
        rows[::8] = 0.0
    kernel = 0.2 * rng.normal(size=(24, 12)).astype("f")
    wanted = rows @ kernel + (0 if dark else rng.normal(size=12))
    fitted = _swap._fit_distances(rows, wanted, kernel, squared=squared)
    fitted = {name: np.asarray(values, np.float64) for name, values in fitted.items()}
    rows, wanted = rows[:400], wanted[:400]
    gaps = rows[:, :, None].astype(np.float64) - fitted["kernel"]
    sums = normed(-(gaps**2).sum(1) / 2 if squared else -np.abs(gaps).sum(1))
    residual = wanted - fitted["norm.scale"] * sums - fitted["norm.bias"]
    if not dark:
        np.testing.assert_allclose(residual.mean(0), 0, atol=1e-4)
        np.testing.assert_allclose((residual * sums).mean(0), 0, atol=1e-3)
    assert residual.var() < 0.5 * wanted.var(0).mean()


@pytest.mark.slow
def test_a_temperature_of_the_teacher_is_in_the_maps_that_heads_are_fitted_to():
    teacher, maps = make(temperature="learned"), []
    for block in teacher.blocks:
        block.attention.log_temperature[...] += 1.0
    for temperature in (1.0, "learned"):
        student = make(1, score="adder", identity=False, temperature=temperature)
        seen, _ = watch(tasks.swap(teacher, student, images()))
        maps.append([each["weights"] for each in seen])
    np.testing.assert_allclose(*maps, rtol=1e-4, atol=1e-6)


def healing(of, progress=0.2, **fields):
    facts = tasks.ImageFacts((8, 8, 1), 10, (0.5,), (0.25,), False)
    settings = dataclasses.replace(tasks.HealingSettings(), **fields)
    return tasks.Healing(settings, facts, teacher=of, progress=progress)


@pytest.mark.slow
def test_an_adder_stem_begins_as_what_its_teacher_s_norms_make_of_its_convolutions():
    """A first convolution whose prototypes explain its teacher's normalised outputs as well as any
    scale and offset can, in NumPy, and better than prototypes of any other kernel."""
    sizes = dict(stem_channels=(12,), stem_strides=(2,))
    teacher, seen = make(**sizes), images(40)
    student = tasks.swap(teacher, make(seed=1, **sizes, stem_linear="adder"), seen)
    old, new = (model.patch_embed.stem[0] for model in (teacher, student))
    assert (old.norm is None, new.norm is None) == (False, True)
    windows = np.asarray(layers.neighbourhoods(seen), np.float64).reshape(-1, 9)
    sums = windows @ np.asarray(old.linear.kernel[...], np.float64) + old.linear.bias[...]
    wanted = normed(sums) * old.norm.scale[...] + old.norm.bias[...]
    distances = normed(-np.abs(windows[:, :, None] - np.asarray(new.linear.kernel[...])).sum(1))
    found = distances * new.linear.norm.scale[...] + new.linear.norm.bias[...]
    pairs = zip(distances.T, wanted.T, strict=True)
    best = np.transpose([np.polyval(np.polyfit(x, y, 1), x) for x, y in pairs])
    np.testing.assert_allclose(found, best, rtol=1e-3, atol=1e-3)
    assert ((found - wanted) ** 2).mean() < 0.5 * wanted.var(0).mean()


@pytest.mark.slow
def test_the_loss_is_that_of_its_formula():
    student = tasks.swap(make(), make(seed=1, **ADDER, anneal_end=0.5), images())
    chosen = dict(teacher="x", distillation="soft", distillation_share=0.3)
    chosen |= dict(distillation_temperature=2.0, map_weight=0.7, output_weight=0.4)
    chosen |= dict.fromkeys(("label_smoothing", "mixup_alpha", "cutmix_alpha"), 0.0)
    task, late = (healing(make(), progress, **chosen) for progress in (0.2, 0.6))
    pixels = np.random.default_rng(3).integers(0, 256, (6, 8, 8, 1), np.uint8)
    # Outputs of the second block vary more, and each counts by the variance of its own block.
    examples = task.examples(jax.random.key(0), {"image": pixels, "label": np.arange(6)})
    seen, targets, taught = (np.asarray(x) for x in examples[:3])
    np.testing.assert_allclose(taught, make()(seen), rtol=1e-4, atol=1e-5)
    (maps, outputs), (own_maps, own_outputs) = watch(make(), seen), watch(student, seen)
    divergence = lambda a, b: (a * np.log(a / b)).sum(-1).mean()
    pairs = zip(maps, own_maps, strict=True)
    by_maps = np.mean([divergence(a["weights"], b["weights"]) for a, b in pairs])
    pairs = [(a["output"], b["output"]) for a, b in zip(outputs, own_outputs, strict=True)]
    by_outputs = np.mean([((a - b) ** 2).mean() / a.var() for a, b in pairs])
    logits = np.asarray(student(seen), np.float64)
    soft = lambda x: softmax(np.asarray(x, np.float64) / 2)
    by_labels = -(targets * np.log(softmax(logits))).sum(-1).mean()
    logits_alone = 0.7 * by_labels + 0.3 * 4 * divergence(soft(taught), soft(logits))
    outcome = task.loss(student, examples, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(outcome.metrics["map_divergence"], by_maps, rtol=1e-4)
    np.testing.assert_allclose(outcome.metrics["output_error"], by_outputs, rtol=1e-4)
    expected = logits_alone + 0.7 * by_maps + 0.4 * by_outputs
    np.testing.assert_allclose(outcome.loss, expected, rtol=1e-4)
    loss = lambda task, examples: task.loss(student, examples, rngs=nnx.Rngs(0)).loss
    # Parts of a batch have its variance, and together its loss.
    parts = [jax.tree.map(lambda x, i=i: x[i::2], examples) for i in range(2)]
    np.testing.assert_allclose(np.mean([loss(task, p) for p in parts]), outcome.loss, rtol=1e-5)
    np.testing.assert_allclose(loss(late, examples), logits_alone, rtol=1e-4)


def test_what_is_no_teacher_to_begin_from_is_refused():
    without = make(mlp_linear="adder", adder_options={"norm": None})
    convolutions = models.ConvNet((4,), in_channels=1, rngs=nnx.Rngs(0))
    for teacher, student, message in (
        (make(score="adder"), make(), "dot-product attention and dense layers to begin from, got"),
        (make(), make(depth=1, **ADDER), "of the model's sizes"),
        (make(), without, "adder layers with a norm"),
        (convolutions, make(), "vision transformer .*, got a ConvNet"),
        (make(layer_scale=0.5), make(**ADDER), "parts.* got blocks.0.layer_scale1.scale, "),
        (make(), make(fc_norm=True), "got fc_norm.bias, fc_norm.scale, norm.bias, norm.scale,"),
        (make(), make(mlp_linear="normed_dense"), "got blocks.0.mlp.fc1.bias, .*fc1.norm.bias"),
        (make(mlp_linear="normed_dense"), make(**ADDER), "got blocks.0.mlp.fc1.bias, blocks.0.mlp"),
    ):
        with pytest.raises(ValueError, match=message):
            tasks.swap(teacher, student, images())


@pytest.mark.slow
def test_a_bypass_makes_maps_uniform_and_turns_branches_off():
    found, sums = {}, lambda model: float(np.asarray(model(images())).sum())
    for linear in ("dense", "adder"):
        options = ADDER if linear == "adder" else dict(score="adder", identity=False)
        model = make(**options)
        graphdef, params = nnx.split(model, nnx.Param)
        score = lambda changed, graphdef=graphdef: sums(nnx.merge(graphdef, changed))
        rows = report.bypass(model, score)
        found[linear] = {(row.part, row.block): row.score for row in rows}
        uniform = sums(with_uniform_maps(model))
        np.testing.assert_allclose(found[linear]["maps", None], uniform, rtol=1e-4)
    assert len(found["dense"]) == 2 + 3 * 2
    silent = make(score="adder", identity=False)
    layer = silent.blocks[1].mlp.fc2
    layer.kernel[...], layer.bias[...] = 0 * layer.kernel[...], 0 * layer.bias[...]
    np.testing.assert_allclose(found["dense"]["MLP", 1], sums(silent), rtol=1e-5)
    assert found["dense"]["attention", 0] != found["dense"]["attention", None]


@pytest.mark.parametrize(
    ("layer", "named"),
    [("qkv", "attention.key"), ("proj", "attention.out"), ("mlp", "mlp.fc2")],
)
def test_a_layer_that_zeros_do_not_turn_off_is_refused(layer, named):
    model = make(**{f"{layer}_linear": "adder"}, adder_options={"norm": None})
    with pytest.raises(ValueError, match=f"without a norm, blocks.0.{named}"):
        report.bypass(model, lambda params: 0.0)


@pytest.mark.slow
def test_a_run_begins_as_its_teacher_and_anneals_by_its_steps(tmp_path):
    config = common.deit("multiplicative", "tiny")
    config.update_from_flattened_dict(TINY | {"num_epochs": 0.1})
    training.Trainer(training.build_run(config), tmp_path / "teacher").fit()
    own = {"name": "healing", "teacher": str(tmp_path / "teacher"), "distillation": "soft"}
    fields = settings.defaults(tasks.HealingSettings) | config.task.to_dict() | own
    config.task = ConfigDict(fields)
    config.model.update(score="adder", identity="off", mlp_linear="adder")
    config.model.update(anneal_start=0.25, anneal_end=0.75)
    run = training.build_run(config)
    params, teacher, losses = run.init()["params"], run.task.teacher, []
    np.testing.assert_array_equal(params["head"]["kernel"], teacher.head.kernel[...])
    value = params["blocks"][0]["attention"]["value"]["kernel"]
    np.testing.assert_array_equal(value, teacher.blocks[0].attention.value.kernel[...])
    key = jax.random.key(1)
    examples = run.task.examples(jax.random.key(0), run.train_source.first(8))
    for step, share in ((0, 1.0), (run.num_steps / 2, 0.5), (run.num_steps, 0.0)):
        parts = run.program.parts({**run.numbers, "step": step})
        losses.append(float(parts.loss(params, examples, key).metrics["teacher_loss"]))
        model = run.model(params)
        for layer in (model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2):
            layer.set_squared_share(share)
        expected = run.task.loss(model, examples, rngs=nnx.Rngs(dropout=key)).metrics
        np.testing.assert_allclose(losses[-1], expected["teacher_loss"], rtol=1e-5)
    assert len(set(losses)) == 3
    result = training.Trainer(run, tmp_path / "healed").fit()
    assert result.step == run.num_steps
    config.task.begin = "random"
    at_random = training.build_run(config).init()["params"]
    assert not np.array_equal(at_random["head"]["kernel"], params["head"]["kernel"])
