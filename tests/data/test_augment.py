"""Augmentation against NumPy and Pillow: exact where pixels move, by formula elsewhere, and
distributions of draws."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax.data import (
    ArraySource,
    DataError,
    augment,
    channel_statistics,
    load_source,
    normalize,
)
from adder_flax.data.augmentation import (
    color_jitter,
    mix,
    random_boxes,
    random_crop,
    random_erase,
    random_flip,
    random_resized_crop,
    resize_boxes,
    symmetric_beta,
)
from adder_flax.settings import AugmentSettings, ClassificationSettings
from adder_flax.tasks import Classification
from tests.data.boxes import FIVE_SIGMA, check_boxes
from tests.processes import run_code, simulated_devices

KEY = jax.random.key(0)
# Compiled whole, since one by one their operations take longer to compile.
augment = jax.jit(augment, static_argnums=3, static_argnames=("num_classes", "mean", "std"))
color_jitter = jax.jit(color_jitter, static_argnames=("brightness", "contrast", "saturation"))
mix = jax.jit(mix, static_argnums=3)
random_boxes = jax.jit(random_boxes, static_argnums=(1, 2, 3, 4))
random_crop = jax.jit(random_crop, static_argnums=2)
random_resized_crop = jax.jit(random_resized_crop, static_argnums=(2, 3))
resize_boxes = jax.jit(resize_boxes)


def noise(batch, height, width, channels, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (batch, height, width, channels), np.uint8)


NUMBERS = "flip_probability color_jitter mixup_alpha cutmix_alpha"
NUMBERS += " erase_probability label_smoothing"
OFF = dict.fromkeys(NUMBERS.split(), 0.0) | dict(resized_crop_scale=None)
GRAY = dict(num_classes=4, mean=(0.0,), std=(1.0,))


def plain(**settings):
    return AugmentSettings(**OFF | settings)


@pytest.mark.parametrize("shape", [(6, 5, 3), (1, 1, 1), (8, 8, 1)])
def test_nothing_switched_on_changes_nothing(shape):
    images, labels = noise(4, *shape), np.arange(4)
    of_set = dict(num_classes=4, mean=(0.0,) * shape[-1], std=(1.0,) * shape[-1])
    got, targets = augment(KEY, images, labels, plain(), **of_set)
    # Up to the last bit: XLA multiplies by 1/255.
    np.testing.assert_allclose(got, images.astype(np.float32) / 255, rtol=1.2e-7, atol=0)
    assert (np.asarray(targets) == np.eye(4)).all()


def test_normalize_is_that_of_each_channel():
    images = noise(2, 4, 3, 3)
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    expected = (images / 255.0 - mean) / std
    np.testing.assert_allclose(normalize(images, mean, std), expected, atol=1e-6)
    # An image in [0, 1] is not divided by 255 again, and no batch axis is needed.
    floats = (images[0] / 255).astype(np.float32)
    np.testing.assert_allclose(normalize(jnp.asarray(floats), mean, std), expected[0], atol=1e-6)


@pytest.mark.parametrize("padding", [2, 3])
def test_random_crop_moves_pixels_exactly(padding):
    """Every output is the window of the padded image at some offset; every offset comes up, rows
    and columns apart."""
    images = np.broadcast_to(np.arange(1, 43, dtype=np.uint8).reshape(1, 7, 6, 1), (900, 7, 6, 1))
    got = np.asarray(random_crop(KEY, images, padding))
    assert got.dtype == np.uint8
    pad = [(padding, padding), (padding, padding), (0, 0)]
    padded = np.pad(images[0], pad)
    side = range(2 * padding + 1)
    windows = {padded[y : y + 7, x : x + 6].tobytes(): (y, x) for y in side for x in side}
    offsets = np.array([windows[image.tobytes()] for image in got])
    counts = np.bincount(offsets[:, 0] * len(side) + offsets[:, 1], minlength=len(side) ** 2)
    expected = 900 / len(side) ** 2
    assert (np.abs(counts - expected) < FIVE_SIGMA * np.sqrt(expected)).all()


def test_random_flip_mirrors_some_images():
    images = noise(1000, 3, 4, 2)
    got = np.asarray(random_flip(KEY, images, 0.3))
    mirrored = (got == images[:, :, ::-1]).all((1, 2, 3))
    untouched = (got == images).all((1, 2, 3))
    assert (mirrored ^ untouched).all()
    assert abs(mirrored.mean() - 0.3) < FIVE_SIGMA * np.sqrt(0.3 * 0.7 / 1000)


def bilinear_reference(image, top, left, height, width):
    """Antialiased bilinear resizing of a box to the image's size, pixel by pixel in float64."""
    rows, columns = image.shape[:2]
    out = np.zeros(image.shape)

    def weights(start, length, size, o):
        scale = length / size
        center = start + (o + 0.5) * scale
        triangle = lambda i: max(0.0, 1 - abs(i + 0.5 - center) / max(scale, 1.0))
        w = {i: triangle(i) for i in range(start, start + length)}
        total = sum(w.values())
        return {i: value / total for i, value in w.items() if value}

    for o in range(rows):
        for p in range(columns):
            for i, wi in weights(top, height, rows, o).items():
                for j, wj in weights(left, width, columns, p).items():
                    out[o, p] += wi * wj * image[i, j]
    return out


