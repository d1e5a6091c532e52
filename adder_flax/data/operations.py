"""Pillow's operations on images, on the device, with a magnitude for each image of a batch, and
which are done to which: RandAugment and three-augment.

Of ``auto_contrast`` to ``translate_y``, those of timm's RandAugment, three families are each one
computation, whatever each image of a batch asks for: tables of 256 levels that pixels are looked up
in, blends of the image with another, and affine maps. All values are whole levels, rounded where
Pillow rounds, so results are equal to Pillow's but where a float32 product falls on the other side
of a whole number than a float64 one: one level there. Counts and sums are exact for images of up to
4,096 × 4,096 pixels.

Sources: Pillow's ``ImageOps``, ``ImageEnhance``, ``Image.transform`` and
``ImageFilter.GaussianBlur`` (https://github.com/python-pillow/Pillow); RandAugment, Cubuk et al.,
2020 (https://arxiv.org/abs/1909.13719), with the ranges of arguments of timm's ``auto_augment.py``
(https://github.com/huggingface/pytorch-image-models), which DeiT is trained with as
``rand-m9-mstd0.5-inc1``; three-augment, Touvron et al., 2022 (DeiT III,
https://arxiv.org/abs/2204.07118).
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from adder_flax.arrays import AnyArray
from adder_flax.settings import AugmentSettings

Levels = UInt8[Array, "batch height width channel"]
Argument = Float[Array, " batch"]
Place = Int[Array, " batch"]
Fill = tuple[int, ...]
_Table = Int[Array, "batch channel 256"]
_Map = Float[Array, "batch 6"]


def choose_operation(
    operation: Place, images: Levels, argument: Argument, *, fill: Fill = (128,)
) -> Levels:
    """Does to each image the operation of that place in `OPERATIONS`, nothing where there is none.

    The program holds each family once and computes all three for every image.

    >>> ramp = jnp.tile(jnp.array([10, 60, 110], jnp.uint8)[:, None], (4, 1, 1, 1))
    >>> names = ("invert", "auto_contrast", "solarize_add", "translate_x")
    >>> places = jnp.array([OPERATIONS.index(name) for name in names])
    >>> arguments = jnp.array([0, 0, 128, -1 / 3])
    >>> jax.jit(choose_operation)(places, ramp, arguments)[:, 0, :, 0].tolist()
    [[245, 195, 145], [0, 127, 255], [138, 188, 238], [128, 10, 60]]

    Args:
        operation: places in `OPERATIONS`: auto_contrast, equalize, invert, …
        images: values 0..255.
        argument: one for each image. posterize: bits kept. solarize: first level that is inverted.
            solarize_add: what levels below 128 gain. color, contrast, brightness, sharpness: the
            factor, 1 changes nothing. rotate: degrees counter-clockwise. shear_x, shear_y: pixels a
            pixel. translate_x, translate_y: as a fraction of the width or height, to the left or
            up. The others have none.
        fill: what moves in from outside of the image, one level or one for each channel.
    """
    counts = histogram(images)
    tables = {name: make(counts, argument) for name, make in _TABLES.items()}
    bases = {name: make(images) for name, make in _BASES.items()}
    maps = {name: make(argument, *images.shape[1:3]) for name, make in _MAPS.items()}
    results = (
        (tables, look_up(images, _chosen(operation, tables))),
        (bases, blend(_chosen(operation, bases), images, argument)),
        (maps, affine(images, _chosen(operation, maps), fill)),
    )
    for family, result in results:
        images = jnp.where(_is_among(operation, family, images.ndim), result, images)
    return images


def _chosen(operation: Place, choices: Mapping[str, Array]) -> Array:
    arrays = jnp.broadcast_arrays(*choices.values())
    chosen = [_is_among(operation, [name], arrays[0].ndim) for name in choices]
    return jnp.select(chosen, arrays, arrays[0])


def _is_among(operation: Place, names, ndim: int) -> Bool[Array, "batch ..."]:
    numbers = jnp.array([OPERATIONS.index(name) for name in names])
    return jnp.isin(operation, numbers).reshape(-1, *(1,) * (ndim - 1))


def histogram(images: Levels) -> Int[Array, "batch channel 256"]:
    """How many pixels of each channel have each level.

    A product of the one-hot upper and lower halves of the bytes: products are what accelerators do
    best, while counters that pixels add to one by one are what they do worst.
    """
    pixels = images.reshape(images.shape[0], -1, images.shape[-1])
    halves = (pixels >> 4, pixels & 15)
    upper, lower = (jax.nn.one_hot(half, 16, dtype=jnp.bfloat16) for half in halves)
    counts = jnp.einsum("bpci,bpcj->bcij", upper, lower, preferred_element_type=jnp.float32)
    return counts.reshape(*counts.shape[:2], 256).astype(int)


def look_up(images: Levels, table: _Table) -> Levels:
    """The level that the table of an image's channel has for each of its levels."""
    batch, height, width, channels = images.shape
    pixels = images.reshape(batch, -1, channels).astype(int)
    found = jnp.take_along_axis(table.astype(jnp.uint8).swapaxes(1, 2), pixels, axis=1)
    return found.reshape(batch, height, width, channels)


