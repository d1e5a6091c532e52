"""Every experiment file builds the network that its name says."""

import functools
import importlib

import jax
import numpy as np
import pytest
from flax import nnx

from adder_flax.attention import resolve_scale
from adder_flax.data import EVAL_CROP_RATIO, load_source
from adder_flax.errors import RunError
from adder_flax.settings import RunSettings, read
from tests.training.pieces import vit

SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
EXPERIMENTS = sorted(
    f"{prefix}deit_{size}" for prefix in ("", "adder_", "additive_") for size in SIZES
)


def _build(name, data=None):
    config = importlib.import_module(f"experiments.{name}").get_config(data)
    source = load_source("fake", "train", image_size=config.data.image_size, num_classes=1000)
    return config, nnx.eval_shape(lambda: vit(read(RunSettings, config).model, source))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_file_gives_the_mechanism_and_size_of_its_name(name):
    config, model = _build(name)
    assert (config.model.width, config.model.num_heads) == SIZES[name.split("_")[-1]]
    mechanism = name.split("_")[0]
    assert (
        config.model.score == {"adder": "adder", "additive": "additive", "deit": "dot"}[mechanism]
    )
    linear = "adder" if mechanism == "adder" else "dense"
    assert {config.model[f"{part}_linear"] for part in ("qkv", "proj", "mlp")} == {linear}
    assert len(model.blocks) == 12