BOXES = np.array(
    [(0, 0, 9, 12), (2, 3, 4, 5), (8, 11, 1, 1), (0, 1, 9, 2), (5, 0, 3, 12)]
)  # top, left, height, width


def test_resized_boxes_match_a_loop_over_pixels():
    images = np.random.default_rng(0).random((len(BOXES), 9, 12, 2), np.float32)
    got = resize_boxes(images, *BOXES.T)
    for image, box, result in zip(images, BOXES, got, strict=True):
        np.testing.assert_allclose(result, bilinear_reference(image.astype(float), *box), atol=2e-6)


@pytest.mark.parametrize(("shape", "box"), [((8, 8), (0, 2, 8, 4)), ((12, 4), (2, 0, 8, 4))])
def test_a_box_that_never_fits_becomes_central(shape, box):
    """torchvision's fallback.

    A width of half the height and the whole area fits into none of these images.
    """
    images = np.random.default_rng(0).random((2, *shape, 1), np.float32)
    got = random_resized_crop(KEY, images, (1.0, 1.0), (0.5, 0.5))
    np.testing.assert_allclose(got, resize_boxes(images, *np.array([box, box]).T), atol=1e-6)


@pytest.mark.parametrize("ratio", [(50.0, 100.0), (0.01, 0.02)])
def test_a_central_box_is_at_least_a_pixel_wide_and_high(ratio):
    """8 pixels over a ratio of 50 are less than half a pixel."""
    images = np.full((2, 8, 8, 1), 0.25, np.float32)
    got = random_resized_crop(KEY, images, (1.0, 1.0), ratio)
    np.testing.assert_allclose(got, images, atol=1e-6)


def test_random_boxes_have_the_right_distribution():
    uniform = jax.random.uniform(KEY, (22, 4000))
    boxes = random_boxes(uniform, 300, 400, (0.2, 0.5), (3 / 4, 4 / 3))
    *boxes, found = map(np.asarray, boxes)
    assert found.all()
    check_boxes(*boxes)


def blend_reference(images, base, factor):
    return np.clip(factor * images + (1 - factor) * base, 0, 1)


@pytest.mark.cases(2)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["brightness", "contrast", "saturation"])
def test_color_jitter_equals_its_formula(kind, channels):
    """The factor, recovered from one pixel that is not clipped, explains every pixel, clipped ones
    included."""
    images = np.random.default_rng(0).random((500, 5, 4, channels)).astype(np.float32)
    got = np.asarray(color_jitter(KEY, images, **{kind: 0.6}))
    weights = np.array([0.299, 0.587, 0.114], np.float32)[:, None]
    gray = images @ weights if channels == 3 else images
    base = {
        "brightness": np.zeros_like(images),
        "contrast": np.broadcast_to(gray.mean((1, 2), keepdims=True), images.shape),
        "saturation": np.broadcast_to(gray, images.shape),
    }[kind]
    if kind == "saturation" and channels == 1:
        np.testing.assert_allclose(got, images, atol=1e-6)
        return
    factors = []
    for image, b, result in zip(images, base, got, strict=True):
        inside = (result > 0) & (result < 1)
        clearest = np.argmax(np.where(inside, np.abs(image - b), 0))
        factor = ((result - b) / np.where(image == b, 1, image - b)).flat[clearest]
        np.testing.assert_allclose(result, blend_reference(image, b, factor), atol=1e-5)
        factors.append(factor)
    factors = np.array(factors)
    assert factors.min() > 0.4 - 1e-4
    assert factors.max() < 1.6 + 1e-4
    sigma = 1.2 / np.sqrt(12)
    assert abs(factors.mean() - 1) < FIVE_SIGMA * sigma / np.sqrt(500)
    assert abs(factors.std() - sigma) < FIVE_SIGMA * sigma / np.sqrt(500)