_LEVELS = np.arange(256)


def _auto_contrast(counts: _Table, argument: Argument) -> _Table:
    present = counts > 0
    low = present.argmax(-1, keepdims=True)
    high = 255 - present[..., ::-1].argmax(-1, keepdims=True)
    stretched = jnp.clip(255 * (_LEVELS - low) // jnp.maximum(high - low, 1), 0, 255)
    return jnp.where(high > low, stretched, _LEVELS)


def _equalize(counts: _Table, argument: Argument) -> _Table:
    last = 255 - (counts > 0)[..., ::-1].argmax(-1, keepdims=True)
    step = (counts.sum(-1, keepdims=True) - jnp.take_along_axis(counts, last, -1)) // 255
    below = jnp.cumsum(counts, -1) - counts
    levels = jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255)
    return jnp.where(step > 0, levels, _LEVELS)


def _of_levels(table: Callable[[AnyArray], AnyArray]) -> Callable[[_Table, Argument], _Table]:
    """A table that does not look at the image, made of whole arguments of shape (batch, 1, 1)."""
    whole = lambda argument: argument.astype(int)[:, None, None]
    return lambda counts, argument: jnp.broadcast_to(table(whole(argument)), counts.shape)


_TABLES: dict[str, Callable[[_Table, Argument], _Table]] = {
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
    "invert": _of_levels(lambda argument: 255 - _LEVELS),
    "posterize": _of_levels(
        lambda bits: _LEVELS >> (8 - jnp.clip(bits, 0, 8)) << (8 - jnp.clip(bits, 0, 8))
    ),
    "solarize": _of_levels(lambda first: jnp.where(first > _LEVELS, _LEVELS, 255 - _LEVELS)),
    "solarize_add": _of_levels(
        lambda gain: jnp.where(_LEVELS < 128, jnp.clip(_LEVELS + gain, 0, 255), _LEVELS)
    ),
}


def solarize(images: Levels, first: float) -> Levels:
    """Inverts the levels from the first one on, by the table of `choose_operation`."""
    counts, argument = histogram(images), jnp.full(images.shape[:1], first, jnp.float32)
    return look_up(images, _TABLES["solarize"](counts, argument))


def blend(base: Int[Array, "batch ..."], images: Levels, factor: Argument) -> Levels:
    """base + factor (images - base), cut to 0..255 and to whole levels: ``PIL.Image.blend``."""
    factor = factor[:, None, None, None]
    # As Pillow has it: with a factor of 1 or 0 the product would be exact in either form.
    mixed = base + factor * (images.astype(int) - base)
    return jnp.clip(mixed, 0, 255).astype(jnp.uint8)


def grayscale(images: Levels) -> Levels:
    """``convert("L")`` in all channels: ITU-R BT.601 in 16-bit fractions."""
    return jnp.broadcast_to(_gray(images), images.shape).astype(jnp.uint8)


def _gray(images: Levels) -> Int[Array, "batch height width 1"]:
    if images.shape[-1] == 1:
        return images.astype(int)
    return ((images * jnp.array([19595, 38470, 7471])).sum(-1, keepdims=True) + 2**15) >> 16


