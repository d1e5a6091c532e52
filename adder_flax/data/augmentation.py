"""Augmentation on the device: pure functions of a key and a batch, inside the jitted training step.

Everything random about sample b is a function of the key and of b, its position in the GLOBAL
batch; under `jax.jit` a batch sharded over any mesh therefore gives what an unsharded one gives.
Only Mixup and CutMix look at another sample.

The order and the defaults of the ranges are those of DeiT
(https://github.com/facebookresearch/deit, augmentation by timm): crop, flip, RandAugment or
three-augment, colour jitter, normalisation, random erasing, Mixup or CutMix.
"""

import math

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped, UInt8

from adder_flax.arrays import AnyArray
from adder_flax.data._source import DataError
from adder_flax.data.operations import rand_augment, three_augment
from adder_flax.settings import AugmentSettings, is_on

Images = Float[Array, "batch height width channel"]
Given = Shaped[AnyArray, "batch height width channel"]
Pixels = Shaped[Array, "batch height width channel"]
Whole = Int[Array, " batch"]
Draws = Float[Array, " draws"]
Targets = Float[Array, "batch classes"]
Range = tuple[float, float]


def augment(
    key: PRNGKeyArray,
    images: UInt8[AnyArray, "batch height width channel"],
    labels: Int[AnyArray, " batch"],
    settings: AugmentSettings,
    *,
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> tuple[Images, Targets]:
    """Augments and normalises a training batch; returns it with targets whose rows sum to one.

    Each kind of augmentation has a key of its own, so switching one on or off leaves the draws of
    the others alone. RandAugment and three-augment work on whole levels, as Pillow does: what a
    crop made in between is rounded to them. Probabilities, strengths and alphas among the settings
    may be traced; a Python 0 leaves its part out of the program. Mean and deviation are of each
    channel of images in [0, 1].

    >>> settings = AugmentSettings(mixup_alpha=0.0, cutmix_alpha=0.0, label_smoothing=0.2)
    >>> white, labels = jnp.full((1, 2, 2, 1), 255, jnp.uint8), jnp.array([1])
    >>> of_set = dict(num_classes=2, mean=(0.0,), std=(1.0,))
    >>> step = jax.jit(lambda key: augment(key, white, labels, settings, **of_set))
    >>> images, targets = step(jax.random.key(0))
    >>> images.dtype, images.shape, [f"{share:.1f}" for share in targets[0]]
    (dtype('float32'), (1, 2, 2, 1), ['0.1', '0.9'])
    """
    crop_key, resize_key, flip_key, jitter_key, erase_key, mix_key = jax.random.split(key, 6)
    images = jnp.asarray(images)
    if settings.crop_padding:
        images = random_crop(crop_key, images, settings.crop_padding)
    if is_on(settings.flip_probability):
        images = random_flip(flip_key, images, settings.flip_probability)
    images = images.astype(jnp.float32) / 255
    if settings.resized_crop_scale is not None:
        ranges = (settings.resized_crop_scale, settings.resized_crop_ratio)
        images = random_resized_crop(resize_key, images, *ranges)
    if is_on(settings.rand_augment_magnitude) or settings.three_augment:
        levels = jnp.round(255 * images).astype(jnp.uint8)
        if is_on(settings.rand_augment_magnitude):
            fill = tuple(min(255, round(255 * channel)) for channel in mean)  # the mean colour
            levels = rand_augment(jax.random.fold_in(key, 6), levels, settings, fill)
        if settings.three_augment:
            levels = three_augment(jax.random.fold_in(key, 7), levels)
        images = levels.astype(jnp.float32) / 255
    if is_on(settings.color_jitter):
        images = color_jitter(jitter_key, images, *[settings.color_jitter] * 3)
    images = normalize(images, mean, std)
    if is_on(settings.erase_probability):
        images = random_erase(erase_key, images, settings.erase_probability)
    hot = jax.nn.one_hot(labels, num_classes)
    targets = optax.smooth_labels(hot, settings.label_smoothing)
    if is_on(settings.mixup_alpha) or is_on(settings.cutmix_alpha):
        images, targets = mix(mix_key, images, targets, settings)
    return images, targets


def normalize(
    images: Shaped[AnyArray, "*batch height width channel"],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Float[Array, "*batch height width channel"]:
    """(x - mean) / std per channel; integer images are divided by 255 first.

    >>> normalize(jnp.full((1, 1, 1), 255, jnp.uint8), (0.5,), (0.25,)).tolist()
    [[[2.0]]]
    """
    if not len(mean) == len(std) in (1, images.shape[-1]):
        raise DataError(
            f"Expected {images.shape[-1]} means and deviations, got {len(mean)} and {len(std)}."
        )
    images = jnp.asarray(images)
    if jnp.issubdtype(images.dtype, jnp.integer):
        images = images.astype(jnp.float32) / 255
    return (images - jnp.asarray(mean, images.dtype)) / jnp.asarray(std, images.dtype)


def random_crop(key: PRNGKeyArray, images: Given, padding: int) -> Pixels:
    """Pads every side by `padding` zeros and cuts the original size at a uniformly random place."""
    batch, height, width, _ = images.shape
    offset = _below(jax.random.uniform(key, (2, batch)), 2 * padding + 1) - padding

    def crop(image, top, left):
        place = image.at[top + jnp.arange(height)[:, None], left + jnp.arange(width)]
        return place.get(mode="fill", fill_value=0, wrap_negative_indices=False)

    return jax.vmap(crop)(images, *offset)


def random_flip(key: PRNGKeyArray, images: Given, probability: float = 0.5) -> Pixels:
    """Mirrors each image left and right with the given probability."""
    flipped = jax.random.bernoulli(key, probability, images.shape[:1])
    return jnp.where(flipped[:, None, None, None], images[:, :, ::-1], images)


def random_resized_crop(
    key: PRNGKeyArray, images: Images, scale: Range, ratio: Range = (3 / 4, 4 / 3)
) -> Images:
    """Cuts a random box and resizes it (bilinear, antialiased) to the image's own size.

    The box is torchvision's: up to ten draws of area and aspect ratio until one fits, then the
    largest central box with a ratio in range. Resizing equals cropping first: no pixel outside the
    box contributes.
    """
    batch, height, width, _ = images.shape
    uniform = jax.random.uniform(key, (_BOX_DRAWS, batch))
    *boxes, found = random_boxes(uniform, height, width, scale, ratio)
    # Of the ratio nearest to a square that is in range, and at least a pixel wide and high.
    central_height = max(1, min(height, round(width / ratio[0])))
    central_width = max(1, min(width, round(height * ratio[1])))
    top, left = (height - central_height) // 2, (width - central_width) // 2
    pairs = zip(boxes, (top, left, central_height, central_width), strict=True)
    return resize_boxes(images, *(jnp.where(found, box, central) for box, central in pairs))


def resize_boxes(
    images: Images, top: Whole, left: Whole, box_height: Whole, box_width: Whole
) -> Images:
    """Resizes one box of each image to the image's size, by two batched matrix products.

    Output pixel o of a box of n pixels starting at s, out of N, has weights
    max(0, 1 - |i + 1/2 - c| / r) on the pixels i of the box, normalised, with c = s + (o + 1/2) n/N
    and r = max(n/N, 1).
    """
    rows = _bilinear_weights(top, box_height, images.shape[1])
    columns = _bilinear_weights(left, box_width, images.shape[2])
    # TPUs and GPUs would otherwise round pixels and weights to a few bits.
    highest = jax.lax.Precision.HIGHEST
    images = jnp.einsum("boi,biwc->bowc", rows, images, precision=highest)
    return jnp.einsum("bpw,bowc->bopc", columns, images, precision=highest)


def color_jitter(
    key: PRNGKeyArray,
    images: Images,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
) -> Images:
    """Jitters brightness, then contrast, then saturation of images in [0, 1].

    Each step is clip(f x + (1 - f) base, 0, 1) with f uniform in [max(0, 1 - strength), 1 +
    strength] and base zero, the mean of the image's grey version, or the grey version. For one
    channel saturation changes nothing. (torchvision shuffles the three steps; here their order is
    fixed.)
    """
    uniform = jax.random.uniform(key, (3, images.shape[0], 1, 1, 1))

    def blend(images, base, strength, uniform):
        low = jnp.maximum(0.0, 1 - strength)
        factor = low + (1 + strength - low) * uniform
        return jnp.clip(factor * images + (1 - factor) * base, 0, 1)

    if is_on(brightness):
        images = blend(images, 0.0, brightness, uniform[0])
    if is_on(contrast):
        images = blend(images, to_gray(images).mean((1, 2), keepdims=True), contrast, uniform[1])
    if is_on(saturation):
        images = blend(images, to_gray(images), saturation, uniform[2])
    return images


def to_gray(images: Images) -> Float[Array, "batch height width 1"]:
    """Grey version of one or three channels, by ITU-R BT.601 as in Pillow and torchvision."""
    if images.shape[-1] == 1:
        return images
    return (images * jnp.asarray((0.299, 0.587, 0.114), images.dtype)).sum(-1, keepdims=True)


def random_erase(
    key: PRNGKeyArray,
    images: Images,
    probability: float,
    scale: Range = (0.02, 1 / 3),
    ratio: Range = (0.3, 1 / 0.3),
) -> Images:
    """Puts noise, N(0, 1), into a random rectangle of each image with the given probability.

    Source: Zhong et al., https://arxiv.org/abs/1708.04896. Images whose ten draws of a rectangle
    all overlap the border stay as they are.
    """
    draw_key, noise_key = jax.random.split(key)
    batch, height, width, _ = images.shape
    uniform = jax.random.uniform(draw_key, (_BOX_DRAWS + 1, batch))
    top, left, box_height, box_width, found = random_boxes(uniform[1:], height, width, scale, ratio)
    inside = _box_mask(top, left, top + box_height, left + box_width, height, width)
    inside &= (found & (uniform[0] < probability))[:, None, None]
    noise = jax.random.normal(noise_key, images.shape, images.dtype)
    return jnp.where(inside[..., None], noise, images)


def mix(
    key: PRNGKeyArray, images: Images, targets: Targets, settings: AugmentSettings
) -> tuple[Images, Targets]:
    """Mixup or CutMix of the batch with its reverse (arXiv:1710.09412 and 1905.04899).

    Both are x w + reverse(x) (1 - w) with a weight w per pixel: Mixup's is constant, CutMix's zero
    inside a box and one outside. Targets are mixed with the mean of w, which for CutMix is the area
    really pasted, boxes being clipped at the border.
    """
    batch, height, width, _ = images.shape
    uniform = jax.random.uniform(key, (8, batch if settings.mix_per == "element" else 1))
    share = jnp.ones_like(uniform[0])
    if is_on(settings.mixup_alpha):
        share = symmetric_beta(uniform[0], uniform[1], settings.mixup_alpha)
    weight = jnp.broadcast_to(share[:, None, None], (*share.shape, height, width))
    if is_on(settings.cutmix_alpha):
        kept = symmetric_beta(uniform[2], uniform[3], settings.cutmix_alpha)
        cutmix_weight, cutmix_share = _cutmix(kept, uniform[4], uniform[5], height, width)
        chosen = uniform[6] < (0.5 if is_on(settings.mixup_alpha) else 1.0)
        weight = jnp.where(chosen[:, None, None], cutmix_weight, weight)
        share = jnp.where(chosen, cutmix_share, share)
    mixed = uniform[7] < settings.mix_probability
    weight = jnp.where(mixed[:, None, None], weight, 1.0)[..., None].astype(images.dtype)
    share = jnp.where(mixed, share, 1.0)[:, None]
    mixed_images = weight * images + (1 - weight) * images[::-1]
    return mixed_images, share * targets + (1 - share) * targets[::-1]


def symmetric_beta(
    first: Float[Array, "*draws"], second: Float[Array, "*draws"], alpha: float
) -> Float[Array, "*draws"]:
    """Beta(alpha, alpha) draws, each from two uniform ones u and v.

    With c = cos(2 pi v) and r = c² (u^(-1/alpha) - 1), (1 + sign(c) sqrt(r / (1 + r))) / 2 has this
    distribution for every alpha > 0 (L. Devroye, "Random variate generation in one line of code",
    Winter Simulation Conference 1996). Far less to compile than the rejection loops of
    `jax.random.beta`.

    >>> draws = symmetric_beta(jnp.full(3, 0.5), jnp.array([0.0, 0.25, 0.5]), 1.0)
    >>> [f"{draw:.4f}" for draw in draws]
    ['0.8536', '0.5000', '0.1464']
    """
    cosine = jnp.cos(2 * jnp.pi * second)
    r = cosine**2 * (first ** (-1 / alpha) - 1)
    # The smaller of the draw and its mirror image, (1 - sqrt(r / (1 + r))) / 2 without the
    # cancellation.
    smaller = 0.5 / ((1 + r) * (1 + jnp.sqrt(1 - 1 / (1 + r))))
    return jnp.where(cosine > 0, 1 - smaller, smaller)


def _cutmix(
    kept: Draws, row: Draws, column: Draws, height: int, width: int
) -> tuple[Float[Array, "draws height width"], Draws]:
    """Weights of zero in a box and one outside, and their mean.

    The box has area 1 - kept and a uniform centre, as fractions of the image, and is clipped.
    """
    side = jnp.sqrt(1 - kept)
    half_height, half_width = (side * height).astype(int) // 2, (side * width).astype(int) // 2
    row, column = _below(row, height), _below(column, width)
    top, bottom = jnp.clip(row - half_height, 0, height), jnp.clip(row + half_height, 0, height)
    left, right = jnp.clip(column - half_width, 0, width), jnp.clip(column + half_width, 0, width)
    inside = _box_mask(top, left, bottom, right, height, width)
    return 1.0 - inside, 1 - (bottom - top) * (right - left) / (height * width)


# Ten areas, ten aspect ratios, and a place.
_BOX_DRAWS = 22


def random_boxes(
    uniform: Float[Array, "22 batch"], height: int, width: int, scale: Range, ratio: Range
) -> tuple[Whole, Whole, Whole, Whole, Bool[Array, " batch"]]:
    """The first of ten draws of (area, width/height) that fits into the image, placed uniformly.

    From draws in [0, 1), the image's size in pixels, the range of the area as a fraction of the
    image's and that of width/height, whose logarithm is uniform, follow top, left, height and width
    of the boxes, and whether any draw did fit.
    """
    area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform[:10])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    root = jnp.exp((low + (high - low) * uniform[10:20]) / 2)
    box_height = jnp.round(jnp.sqrt(area) / root).astype(int)
    box_width = jnp.round(jnp.sqrt(area) * root).astype(int)
    fits = (box_height >= 1) & (box_height <= height) & (box_width >= 1) & (box_width <= width)
    first = jnp.argmax(fits, axis=0)[None]
    box_height = jnp.take_along_axis(box_height, first, 0)[0]
    box_width = jnp.take_along_axis(box_width, first, 0)[0]
    top = _below(uniform[20], height - box_height + 1)
    left = _below(uniform[21], width - box_width + 1)
    return top, left, box_height, box_width, fits.any(0)


def _below(uniform: Float[Array, "*batch"], bound: int | Int[Array, "*batch"]) -> Array:
    """Whole numbers in [0, bound) from numbers in [0, 1]."""
    return jnp.minimum((uniform * bound).astype(int), bound - 1)


def _box_mask(top, left, bottom, right, height, width) -> Bool[Array, "batch height width"]:
    rows, columns = jnp.arange(height), jnp.arange(width)
    in_rows = (rows >= top[:, None]) & (rows < bottom[:, None])
    in_columns = (columns >= left[:, None]) & (columns < right[:, None])
    return in_rows[:, :, None] & in_columns[:, None, :]


def _bilinear_weights(start: Whole, length: Whole, size: int) -> Float[Array, "batch size size"]:
    scale = length[:, None, None] / size
    center = start[:, None, None] + (jnp.arange(size)[:, None] + 0.5) * scale
    pixel = jnp.arange(size)
    inside = (pixel >= start[:, None, None]) & (pixel < (start + length)[:, None, None])
    distance = jnp.abs(pixel + 0.5 - center) / jnp.maximum(scale, 1)
    weights = jnp.where(inside, jnp.maximum(0, 1 - distance), 0)
    return weights / weights.sum(-1, keepdims=True)
