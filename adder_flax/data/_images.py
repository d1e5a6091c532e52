"""Image decoding and cropping on the host, with Pillow, which releases the GIL."""

from __future__ import annotations

import io
import math

import numpy as np
from jaxtyping import UInt8
from PIL import Image

EVAL_CROP_RATIO = 0.875
"""Side of the centre crop over the shorter side of the resized image (DeiT: 224 of 256)."""

ASPECT_RATIO_RANGE = (3 / 4, 4 / 3)
"""Range of width/height of a random resized crop before resizing (torchvision's default)."""


def decode_and_resize(encoded: bytes, image_shape: tuple[int, int, int]) -> UInt8[np.ndarray, "height width channel"]:
    """The whole image, resized (bicubic) only if its size is another."""
    height, width, channels = image_shape
    image = _open(encoded, channels)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return _to_array(image)


def decode_and_center_crop(encoded: bytes, size: int, channels: int) -> UInt8[np.ndarray, "size size channel"]:
    """DeiT's evaluation view: shorter side to size / 0.875 (bicubic), then the central size x size.

    The rounding is torchvision's (`Resize`, `CenterCrop`), as in the evaluation transform of
    https://github.com/facebookresearch/deit (datasets.py), so published weights see the pixels that they were
    measured on.
    """
    image = _open(encoded, channels)
    shorter = int(size / EVAL_CROP_RATIO)
    resized = tuple(int(shorter * side / min(image.size)) for side in image.size)
    image = image.resize(resized, Image.Resampling.BICUBIC)
    left, top = round((resized[0] - size) / 2), round((resized[1] - size) / 2)
    return _to_array(image.crop((left, top, left + size, top + size)))


def decode_and_random_crop(
    encoded: bytes, size: int, channels: int, seed: tuple[int, ...], scale: tuple[float, float]
) -> UInt8[np.ndarray, "size size channel"]:
    """A random resized crop (bicubic) that is a function of the image and the seed alone."""
    image = Image.open(io.BytesIO(encoded))
    left, top, width, height = random_crop_box(np.random.default_rng(seed), *image.size, scale)
    full_width, full_height = image.size
    reduction = min(width, height) / size
    if reduction >= 2:
        # JPEG decodes at 1/2, 1/4 or 1/8 of its size for less work, here if the crop still has the pixels asked for.
        # For other formats this does nothing.
        image.draft(None, (math.ceil(full_width / reduction), math.ceil(full_height / reduction)))
    image = _convert(image, channels)
    # Multiplied first: then the edges of the whole image stay exactly those of the reduced one.
    horizontal = [edge * image.size[0] / full_width for edge in (left, left + width)]
    vertical = [edge * image.size[1] / full_height for edge in (top, top + height)]
    box = (horizontal[0], vertical[0], horizontal[1], vertical[1])
    return _to_array(image.resize((size, size), Image.Resampling.BICUBIC, box=box))


def random_crop_box(
    rng: np.random.Generator, width: int, height: int, scale: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Draws a box as torchvision's `RandomResizedCrop` does.

    Area uniform in `scale` times the image's, log of the aspect ratio uniform; up to ten draws until the box
    fits, then the largest central box with an aspect ratio in range.

    >>> random_crop_box(np.random.default_rng(0), 100, 10, (1.0, 1.0))  # never fits: central box of ratio 4/3
    (43, 0, 13, 10)

    Args:
        rng: source of the draws.
        width: width of the image, pixels.
        height: height of the image, pixels.
        scale: lowest and highest area as a fraction of the image's.

    Returns:
        left, top, width, height in pixels.
    """
    low, high = (math.log(ratio) for ratio in ASPECT_RATIO_RANGE)
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(low, high))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(rng.integers(0, width - box_width + 1))
            top = int(rng.integers(0, height - box_height + 1))
            return left, top, box_width, box_height
    box_width, box_height = width, height
    if width / height < ASPECT_RATIO_RANGE[0]:
        box_height = round(width / ASPECT_RATIO_RANGE[0])
    elif width / height > ASPECT_RATIO_RANGE[1]:
        box_width = round(height * ASPECT_RATIO_RANGE[1])
    return (width - box_width) // 2, (height - box_height) // 2, box_width, box_height


def _open(encoded: bytes, channels: int) -> Image.Image:
    return _convert(Image.open(io.BytesIO(encoded)), channels)


def _convert(image: Image.Image, channels: int) -> Image.Image:
    return image.convert({1: "L", 3: "RGB"}[channels])


def _to_array(image: Image.Image) -> UInt8[np.ndarray, "height width channel"]:
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]