def _mean_gray(images: Levels) -> Int[Array, "batch 1 1 1"]:
    gray = _gray(images)
    count = gray.shape[1] * gray.shape[2]
    total = gray.sum((1, 2, 3), dtype=jnp.uint32)
    return ((total + count // 2) // count).astype(int).reshape(-1, 1, 1, 1)


def _smooth(images: Levels) -> Int[Array, "batch height width channel"]:
    """``ImageFilter.SMOOTH``: the mean of nine pixels, the middle one five times."""
    values = images.astype(int)
    rows = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    nine = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    return values.at[:, 1:-1, 1:-1].set((nine + 4 * values[:, 1:-1, 1:-1] + 6) // 13)


_BASES: dict[str, Callable[[Levels], Array]] = {
    "color": _gray,
    "contrast": _mean_gray,
    "brightness": lambda images: jnp.zeros((), int).reshape(1, 1, 1, 1),
    "sharpness": _smooth,
}


def affine(images: Levels, coefficients: _Map, fill: Fill = (128,)) -> Levels:
    """``Image.transform(size, AFFINE, (a, …, f), BICUBIC)``, with coefficients for each image.

    The pixel at column x and row y, counted from the middle of the first one at (1/2, 1/2), comes
    from (a x + b y + c, d x + e y + f); pixels in between have Keys' kernel with a = -1, levels are
    cut, not rounded.
    """
    batch, height, width, channels = images.shape
    a, b, c, d, e, f = jnp.moveaxis(coefficients[..., None, None], 1, 0)
    x, y = jnp.arange(width) + 0.5, (jnp.arange(height) + 0.5)[:, None]
    column, row = a * x + b * y + c, d * x + e * y + f
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    left, top = jnp.floor(column - 0.5), jnp.floor(row - 0.5)
    pixels = images.reshape(batch, height * width, channels)

    def pixel(down: int, right: int) -> Float[Array, "batch height width channel"]:
        row = jnp.clip(top.astype(int) + down, 0, height - 1)
        place = row * width + jnp.clip(left.astype(int) + right, 0, width - 1)
        found = jnp.take_along_axis(pixels, place.reshape(batch, -1, 1), axis=1)
        return found.reshape(images.shape).astype(jnp.float32)

    across, along = (column - 0.5 - left)[..., None], (row - 0.5 - top)[..., None]
    line = lambda down: _between([pixel(down, right) for right in range(-1, 3)], across)
    lines = [line(down) for down in range(-1, 3)]
    values = jnp.clip(_between(lines, along), 0, 255).astype(jnp.uint8)
    return jnp.where(inside[..., None], values, jnp.array(fill, jnp.uint8))


def _between(four: list[Array], share: Array) -> Array:
    """Between the middle two of four values, in a form that leaves equal values what they are."""
    before, first, second, after = four
    cube = -before + first - second + after
    square = 2 * (before - first) + second - after
    return first + share * (second - before + share * (square + share * cube))


def _rotation(degrees: Argument, height: int, width: int) -> _Map:
    cosine, sine = jnp.cos(jnp.radians(degrees)), jnp.sin(jnp.radians(degrees))
    x, y = width / 2, height / 2
    rows = (cosine, -sine, x - cosine * x + sine * y), (sine, cosine, y - sine * x - cosine * y)
    return jnp.stack([*rows[0], *rows[1]], -1)


def _moves(place: int, size: Callable[[int, int], int]) -> Callable[[Argument, int, int], _Map]:
    """Maps whose coefficient at a place is the argument times a size; else they are identities."""

    def make(argument: Argument, height: int, width: int) -> _Map:
        identity = jnp.broadcast_to(jnp.array([1.0, 0, 0, 0, 1, 0]), (*argument.shape, 6))
        return identity.at[:, place].set(argument * size(height, width))

    return make


_MAPS: dict[str, Callable[[Argument, int, int], _Map]] = {
    "rotate": _rotation,
    "shear_x": _moves(1, lambda height, width: 1),
    "shear_y": _moves(3, lambda height, width: 1),
    "translate_x": _moves(2, lambda height, width: width),
    "translate_y": _moves(5, lambda height, width: height),
}

OPERATIONS: tuple[str, ...] = (*_TABLES, *_BASES, *_MAPS)
"""Names of the operations of `choose_operation`, by their places."""


def gaussian_blur(images: Levels, radius: Argument | float) -> Levels:
    """``ImageFilter.GaussianBlur(radius)`` for radii, standard deviations in pixels, of up to 2.

    Pillow's is no Gaussian but three box blurs along the rows and three along the columns, each
    rounded to whole levels, of a width that need not be whole, with the same variance (Gwosdek et
    al., "Theoretical foundations of Gaussian convolution by extended box filtering", 2011). Up to a
    radius of 2 a box has at most five pixels.

    >>> dot = jnp.zeros((1, 1, 5, 1), jnp.uint8).at[0, 0, 2, 0].set(255)
    >>> jax.jit(gaussian_blur)(dot, 0.5).ravel().tolist()
    [1, 27, 199, 27, 1]
    """
    radius = jnp.broadcast_to(jnp.asarray(radius, jnp.float32), images.shape[:1])
    variance = radius**2 / 3
    whole = jnp.floor((jnp.sqrt(12 * variance + 1) - 1) / 2)
    over = 6 * (variance - (whole + 1) ** 2)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / over
    # In 24-bit fractions, as Pillow counts: pixels of the box, and the two that are partly in it.
    full = (2.0**24 / (2 * (whole + part) + 1)).astype(jnp.uint32)
    ends = (2**24 - (2 * whole.astype(jnp.uint32) + 1) * full) // 2
    offsets = abs(jnp.arange(-2, 3))
    inside, at_end = offsets <= whole[:, None], offsets == whole[:, None] + 1
    weights = jnp.where(inside, full[:, None], jnp.where(at_end, ends[:, None], 0))
    for axis in (2, 1):
        blur = lambda _, images, axis=axis: _box(images, weights.astype(jnp.uint32), axis)
        images = jax.lax.fori_loop(0, 3, blur, images)
    return images


def _box(images: Levels, weights: Array, axis: int) -> Levels:
    """Five pixels along an axis, weighted in 24-bit fractions; borders go on outside."""
    size = images.shape[axis]
    padding = [(0, 0)] * axis + [(2, 2)] + [(0, 0)] * (3 - axis)
    padded = jnp.pad(images, padding, mode="edge").astype(jnp.uint32)
    moved = lambda i: jax.lax.slice_in_dim(padded, i, i + size, axis=axis)
    parts = (moved(i) * weights[:, i, None, None, None] for i in range(5))
    return (sum(parts, jnp.uint32(2**23)) >> 24).astype(jnp.uint8)


MOST_MAGNITUDE = 10.0
"""The magnitude at which the arguments of operations are at the end of their ranges."""

LAYER_PROBABILITY = 0.5
"""Of doing a drawn operation at all, for each layer and image (timm's)."""


def rand_augment(
    key: PRNGKeyArray, images: Levels, settings: AugmentSettings, fill: Fill = (128,)
) -> Levels:
    """Does two random operations to each image in turn.

    What is drawn for sample b is a function of the key and b. Magnitude and deviation in the
    settings may be traced; ``fill`` is the level of what moves in from outside, of each channel.

    >>> settings = AugmentSettings(rand_augment_magnitude=9.0, rand_augment_std=0.5)
    >>> photographs = jnp.arange(4 * 8 * 8 * 3).reshape(4, 8, 8, 3).astype(jnp.uint8)
    >>> step = jax.jit(lambda key: rand_augment(key, photographs, settings))
    >>> augmented = step(jax.random.key(0))
    >>> augmented.shape, augmented.dtype
    ((4, 8, 8, 3), dtype('uint8'))
    """
    layers = jax.vmap(lambda key: draw_layer(key, images.shape[0], settings))
    step = lambda images, layer: (choose_operation(layer[0], images, layer[1], fill=fill), None)
    return jax.lax.scan(step, images, layers(jax.random.split(key, 2)))[0]


def draw_layer(key: PRNGKeyArray, batch: int, settings: AugmentSettings) -> tuple[Place, Argument]:
    """Draws an operation for each image with equal chances, done with `LAYER_PROBABILITY`.

    The magnitude is normal around the one that is set, cut to 0..`MOST_MAGNITUDE`; arguments that
    have a sign have either with equal chances. Returns places in ``OPERATIONS`` (-1: none) and
    arguments, as ``choose_operation`` takes them.
    """
    operation_key, uniform_key, normal_key = jax.random.split(key, 3)
    operation = jax.random.randint(operation_key, (batch,), 0, len(OPERATIONS))
    done, negative = jax.random.uniform(uniform_key, (2, batch)) < LAYER_PROBABILITY
    deviation = settings.rand_augment_std * jax.random.normal(normal_key, (batch,))
    magnitude = jnp.clip(settings.rand_augment_magnitude + deviation, 0, MOST_MAGNITUDE)
    of_all = operation_arguments(magnitude, jnp.where(negative, -1.0, 1.0))
    argument = jnp.take_along_axis(of_all, operation[None], axis=0)[0]
    return jnp.where(done, operation, -1), argument


def operation_arguments(magnitude: Argument, sign: Argument) -> Float[Array, "operation batch"]:
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
