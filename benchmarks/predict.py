"""Predictions of a folder of photographs, some of them broken, by the command.

    python -m benchmarks.predict
    python -m benchmarks.predict --images=FOLDER --broken=10

A DeiT-Tiny at 224 pixels with random weights in timm's names, one process after the other: the
first compiles, the others are warm. Printed are the seconds from the start of the process to its
first answer, images per second from there on, and whether each broken file, and no other, got its
one line and the exit code told of them.

The folder is made of pieces of scikit-learn's two photographs, from 8 to 2,000 pixels wide, in
seven formats, all EXIF orientations, grey, with a palette, transparent and CMYK ones; one in 25
is broken: cut short, empty, damaged by one bit, or no image.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax import nnx
from PIL import Image
from sklearn.datasets import load_sample_images

from adder_flax import interop, models

BATCH = 64  # of the command: so many answers come at once
FORMATS = ("JPEG", "PNG", "JPEG", "WEBP", "JPEG", "BMP", "JPEG", "TIFF", "JPEG", "GIF", "PPM")
MODES = ("RGB", "RGB", "L", "P", "RGBA", "CMYK")
HOLDS = {
    **dict.fromkeys(("WEBP", "BMP", "PPM"), ("RGB",)),
    "JPEG": ("RGB", "L", "CMYK"),
    "GIF": ("L", "P"),
}


class Answers(NamedTuple):
    """What a process said, and when.

    Attributes:
      first: seconds until its first line.
      per_second: lines, behind those of the first batch.
      unread: names of the files that it could not read.
      count: of its lines.
      code: that it ended with.
    """

    first: float
    per_second: float
    unread: list[str]
    count: int
    code: int


def pieces(count: int) -> Iterator[tuple[Image.Image, str]]:
    """Pieces of photographs and the format of each."""
    rng = np.random.default_rng(0)
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    for number, kind, mode in zip(
        range(count), itertools.cycle(FORMATS), itertools.cycle(MODES), strict=False
    ):
        whole = photographs[number % 2]
        width, height = (int(rng.integers(40, side)) for side in whole.size)
        left, top = int(rng.integers(0, 640 - width)), int(rng.integers(0, 427 - height))
        piece = whole.crop((left, top, left + width, top + height))
        scale = rng.choice([0.2, 0.5, 1.0, 1.0, 1.0, 3.0])
        piece = piece.resize([max(8, round(side * scale)) for side in piece.size])
        yield piece.convert(mode if mode in HOLDS.get(kind, MODES[:5]) else "RGB"), kind


def write_folder(folder: Path, count: int) -> set[str]:
    """Writes so many files and returns the names of the broken ones."""
    broken = set()
    for number, (image, kind) in enumerate(pieces(count)):
        path = folder / f"{number:05d}.{kind.lower()}"
        exif = Image.Exif()
        exif[0x0112] = number % 8 + 1
        image.save(path, kind, **({"exif": exif} if kind == "JPEG" else {}))
        if number % 25 == 7:
            broken.add(path.name)
            path.write_bytes(damaged(path.read_bytes(), kind, number // 25 % 4))
    return broken


def damaged(encoded: bytes, kind: str, how: int) -> bytes:
    """A file cut short, empty, one whose magic or, in a PNG, whose pixels lost a bit, or none."""
    place = len(encoded) // 2 if kind == "PNG" else 1
    return (
        encoded[: len(encoded) // 3],
        b"",
        encoded[:place] + bytes([encoded[place] ^ 1]) + encoded[place + 1 :],
        b"This is no image.\n" * 50,
    )[how]


def predict(images: Path, weights: Path, cache: Path) -> Answers:
    """Runs the command on a folder."""
    program = Path(__file__).parents[1] / "main.py"
    command = [sys.executable, program, "--mode=predict", f"--images={images}"]
    command += ["--config=deit_tiny:imagenet2012", f"--config.init_from={weights}"]
    command += [f"--config.data.data_dir={cache}", f"--workdir={cache / 'none'}"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache / "jax")}
    start, times, lines = time.perf_counter(), [], []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            times.append(time.perf_counter() - start)
            lines.append(line)
    unread = [Path(line.split("  ")[0].strip()).name for line in lines if "not read: " in line]
    later = (len(times) - BATCH) / (times[-1] - times[0]) if len(times) > BATCH else float("nan")
    first = times[0] if times else float("nan")
    return Answers(first, later, unread, len(lines), process.returncode)


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each process.

    Args:
        arguments: command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="a folder of yours in place of the made one")
    parser.add_argument("--broken", type=int, help="how many files of yours are broken")
    parser.add_argument("--count", type=int, default=1000, help="of the made files")
    parser.add_argument("--rounds", type=int, default=3, help="processes, the first of them cold")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder, cache = Path(place, "images"), Path(place, "cache")
        folder.mkdir()
        cache.mkdir()
        broken = None if options.images else write_folder(folder, options.count)
        weights = Path(place, "weights.safetensors")
        model = models.deit_tiny(image_size=224, patch_size=16, num_classes=1000, rngs=nnx.Rngs(0))
        interop.save_weights(model, weights, names="timm")
        for number in range(options.rounds):
            found = predict(options.images or folder, weights, cache)
            right = (
                set(found.unread) == broken
                if broken is not None
                else options.broken in (None, len(found.unread))
            )
            print(
                f"{'warm' if number else 'cold'}: first answer after {found.first:.2f} s, then "
                f"{found.per_second:.1f} images/s; {found.count} lines, {len(found.unread)} of "
                f"them for broken files ({'all of these' if right else 'NOT THESE'}), exit code "
                f"{found.code}",
                flush=True,
            )


if __name__ == "__main__":
    main()
