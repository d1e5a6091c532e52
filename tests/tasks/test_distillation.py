"""Distillation: the loss against NumPy, teachers of every kind in one process, a student that
follows its teacher."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from adder_flax import data, interop, models, settings, tasks, training
from adder_flax.experiments import common
from kfac.curvature._fisher import get_likelihood, read_weights
from tests.training.tiny import TINY

FACTS = tasks.ImageFacts((8, 8, 1), 10, (0.5,), (0.25,), False)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def make_model(**options):
    sizes = dict(image_size=8, patch_size=4, channels=1, num_classes=10)
    sizes |= dict(width=16, depth=1, num_heads=2)
    return models.VisionTransformer(**sizes | options, rngs=nnx.Rngs(0))


def task_of(kind):
    numbers = dict(distillation_share=0.3, distillation_temperature=2.0)
    settings = tasks.DistillationSettings(teacher="x", distillation=kind, **numbers)
    return tasks.Distillation(settings, FACTS)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("distilled", [True, False])
def test_the_loss_is_that_of_the_paper(kind, distilled):
    rng = np.random.default_rng(0)
    images, taught = rng.normal(size=(6, 8, 8, 1)).astype("f"), rng.normal(size=(6, 10)).astype("f")
    targets = rng.dirichlet(np.ones(10), 6).astype("f")
    task = task_of(kind)
    model = make_model(distilled=distilled)
    outcome = task.loss(model, (images, targets, taught), rngs=nnx.Rngs(0))
    heads = np.asarray(model.heads(images), np.float64)
    assert heads.shape == (6, 2 if distilled else 1, 10)
    by_labels = -(targets * log_softmax(heads[:, 0])).sum(-1).mean()
    if kind == "hard":
        by_teacher = -log_softmax(heads[:, -1])[np.arange(6), taught.argmax(-1)].mean()
    else:
        expected, found = log_softmax(taught / 2), log_softmax(heads[:, -1] / 2)
        by_teacher = 4 * (np.exp(expected) * (expected - found)).sum(-1).mean()
    np.testing.assert_allclose(outcome.loss, 0.7 * by_labels + 0.3 * by_teacher, rtol=1e-5)
    np.testing.assert_allclose(model(images), heads.mean(1), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_the_curvature_is_the_hessian_of_both_terms(kind, num_heads):
    """JAX's Hessian in the logits of the heads; its blocks are those of images, times their number.

    The roots of both terms' Hessians are pulled back to the heads one by one.
    """
    rng, size = np.random.default_rng(0), num_heads * 3
    logits = jnp.float32(rng.normal(size=(2, num_heads, 3)))
    taught, targets = rng.normal(size=(2, 3)), jnp.float32(rng.dirichlet(np.ones(3), 2))
    task = task_of(kind)

    def outcome(logits):
        model = types.SimpleNamespace(heads=lambda *_, **__: logits)
        return task.loss(model, (jnp.zeros((2, 1)), targets, taught), rngs=nnx.Rngs(0))

    hessian = jax.jit(jax.hessian(lambda z: outcome(z).loss))(logits).reshape(2, size, 2, size)
    outputs, pull = jax.vjp(lambda z: outcome(z).outputs, logits)
    share = read_weights(outcome(logits).weights, 2).shares()
    likelihood, found = get_likelihood(task.likelihood), np.zeros((2, size, size))
    for position in range(2):
        for unit in np.eye(3, dtype="f"):
            columns = likelihood.root(outputs, jnp.broadcast_to(unit, outputs.shape))
            columns = columns * jnp.sqrt(share)[..., None]
            (column,) = pull(jnp.zeros_like(columns).at[:, position].set(columns[:, position]))
            column = np.asarray(column, np.float64).reshape(2, size)
            found += column[:, :, None] * column[:, None]
    expected = [2 * hessian[image, :, image] for image in range(2)]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def tiny(**fields):
    config = common.deit("multiplicative", "tiny")
    config.update_from_flattened_dict(TINY | fields)
    return config


def taught_by(teacher, **fields):
    config = tiny(**fields)
    task = settings.defaults(tasks.DistillationSettings) | config.task.to_dict()
    config.task = ConfigDict(task | {"name": "distillation", "teacher": str(teacher)})
    return config


def train(config, workdir):
    return training.Trainer(training.build_run(config), workdir).fit()


def train_teacher(workdir, **fields):
    """A convolutional network, trained for a moment; returns what it says of normalised images."""
    config = tiny(**{"num_epochs": 0.1} | fields)
    config.model = ConfigDict(settings.defaults(models.ConvNetSettings) | {"channels": "4,8"})
    result = train(config, workdir)
    teacher = models.ConvNet((4, 8), in_channels=1, num_classes=10, rngs=nnx.Rngs(1))
    nnx.update(teacher, training.evaluation_params(result.state))
    return teacher


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("teacher")
    return workdir, train_teacher(workdir)


def first_examples(run):
    """Images of the first batch as the student sees them, and what the teacher says of them."""
    images, _, taught = run.task.examples(jax.random.key(0), run.train_source.first(4))
    return images, taught


@pytest.mark.slow
def test_a_run_teaches_and_its_files_are_read_again_to_resume(teacher_run, tmp_path):
    """The student's examples have what the teacher says of the same augmented images."""
    workdir, teacher = teacher_run
    run = training.build_run(taught_by(workdir, **{"model.distilled": True, "num_epochs": 0.1}))
    images, taught = first_examples(run)
    np.testing.assert_allclose(taught, teacher(images), rtol=1e-4, atol=1e-5)
    first = training.Trainer(run, tmp_path / "student").fit()
    assert first.step == run.num_steps
    assert train(run.config, tmp_path / "student").evaluation == first.evaluation
    rows = [json.loads(line) for line in (tmp_path / "student" / "metrics.jsonl").open()]
    assert {"train/teacher_loss", "train/teacher_agreement"} <= rows[0].keys()
    # None of the teacher's:
    assert not [leaf for leaf in jax.tree.leaves(first.state) if leaf.shape == (3, 3, 1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("said", [True, False])
def test_a_teacher_of_another_set_sees_images_normalised_as_it_learned_them(said, tmp_path):
    """Half as bright, its images have another mean than the student's, said or measured."""
    statistics = {"bright": ((0.2,), (0.5,)), "dark": ((0.1,), (0.3,))} if said else {}

    def load(split, *, name, **options):
        source = data.load_source("digits", split)
        images = source.images if name == "bright" else source.images // 2
        given = source.labels, source.label_names
        return data.ArraySource(name, split, source.splits, images, *given)

    with data.SETS.temporary():
        for name in ("bright", "dark"):
            shape = (("train", "test"), (8, 8, 1), 10)
            data.register_source(data.DataSet(name, load, *shape, statistics.get(name)))
        teacher = train_teacher(tmp_path, **{"data.name": "dark"})
        run = training.build_run(taught_by(tmp_path, **{"data.name": "bright"}))
        images, taught = first_examples(run)
        pairs = [data.channel_statistics(data.load_source(n, "train")) for n in ("bright", "dark")]
    (((mean,), (std,)), ((own_mean,), (own_std,))) = pairs
    assert pairs[0] == statistics.get("bright", pairs[0])
    expected = teacher((images * std + mean - own_mean) / own_std)
    np.testing.assert_allclose(taught, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_teachers_parameters_are_arguments_of_the_step(teacher_run):
    workdir, teacher = teacher_run
    text = training.trace(training.build_run(taught_by(workdir))).lower().as_text()
    assert teacher.stem.kernel.shape == (3, 3, 1, 4)
    assert "tensor<3x3x1x4xf32>" in text.partition("func.func public @main")[2].partition("->")[0]


@pytest.mark.slow
def test_weights_of_timm_and_hugging_face_teach_by_path(tmp_path):
    facts = {"timm": {"architecture": "vit_tiny_patch16_224", "model_args": {"num_heads": 2}}}
    facts["timm"]["pretrained_cfg"] = {"mean": [0.5], "std": [0.5]}
    facts["hugging_face"] = {"model_type": "vit", "num_attention_heads": 2, "layer_norm_eps": 1e-6}
    ((mean,), (std,)) = data.channel_statistics(data.load_source("digits", "train"))
    model = make_model()
    for names, config in facts.items():
        path = tmp_path / names / "model.safetensors"
        path.parent.mkdir()
        interop.save_weights(model, path, names=names)
        (path.parent / "config.json").write_text(json.dumps(config))
        images, taught = first_examples(training.build_run(taught_by(path)))
        seen = images if names == "hugging_face" else (images * std + mean - 0.5) / 0.5
        np.testing.assert_allclose(taught, model(seen), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_teacher_that_cannot_teach_is_refused_in_one_message(teacher_run, tmp_path):
    run, other, own = teacher_run[0], tmp_path / "timm.safetensors", tmp_path / "own.safetensors"
    interop.save_weights(make_model(num_classes=7), other, names="timm")
    interop.save_weights(make_model(), own)
    for teacher, fields, message in (
        ("", {}, "config.task.teacher: expected .* got nothing"),
        (tmp_path, {}, "expected the directory of a run"),
        (tmp_path / "none", {}, "got nothing at .*none; train it first"),
        (run, {"data.name": "fake", "data.image_size": 16}, "of 16 pixels, .* which saw 8"),
        (other, {}, "expected a head for 10 classes in .*: head.bias, head.kernel"),
        (own, {}, "take the directory of the run"),
        (run, {"model.distilled": True, "model.pooling": "mean"}, "distilled: expected False with"),
    ):
        with pytest.raises(training.RunError, match=message):
            training.build_run(taught_by(teacher, **fields))