def test_color_jitter_above_one_never_inverts():
    images = np.random.default_rng(0).random((64, 2, 2, 3)).astype(np.float32)
    got = np.asarray(color_jitter(KEY, images, brightness=3.0))
    assert got.min() >= 0
    assert got.max() <= 1


def two_images(pairs=1, height=9, width=7):
    """`pairs` zeros, then `pairs` ones, with the classes 0 and 1: image b is mixed with its
    opposite."""
    images = np.repeat(np.array([0, 1], np.float32), pairs)[:, None, None, None]
    images = np.broadcast_to(images, (2 * pairs, height, width, 2))
    return images, np.repeat(np.eye(2, dtype=np.float32), pairs, 0)


def test_cutmix_weighs_labels_by_the_area_pasted():
    images, targets = two_images(200)
    settings = plain(cutmix_alpha=1.0, mix_per="element")
    got, mixed = map(np.asarray, mix(KEY, images, targets, settings))
    assert set(np.unique(got)) == {0.0, 1.0}
    assert (got[..., 0] == got[..., 1]).all()
    ones = got[..., 0].mean((1, 2), dtype=np.float64)
    # Exact up to the rounding of one float32 division.
    np.testing.assert_allclose(mixed[:, 1], ones, atol=1e-7)
    np.testing.assert_allclose(mixed.sum(1), 1, atol=1e-6)
    for image, own in zip(got[..., 0], images[:, 0, 0, 0], strict=True):
        pasted = image != own
        rows, columns = np.flatnonzero(pasted.any(1)), np.flatnonzero(pasted.any(0))
        assert pasted.sum() == len(rows) * len(columns)  # one full rectangle
        assert (np.diff(rows) == 1).all()
        assert (np.diff(columns) == 1).all()


def test_cutmix_boxes_are_those_of_the_paper():
    """Sides of sqrt(1 - Beta) around a uniform centre, clipped: with alpha 1 on a large image, a
    known mean area.

    For a side of s (of 1) and a uniform centre the clipped length has mean s - s²/4, and s² is
    uniform.
    """
    settings = plain(cutmix_alpha=1.0, mix_per="element")
    images, targets = two_images(600, 128, 128)
    _, mixed = mix(KEY, images[..., :1], targets, settings)
    pasted = 1 - np.asarray(mixed)[:600, 0]
    area = np.random.default_rng(0).random(10**6)
    side = np.sqrt(area)
    expected = ((side - side**2 / 4) ** 2).mean()
    assert abs(pasted.mean() - expected) < FIVE_SIGMA * pasted.std() / np.sqrt(600) + 2 / 128


@pytest.mark.parametrize("alpha", [0.2, 0.8])
def test_mixup_is_convex_and_beta_distributed(alpha):
    images, targets = two_images(1500, 2, 2)
    settings = plain(mixup_alpha=alpha, mix_per="element")
    got, mixed = map(np.asarray, mix(KEY, images, targets, settings))
    np.testing.assert_allclose(
        got, np.broadcast_to(mixed[:, 1, None, None, None], got.shape), atol=1e-6
    )
    np.testing.assert_allclose(mixed.sum(1), 1, atol=1e-6)
    share = mixed[:1500, 0]
    assert share.min() >= 0
    assert share.max() <= 1
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(share.mean() - 0.5) < FIVE_SIGMA * np.sqrt(variance / 1500)
    assert abs(share.var() - variance) < FIVE_SIGMA * variance / np.sqrt(1500)


def test_mixup_mixes_with_the_reversed_batch():
    images, targets = np.random.default_rng(0).random((5, 3, 4, 2)), np.eye(5)
    got, mixed = mix(KEY, jnp.float32(images), jnp.float32(targets), plain(mixup_alpha=0.8))
    share = float(mixed[0, 0])
    assert 0 < share < 1
    np.testing.assert_allclose(got, share * images + (1 - share) * images[::-1], atol=1e-6)
    np.testing.assert_allclose(mixed, share * targets + (1 - share) * targets[::-1], atol=1e-6)


def test_mixup_or_cutmix_with_the_given_probabilities():
    images, targets = two_images(1000, 4, 4)
    alphas = dict(mixup_alpha=1.0, cutmix_alpha=1.0)
    settings = plain(**alphas, mix_probability=0.8, mix_per="element")
    got = np.asarray(mix(KEY, images, targets, settings)[0])[:1000, ..., 0].reshape(1000, -1)
    flat = got.std(1) < 1e-6
    mixup = flat & (got[:, 0] > 0) & (got[:, 0] < 1)
    # What CutMix leaves flat (a box of no pixel, or of the whole image) looks like no mixing at
    # all.
    assert abs(mixup.mean() - 0.8 * 0.5) < FIVE_SIGMA * np.sqrt(0.4 * 0.6 / 1000)
    assert 0.8 * 0.5 * 0.5 < (~flat).mean() < 0.8 * 0.5


