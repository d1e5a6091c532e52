"""Which operations are done to which images: RandAugment and three-augment, drawn for each.

Sources: RandAugment, Cubuk et al., 2020 (https://arxiv.org/abs/1909.13719), with the ranges of
arguments of timm's ``auto_augment.py`` (https://github.com/huggingface/pytorch-image-models), which
DeiT is trained with as ``rand-m9-mstd0.5-inc1``; three-augment, Touvron et al., 2022 (DeiT III,
https://arxiv.org/abs/2204.07118).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from adder_flax.data.operations import (
    OPERATIONS,
    Levels,
    choose_operation,
    gaussian_blur,
    grayscale,
    solarize,
)
from adder_flax.settings import AugmentSettings

MOST_MAGNITUDE = 10.0
"""The magnitude at which the arguments of operations are at the end of their ranges."""

LAYER_PROBABILITY = 0.5
"""Of doing a drawn operation at all, for each layer and image (timm's)."""

_Layer = tuple[Int[Array, " batch"], Float[Array, " batch"]]


def rand_augment(
    key: PRNGKeyArray, images: Levels, settings: AugmentSettings, fill: tuple[int, ...] = (128,)
) -> Levels:
    """Does two random operations to each image in turn.

    >>> settings = AugmentSettings(rand_augment_magnitude=9.0, rand_augment_std=0.5)
    >>> photographs = jnp.arange(4 * 8 * 8 * 3).reshape(4, 8, 8, 3).astype(jnp.uint8)
    >>> step = jax.jit(lambda key: rand_augment(key, photographs, settings))
    >>> augmented = step(jax.random.key(0))
    >>> augmented.shape, augmented.dtype
    ((4, 8, 8, 3), dtype('uint8'))

    Args:
        key: what is drawn for sample b is a function of the key and b.
        images: values 0..255.
        settings: those named rand_augment_…; magnitude and deviation may be traced.
        fill: level of what moves in from outside, of each channel.
    """
    layers = jax.vmap(lambda key: draw_layer(key, images.shape[0], settings))
    keys = jax.random.split(key, 2)

    def step(images: Levels, layer: _Layer) -> tuple[Levels, None]:
        operation, argument = layer
        return choose_operation(operation, images, argument, fill=fill), None

    return jax.lax.scan(step, images, layers(keys))[0]


def draw_layer(key: PRNGKeyArray, batch: int, settings: AugmentSettings) -> _Layer:
    """Draws an operation for each image with equal chances, done with `LAYER_PROBABILITY`.

    The magnitude is normal around the one that is set, cut to 0..`MOST_MAGNITUDE`; arguments that
    have a sign have either with equal chances.

    Returns places in ``OPERATIONS`` (-1: none) and arguments, as ``choose_operation`` takes them.
    """
    operation_key, uniform_key, normal_key = jax.random.split(key, 3)
    operation = jax.random.randint(operation_key, (batch,), 0, len(OPERATIONS))
    done, negative = jax.random.uniform(uniform_key, (2, batch)) < LAYER_PROBABILITY
    deviation = settings.rand_augment_std * jax.random.normal(normal_key, (batch,))
    magnitude = jnp.clip(settings.rand_augment_magnitude + deviation, 0, MOST_MAGNITUDE)
    of_all = operation_arguments(magnitude, jnp.where(negative, -1.0, 1.0))
    argument = jnp.take_along_axis(of_all, operation[None], axis=0)[0]
    return jnp.where(done, operation, -1), argument


def operation_arguments(
    magnitude: Float[Array, " batch"], sign: Float[Array, " batch"]
) -> Float[Array, "operation batch"]:
    """What a magnitude means to each of `OPERATIONS`, by timm's ``inc1``: more is more change.

    >>> at_nine = operation_arguments(jnp.array([9.0]), jnp.array([-1.0]))[:, 0]
    >>> [round(float(at_nine[OPERATIONS.index(name)]), 3) for name in ("color", "rotate")]
    [0.19, -27.0]
    """
    tenths = magnitude / MOST_MAGNITUDE
    # Multiplied first: then whole magnitudes give whole numbers, not the ones just below.
    factor = jnp.maximum(1 + sign * 0.9 * tenths, 0.1)
    known = {
        "posterize": 4 - jnp.floor(4 * magnitude / 10),
        "solarize": 256 - jnp.floor(256 * magnitude / 10),
        "solarize_add": jnp.floor(110 * magnitude / 10),
        **dict.fromkeys(("color", "contrast", "brightness", "sharpness"), factor),
        "rotate": sign * 30 * tenths,
        **dict.fromkeys(("shear_x", "shear_y"), sign * 0.3 * tenths),
        **dict.fromkeys(("translate_x", "translate_y"), sign * 0.45 * tenths),
    }
    return jnp.stack([known.get(name, jnp.zeros_like(magnitude)) for name in OPERATIONS])


def three_augment(key: PRNGKeyArray, images: Levels) -> Levels:
    """Makes each image grey, inverts its levels from 128 on, or blurs it by 0.1 to 2 pixels."""
    kind_key, radius_key = jax.random.split(key)
    kind = jax.random.randint(kind_key, images.shape[:1], 0, 3)
    radius = jax.random.uniform(radius_key, images.shape[:1], minval=0.1, maxval=2.0)
    choices = [grayscale(images), solarize(images, 128), gaussian_blur(images, radius)]
    chosen = [(kind == place).reshape(-1, 1, 1, 1) for place in range(3)]
    return jnp.select(chosen, choices, images)
