"""What becomes of an image file: its formula in NumPy, or it is refused with the reason."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from adder_flax.data._images import (
    decode_and_center_crop,
    decode_and_random_crop,
    decode_and_resize,
)
from tests.data.files import smooth_image

RNG = np.random.default_rng(0)
HEIGHT, WIDTH = 9, 14
GREY = RNG.integers(0, 256, (HEIGHT, WIDTH), np.uint8)
COLOUR = RNG.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
DEEP = RNG.integers(0, 2**16, (HEIGHT, WIDTH)).astype(np.uint16)
ALPHA = RNG.integers(0, 256, (HEIGHT, WIDTH), np.uint8)


def save(image, image_format="png", **options):
    buffer = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def png(bit_depth, colour_type, rows):
    """A PNG written by hand: Pillow writes few kinds of more than eight bits."""

    number = lambda value: struct.pack(">I", value)
    chunk = lambda kind, data: number(len(data)) + kind + data + number(zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, bit_depth, colour_type, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def three(grey):
    return np.repeat(np.asarray(grey, np.float64)[..., None], 3, axis=-1)


def cmyk_to_rgb(cmyk):
    ink = cmyk.astype(np.float64) / 255
    return 255 * (1 - ink[..., :3]) * (1 - ink[..., 3:])


PALETTE = RNG.integers(0, 256, (256, 3), np.uint8)
INDICES = Image.fromarray(GREY, "P")
INDICES.putpalette(PALETTE.tobytes())
CMYK = RNG.integers(0, 256, (HEIGHT, WIDTH, 4), np.uint8)
DEEP_COLOUR = RNG.integers(0, 2**16, (HEIGHT, WIDTH, 3)).astype(np.uint16)

HALF = GREY[:, : WIDTH // 2]
NIBBLES = np.stack([HALF >> 4, HALF & 15], -1).reshape(HEIGHT, WIDTH)
DEEP_GREY, SHALLOW = three(np.rint(DEEP / 257)), DEEP // 300
BIG_ENDIAN = Image.fromarray(DEEP.astype(">u2"))
TEN_BITS = b"P5 %d %d 1023\n" % (WIDTH, HEIGHT) + (DEEP % 1024).astype(">u2").tobytes()
DEEP_ROWS = [row.astype(">u2").tobytes() for row in DEEP_COLOUR]
WITH_ALPHA = [np.stack([row, row[::-1]], -1).astype(">u2").tobytes() for row in DEEP]
FRAME = Image.fromarray(255 - GREY)
COLOUR_FRAME = Image.fromarray(255 - COLOUR)

# The file, its pixels, and how many levels they may differ.
KINDS = {
    "8-bit grey": (save(GREY), three(GREY), 0),
    "16-bit grey PNG": (save(DEEP), DEEP_GREY, 0),
    "16-bit PNG, dark": (save(SHALLOW), three(np.rint(SHALLOW / 257)), 0),
    "16-bit grey TIFF": (save(DEEP, "tiff"), DEEP_GREY, 0),
    "16-bit TIFF, big-endian": (save(BIG_ENDIAN, "tiff", big_endian=True), DEEP_GREY, 0),
    "16-bit PGM": (save(DEEP, "ppm"), DEEP_GREY, 0),
    "10-bit PGM": (TEN_BITS, three(DEEP % 1024 / 1023 * 255), 0.51),
    # Pillow keeps the upper byte of each channel, at most one level from v / 257.
    "16-bit RGB PNG": (png(16, 2, DEEP_ROWS), DEEP_COLOUR / 257, 1),
    "16-bit grey with alpha": (png(16, 4, WITH_ALPHA), three(DEEP / 257), 1),
    "4-bit grey": (png(4, 0, [row.tobytes() for row in HALF]), three(17 * NIBBLES), 0),
    "1-bit": (save(GREY > 127), three(255 * (GREY > 127)), 0),
    "palette": (save(INDICES), PALETTE[GREY], 0),
    "palette with a transparent colour": (save(INDICES, transparency=5), PALETTE[GREY], 0),
    "palette, alphas": (save(INDICES, transparency=bytes(range(256))), PALETTE[GREY], 0),
    "grey with alpha": (save(Image.fromarray(np.stack([GREY, ALPHA], -1), "LA")), three(GREY), 0),
    "RGBA": (save(Image.fromarray(np.dstack([COLOUR, ALPHA]), "RGBA")), COLOUR, 0),
    "CMYK TIFF": (save(Image.fromarray(CMYK, "CMYK"), "tiff"), cmyk_to_rgb(CMYK), 1),
    "GIF": (save(INDICES, "gif", save_all=True, append_images=[FRAME]), PALETTE[GREY], 0),
    "animated PNG": (save(COLOUR, save_all=True, append_images=[COLOUR_FRAME]), COLOUR, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_the_formula(kind):
    encoded, expected, tolerance = KINDS[kind]
    got = decode_and_resize(encoded, (HEIGHT, WIDTH, 3))
    assert got.dtype == np.uint8
    assert np.abs(got - expected.astype(np.float64)).max() <= tolerance


def test_grey_images_keep_sixteen_bits_scaled():
    encoded = save(DEEP)
    assert (decode_and_resize(encoded, (HEIGHT, WIDTH, 1))[..., 0] == np.rint(DEEP / 257)).all()


def test_other_sizes_are_resized():
    image = Image.fromarray(COLOUR)
    expected = image.resize((12, 12), Image.BICUBIC)
    assert (decode_and_resize(save(image), (12, 12, 3)) == np.asarray(expected)).all()


def turned(image, orientation):
    """One of the eight orientations of EXIF, as arrays; numbers that are none change nothing."""
    image = image[::-1] if orientation in (3, 4, 6, 7) else image
    image = image[:, ::-1] if orientation in (2, 3, 7, 8) else image
    return image.swapaxes(0, 1) if orientation in (5, 6, 7, 8) else image


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("image_format", ["png", "tiff", "jpeg"])
def test_images_are_upright(orientation, image_format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = smooth_image(40, 64)
    encoded = save(image, image_format, exif=exif)
    expected = np.ascontiguousarray(turned(image, orientation))
    got = decode_and_resize(encoded, expected.shape).astype(int)
    assert np.abs(got - expected).mean() < 4
    if image_format != "jpeg":
        assert (got == expected).all()
    crop = lambda encoded: decode_and_random_crop(encoded, 16, 3, (0,), (1.0, 1.0)).astype(int)
    assert np.abs(crop(encoded) - crop(save(expected))).mean() < 8


UNKNOWN = "no image of a kind that is read"


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (save(RNG.random((4, 4), np.float32), "tiff"), "floating-point values"),
        (save(np.full((4, 4), 70_000, np.int32), "tiff"), "32-bit or signed values"),
        (b"these are words", UNKNOWN),
        (b"", "an empty file"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", UNKNOWN),
    ],
)
def test_what_cannot_be_read_says_why(encoded, reason):
    with pytest.raises(Exception, match=reason):
        decode_and_center_crop(encoded, 16, 3)


def test_a_png_with_one_wrong_bit_is_never_decoded_to_other_pixels():
    """Pillow alone decodes some of these to other values."""
    ramp = np.linspace(0, 255, 30 * 40 * 3).reshape(30, 40, 3).astype(np.uint8)
    encoded = save(ramp)
    true = decode_and_resize(encoded, (30, 40, 3))
    for bit in range(0, 8 * len(encoded), 7):
        damaged = bytearray(encoded)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            got = decode_and_resize(bytes(damaged), (30, 40, 3))
        except Exception:
            continue
        assert (got == true).all()


def test_broken_exif_data_does_not_make_an_image_unreadable():
    image = smooth_image(16, 16)
    encoded = save(image, "jpeg", exif=b"Exif\0\0" + b"MM\0*\0\0\0\x08\0\x05garbage")
    got, expected = (decode_and_resize(e, (16, 16, 3)) for e in (encoded, save(image, "jpeg")))
    assert (got == expected).all()
