"""What a trained classifier takes files of images for: ``--mode=predict``."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import UInt8

from adder_flax import data, recorder
from adder_flax.attention import attention_map
from adder_flax.data._images import decode_and_resize
from adder_flax.errors import RunError, first_line
from adder_flax.report import attention_figure, save_figure, tokens_in_front
from adder_flax.tasks import Classification
from adder_flax.text import printable

_TOP = 5
_BATCH = 64


class Prediction(NamedTuple):
    """What one file is taken for.

    Attributes:
      path: of the file.
      classes: the likeliest first, at most five: name and probability.
      problem: why there are none, else "".
    """

    path: Path
    classes: tuple[tuple[str, float], ...] = ()
    problem: str = ""

    def as_json(self) -> str:
        """One line of JSON: ``file``, and either ``classes`` or ``problem``."""
        classes = [{"name": name, "probability": round(p, 6)} for name, p in self.classes]
        found = {"problem": self.problem} if self.problem else {"classes": classes}
        file = os.fsencode(self.path).decode(errors="backslashreplace")
        return json.dumps({"file": file, **found})

    def as_text(self, width: int) -> str:
        """One line for a person, the file's name in a column of this width."""
        classes = "  ".join(f"{printable(name, limit=30)} {p:.1%}" for name, p in self.classes)
        said = classes or f"not read: {self.problem}"
        return f"{printable(self.path, limit=width):{width}}  {said}"


def files_of(place: str | Path) -> list[Path]:
    """Returns the file, or the files of a folder and of the folders in it, ordered by name.

    Hidden ones are left alone. Whether a file is an image is seen when it is read.
    """
    place = Path(place)
    if not place.exists():
        raise RunError(
            f"expected an image or a folder of images, got {printable(place)}, which is not "
            "there; set --images"
        )
    if not place.is_dir():
        return [place]

    def refuse(error: OSError) -> None:
        raise error

    walked = os.walk(place, onerror=refuse)
    paths = (Path(folder, name) for folder, _, names in walked for name in names)
    is_shown = lambda path: not any(p.startswith(".") for p in path.relative_to(place).parts)
    found = sorted(filter(is_shown, paths))
    if not found:
        raise RunError(f"expected images in {printable(place)}, got an empty folder; set --images")
    return found


class Predictor:
    """A classifier with all that lies between a file and names of classes.

    Images of any size are resized and cropped as those of the evaluation split: photographs to
    their centre, of sets whose images are all of one size to the largest square in their middle, or
    whole where that size is no square.

    Args:
      task: of the run.
      model: trained.
      source: any split of the data set: size of its images, names of its classes.
    """

    def __init__(self, task: Any, model: nnx.Module, source: data.Source):
        if not isinstance(task, Classification):
            raise RunError(
                "expected a run of config.task.name=classification to predict with; set --workdir"
            )
        self._task, self._model = task, model
        self._source = data.require_kind(data.ImageSource, source, "--mode=predict")
        self._probabilities = jax.jit(
            lambda model, images: jax.nn.softmax(model(*task.inputs({"image": images})), axis=-1)
        )

    def __call__(
        self, files: Sequence[Path]
    ) -> Iterator[tuple[Prediction, UInt8[np.ndarray, "h w c"] | None]]:
        """Yields per file, in turn, what it is taken for and the pixels the model saw, if any."""
        size = min(_BATCH, len(files))
        with futures.ThreadPoolExecutor(data.usable_cores()) as pool:
            batches = [files[start : start + size] for start in range(0, len(files), size)]
            ahead = [pool.submit(self._read, path) for path in batches[0]]
            for batch, following in zip(batches, [*batches[1:], []], strict=True):
                read = [future.result() for future in ahead]
                # While the model computes.
                ahead = [pool.submit(self._read, path) for path in following]
                yield from self._predict(batch, read, size)

    def draw(self, pixels: UInt8[np.ndarray, "h w c"], prediction: Prediction, path: Path) -> None:
        """Writes a PNG of where the model looks in the pixels of a prediction."""
        inputs = self._task.inputs({"image": pixels[None]})
        _, records = recorder.record({"attention": ["weights"]}, self._model, *inputs)
        figure = attention_figure(
            pixels[None],
            [attention_map(record) for record in records],
            **tokens_in_front(self._model),
            with_rollout=True,
            captions=["{} {:.1%}".format(*prediction.classes[0])],
        )
        save_figure(figure, path)

    def _read(self, path: Path) -> UInt8[np.ndarray, "h w c"] | str:
        """Returns the pixels of a file, or why there are none."""
        shape, ratio = self._source.image_shape, self._source.eval_crop_ratio
        try:
            if shape[0] != shape[1]:
                return decode_and_resize(path.read_bytes(), shape)
            return data.read_image(path, shape[0], shape[2], crop_ratio=ratio)
        except Exception as error:  # Pillow's decoders raise errors of many types for a broken file
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            return printable(kind + first_line(error))

    def _predict(
        self, files: Sequence[Path], read: Sequence[Any], size: int
    ) -> Iterator[tuple[Prediction, UInt8[np.ndarray, "h w c"] | None]]:
        # Always as many: one program serves all.
        images = np.zeros((size, *self._source.image_shape), np.uint8)
        for row, pixels in zip(images, read, strict=False):
            if not isinstance(pixels, str):
                row[:] = pixels
        rows = np.asarray(self._probabilities(self._model, images))
        for path, pixels, row in zip(files, read, rows, strict=False):
            if isinstance(pixels, str):
                yield Prediction(path, problem=pixels), None
                continue
            best = np.argsort(-row, kind="stable")[:_TOP]
            classes = tuple((self._source.label_names[i], float(row[i])) for i in best)
            yield Prediction(path, classes), pixels


def predict_files(
    predictor: Predictor, files: Sequence[Path], output: Path | None, overlay: Path | None
) -> int:
    """Prints a line for every file; returns how many could not be read.

    JSON lines go to ``output``, a picture of each image's attention into the folder ``overlay``,
    under the file's number and name.
    """
    unread, width = 0, min(60, max(len(printable(path)) for path in files))
    with contextlib.ExitStack() as stack:
        try:
            lines = output and stack.enter_context(output.open("w", encoding="utf-8"))
            if overlay is not None:
                overlay.mkdir(parents=True, exist_ok=True)
            for number, (prediction, pixels) in enumerate(predictor(files)):
                unread += pixels is None
                print(prediction.as_text(width), flush=True)
                if lines is not None:
                    lines.write(prediction.as_json() + "\n")
                if overlay is not None and pixels is not None:
                    name = printable(prediction.path.stem, limit=100).replace("/", "_")
                    predictor.draw(pixels, prediction, overlay / f"{number:05d}-{name}.png")
        except BrokenPipeError:
            raise
        except OSError as error:
            raise RunError(
                f"expected to write to {printable(error.filename or output or overlay)}, got: "
                f"{error.strerror}; set --predictions or --overlay to another place"
            ) from error
    return unread
