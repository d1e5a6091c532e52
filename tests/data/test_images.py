"""What becomes of an image file: every kind against its formula in NumPy, or refused with the
reason."""

from __future__ import annotations

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
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def png(bit_depth, colour_type, rows):
    """A PNG written by hand: Pillow writes few kinds of more than eight bits."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, bit_depth, colour_type, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


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

KINDS = {
    "8-bit grey": (save(Image.fromarray(GREY)), three(GREY), 0),
    "16-bit grey PNG": (save(Image.fromarray(DEEP)), three(np.rint(DEEP / 257)), 0),
    "16-bit grey PNG of small values": (
        save(Image.fromarray(DEEP // 300)),
        three(np.rint(DEEP // 300 / 257)),
        0,
    ),
    "16-bit grey TIFF": (save(Image.fromarray(DEEP), "tiff"), three(np.rint(DEEP / 257)), 0),
    "16-bit grey TIFF, big-endian": (
        save(Image.fromarray(DEEP.astype(">u2")), "tiff", big_endian=True),
        three(np.rint(DEEP / 257)),
        0,
    ),
    "16-bit PGM": (save(Image.fromarray(DEEP), "ppm"), three(np.rint(DEEP / 257)), 0),
    "10-bit PGM": (
        b"P5 %d %d 1023\n" % (WIDTH, HEIGHT) + (DEEP % 1024).astype(">u2").tobytes(),
        three(DEEP % 1024 / 1023 * 255),
        0.51,
    ),
    # Pillow keeps the upper byte of each channel, at most one level from v / 257.
    "16-bit RGB PNG": (
        png(16, 2, [row.astype(">u2").tobytes() for row in DEEP_COLOUR]),
        DEEP_COLOUR / 257,
        1,
    ),
    "16-bit grey with alpha": (
        png(16, 4, [np.stack([row, row[::-1]], -1).astype(">u2").tobytes() for row in DEEP]),
        three(DEEP / 257),
        1,
    ),
    "4-bit grey": (
        png(4, 0, [np.packbits(np.unpackbits(r)).tobytes() for r in GREY[:, : WIDTH // 2]]),
        None,
        0,
    ),
    "1-bit": (save(Image.fromarray(GREY > 127)), three(255 * (GREY > 127)), 0),
    "palette": (save(INDICES), PALETTE[GREY].astype(np.float64), 0),
    "palette with a transparent colour": (
        save(INDICES, transparency=5),
        PALETTE[GREY].astype(np.float64),
        0,
    ),
    "palette with alphas": (
        save(INDICES, transparency=bytes(range(256))),
        PALETTE[GREY].astype(np.float64),
        0,
    ),
    "grey with alpha": (save(Image.fromarray(np.stack([GREY, ALPHA], -1), "LA")), three(GREY), 0),
    "RGBA": (
        save(Image.fromarray(np.dstack([COLOUR, ALPHA]), "RGBA")),
        COLOUR.astype(np.float64),
        0,
    ),
    "CMYK TIFF": (save(Image.fromarray(CMYK, "CMYK"), "tiff"), cmyk_to_rgb(CMYK), 1),
    "animated GIF": (
        save(INDICES, "gif", save_all=True, append_images=[Image.fromarray(255 - GREY)]),
        PALETTE[GREY].astype(np.float64),
        0,
    ),
    "animated PNG": (
        save(Image.fromarray(COLOUR), save_all=True, append_images=[Image.fromarray(255 - COLOUR)]),
        COLOUR.astype(np.float64),
        0,
    ),
}
NIBBLES = np.stack([GREY[:, : WIDTH // 2] >> 4, GREY[:, : WIDTH // 2] & 15], -1).reshape(
    HEIGHT, WIDTH
)
KINDS["4-bit grey"] = (KINDS["4-bit grey"][0], three(17 * NIBBLES), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_the_formula(kind):
    encoded, expected, tolerance = KINDS[kind]
    got = decode_and_resize(encoded, (HEIGHT, WIDTH, 3))
    assert got.dtype == np.uint8
    assert np.abs(got - expected).max() <= tolerance


def test_grey_images_keep_sixteen_bits_scaled():
    encoded = save(Image.fromarray(DEEP))
    assert (decode_and_resize(encoded, (HEIGHT, WIDTH, 1))[..., 0] == np.rint(DEEP / 257)).all()


TURNED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[:, ::-1].swapaxes(0, 1),
}


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("image_format", ["png", "tiff", "jpeg"])
def test_images_are_upright(orientation, image_format):
    """The eight orientations of EXIF, as arrays; numbers that are none change nothing."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = smooth_image(40, 64)
    encoded = save(Image.fromarray(image), image_format, exif=exif)
    expected = TURNED.get(orientation, TURNED[1])(
        np.asarray(Image.open(io.BytesIO(save(Image.fromarray(image)))))
    )
    got = decode_and_resize(encoded, expected.shape).astype(int)
    assert np.abs(got - expected).mean() < 4
    if image_format != "jpeg":
        assert (got == expected).all()
    whole = decode_and_random_crop(encoded, 16, 3, (0,), (1.0, 1.0)).astype(int)
    central = decode_and_random_crop(
        save(Image.fromarray(np.ascontiguousarray(expected))), 16, 3, (0,), (1.0, 1.0)
    )
    assert np.abs(whole - central).mean() < 8


REFUSED = {
    "float TIFF": (
        save(Image.fromarray(RNG.random((4, 4), np.float32)), "tiff"),
        "floating-point values",
    ),
    "32-bit TIFF": (
        save(Image.fromarray(np.full((4, 4), 70_000, np.int32)), "tiff"),
        "32-bit or signed values",
    ),
    "no image": (b"these are words", "no image of a kind that is read"),
    "nothing": (b"", "an empty file"),
    "a program for a printer": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "no image of a kind that is read",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_says_why(kind):
    encoded, reason = REFUSED[kind]
    with pytest.raises(Exception, match=reason):
        decode_and_center_crop(encoded, 16, 3)


def test_a_png_with_one_wrong_bit_is_never_decoded_to_other_pixels():
    """Pillow alone decodes some of these to other values."""
    encoded = save(
        Image.fromarray(np.linspace(0, 255, 30 * 40 * 3).reshape(30, 40, 3).astype(np.uint8))
    )
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
    image = Image.fromarray(smooth_image(16, 16))
    encoded = save(image, "jpeg", exif=b"Exif\0\0" + b"MM\0*\0\0\0\x08\0\x05garbage")
    assert (
        decode_and_resize(encoded, (16, 16, 3))
        == decode_and_resize(save(image, "jpeg"), (16, 16, 3))
    ).all()
