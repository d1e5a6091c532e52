"""What the experiments share: DeiT's sizes, the three mechanisms, and one recipe per kind of data.

An experiment file is ``get_config = functools.partial(common.deit, mechanism, size)`` and a header
that says what it gives. The argument after the colon names the data:
``--config=experiments/adder_deit_tiny.py:cifar10``. What is not set here has the default of
``adder_flax.settings``, with the ranges and reasons of all fields (docs/settings.md).

Sources: sizes and the ImageNet recipe, Touvron et al., "Training data-efficient image
transformers", 2021 (DeiT); the CIFAR recipe, Lee et al., "Vision Transformer for Small-Size
Datasets", 2021.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from adder_flax import settings
from adder_flax.data import DataSet, describe
from adder_flax.errors import RunError

# Pixels up to which images are small.
_SMALL_SIDE = 64

MECHANISMS = {
    "multiplicative": dict(
        score="dot", qkv_linear="dense", proj_linear="dense", mlp_linear="dense"
    ),
    "additive": dict(score="additive", qkv_linear="dense", proj_linear="dense", mlp_linear="dense"),
    # Patch embedding, the product of map and values, and the head stay multiplicative.
    "adder": dict(score="adder", qkv_linear="adder", proj_linear="adder", mlp_linear="adder"),
}


def chosen(choices: Mapping[str, Any], name: str) -> Any:
    """Returns what a name behind the colon of ``--config`` stands for.

    Raises:
      RunError: it is none of the names.
    """
    if name not in choices:
        raise RunError(
            f"expected {', '.join(choices)} behind the colon of --config, got {name!r}; the header "
            "of the experiment's file says what it takes"
        )
    return choices[name]


def deit(mechanism: str, size: str, data: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration of a DeiT of one mechanism and size on one data set.

    Args:
      mechanism: ``multiplicative``, ``additive`` or ``adder``.
      size: ``tiny``, ``small`` or ``base``.
      data: ``digits`` (the default), ``folder``, ``fake``, any TFDS image-classification set, or
        one added with ``adder_flax.data.register_source``. Images of up to 64 pixels get CIFAR's
        recipe with patches that divide them, others ImageNet's.
    """
    data = data or "digits"
    width, num_heads = chosen(settings.DEIT_SIZES, size)
    config = ml_collections.ConfigDict(settings.defaults(settings.RunSettings))
    config.model.update(width=width, num_heads=num_heads, **chosen(MECHANISMS, mechanism))
    config.data.name = data
    _recipe(data)(config)
    return config


def shorten(config: ml_collections.ConfigDict, num_epochs: float) -> None:
    """Makes a training on small images one of minutes on one core.

    16 patches, small batches for more steps, and no regularisation but shifts and mirroring.
    """
    config.model.update(patch_size=config.data.image_size // 4, drop_path_rate=0.0)
    config.task.update(mixup_alpha=0.0, cutmix_alpha=0.0, erase_probability=0.0, crop_padding=2)
    config.update(batch_size=64, num_epochs=num_epochs, eval_every_steps=211)
    config.optimizer.warmup_epochs = num_epochs / 10


def _imagenet(config: ml_collections.ConfigDict) -> None:
    """DeiT's recipe less RandAugment and repeated augmentation.

    experiments/deit_recipe.py has them.
    """
    config.model.drop_path_rate = 0.1


def _small_images(config: ml_collections.ConfigDict, crop_padding: int) -> None:
    """Shifts in place of resized crops and colour jitter."""
    config.task.update(
        resized_crop_scale=(),
        crop_padding=crop_padding,
        color_jitter=0.0,
    )


def _small(config: ml_collections.ConfigDict, known: DataSet) -> None:
    """CIFAR's recipe for images of any small size; characters are neither mirrored nor mixed."""
    side = known.image_shape[0]
    if known.kind == "characters":
        _only_shifts(config)
    else:
        _small_images(config, crop_padding=4)
        config.task.mix_probability = 0.5
    config.data.image_size = side
    config.model.patch_size = _patch_size(side)
    config.model.drop_path_rate = 0.1
    config.batch_size = 128
    config.num_epochs = 100.0
    config.optimizer.warmup_epochs = 10.0


def _patch_size(side: int) -> int:
    """Returns the divisor of the side that gives closest to 8 × 8 patches.

    4 for 28 and 32 pixels, 8 for 64.
    """
    return min((p for p in range(1, side + 1) if side % p == 0), key=lambda p: abs(side / p - 8))


def _only_shifts(config: ml_collections.ConfigDict) -> None:
    """Slight zooms and shifts and nothing else: a mirrored or mixed digit is no digit."""
    _small_images(config, crop_padding=0)
    config.task.update(
        resized_crop_scale=(0.8, 1.0),
        resized_crop_ratio=(0.9, 1.1),
        flip_probability=0.0,
        mixup_alpha=0.0,
        cutmix_alpha=0.0,
        erase_probability=0.0,
        label_smoothing=0.0,
    )


def _digits(config: ml_collections.ConfigDict) -> None:
    _only_shifts(config)
    config.data.image_size = 8
    config.model.patch_size = 2
    config.batch_size = 64
    config.eval_batch_size = 360
    config.num_epochs = 20.0
    config.optimizer.warmup_epochs = 1.0
    # Adder networks learn faster with larger rates (AdderNet, section 3.3); dense ones stall at
    # 2e-3.
    config.optimizer.learning_rate = 2e-3 if config.model.score == "adder" else 5e-4


def _fake(config: ml_collections.ConfigDict) -> None:
    _small_images(config, crop_padding=4)
    config.data.image_size = 32
    config.model.patch_size = 4
    config.batch_size = 64
    config.num_epochs = 1.0
    config.optimizer.warmup_epochs = 0.0


_RECIPES = {"digits": _digits, "fake": _fake}


def _recipe(data: str) -> Callable[[ml_collections.ConfigDict], None]:
    """Returns the recipe of a data set.

    Its own, or what follows from the size and kind of its images.
    """
    known = describe(data)
    if known.name in _RECIPES:
        return _RECIPES[known.name]
    height, width = (known.image_shape or (None, None, 3))[:2]
    if height is not None and height == width and height <= _SMALL_SIDE:
        return functools.partial(_small, known=known)
    return _imagenet
