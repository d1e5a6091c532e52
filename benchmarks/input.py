"""Images per second of the input pipeline alone, by number of threads.

    python -m benchmarks.input
    python -m benchmarks.input --threads=1,8,16 --step_images_per_second=2290

ImageNet-like: 500x375 JPEG files cut from scikit-learn's two photographs, read from a folder,
decoded and cropped to 224x224: in training by random resized crops, in evaluation by centre crops.
CIFAR-like: 32x32 PNG, decoded each time, or once and then copied from memory, which is what
`load_source` does with CIFAR.

The files are in the page cache, so this measures decoding and copying, not the disk. Each figure is
the median of several rounds over all settings in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from PIL import Image

from adder_flax.data import (
    CachedSource,
    EncodedSource,
    EvalPipeline,
    Source,
    TrainPipeline,
    load_source,
)

JPEG_QUALITY = (
    97  # Gives about 100 kB a file, near ImageNet's average: decoding time grows with the bytes.
)
NUM_FILES = 256
NUM_SMALL = 10_000


def photographs() -> list[Image.Image]:
    """scikit-learn's sample photographs, 640x427 pixels."""
    package = importlib.util.find_spec("sklearn").submodule_search_locations[0]
    return [
        Image.open(path).convert("RGB")
        for path in sorted(pathlib.Path(package, "datasets", "images").glob("*.jpg"))
    ]


def random_box(
    photograph: Image.Image, width: int, height: int, rng: np.random.Generator
) -> Image.Image:
    """A part of a photograph."""
    left = int(rng.integers(0, photograph.width - width + 1))
    top = int(rng.integers(0, photograph.height - height + 1))
    return photograph.crop((left, top, left + width, top + height))


def write_folder(root: pathlib.Path) -> None:
    """Makes an image folder of 500x375 JPEG files, one class per photograph."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label, photograph in enumerate(photographs()):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            for number in range(NUM_FILES // 2):
                random_box(photograph, 500, 375, rng).save(
                    folder / f"{number}.jpg", quality=JPEG_QUALITY
                )


class SmallRecords:
    """32x32 PNG images in memory."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self._encoded = [
            self._encode(photograph, rng)
            for photograph in photographs()
            for _ in range(NUM_SMALL // 2)
        ]

    @staticmethod
    def _encode(photograph: Image.Image, rng: np.random.Generator) -> bytes:
        buffer = io.BytesIO()
        random_box(photograph, 32, 32, rng).save(buffer, "png")
        return buffer.getvalue()

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return self._encoded[index], 2 * index // NUM_SMALL

    def __getitems__(self, indices: list[int]) -> list[tuple[bytes, int]]:
        return [self[index] for index in indices]

    def describe(self, index: int) -> str:
        return f"image {index}"


def images_per_second(batches: Iterator, batch_size: int, seconds: float) -> float:
    """Speed of an iterator once its threads are at work."""
    next(batches)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        next(batches)
        count += batch_size
    elapsed = time.perf_counter() - start
    batches.close()
    return count / elapsed


def repeat(pipeline: EvalPipeline) -> Iterator:
    """Evaluation over and over, as long as the measurement takes."""
    while True:
        yield from pipeline


def cases(folder: pathlib.Path, batch_size: int) -> dict[str, Callable[[int], Iterator]]:
    """What is measured: name to iterator of batches for a number of threads."""
    train, val = (
        load_source("folder", split, data_dir=str(folder), image_size=224)
        for split in ("train", "val")
    )
    small = EncodedSource(
        "small", "train", ["train"], SmallRecords(), ["0", "1"], (32, 32, 3), crops_on_host=False
    )
    cached = CachedSource(small)
    cached.gather(np.arange(len(cached)))

    def training(source: Source) -> Callable[[int], Iterator]:
        return lambda threads: TrainPipeline(source, batch_size, num_threads=threads).iterate()

    return {
        "ImageNet-like, train": training(train),
        "ImageNet-like, eval": lambda threads: repeat(
            EvalPipeline(val, batch_size, num_threads=threads)
        ),
        "CIFAR-like, decoded": training(small),
        "CIFAR-like, cached": training(cached),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table.

    Args:
        arguments: command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", default="1,2,4", help="numbers of decoding threads, with commas"
    )
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--step_images_per_second", type=float, help="what training consumes, as main.py prints it"
    )
    options = parser.parse_args(arguments)
    threads = [int(number) for number in options.threads.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(pathlib.Path(folder))
        sizes = [path.stat().st_size for path in pathlib.Path(folder).rglob("*.jpg")]
        print(
            f"batch {options.batch_size}; JPEG files of {statistics.mean(sizes) / 1000:.0f} kB on "
            "average; images/s"
        )
        measured = {}
        for _ in range(options.rounds):
            for name, iterate in cases(pathlib.Path(folder), options.batch_size).items():
                for number in threads:
                    speed = images_per_second(iterate(number), options.batch_size, options.seconds)
                    measured.setdefault(name, {}).setdefault(number, []).append(speed)
    print(f"{'':22}" + "".join(f"{f'{number} threads':>16}" for number in threads))
    for name, speeds in measured.items():
        row = [statistics.median(speeds[number]) for number in threads]
        needed = options.step_images_per_second
        cells = [f"{speed:,.0f}" + (f" ({speed / needed:.1f}x)" if needed else "") for speed in row]
        print(f"{name:22}" + "".join(f" {cell:>15}" for cell in cells))


if __name__ == "__main__":
    main()
