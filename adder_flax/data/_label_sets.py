"""Images of which several labels are right, or none."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adder_flax.data._source import DataError, ImageSource
from adder_flax.errors import first_line
from adder_flax.text import printable

if TYPE_CHECKING:
    import jax


class LabelSetSource(ImageSource):
    """A split whose records also have all right labels: ``"labels"``, bool (classes,).

    They are all False where no class of the set is to be seen.

    >>> from adder_flax.data import ArraySource
    >>> images = np.zeros((2, 1, 1, 1), np.uint8)
    >>> source = ArraySource("stripes", "test", ["test"], images, [0, 1], ["row", "column"])
    >>> LabelSetSource(source, [[0, 1], []]).read(np.array([0, 1]))[0]["labels"].tolist()
    [[True, True], [False, False]]
    """

    def __init__(self, source: ImageSource, label_sets: Sequence[Sequence[int]]):
        # The mapping of unreadable records is the same: it fills while records are read.
        fields = ("label_names", "image_shape", "crops_on_host", "eval_crop_ratio", "statistics")
        super().__init__(source.name, source.split, source.splits)
        vars(self).update({name: getattr(source, name) for name in (*fields, "unreadable")})
        self._source, self._label_sets = source, label_sets

    def __len__(self) -> int:
        return len(self._source)

    @property
    def record_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        import jax  # here, as in ImageSource

        return super().record_shapes | {"labels": jax.ShapeDtypeStruct((self.num_classes,), bool)}

    def read(self, indices, seeds=None, map_function=map):
        arrays, readable = self._source.read(indices, seeds, map_function)
        right = np.zeros((len(indices), self.num_classes), bool)
        for row, index in zip(right, indices, strict=True):
            row[list(self._label_sets[index])] = True
        return arrays | {"labels": right}, readable


def with_label_sets(source: ImageSource, path: str | Path) -> LabelSetSource:
    """A split with the right labels that a file has for each of its images.

    The file is in JSON: a list with a list of labels for each image, in the order of the images'
    names. Such are the reassessed labels of ImageNet's validation images, ``real.json`` of
    https://github.com/google-research/reassessed-imagenet (Beyer et al., 2020,
    https://arxiv.org/abs/2006.07159). A file that does not belong to the split is a `DataError`,
    and so is a set that does not know its images by names that differ.
    """
    label_sets = _read(path, source)
    names = source.file_names()
    ordered = sorted(names)
    if twice := [name for name, other in itertools.pairwise(ordered) if name == other]:
        raise DataError(
            f"Expected images of different names in {source.name}/{source.split}, which "
            f"{printable(path)} tells apart by them, got {printable(twice[0])} twice. Rename the "
            "files."
        )
    place = {name: place for place, name in enumerate(ordered)}
    return LabelSetSource(source, [label_sets[place[name]] for name in names])


def _read(path: str | Path, source: ImageSource) -> list[list[int]]:
    try:
        label_sets = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"Expected lists of labels in JSON in {printable(path)}, got: "
            f"{printable(first_line(error))}. Get the file again (ImageNet's is real.json of "
            "google-research/reassessed-imagenet), or set --labels to it."
        ) from error
    if not isinstance(label_sets, list) or len(label_sets) != len(source):
        got = f"{len(label_sets):,}" if isinstance(label_sets, list) else "no list"
        raise DataError(
            f"Expected a list of labels for each of the {len(source):,} images of "
            f"{source.name}/{source.split} in {printable(path)}, got {got}. Set --labels or "
            "--split so that they belong together."
        )
    known = range(source.num_classes)
    for number, labels in enumerate(label_sets):
        if not isinstance(labels, list) or any(label not in known for label in labels):
            raise DataError(
                f"Expected a list of labels in [0, {source.num_classes}) for image {number} in "
                f"{printable(path)}, got {printable(labels, limit=80)}. Set --labels to a file for "
                "these classes."
            )
    return label_sets
