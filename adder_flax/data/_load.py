"""Sources by name, and parts of their splits: ``train[:90%]``."""

import copy
import dataclasses
import re
from typing import Any

import numpy as np

from adder_flax.data import _folder, _hugging_face, _sequences, _webdataset  # noqa: F401
from adder_flax.data._built_in import FakeSource
from adder_flax.data._images import ASPECT_RATIO_RANGE, EVAL_CROP_RATIO
from adder_flax.data._registry import SETS, DataSet, resolve_split
from adder_flax.data._source import DataError, EncodedSource, ImageSource, NotPreparedError, Source
from adder_flax.data._tfds import base_name, load_tfds, tfds_shape


def load_source(
    name: str,
    split: str,
    *,
    data_dir: str | None = None,
    image_size: int | None = None,
    crop_scale: tuple[float, float] | None = (0.08, 1.0),
    crop_ratio: tuple[float, float] = ASPECT_RATIO_RANGE,
    eval_crop_ratio: float = EVAL_CROP_RATIO,
    on_unreadable: str = "raise",
) -> Source:
    """Loads one split of a data set by name.

    - ``"digits"``: scikit-learn's handwritten digits, 8x8x1, always there.
    - ``"folder"``: data_dir/<split>/<class>/<image>, decoded to RGB, as those of the next three.
    - ``"image_list"``: data_dir/<split>.csv with the columns path and label.
    - ``"hugging_face"``: a folder of Hugging Face's ``datasets``, or of Parquet files.
    - ``"webdataset"``: data_dir/<split>-<number>.tar with an image and its class for each sample.
    - ``"fake"``: random images, by default 224x224x3, of 1,000 classes, 50,000 examples.
    - ``"cmudict"``: words and their phonemes, from the CMU Pronouncing Dictionary.
    - what was added with `register_source`.
    - any other name: that TFDS set, read without TensorFlow where it is prepared as ArrayRecord;
      the error for one that is not prepared names the command that prepares it.

    >>> source = load_source("digits", "train")
    >>> len(source), source[0]["image"].shape, source.splits
    (1437, (8, 8, 1), ('train', 'test'))

    Args:
        name: the set.
        split: one of the set's splits, or ``"eval"`` for the first that exists of ``validation``,
            ``val``, ``test``; ``"train[:90%]"`` and ``"train[90%:]"`` are parts of one, whose
            records are dealt at random.
        data_dir: root of the folder, or where TFDS sets are prepared (None: TFDS's default).
        image_size: height and width of the returned images, pixels. None: the set's own size. Sets
            whose images vary in size need it: they are resized and cropped on the host.
        crop_scale, crop_ratio: ranges of the area of that crop in training, as a fraction of the
            image's (None trains on the centre), and of its width over its height.
        eval_crop_ratio: side of the centre of images that vary in size, over their shorter side.
        on_unreadable: ``"raise"`` stops at an image that cannot be decoded, naming it; ``"skip"``
            counts it in `Source.unreadable`, takes the next record instead in training, and leaves
            it out in evaluation.

    An unknown set or split, a set that is not prepared, or another size than that of a set in
    memory is a `DataError`.
    """
    data_set = _find(name)
    split, percents = read_part(split)
    if data_set.splits is not None:
        split = resolve_split(split, data_set.splits, name)
    place = dict(name=name, data_dir=data_dir, image_size=image_size)
    crops = dict(crop_scale=crop_scale, eval_crop_ratio=eval_crop_ratio)
    source = data_set.load(split, **place, **crops, on_unreadable=on_unreadable)
    side = getattr(source, "image_shape", (image_size,))[0]
    if image_size not in (None, side):
        raise DataError(
            f"Expected image_size {side} for {name}, got {image_size}. Its images are kept in "
            "memory at that size."
        )
    if isinstance(source, EncodedSource):
        source.crop_ratio = crop_ratio
    if isinstance(source, ImageSource) and data_set.statistics is not None:
        source.statistics = data_set.statistics
    return source if percents is None else part_of(source, percents)


