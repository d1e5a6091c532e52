"""Image decoding and cropping on the host, with Pillow, which releases the GIL.

What becomes of a file: its first image, upright as its EXIF orientation says, eight bits a channel.
Sixteen bits are scaled, v ↦ v / 257; kinds whose range no file states (32-bit integers, floating
point) are refused. Transparency is dropped, as torchvision's `ImageFolder` does.
"""

import functools
import io
import math
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from adder_flax.extras import needs

with needs("data"):
    from PIL import ExifTags, Image, TiffImagePlugin

Square = UInt8[np.ndarray, "size size channel"]
Range = tuple[float, float]

EVAL_CROP_RATIO = 0.875
"""Side of the centre crop over the shorter side of the resized image (DeiT: 224 of 256)."""

ASPECT_RATIO_RANGE = (3 / 4, 4 / 3)
"""Range of width/height of a random resized crop before resizing (torchvision's default)."""

# What Pillow opens and does not read itself: EPS starts Ghostscript, the others wait for a program
# that is told to it, or belong to a system.
_NOT_READ = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}


@functools.cache
def _formats() -> tuple[str, ...]:
    """The names of the formats that are read, the usual ones first."""
    Image.init()
    usual = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
    return (*usual, *sorted(set(Image.OPEN) - _NOT_READ - set(usual)))


@functools.cache
def image_suffixes() -> frozenset[str]:
    """The endings of file names of images: those of every format that is read."""
    known = Image.registered_extensions().items()
    return frozenset(suffix for suffix, name in known if name in _formats())


_TURNS = (
    *("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE"),
    *("ROTATE_270", "TRANSVERSE", "ROTATE_90"),
)
_UPRIGHT = {number: Image.Transpose[turn] for number, turn in enumerate(_TURNS, 2)}  # EXIF's


def decode_and_resize(
    encoded: bytes, image_shape: tuple[int, int, int], stored_size: tuple[int, int] | None = None
) -> UInt8[np.ndarray, "height width channel"]:
    """The whole image, resized (bicubic) only if its size is another than `image_shape`."""
    height, width, channels = image_shape
    image = _convert(_open(encoded), channels)
    if stored_size not in (None, (image.height, image.width)):
        raise ValueError(
            f"an image of {image.height} × {image.width} pixels in a set of {stored_size} ones"
        )
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return _to_array(image)


def read_image(
    path: str | Path, size: int, channels: int, *, crop_ratio: float = EVAL_CROP_RATIO
) -> Square:
    """The pixels of a file as an evaluation sees them; errors at what is no image vary."""
    return decode_and_center_crop(Path(path).read_bytes(), size, channels, crop_ratio)


def resized_side(size: int, crop_ratio: float) -> int:
    """Length of the shorter side of a photograph before the middle of `size` pixels is taken.

    As timm and DeiT compute it, so that whoever evaluates an exported model sees the same pixels.

    >>> resized_side(224, 0.875), resized_side(32, 0.9)
    (256, 35)
    """
    return int(size / crop_ratio)