def test_random_erase_fills_one_rectangle():
    images = np.full((800, 20, 30, 2), 0.5, np.float32)
    options = dict(probability=0.25, scale=(0.1, 0.3), ratio=(0.5, 2.0))
    got = np.asarray(jax.jit(functools.partial(random_erase, **options))(KEY, images))
    changed = (got != 0.5).all(-1)
    assert (changed == (got != 0.5).any(-1)).all()
    erased = changed.any((1, 2))
    assert abs(erased.mean() - 0.25) < FIVE_SIGMA * np.sqrt(0.25 * 0.75 / 800)
    for mask in changed[erased]:
        height, width = mask.any(1).sum(), mask.any(0).sum()
        assert mask.sum() == height * width
        # Sides are rounded to pixels, so area and ratio may leave their range by one pixel's worth.
        assert (height - 0.5) * (width - 0.5) <= 0.3 * 600
        assert (height + 0.5) * (width + 0.5) >= 0.1 * 600
        assert (width - 0.5) / (height + 0.5) <= 2.0
        assert (width + 0.5) / (height - 0.5) >= 0.5
    filled = got[changed]
    assert abs(filled.mean()) < FIVE_SIGMA / np.sqrt(filled.size)
    assert abs(filled.std() - 1) < FIVE_SIGMA / np.sqrt(2 * filled.size)


def test_label_smoothing():
    settings = plain(label_smoothing=0.1)
    _, targets = augment(KEY, noise(2, 2, 2, 1), np.array([2, 0]), settings, **GRAY)
    expected = [[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]]
    np.testing.assert_allclose(targets, expected, atol=1e-7)


FULL = dict(crop_padding=2, resized_crop_scale=(0.3, 1.0), mix_per="element", erase_probability=0.5)


def test_everything_at_once():
    source = load_source("digits", "train")
    settings, facts = AugmentSettings(**FULL), dict(num_classes=10, mean=(0.3,), std=(0.4,))
    images, labels = source.read(np.arange(65))[0].values()
    before = augment._cache_size()
    got, targets = augment(KEY, images, labels, settings, **facts)
    assert (got.shape, got.dtype, targets.shape) == ((65, 8, 8, 1), jnp.float32, (65, 10))
    assert bool(jnp.isfinite(got).all())
    np.testing.assert_allclose(targets.sum(1), 1, atol=1e-6)
    with_seed = lambda seed: augment(jax.random.key(seed), images, labels, settings, **facts)
    again, other = with_seed(0), with_seed(1)
    assert (again[0] == got).all()
    assert (other[0] != got).any()
    # The same settings made again are the same static argument.
    augment(KEY, images, labels, AugmentSettings(**FULL), **facts)
    assert augment._cache_size() == before + 1


def test_switching_one_off_leaves_the_other_draws_alone():
    """The brightest pixel stays the brightest under a change of brightness, and shows which images
    are mirrored."""
    images = np.random.default_rng(0).integers(0, 100, (64, 6, 6, 1), np.uint8)
    images[:, 2, 0] = 150
    columns = []
    for settings in (plain(flip_probability=0.5), plain(flip_probability=0.5, color_jitter=0.5)):
        got, _ = augment(KEY, images, np.zeros(64, int), settings, **GRAY)
        columns.append(np.argmax(np.asarray(got)[:, 2, :, 0], 1))
    assert set(columns[0]) == {0, 5}
    assert (columns[0] == columns[1]).all()


@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0, 6.0])
def test_symmetric_beta_has_the_beta_distribution(alpha):
    """Kolmogorov-Smirnov against SciPy's, in float64: in float32 too much of what lies near one is
    rounded to it."""
    stats = pytest.importorskip("scipy.stats")
    uniform = np.random.default_rng(0).random((2, 20_000))
    with jax.enable_x64(True):
        draws = np.asarray(symmetric_beta(*jnp.asarray(uniform), alpha))
    assert stats.kstest(draws, stats.beta(alpha, alpha).cdf).pvalue > 0.001


