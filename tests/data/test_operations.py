"""Operations on images against Pillow on photographs, and the draws against those of timm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from sklearn.datasets import load_sample_images

from adder_flax.data import augment
from adder_flax.data.operations import (
    OPERATIONS,
    choose_operation,
    draw_layer,
    gaussian_blur,
    grayscale,
    operation_arguments,
    three_augment,
)
from adder_flax.settings import AugmentSettings
from tests.data.test_augment import FIVE_SIGMA, OFF

choose_operation = jax.jit(choose_operation, static_argnames="fill")


FILL = (124, 116, 104)


def _map(coefficients):
    return lambda image, x, way: image.transform(
        image.size, Image.AFFINE, coefficients(x, *image.size), resample=way, fillcolor=FILL
    )


# What each operation is of an image, an argument and a way to resample.
PILLOW = {
    "auto_contrast": lambda image, x, way: ImageOps.autocontrast(image),
    "equalize": lambda image, x, way: ImageOps.equalize(image),
    "invert": lambda image, x, way: ImageOps.invert(image),
    # No bits are black; Pillow refuses to keep none.
    "posterize": lambda image, x, way: (
        ImageOps.posterize(image, int(x)) if x else Image.new("RGB", image.size)
    ),
    "solarize": lambda image, x, way: ImageOps.solarize(image, x),
    "solarize_add": lambda image, x, way: image.point(
        [min(255, v + int(x)) if v < 128 else v for v in range(256)] * 3
    ),
    "color": lambda image, x, way: ImageEnhance.Color(image).enhance(x),
    "contrast": lambda image, x, way: ImageEnhance.Contrast(image).enhance(x),
    "brightness": lambda image, x, way: ImageEnhance.Brightness(image).enhance(x),
    "sharpness": lambda image, x, way: ImageEnhance.Sharpness(image).enhance(x),
    "rotate": lambda image, x, way: image.rotate(x, resample=way, fillcolor=FILL),
    "shear_x": _map(lambda x, width, height: (1, x, 0, 0, 1, 0)),
    "shear_y": _map(lambda x, width, height: (1, 0, 0, x, 1, 0)),
    "translate_x": _map(lambda x, width, height: (1, 0, x * width, 0, 1, 0)),
    "translate_y": _map(lambda x, width, height: (1, 0, 0, 0, 1, x * height)),
}


@pytest.fixture(scope="module")
def photographs():
    """Eight pieces of scikit-learn's photographs of a temple and a flower, reduced to a third."""
    corners = (60, 80), (250, 200), (400, 100), (150, 250)
    cut = lambda image, x, y: image.crop((x, y, x + 144, y + 120)).resize((48, 40))
    images = map(Image.fromarray, load_sample_images().images)
    return np.stack([np.asarray(cut(image, *corner)) for image in images for corner in corners])


# One for each photograph, to both ends of the ranges.
ARGUMENTS = {
    "posterize": [0, 1, 2, 3, 4, 5, 7, 8],
    "solarize": [0, 26, 64, 128, 150, 200, 230, 256],
    "solarize_add": [0, 10, 30, 60, 90, 99, 100, 110],
    "rotate": [-30, -27, -13.3, 0, 1.7, 8, 27, 30],
}
FACTORS = [0.1, 0.19, 0.55, 0.9, 1.0, 1.3, 1.81, 1.9]
ARGUMENTS |= dict.fromkeys(["color", "contrast", "brightness", "sharpness"], FACTORS)
ARGUMENTS |= dict.fromkeys(["shear_x", "shear_y"], [-0.3, -0.27, -0.1, 0, 0.05, 0.2, 0.27, 0.3])
PLACES = [-0.45, -0.405, -0.1, 0, 0.05, 0.2, 0.41, 0.45]
ARGUMENTS |= dict.fromkeys(["translate_x", "translate_y"], PLACES)
# Where a product in float64 and one in float32 may fall on two sides of a whole number.
MAY_DIFFER_BY_ONE = {"auto_contrast", "rotate", "shear_x", "shear_y", "translate_x", "translate_y"}


@pytest.mark.parametrize("name", [None, *OPERATIONS])
def test_an_operation_is_pillows(photographs, name):
    """In one program for all operations and arguments."""
    arguments = ARGUMENTS.get(name, [0.3] * 8)
    operation = np.full(8, OPERATIONS.index(name) if name else -1)
    got = choose_operation(operation, photographs, np.array(arguments, np.float32), fill=FILL)
    for image, argument, result in zip(photographs, arguments, np.asarray(got), strict=True):
        picture = Image.fromarray(image)
        expected = PILLOW[name](picture, argument, Image.BICUBIC) if name else picture
        off = np.abs(result.astype(int) - np.asarray(expected))
        assert off.max() <= (name in MAY_DIFFER_BY_ONE)
        assert (off > 0).mean() < 0.2  # a whole shift of levels would be nearly all
    assert choose_operation._cache_size() == 1