def load_or_imitate(name: str, split: str, **options: Any) -> Source:
    """`load_source`, or where a set is not prepared here, random images in its shape.

    It serves to compile a run, and to look at other images with it, on a machine without the data,
    where how many images the set has is not known.

    >>> source = load_or_imitate("imagenet2012", "train", data_dir="nowhere", image_size=224)
    >>> source.image_shape, source.num_classes, source.crops_on_host
    ((224, 224, 3), 1000, True)
    """
    try:
        return load_source(name, split, **options)
    except NotPreparedError:
        known = describe(name)
        if known.image_shape is None or known.num_classes is None:
            raise
        height, width, channels = known.image_shape
        size = options.get("image_size") or (height if height == width else None)
        if size is None:
            raise
        split = resolve_split(read_part(split)[0], ("train", "test"))
        source = FakeSource(split, (size, size, channels), known.num_classes, 1_000_000)
        source.statistics = known.statistics
        if height is None:
            source.crops_on_host = True
            source.eval_crop_ratio = options.get("eval_crop_ratio", EVAL_CROP_RATIO)
        return source


def describe(name: str) -> DataSet:
    """What is known of a data set without reading it; of an unknown name, nothing but that.

    >>> describe("digits").image_shape, describe("cifar100").num_classes
    ((8, 8, 1), 100)
    """
    try:
        data_set = _find(name)
        if data_set.name in SETS:
            return data_set
        image_shape, num_classes = tfds_shape(name, None)
    except DataError:
        return DataSet(name, load_tfds)
    return dataclasses.replace(data_set, image_shape=image_shape, num_classes=num_classes)


def _find(name: str) -> DataSet:
    """A registered set, or the TFDS set of this name, configuration and version included."""
    base = name if name in SETS else base_name(name)
    return SETS.get(base) if base in SETS else DataSet(base, load_tfds)


_PART = re.compile(r"([^\[\]]+)\[(?:(\d+)%)?:(?:(\d+)%)?\]")


def read_part(split: str) -> tuple[str, tuple[int, int] | None]:
    """The split that a name like ``train[:90%]`` is a part of, and which percent (None for all).

    >>> read_part("train[80%:]"), read_part("train")
    (('train', (80, 100)), ('train', None))
    """
    found = _PART.fullmatch(split)
    if found is None:
        return split, None
    low, high = int(found[2] or 0), int(found[3] or 100)
    if not 0 <= low < high <= 100:
        raise DataError(
            f"Expected a part like {found[1]}[:90%], percents rising from 0 to 100, got {split!r}."
        )
    return found[1], (low, high)


def part_of(source: Source, percents: tuple[int, int]) -> Source:
    """A part of the records of a source, as a source of its own that is else what the whole is.

    Records are dealt in a fixed random order, the same for every part and on every machine: what
    lies on a disk is often sorted by class.
    """
    low, high = (round(len(source) * percent / 100) for percent in percents)
    rows = np.sort(np.argsort(np.random.Philox(0).random_raw(len(source)), kind="stable")[low:high])
    if not rows.size:
        raise DataError(
            f"Expected a part of {source.name}/{source.split} with a record in it, got "
            f"{percents[0]} to {percents[1]} percent of {len(source)}. Take a larger part."
        )

    class Part(type(source)):
        def __len__(self):
            return len(rows)

        def read(self, indices, *options):
            return source.read(rows[indices], *options)

        def file_names(self):
            images: Any = source
            names = images.file_names()
            return [names[row] for row in rows]

    part = copy.copy(source)
    part.__class__ = Part
    part.split = f"{source.split}[{percents[0]}%:{percents[1]}%]"
    part.dealt = (low, high)
    return part


def shared_records(one: Source, other: Source) -> int:
    """How many records two splits of one set, or parts of them, have in common.

    >>> from adder_flax.data import load_source
    >>> parts = [load_source("digits", f"train[{part}]") for part in (":50%", "40%:")]
    >>> shared_records(*parts), shared_records(parts[0], load_source("digits", "test"))
    (143, 0)
    """
    wholes = [(source.name, read_part(source.split)[0]) for source in (one, other)]
    if wholes[0] != wholes[1]:
        return 0
    if one.dealt is None or other.dealt is None:
        return min(len(one), len(other))  # one of them is the whole
    return max(0, min(one.dealt[1], other.dealt[1]) - max(one.dealt[0], other.dealt[0]))
