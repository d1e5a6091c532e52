"""Augmentation against NumPy: exact where pixels move, by formula elsewhere, and draws."""

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


OFF = dict(flip_probability=0.0, color_jitter=0.0, mixup_alpha=0.0, cutmix_alpha=0.0)
OFF |= dict(erase_probability=0.0, label_smoothing=0.0, resized_crop_scale=None)
GRAY = dict(num_classes=4, mean=(0.0,), std=(1.0,))


def plain(**settings):
    return AugmentSettings(**OFF | settings)


@pytest.mark.parametrize("shape", [(6, 5, 3), (1, 1, 1)])
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
    """Antialiased bilinear resizing of a box to the image's size, in float64."""

    def weights(start, length, size):
        scale, pixels = length / size, np.arange(start, start + length)
        center = start + (np.arange(size)[:, None] + 0.5) * scale
        triangle = np.maximum(0, 1 - np.abs(pixels + 0.5 - center) / max(scale, 1))
        return triangle / triangle.sum(1, keepdims=True)

    box = image[top : top + height, left : left + width]
    down, across = weights(top, height, len(image)), weights(left, width, image.shape[1])
    return np.einsum("oi,pj,ijc->opc", down, across, box)


# top, left, height, width
BOXES = np.array([(0, 0, 9, 12), (2, 3, 4, 5), (8, 11, 1, 1), (0, 1, 9, 2), (5, 0, 3, 12)])


def test_resized_boxes_are_triangles_over_pixels():
    images = np.random.default_rng(0).random((len(BOXES), 9, 12, 2), np.float32)
    got = resize_boxes(images, *BOXES.T)
    for image, box, result in zip(images, BOXES, got, strict=True):
        np.testing.assert_allclose(result, bilinear_reference(image.astype(float), *box), atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "ratio", "box"),
    [
        ((8, 8), 0.5, (0, 2, 8, 4)),
        ((12, 4), 0.5, (2, 0, 8, 4)),
        # At least a pixel wide and high: 8 pixels over a ratio of 50 are less than half of one.
        ((8, 8), 50.0, (3, 0, 1, 8)),
        ((8, 8), 0.02, (0, 3, 8, 1)),
    ],
)
def test_a_box_that_never_fits_becomes_central(shape, ratio, box):
    """torchvision's fallback: the whole area in this ratio fits into none of these images."""
    images = np.random.default_rng(0).random((2, *shape, 1), np.float32)
    got = random_resized_crop(KEY, images, (1.0, 1.0), (ratio, ratio))
    np.testing.assert_allclose(got, resize_boxes(images, *np.array([box, box]).T), atol=1e-6)


def test_random_boxes_have_the_right_distribution():
    uniform = jax.random.uniform(KEY, (22, 4000))
    boxes = random_boxes(uniform, 300, 400, (0.2, 0.5), (3 / 4, 4 / 3))
    *boxes, found = map(np.asarray, boxes)
    assert found.all()
    check_boxes(*boxes)


@pytest.mark.cases(2)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["brightness", "contrast", "saturation"])
def test_color_jitter_equals_its_formula(kind, channels):
    """The factor, recovered from one pixel that is not clipped, explains every pixel, clipped ones
    included."""
    images = np.random.default_rng(0).random((500, 5, 4, channels)).astype(np.float32)
    got = np.asarray(color_jitter(KEY, images, **{kind: 0.6}))
    if kind == "saturation" and channels == 1:
        np.testing.assert_allclose(got, images, atol=1e-6)
        return
    gray = images @ np.float32([[0.299], [0.587], [0.114]]) if channels == 3 else images
    mean = gray.mean((1, 2), keepdims=True)
    base = {"brightness": 0 * images, "contrast": mean + 0 * images, "saturation": gray}[kind]
    factors = []
    for image, b, result in zip(images, base + 0 * images, got, strict=True):
        inside = (result > 0) & (result < 1)
        clearest = np.argmax(np.where(inside, np.abs(image - b), 0))
        factor = ((result - b) / np.where(image == b, 1, image - b)).flat[clearest]
        expected = np.clip(factor * image + (1 - factor) * b, 0, 1)
        np.testing.assert_allclose(result, expected, atol=1e-5)
        factors.append(factor)
    factors, sigma = np.array(factors), 1.2 / np.sqrt(12)
    assert factors.min() > 0.4 - 1e-4
    assert factors.max() < 1.6 + 1e-4
    assert abs(factors.mean() - 1) < FIVE_SIGMA * sigma / np.sqrt(500)
    assert abs(factors.std() - sigma) < FIVE_SIGMA * sigma / np.sqrt(500)


