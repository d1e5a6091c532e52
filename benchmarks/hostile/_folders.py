"""Image folders for the cases: files of every kind beside what their pixels mean, and reading them
as training does."""

import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from absl import logging
from PIL import Image

from adder_flax import data
from benchmarks.hostile.case import Observed, Verdict, judge_call

SIDE = 40
_PATIENCE = 120  # seconds


def quadrants(rng: np.random.Generator, high: int = 256, channels: int = 3) -> np.ndarray:
    """An image of four squares, (SIDE, SIDE, channels): which way up it lies shows, and a crop
    keeps its values."""
    return np.kron(rng.integers(0, high, (2, 2, channels)), np.ones((SIDE // 2, SIDE // 2, 1), int))


def png(pixels: np.ndarray, **options) -> bytes:
    """A PNG of 8-bit pixels."""
    return save(Image.fromarray(pixels.squeeze().astype(np.uint8)), "png", **options)


def save(image: Image.Image, image_format: str, **options) -> bytes:
    """An image as a file's content."""
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def make_folder(
    root: Path, rng: np.random.Generator, classes=("ant", "bird"), train: int = 4, val: int = 2
) -> None:
    """Writes root/{train,val}/<class>/<number>.png; names may be bytes."""
    for split, count in (("train", train), ("val", val)):
        for name in classes:
            folder = os.path.join(os.fsencode(root), split.encode(), os.fsencode(name))
            os.makedirs(folder)
            for number in range(count):
                with open(os.path.join(folder, b"%d.png" % number), "wb") as file:
                    file.write(png(quadrants(rng)))


def read_all(
    name: str, data_dir: Path, size: int = 28, **options
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Loads both splits as a run does, and reads each once through its pipeline: {split: (images,
    labels)}."""
    train = data.load_source(
        name, "train", data_dir=str(data_dir), image_size=size, **{"crop_scale": None} | options
    )
    evaluated = data.load_source(name, "eval", data_dir=str(data_dir), image_size=size, **options)
    pipeline = data.TrainPipeline(train, len(train), num_threads=2)
    batch = pipeline[0]
    order = np.argsort(pipeline.record_indices(0))
    batches = list(data.EvalPipeline(evaluated, 4, num_threads=2))
    masks = np.concatenate([part["mask"] for part in batches])
    return {
        "train": (batch["image"][order], batch["label"][order]),
        "eval": tuple(
            np.concatenate([part[key] for part in batches])[masks] for key in ("image", "label")
        ),
    }


def judge_folder(
    spoil: Callable[[Path], Callable[[object], bool] | None],
    read: Callable[[Path], object],
) -> Observed:
    """Makes a folder, has it read, and judges how that ends; what takes too long hangs.

    Args:
      spoil: fills the empty folder and returns what judges the result of reading it, if anything
        but a message is right.
      read: reads it.
    """
    # A warning of each image that is skipped would hide the verdicts.
    logging.set_verbosity(logging.ERROR)
    root = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        is_right = spoil(root)
        seen: list[Observed] = []
        thread = threading.Thread(
            target=lambda: seen.append(judge_call(lambda: read(root), is_right)), daemon=True
        )
        thread.start()
        thread.join(_PATIENCE)
        return seen[0] if seen else Observed(Verdict.HANG, f"no end after {_PATIENCE} s")
    finally:
        shutil.rmtree(os.fsencode(root), ignore_errors=True)
