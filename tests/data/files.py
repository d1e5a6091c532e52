"""Writes small files in the formats of published data sets."""

from __future__ import annotations

import gzip
import io
import pathlib
import tarfile

import numpy as np
from PIL import Image


def write_tar(path: pathlib.Path, members: dict[str, bytes]) -> None:
    """A .tar.gz of the given files."""
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_dictionary(path: pathlib.Path, num_words: int = 4000) -> None:
    """A pronouncing dictionary of up to that many words of two to six consonants that sound as they
    are written."""
    letters = lambda n: np.random.default_rng(n).choice(list("bdfgklmn"), 2 + n % 5)
    words = {"".join(letters(n)) for n in range(num_words)}
    path.write_text("".join(f"{word} {' '.join(word.upper())}\n" for word in sorted(words)))


def write_idx(path: pathlib.Path, array: np.ndarray) -> None:
    """A gzipped idx file of unsigned bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))


def center_crop(image: Image.Image, side: int, ratio: float) -> np.ndarray:
    """torchvision's Resize(int(side / ratio)), CenterCrop(side)."""
    short = int(side / ratio)
    size = [int(short * length / min(image.size)) for length in image.size]
    left, top = (round((length - side) / 2) for length in size)
    resized = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(resized.crop((left, top, left + side, top + side)))


def smooth_image(height: int, width: int, seed: int = 0) -> np.ndarray:
    """An RGB image without sharp edges, which JPEG keeps within a few grey levels."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def write_images(folder: pathlib.Path, count: int, side: int = 12, seed: int = 0) -> None:
    """folder/<number>.png, no two of them alike."""
    folder.mkdir(parents=True)
    for number in range(count):
        image = smooth_image(side, side, seed + number)
        (folder / f"{number}.png").write_bytes(encode(image))


def encode(image: np.ndarray, image_format: str = "png") -> bytes:
    """An image file's bytes."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, image_format)
    return buffer.getvalue()