def decode_and_center_crop(
    encoded: bytes, size: int, channels: int, crop_ratio: float = EVAL_CROP_RATIO
) -> Square:
    """DeiT's evaluation view: shorter side to size / 0.875 (bicubic), then the central size x size.

    The rounding is torchvision's, as in https://github.com/facebookresearch/deit (datasets.py), so
    published weights see the pixels that they were measured on.
    """
    image = _convert(_open(encoded), channels)
    shorter = resized_side(size, crop_ratio)
    width, height = (int(shorter * side / min(image.size)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return _to_array(image.crop((left, top, left + size, top + size)))


def decode_and_random_crop(
    encoded: bytes,
    size: int,
    channels: int,
    seed: tuple[int, ...],
    scale: Range,
    ratio: Range = ASPECT_RATIO_RANGE,
) -> Square:
    """A random resized crop (bicubic) that is a function of the image and the seed alone."""
    image = _open(encoded)
    rng = np.random.default_rng(seed)
    left, top, width, height = random_crop_box(rng, *image.size, scale, ratio)
    full_width, full_height = image.size
    reduction = min(width, height) / size
    if reduction >= 2:
        # JPEG decodes at 1/2, 1/4 or 1/8 of its size for less work, here if the crop still has the
        # pixels asked for. For other formats this does nothing.
        image.draft(None, (math.ceil(full_width / reduction), math.ceil(full_height / reduction)))
    image = _convert(image, channels)
    # Multiplied first: then the edges of the whole image stay exactly those of the reduced one.
    scaled = lambda x, y: (x * image.width / full_width, y * image.height / full_height)
    box = (*scaled(left, top), *scaled(left + width, top + height))
    return _to_array(image.resize((size, size), Image.Resampling.BICUBIC, box=box))


def random_crop_box(
    rng: np.random.Generator,
    width: int,
    height: int,
    scale: Range,
    ratio: Range = ASPECT_RATIO_RANGE,
) -> tuple[int, int, int, int]:
    """Draws left, top, width and height of a box, in pixels, as torchvision's `RandomResizedCrop`.

    The area is uniform in `scale` times the image's, the log of the aspect ratio uniform; up to ten
    draws until the box fits, then the largest central box with an aspect ratio in range.
    """
    low, high = map(math.log, ratio)
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        drawn = math.exp(rng.uniform(low, high))
        box_width, box_height = round(math.sqrt(area * drawn)), round(math.sqrt(area / drawn))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(rng.integers(0, width - box_width + 1))
            top = int(rng.integers(0, height - box_height + 1))
            return left, top, box_width, box_height
    box_width, box_height = width, height
    if width / height < ratio[0]:
        box_height = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        box_width = max(1, round(height * ratio[1]))
    return (width - box_width) // 2, (height - box_height) // 2, box_width, box_height


def _open(encoded: bytes) -> Image.Image:
    """The first image of a file, upright, in eight bits a channel; of a JPEG not yet decoded."""
    if not encoded:
        raise ValueError("an empty file")
    try:
        image = Image.open(io.BytesIO(encoded), formats=_formats())
        if image.format == "PNG":  # whose check sums Pillow looks at when it is told to
            image.verify()
            image = Image.open(io.BytesIO(encoded))
    except Image.UnidentifiedImageError as error:
        raise ValueError(f"no image of a kind that is read ({', '.join(_formats())})") from error
    if image.format not in ("JPEG", "MPO"):
        image.load()  # before its orientation is asked for: TIFF files are turned upright by that
    orientation = _orientation(image)
    if image.mode.startswith(("I", "F")):
        image = _to_eight_bits(image)
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """round(255 v / maximum) of a grey image of more than eight bits."""
    maximum = 2**16 - 1
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        bits, white_is_zero = (image.tag_v2.get(tag) for tag in (258, 262))
        maximum = 2 ** bits[0] - 1 if bits else maximum
        known = image.mode.startswith("I;16") and white_is_zero != 0
    else:
        known = image.mode.startswith("I") and image.format in ("PNG", "PPM")
    values = np.asarray(image)
    if not known or values.min() < 0 or values.max() > maximum:
        kind = {"F": "floating-point", "I": "32-bit or signed"}.get(image.mode, "inverted 16-bit")
        raise ValueError(
            f"an image of {kind} values, whose range is not known; save it with 8 or 16 bits a "
            "channel"
        )
    levels = (values.astype(np.uint32) * 255 + maximum // 2) // maximum
    return Image.fromarray(levels.astype(np.uint8))


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        return 1  # errors of many types for broken EXIF data, which say nothing about the pixels


def _convert(image: Image.Image, channels: int) -> Image.Image:
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert({1: "L", 3: "RGB"}[channels])


def _to_array(image: Image.Image) -> UInt8[np.ndarray, "height width channel"]:
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]