SHARDED = """
import jax, numpy as np, re
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import functools
from adder_flax.data import augment
from adder_flax.settings import AugmentSettings
from tests.data.test_augment import FULL

assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, PartitionSpec("data"))
images = np.random.default_rng(0).integers(0, 256, (32, 12, 12, 3), np.uint8)
labels = np.arange(32, dtype=np.int32) % 10
augment = functools.partial(augment, num_classes=10, mean=(0.5,) * 3, std=(0.25,) * 3)
settings = AugmentSettings(**FULL)
key = jax.random.key(3)
whole = jax.jit(augment, static_argnums=3)(key, images, labels, settings)
sharded = jax.jit(
    augment, static_argnums=3, in_shardings=(None, rows, rows), out_shardings=(rows, rows)
)
program = sharded.lower(key, images, labels, settings).compile()
for a, b in zip(whole, program(key, jax.device_put(images, rows), jax.device_put(labels, rows))):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
kinds = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)[-a-z]*[(]"
print(re.findall(kinds, program.as_text()))
"""  # noqa: E501 - lines of another language


@pytest.mark.slow
def test_sharded_over_devices_equals_unsharded():
    """And the only communication is what reverses images and targets for Mixup and CutMix."""
    # The programs are small: spend the time on running them, not on optimising them.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flags = f"{simulated_devices(8)['XLA_FLAGS']} {flags}"
    found = run_code(SHARDED, XLA_FLAGS=flags)
    assert found.strip() == "['collective-permute', 'collective-permute']"


def test_statistics_of_digits():
    images = load_source("digits", "train").images / 255
    mean, std = channel_statistics(load_source("digits", "train"))
    np.testing.assert_allclose([mean, std], [[images.mean()], [images.std()]], atol=5e-5)


def test_statistics_of_cifar10(cifar10_dir):
    """On 4,000 of the 50,000 images, which here are JPEGs: smoother, so their deviation is up to
    0.003 lower."""
    source = load_source("cifar10", "train[:8%]", data_dir=cifar10_dir)
    pixels = source.read(np.arange(4000))[0]["image"].reshape(-1, 3) / 255
    mean, std = channel_statistics(source)
    np.testing.assert_allclose(pixels.mean(0), mean, atol=0.01)
    np.testing.assert_allclose(pixels.std(0), std, atol=0.01)


def test_statistics_of_fake_images():
    images = load_source("fake", "train", image_size=64).read(np.arange(8))[0]["image"]
    images = images.reshape(-1, 3) / 255
    mean, std = channel_statistics(load_source("fake", "train"))
    np.testing.assert_allclose(images.mean(0), mean, atol=0.005)
    np.testing.assert_allclose(images.std(0), std, atol=0.005)


def test_statistics_of_a_set_without_any_are_those_of_its_images():
    images = noise(700, 5, 4, 3) // np.array([1, 2, 3], np.uint8)
    rest = (np.zeros(700, int), ["one", "two"])
    got = channel_statistics(ArraySource("own", "train", ["train"], images, *rest))
    pixels = images.reshape(-1, 3) / 255
    np.testing.assert_allclose(got, [pixels.mean(0), pixels.std(0)], atol=5e-5)
    constant = ArraySource("own", "train", ["train"], 0 * images, *rest)
    assert channel_statistics(constant) == ((0.0,) * 3, (1.0,) * 3)


def test_grey_photographs_have_the_mean_of_imagenet_s_channels(image_folder):
    source = load_source("folder", "train", data_dir=str(image_folder), image_size=16)
    assert channel_statistics(source) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    source.image_shape = (16, 16, 1)
    np.testing.assert_allclose(channel_statistics(source), [[0.449], [0.226]])


def test_a_source_that_crops_itself_is_not_cropped_again(image_folder):
    source = load_source("folder", "train", data_dir=str(image_folder), image_size=16)
    settings = dataclasses.replace(ClassificationSettings(), crop_padding=4)
    done_to = lambda source: Classification(settings, Classification.facts(source)).augmentation
    kept, digits = done_to(source), done_to(load_source("digits", "train"))
    assert (kept.crop_padding, kept.resized_crop_scale, kept.flip_probability) == (0, None, 0.5)
    assert (digits.crop_padding, digits.resized_crop_scale) == (4, (0.08, 1.0))
    settings = dataclasses.replace(settings, resized_crop_scale=None)  # which takes the middle
    assert done_to(source).crop_padding == 4


def test_settings_must_fit_the_images():
    images, labels = noise(2, 4, 4, 3), np.arange(2)
    with pytest.raises(DataError, match="Expected 3 means and deviations, got 2 and 2"):
        augment(KEY, images, labels, plain(), num_classes=2, mean=(0.0, 0.0), std=(1.0, 1.0))
