"""Every experiment file builds the network that its name says."""

import functools
import importlib
import operator
import os
import re
import subprocess

import pytest
from flax import nnx

from adder_flax.attention import resolve_scale
from adder_flax.data import EVAL_CROP_RATIO, load_source
from adder_flax.errors import RunError
from adder_flax.settings import RunSettings, read
from tests.processes import ROOT
from tests.training.pieces import vit

SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
EXPERIMENTS = [f"{front}deit_{size}" for front in ("adder_", "additive_", "") for size in SIZES]


def config_of(name, *argument):
    return importlib.import_module(f"experiments.{name}").get_config(*argument)


def _build(name, data=None):
    config = config_of(name, data)
    source = load_source("fake", "train", image_size=config.data.image_size)
    return config, nnx.eval_shape(lambda: vit(read(RunSettings, config).model, source))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_file_gives_the_mechanism_and_size_of_its_name(name):
    config, model = _build(name)
    assert (config.model.width, config.model.num_heads) == SIZES[name.split("_")[-1]]
    mechanism = name.split("_")[0].replace("deit", "dot")
    assert config.model.score == mechanism
    linear = "adder" if mechanism == "adder" else "dense"
    assert {config.model[f"{part}_linear"] for part in ("qkv", "proj", "mlp")} == {linear}
    assert len(model.blocks) == 12


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("data", "tokens"),
    [(None, 17), ("cifar10", 65), ("fashion_mnist", 50), ("mnist", 50), ("imagenet2012", 197)],
)
def test_patches_follow_the_data(data, tokens):
    _, model = _build("deit_tiny", data)
    assert model.pos_embed.shape[1] == tokens


def test_mirrored_and_mixed_are_photographs_alone():
    for data, probability in dict(mnist=0.0, digits=0.0, fashion_mnist=0.5, folder=0.5).items():
        task = config_of("deit_tiny", data).task
        assert task.flip_probability == probability
        assert (task.mixup_alpha > 0) == (probability > 0)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "scale"), [("deit_tiny", 64**-0.5), ("additive_deit_tiny", 1.0)])
def test_scores_are_scaled_as_their_formulas_say(name, scale):
    _, model = _build(name)
    attention = model.blocks[0].attention
    score, given = attention.settings.score, attention.settings.scale
    assert resolve_scale(score, given, attention.head_dim) == scale


def test_the_twin_of_the_fast_recipe_has_its_sizes():
    """The same convolutions, then 4 × 4 tokens; it heals on the same images."""
    own, twin = config_of("cifar10_fast"), config_of("adder_cifar10_fast")
    kinds = {"score", "qkv_linear", "proj_linear", "mlp_linear"}
    models = [config.model.to_dict() for config in (own, twin)]
    differ = {name for name in models[0] if models[0][name] != models[1][name]}
    assert differ == kinds | {"identity", "adder_options", "anneal_end", "anneal_blocks"}
    assert {twin.model[name] for name in kinds} == {"adder"}
    assert own.task.to_dict().items() - twin.task.to_dict().items() == {("name", own.task.name)}
    assert own.data == twin.data
    source = load_source("fake", "train", image_size=32)
    for config in (own, twin):
        model = nnx.eval_shape(functools.partial(vit, read(RunSettings, config).model, source))
        assert model.pos_embed.shape == (1, 16, 192)


def has(section, **fields):
    assert {name: getattr(section, name) for name in fields} == fields


def test_the_recipe_of_deit_is_its_defaults():
    """Table 9 of the paper and the defaults of facebookresearch/deit's main.py, typed off."""
    run = read(RunSettings, config_of("deit_recipe"))
    has(run, num_epochs=300, batch_size=1024, ema_decay=0.99996)
    has(run.data, name="imagenet2012", image_size=224, repeats=3)
    has(run.model, patch_size=16, drop_path_rate=0.1, dropout_rate=0)
    has(run.optimizer, name="adamw", learning_rate=5e-4 * 1024 / 512, final_learning_rate=1e-5)
    has(run.optimizer, warmup_epochs=5, weight_decay=0.05, clip_norm=None, b1=0.9, b2=0.999)
    has(run.task, mixup_alpha=0.8, cutmix_alpha=1, mix_probability=1, mix_per="batch")
    has(run.task, rand_augment_magnitude=9, rand_augment_std=0.5)
    has(run.task, color_jitter=0, three_augment=False)
    has(run.task, resized_crop_scale=(0.08, 1), resized_crop_ratio=(3 / 4, 4 / 3))
    has(run.task, flip_probability=0.5, erase_probability=0.25, label_smoothing=0.1)
    assert EVAL_CROP_RATIO == 0.875