def test_blur_and_grey_are_pillows(photographs):
    radii = np.linspace(0.1, 2, 8)
    blurred = np.asarray(jax.jit(gaussian_blur)(photographs, radii.astype(np.float32)))
    gray = np.asarray(jax.jit(grayscale)(photographs))
    for image, radius, soft, grey in zip(photographs, radii, blurred, gray, strict=True):
        image = Image.fromarray(image)
        assert (soft == np.asarray(image.filter(ImageFilter.GaussianBlur(float(radius))))).all()
        assert (grey == np.asarray(image.convert("L").convert("RGB"))).all()


# At 0, 5, 9 and 10, by hand from the ranges of timm 1.0.31's `auto_augment.py`, with either sign.
MAGNITUDES = {
    ("posterize", 1): [4, 2, 1, 0],
    ("solarize", 1): [256, 128, 26, 0],
    ("solarize_add", 1): [0, 55, 99, 110],
    ("color", 1): [1, 1.45, 1.81, 1.9],
    ("rotate", 1): [0, 15, 27, 30],
    ("shear_y", 1): [0, 0.15, 0.27, 0.3],
    ("translate_x", 1): [0, 0.225, 0.405, 0.45],
    ("invert", 1): [0, 0, 0, 0],
    ("sharpness", -1): [1, 0.55, 0.19, 0.1],
    ("rotate", -1): [0, -15, -27, -30],
    ("posterize", -1): [4, 2, 1, 0],
}


def test_magnitudes_mean_what_they_mean_in_timm():
    magnitudes, arguments = jnp.array([0.0, 5, 9, 10]), jax.jit(operation_arguments)
    got = {sign: arguments(magnitudes, jnp.full(4, float(sign))) for sign in (1, -1)}
    for (name, sign), values in MAGNITUDES.items():
        found = got[sign][OPERATIONS.index(name)]
        np.testing.assert_allclose(found, values, atol=1e-6, err_msg=name)


def test_what_is_drawn_has_timms_distribution():
    """Fifteen operations alike, half of them done, magnitudes N(9, 1/2) cut at 10, either sign
    alike."""
    settings = AugmentSettings(rand_augment_magnitude=9.0, rand_augment_std=0.5)
    count = 60_000
    draw = jax.jit(lambda key: draw_layer(key, count, settings))
    operation, argument = map(np.asarray, draw(jax.random.key(0)))
    frequency = np.bincount(operation + 1, minlength=16) / count
    expected = np.array([0.5, *[0.5 / 15] * 15])
    sigma = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(frequency - expected) < FIVE_SIGMA * sigma).all()
    magnitude = argument[operation == OPERATIONS.index("rotate")] / 3
    assert abs((magnitude > 0).mean() - 0.5) < FIVE_SIGMA * 0.5 / np.sqrt(magnitude.size)
    drawn = np.minimum(np.random.default_rng(0).normal(9, 0.5, 10**6), 10)
    quantiles = np.linspace(0.05, 0.95, 7)
    got, expected = (np.quantile(values, quantiles) for values in (np.abs(magnitude), drawn))
    np.testing.assert_allclose(got, expected, atol=0.08)
    assert np.abs(magnitude).max() == pytest.approx(10, abs=1e-5)


def test_rand_augment_of_a_batch(photographs):
    """Two layers, each of nothing half of the time: a quarter stays, and more where an operation
    changes nothing."""
    settings = AugmentSettings(**OFF | dict(rand_augment_magnitude=9.0, rand_augment_std=0.5))
    images, labels = np.tile(photographs[:, ::4, ::4], (50, 1, 1, 1)), np.zeros(400, int)
    facts = dict(num_classes=2, mean=(0.0,) * 3, std=(1.0,) * 3)
    whole = jax.jit(lambda key: augment(key, images, labels, settings, **facts)[0] * 255)
    got = np.asarray(whole(jax.random.key(1)))
    np.testing.assert_allclose(got, np.round(got), atol=1e-4)
    same = (np.abs(got - images) < 0.5).all((1, 2, 3)).mean()
    assert abs(same - 0.25) < FIVE_SIGMA * np.sqrt(0.25 * 0.75 / 400) + 0.02
    assert (np.asarray(whole(jax.random.key(1))) == got).all()


def test_three_augment_does_one_of_three_to_each_image(photographs):
    images = np.tile(photographs[:, ::4, ::4], (50, 1, 1, 1))
    got = np.asarray(jax.jit(three_augment)(jax.random.key(0), images))
    grey = (got == np.asarray(grayscale(images))).all((1, 2, 3))
    solarized = (got == np.where(images < 128, images, 255 - images)).all((1, 2, 3))
    assert not (grey & solarized).any()
    blurred = ~(grey | solarized)
    for share in (grey, solarized, blurred):
        assert abs(share.mean() - 1 / 3) < FIVE_SIGMA * np.sqrt(2 / 9 / 400)
    # A blur keeps the mean, but for rounding.
    drift = got[blurred].mean((1, 2), dtype=float) - images[blurred].mean((1, 2), dtype=float)
    assert np.abs(drift).max() < 12
