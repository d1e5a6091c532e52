"""Every experiment file builds the network that its name says."""

import importlib

import jax
import numpy as np
import pytest
from flax import nnx

from adder_flax.attention import resolve_scale
from adder_flax.data import load_source
from adder_flax.settings import RunSettings, SettingsError, read
from tests.processes import ROOT
from tests.training.pieces import vit

EXPERIMENTS = sorted(path.stem for path in (ROOT / "experiments").glob("*deit_*.py"))
SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}


def _build(name, data=None):
    config = importlib.import_module(f"experiments.{name}").get_config(data)
    source = load_source("fake", "train", image_size=config.data.image_size, num_classes=1000)
    return config, nnx.eval_shape(lambda: vit(read(RunSettings, config).model, source))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_file_gives_the_mechanism_and_size_of_its_name(name):
    config, model = _build(name)
    assert (config.model.width, config.model.num_heads) == SIZES[name.split("_")[-1]]
    mechanism = name.split("_")[0]
    assert config.model.score == {"adder": "adder", "additive": "additive", "deit": "dot"}[mechanism]
    linear = "adder" if mechanism == "adder" else "dense"
    assert {config.model[f"{part}_linear"] for part in ("qkv", "proj", "mlp")} == {linear}
    assert len(model.blocks) == 12


@pytest.mark.parametrize(
    ("name", "millions"), [("deit_tiny", 5.717416), ("deit_small", 22.050664), ("deit_base", 86.567656)]
)
def test_parameters_of_the_multiplicative_224_pixel_models_are_deits(name, millions):
    _, model = _build(name, "imagenet2012")
    sizes = [np.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sum(sizes) == millions * 1e6


@pytest.mark.parametrize(
    ("data", "tokens"), [(None, 17), ("cifar10", 65), ("fashion_mnist", 50), ("mnist", 50), ("imagenet2012", 197)]
)
def test_patches_follow_the_data(data, tokens):
    _, model = _build("deit_tiny", data)
    assert model.pos_embed.shape[1] == tokens


def test_mirrored_and_mixed_are_photographs_alone():
    for data, probability in (("mnist", 0.0), ("digits", 0.0), ("fashion_mnist", 0.5), ("folder", 0.5)):
        task = importlib.import_module("experiments.deit_tiny").get_config(data).task
        assert task.flip_probability == probability
        assert (task.mixup_alpha > 0) == (probability > 0)


@pytest.mark.parametrize(("name", "scale"), [("deit_tiny", 64**-0.5), ("additive_deit_tiny", 1.0)])
def test_scores_are_scaled_as_their_formulas_say(name, scale):
    _, model = _build(name)
    attention = model.blocks[0].attention
    assert resolve_scale(attention.settings.score, attention.settings.scale, attention.head_dim) == scale


@pytest.mark.parametrize(("setting", "key_block"), [("auto", "auto"), ("off", None), ("4", 4)])
def test_a_key_block_reaches_every_block(setting, key_block):
    config = importlib.import_module("experiments.deit_tiny").get_config()
    assert config.model.key_block == "auto"
    config.model.key_block = setting
    source = load_source("fake", "train", image_size=config.data.image_size, num_classes=10)
    model = nnx.eval_shape(lambda: vit(read(RunSettings, config).model, source))
    assert {block.attention.settings.key_block for block in model.blocks} == {key_block}


@pytest.mark.parametrize("setting", ["0", "-1", "many"])
def test_a_key_block_that_is_none_is_refused(setting):
    config = importlib.import_module("experiments.deit_tiny").get_config()
    config.model.key_block = setting
    source = load_source("fake", "train", image_size=config.data.image_size, num_classes=10)
    with pytest.raises(SettingsError, match="config.model.key_block: expected 'auto', 'off' or an integer from 1"):
        vit(read(RunSettings, config).model, source)


def test_the_fast_recipes_differ_in_their_layers_alone():
    """Convolutions, then 8 × 8 tokens, in either kind of layer."""
    own, twin = (importlib.import_module(f"experiments.{name}cifar10_fast").get_config() for name in ("", "adder_"))
    kinds = {"score", "qkv_linear", "proj_linear", "mlp_linear", "stem_linear"}
    flat = [config.to_dict() for config in (own, twin)]
    differ = {name for name in flat[0]["model"] if flat[0]["model"][name] != flat[1]["model"][name]}
    assert differ == kinds
    assert {twin.model[name] for name in kinds} == {"adder"}
    assert {name: section for name, section in flat[0].items() if name != "model"} == {
        name: section for name, section in flat[1].items() if name != "model"
    }
    source = load_source("fake", "train", image_size=32, num_classes=10)
    model = nnx.eval_shape(lambda: vit(read(RunSettings, twin).model, source))
    assert model.pos_embed.shape == (1, 64, 128)