@pytest.mark.parametrize(
    ("size", "rate", "drop_path_rate", "pixels"),
    [("small", 4e-3, 0.05, 224), ("base", 3e-3, 0.2, 192)],
)
def test_the_recipe_of_deit_3_is_that_of_its_commands(size, rate, drop_path_rate, pixels):
    """The first two training commands of facebookresearch/deit's README_revenge.md, typed off."""
    run = read(RunSettings, config_of("deit3_recipe", f"multiplicative,{size},imagenet2012"))
    has(run, batch_size=8 * 256, num_epochs=800, ema_decay=0, seed=0)
    has(run.optimizer, name="lamb", learning_rate=rate, warmup_epochs=5)
    has(run.optimizer, weight_decay=0.05, clip_norm=1, b1=0.9, b2=0.999)
    has(run.data, image_size=pixels, eval_crop_ratio=1, repeats=3)
    has(run.task, loss="sigmoid", label_smoothing=0, erase_probability=0, three_augment=True)
    has(run.task, color_jitter=0.3, rand_augment_magnitude=0, mixup_alpha=0.8, cutmix_alpha=1)
    has(run.model, layer_scale=1e-4, drop_path_rate=drop_path_rate, dropout_rate=0)


def test_the_recipe_of_deit_takes_a_mechanism_a_size_and_data():
    config = config_of("deit_recipe", "adder,small,folder")
    has(config.model, score="adder", mlp_linear="adder", width=384)
    assert (config.data.name, config.task.rand_augment_magnitude) == ("folder", 9)
    assert config.optimizer.clip_norm == 0
    with pytest.raises(RunError, match="expected .*mechanism,size,data.*, got 'dot,tiny'"):
        config_of("deit_recipe", "dot,tiny")


@pytest.mark.parametrize(
    ("name", "argument", "among"),
    [
        ("compare_optimizers", "cifar10", "multiplicative, additive, adder"),
        ("compare_trained", "mnist", "digits, fashion_mnist, cifar10, cmudict"),
        ("compare_second_order", "mnist", "fashion_mnist, cifar10"),
        ("compare_healing", "fashion_mnist", "attention, all"),
    ],
)
def test_what_no_comparison_takes_is_named_with_what_it_takes(name, argument, among):
    with pytest.raises(RunError, match=f"expected {among} behind the colon .*got '{argument}'"):
        config_of(name, argument)


def test_the_half_hour_of_a_gpu_names_what_there_is_and_goes_on_where_it_was(tmp_path):
    """With a command in place of Python that notes its arguments and leaves what a run leaves."""
    (tmp_path / "python").write_text(
        '#!/bin/bash\necho "$@" >> commands\n'
        'for a in "$@"; do case $a in --workdir=*) w=${a#*=};; esac; done\n'
        'mkdir -p "$w/report"; touch "$w"/{config.json,metrics.jsonl,report/claims.csv}\n'
    )
    (tmp_path / "python").chmod(0o755)
    script = (ROOT / "experiments/gpu_half_hour.sh").read_text()
    script = script.replace('cd "$(dirname "$0")/.."', f'cd "{tmp_path}"')
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAST": "1"}
    for half, runs in (("first", 5), ("second", 10), ("first", 0)):
        (tmp_path / "commands").unlink(missing_ok=True)
        subprocess.run(["bash", "-c", script, "bash", half], env=environ, check=True)
        noted = tmp_path / "commands"
        commands = noted.read_text().splitlines() if noted.exists() else []
        assert len(commands) == 2 * runs
        for command in commands[::2]:
            [name] = re.findall(r"--config=experiments/(\w+)\.py:cifar10", command)
            config = config_of(name, "cifar10")
            for path, value in re.findall(r"--config\.([\w.]+)=(\S+)", command):
                *sections, field = path.split(".")
                section = functools.reduce(operator.getitem, sections, config)
                section[field] = type(section[field])(value)
            read(RunSettings, config)
