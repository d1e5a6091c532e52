"""Reconstruction: loss, scores and curvature against NumPy in float64, padding, who is refused."""

import importlib

import flax.nnx as nnx
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from adder_flax import data, models, tasks, training
from adder_flax.compare import Plan
from adder_flax.errors import RunError
from adder_flax.settings import CompareSettings, defaults
from kfac.curvature._fisher import get_likelihood, output_cotangents
from tests.data.files import write_images

EXPERIMENT = importlib.import_module("experiments.autoencoder")


@pytest.fixture
def task():
    facts = tasks.Reconstruction.facts(data.load_source("digits", "train"))
    return tasks.Reconstruction(tasks.ReconstructionSettings(), facts)


@pytest.fixture
def batch():
    return {"image": data.load_source("digits", "train").first(6)["image"]}


def make_model(**options):
    return models.Autoencoder((6, 3), image_shape=(8, 8, 1), rngs=nnx.Rngs(0), **options)


def by_formula(model, images):
    """Nats and mean squared error of each image."""
    x = np.asarray(images, np.float64) / 255
    p = 1 / (1 + np.exp(-np.asarray(model(x.astype(np.float32)), np.float64)))
    losses = -(x * np.log(p) + (1 - x) * np.log(1 - p))
    return losses.sum((1, 2, 3)), np.square(p - x).mean((1, 2, 3))


def test_the_loss_is_the_sum_over_an_image_and_the_mean_over_images(task, batch):
    model = make_model()
    (images,) = task.examples(jax.random.key(0), batch)
    assert (images.min(), images.max()) == (0, 1)
    outcome = task.loss(model, (images,), rngs=nnx.Rngs(0))
    losses, errors = by_formula(model, batch["image"])
    np.testing.assert_allclose(outcome.loss, losses.mean(), rtol=1e-6)
    np.testing.assert_allclose(outcome.metrics["squared_error"], errors.mean(), rtol=1e-6)


def test_what_fills_a_batch_up_does_not_count(task, batch):
    model, mask = make_model(), np.arange(6) < 4
    sums = task.sums(model, batch | {"mask": mask})
    scores = task.scores({name: float(value) for name, value in sums.items()})
    losses, errors = by_formula(model, batch["image"][mask])
    expected = {"loss": losses.mean(), "squared_error": errors.mean()}
    assert scores == pytest.approx(expected, rel=1e-6)
    assert (task.best.name, task.best.largest) == ("loss", False)


def test_the_curvature_is_the_hessian_of_an_image(task, batch):
    """Of a Bernoulli variable for each value: p (1 − p)."""
    model, (images,) = make_model(), task.inputs(batch)
    outputs = task.loss(model, (images,), rngs=nnx.Rngs(0)).outputs
    likelihood = get_likelihood(task.likelihood)
    columns = output_cotangents("ggn", likelihood, outputs, jax.random.key(0), 1)
    p = 1 / (1 + np.exp(-np.asarray(model(images), np.float64)))
    found = np.square(columns[0]).reshape(p.shape)
    np.testing.assert_allclose(found, p * (1 - p), rtol=1e-5)


def tiny_config(**fields):
    config = EXPERIMENT.get_config()
    config.update_from_flattened_dict({"num_epochs": 2.0, "optimizer.warmup_epochs": 0.0} | fields)
    return config


PAIRS = [(name, "dense") for name in ("adamw", "kfac", "muon", "soap", "kl_shampoo")]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "linear"), [*PAIRS, ("adamw", "adder"), ("kfac", "adder")])
def test_steps_lower_the_loss(optimizer, linear):
    fields = {"optimizer.name": optimizer, "optimizer.learning_rate": 5e-3, "model.linear": linear}
    fields["optimizer.kfac.step"] = "share"
    run = training.build_run(tiny_config(num_epochs=8.0, **fields))
    state, batch, losses = run.init(), run.batches()[0], []
    for _ in range(20):
        state, metrics = run.train_step(state, batch, run.hyper)
        losses.append(float(metrics["loss"]))
    assert 64 * np.log(2) < losses[0] < 80  # nothing is known, and little said
    assert losses[1] < losses[0]
    assert losses[-1] < 0.9 * losses[0]
    if optimizer == "kfac":
        layers = run.program.layers
        assert all("/norm/" in path for path in layers.shapes.keys() - layers.block_of)


def test_the_experiment_is_the_benchmarks_network_and_can_be_compared():
    config = EXPERIMENT.get_config()
    run = training.build_run(config)
    params = run.abstract_state["params"]
    layers = [*params["encoder"].values(), *params["decoder"].values()]
    shapes = [layer["kernel"].shape for layer in layers]
    assert shapes == [(64, 48), (48, 24), (24, 8), (8, 24), (24, 48), (48, 64)]
    assert run.num_steps == 250
    optimizers = {name: {"optimizer": {"name": name}} for name in ("adamw", "muon")}
    fields = {"title": "Two", "base": config, "factors": {"optimizer": optimizers}}
    assert list(Plan(ConfigDict(defaults(CompareSettings) | fields)).arms) == ["adamw", "muon"]


def test_a_set_without_images_is_refused():
    arrays = {"source": np.ones((600, 3), np.int32), "target": np.ones((600, 3), np.int32)}
    symbols = {"source": ("", "a"), "target": ("", "a")}
    words = data.SequenceSource("words", "train", ["train"], arrays, symbols, longest=3)
    message = r"^Expected a data set of images.* for config\.task\.name=reconstruction, got words\."
    with pytest.raises(RunError, match=message):
        training.build_run(EXPERIMENT.get_config(), load=lambda *_, **__: words)


def test_large_images_are_read_without_random_crops(tmp_path):
    for place in ("train/a", "train/b", "val/a"):
        write_images(tmp_path / place, 1, side=30)
    fields = {"data.name": "folder", "data.data_dir": str(tmp_path), "data.image_size": 8}
    source = training.build_run(tiny_config(batch_size=2, **fields)).train_source
    rows = np.arange(2)
    for seeds in ([(0, 1), (0, 2)], [(0, 3), (0, 4)]):
        images = source.read(rows, seeds)[0]["image"]
        np.testing.assert_array_equal(images, source.read(rows)[0]["image"])