def test_color_jitter_above_one_never_inverts():
    images = np.random.default_rng(0).random((64, 2, 2, 3)).astype(np.float32)
    got = np.asarray(color_jitter(KEY, images, brightness=3.0))
    assert ((got >= 0) & (got <= 1)).all()


def mixed_images(pairs, height, width, **settings):
    """`pairs` zeros, then `pairs` ones, of the classes 0 and 1, each mixed with its opposite; and
    their targets."""
    images = np.repeat(np.array([0, 1], np.float32), pairs)[:, None, None, None]
    images = np.broadcast_to(images, (2 * pairs, height, width, 2))
    targets = np.repeat(np.eye(2, dtype=np.float32), pairs, 0)
    return map(np.asarray, mix(KEY, images, targets, plain(**settings, mix_per="element")))


def test_cutmix_weighs_labels_by_the_area_pasted():
    got, mixed = mixed_images(200, 9, 7, cutmix_alpha=1.0)
    assert set(np.unique(got)) == {0.0, 1.0}
    assert (got[..., 0] == got[..., 1]).all()
    ones = got[..., 0].mean((1, 2), dtype=np.float64)
    # Exact up to the rounding of one float32 division.
    np.testing.assert_allclose(mixed[:, 1], ones, atol=1e-7)
    np.testing.assert_allclose(mixed.sum(1), 1, atol=1e-6)
    for pasted in [*(got[:200, ..., 0] == 1), *(got[200:, ..., 0] == 0)]:
        rows, columns = np.flatnonzero(pasted.any(1)), np.flatnonzero(pasted.any(0))
        assert pasted.sum() == len(rows) * len(columns)  # one full rectangle
        assert (np.diff(rows) == 1).all()
        assert (np.diff(columns) == 1).all()


def test_cutmix_boxes_are_those_of_the_paper():
    """Sides of sqrt(1 - Beta) around a uniform centre, clipped: with alpha 1 on a large image the
    side s (of 1) has a uniform square, and its clipped length the mean s - s²/4."""
    _, mixed = mixed_images(600, 128, 128, cutmix_alpha=1.0)
    pasted = 1 - mixed[:600, 0]
    area = (np.arange(10**6) + 0.5) / 10**6
    expected = ((np.sqrt(area) - area / 4) ** 2).mean()
    assert abs(pasted.mean() - expected) < FIVE_SIGMA * pasted.std() / np.sqrt(600) + 2 / 128


def test_mixup_is_convex_and_of_the_symmetric_beta_distribution():
    """Whose variance is 1/(4 (2 α + 1))."""
    got, mixed = mixed_images(1500, 2, 2, mixup_alpha=0.2)
    np.testing.assert_allclose(got, mixed[:, 1, None, None, None] + 0 * got, atol=1e-6)
    np.testing.assert_allclose(mixed.sum(1), 1, atol=1e-6)
    share, variance = mixed[:1500, 0], 1 / 5.6
    assert ((share >= 0) & (share <= 1)).all()
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
    alphas = dict(mixup_alpha=1.0, cutmix_alpha=1.0)
    got, _ = mixed_images(1000, 4, 4, **alphas, mix_probability=0.8)
    got = got[:1000, ..., 0].reshape(1000, -1)
    flat = got.std(1) < 1e-6
    mixup = flat & (got[:, 0] > 0) & (got[:, 0] < 1)
    # What CutMix leaves flat, a box of no pixel or of all of them, looks like no mixing at all.
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
    # The same settings made again are the same static argument.
    for seed in (0, 1):
        key, settings = jax.random.key(seed), AugmentSettings(**FULL)
        again, _ = augment(key, images, labels, settings, **facts)
        assert (again == got).all() == (seed == 0)
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
    found = run_code(SHARDED, XLA_FLAGS=f"{simulated_devices(8)['XLA_FLAGS']} {flags}")
    assert found.strip() == "['collective-permute', 'collective-permute']"


@pytest.mark.parametrize(
    ("name", "split", "image_size", "atol"),
    [
        ("digits", "train", None, 5e-5),
        ("fake", "train", 64, 0.005),
        # 4,000 of the 50,000 images, which here are JPEGs: smoother, so their deviation is up to
        # 0.003 lower.
        ("cifar10", "train[:8%]", None, 0.01),
    ],
)
def test_statistics_are_those_of_the_images(name, split, image_size, atol, request):
    place = request.getfixturevalue("cifar10_dir") if name == "cifar10" else None
    source = load_source(name, split, data_dir=place, image_size=image_size)
    images = source.first(8 if name == "fake" else len(source))["image"]
    pixels = images.reshape(-1, images.shape[-1]) / 255
    found = channel_statistics(source)
    np.testing.assert_allclose(found, [pixels.mean(0), pixels.std(0)], atol=atol)


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