@pytest.mark.parametrize(
    ("name", "millions"),
    [("deit_tiny", 5.717416), ("deit_small", 22.050664), ("deit_base", 86.567656)],
)
def test_parameters_of_the_multiplicative_224_pixel_models_are_deits(name, millions):
    _, model = _build(name, "imagenet2012")
    sizes = [np.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sum(sizes) == millions * 1e6


@pytest.mark.parametrize(
    ("data", "tokens"),
    [(None, 17), ("cifar10", 65), ("fashion_mnist", 50), ("mnist", 50), ("imagenet2012", 197)],
)
def test_patches_follow_the_data(data, tokens):
    _, model = _build("deit_tiny", data)
    assert model.pos_embed.shape[1] == tokens


def test_mirrored_and_mixed_are_photographs_alone():
    for data, probability in (
        ("mnist", 0.0),
        ("digits", 0.0),
        ("fashion_mnist", 0.5),
        ("folder", 0.5),
    ):
        task = importlib.import_module("experiments.deit_tiny").get_config(data).task
        assert task.flip_probability == probability
        assert (task.mixup_alpha > 0) == (probability > 0)


@pytest.mark.parametrize(("name", "scale"), [("deit_tiny", 64**-0.5), ("additive_deit_tiny", 1.0)])
def test_scores_are_scaled_as_their_formulas_say(name, scale):
    _, model = _build(name)
    attention = model.blocks[0].attention
    assert (
        resolve_scale(attention.settings.score, attention.settings.scale, attention.head_dim)
        == scale
    )


@pytest.mark.parametrize(("setting", "key_block"), [("auto", "auto"), ("off", None), ("4", 4)])
def test_a_key_block_reaches_every_block(setting, key_block):
    config = importlib.import_module("experiments.deit_tiny").get_config()
    assert config.model.key_block == "auto"
    config.model.key_block = setting
    source = load_source("fake", "train", image_size=config.data.image_size, num_classes=10)
    model = nnx.eval_shape(lambda: vit(read(RunSettings, config).model, source))
    assert {block.attention.settings.key_block for block in model.blocks} == {key_block}


def test_the_twin_of_the_fast_recipe_has_its_sizes():
    """The same convolutions, then 4 × 4 tokens in either kind of layer; it heals on the same
    images."""
    own, twin = (
        importlib.import_module(f"experiments.{name}cifar10_fast").get_config()
        for name in ("", "adder_")
    )
    kinds = {"score", "qkv_linear", "proj_linear", "mlp_linear"}
    models = [config.model.to_dict() for config in (own, twin)]
    differ = {name for name in models[0] if models[0][name] != models[1][name]}
    assert differ == kinds | {"identity", "adder_options", "anneal_end", "anneal_blocks"}
    assert {twin.model[name] for name in kinds} == {"adder"}
    assert {name: twin.task[name] for name in own.task if name != "name"} == {
        name: value for name, value in own.task.items() if name != "name"
    }
    assert own.data == twin.data
    source = load_source("fake", "train", image_size=32, num_classes=10)
    for config in (own, twin):
        model = nnx.eval_shape(functools.partial(vit, read(RunSettings, config).model, source))
        assert model.pos_embed.shape == (1, 16, 192)


def test_the_recipe_of_deit_is_its_defaults():
    """Table 9 of the paper and the defaults of facebookresearch/deit's main.py, typed off."""
    config = importlib.import_module("experiments.deit_recipe").get_config()
    run = read(RunSettings, config)
    task, optimizer = run.task, run.optimizer
    assert (run.data.name, run.data.image_size, run.model.patch_size) == ("imagenet2012", 224, 16)
    assert (run.num_epochs, run.batch_size, run.ema_decay, run.data.repeats) == (
        300,
        1024,
        0.99996,
        3,
    )
    assert (optimizer.name, optimizer.learning_rate, optimizer.final_learning_rate) == (
        "adamw",
        5e-4 * 1024 / 512,
        1e-5,
    )
    assert (optimizer.warmup_epochs, optimizer.weight_decay, optimizer.clip_norm) == (5, 0.05, None)
    assert (optimizer.b1, optimizer.b2) == (0.9, 0.999)
    assert (task.mixup_alpha, task.cutmix_alpha, task.mix_probability) == (0.8, 1, 1)
    assert (
        task.mix_per,
        task.label_smoothing,
        run.model.drop_path_rate,
        run.model.dropout_rate,
    ) == ("batch", 0.1, 0.1, 0)
    assert task.erase_probability == 0.25
    assert (task.rand_augment_magnitude, task.rand_augment_std) == (9, 0.5)
    assert (task.rand_augment_increasing, task.rand_augment_interpolation) == (True, "bicubic")
    assert (task.color_jitter, task.three_augment) == (0, False)
    assert (task.resized_crop_scale, task.resized_crop_ratio, task.flip_probability) == (
        (0.08, 1),
        (3 / 4, 4 / 3),
        0.5,
    )
    assert EVAL_CROP_RATIO == 0.875


def test_the_recipe_of_deit_3_is_that_of_its_commands():
    """The first two training commands of facebookresearch/deit's README_revenge.md, typed off."""
    get_config = importlib.import_module("experiments.deit3_recipe").get_config
    for size, rate, drop_path_rate, pixels in (
        ("small", 4e-3, 0.05, 224),
        ("base", 3e-3, 0.2, 192),
    ):
        run = read(RunSettings, get_config(f"multiplicative,{size},imagenet2012"))
        optimizer, task, data = run.optimizer, run.task, run.data
        assert (run.batch_size, run.num_epochs, run.ema_decay, run.seed) == (8 * 256, 800, 0, 0)
        assert (optimizer.name, optimizer.learning_rate, optimizer.warmup_epochs) == (
            "lamb",
            rate,
            5,
        )
        assert (optimizer.weight_decay, optimizer.clip_norm, optimizer.b1, optimizer.b2) == (
            0.05,
            1,
            0.9,
            0.999,
        )
        assert (data.image_size, data.eval_crop_ratio, data.repeats) == (pixels, 1, 3)
        assert (task.loss, task.label_smoothing, task.erase_probability, task.three_augment) == (
            "sigmoid",
            0,
            0,
            True,
        )
        assert task.color_jitter == 0.3
        assert (task.rand_augment_magnitude, task.mixup_alpha, task.cutmix_alpha) == (0, 0.8, 1)
        assert (run.model.layer_scale, run.model.drop_path_rate, run.model.dropout_rate) == (
            1e-4,
            drop_path_rate,
            0,
        )


def test_the_recipe_of_deit_takes_a_mechanism_a_size_and_data():
    config = importlib.import_module("experiments.deit_recipe").get_config("adder,small,folder")
    assert (config.model.score, config.model.mlp_linear, config.model.width) == (
        "adder",
        "adder",
        384,
    )
    assert (config.data.name, config.task.rand_augment_magnitude) == ("folder", 9)
    assert config.optimizer.clip_norm == 0
    with pytest.raises(RunError, match="expected .*mechanism,size,data.*, got 'dot,tiny'"):
        importlib.import_module("experiments.deit_recipe").get_config("dot,tiny")
