"""Sources by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adder_flax.data._digits import load_digits
from adder_flax.data._fake import FakeSource
from adder_flax.data._folder import ImageFolder
from adder_flax.data._source import ArraySource, CachedSource, DataError, EncodedSource, Source
from adder_flax.data._tfds import TfdsSet, tfds_shape

EVAL_SPLITS = ("validation", "val", "test")
"""What split ``"eval"`` stands for, in order of preference: the test split of ImageNet has no labels."""

CACHE_BYTES = 2**30
"""Sets of a fixed image size stay in memory if the decoded split is no larger (CIFAR's train split: 154 MB)."""


def load_source(
    name: str,
    split: str,
    *,
    data_dir: str | None = None,
    image_size: int | None = None,
    num_classes: int | None = None,
    num_examples: int | None = None,
    channels: int | None = None,
    crop_scale: tuple[float, float] | None = (0.08, 1.0),
    on_unreadable: str = "raise",
) -> Source:
    """Loads one split of an image-classification set by name.

    - ``"digits"``: scikit-learn's handwritten digits, 8x8x1, always there.
    - ``"folder"``: data_dir/<split>/<class>/<image>, decoded to RGB.
    - ``"fake"``: random images, default 224x224x3, 1,000 classes, 50,000 examples.
    - any other name: that TFDS set, read without TensorFlow where it is prepared as ArrayRecord; the error
      for one that is not prepared names the command that prepares it.

    >>> source = load_source("digits", "train")
    >>> len(source), source[0]["image"].shape, source.splits
    (1437, (8, 8, 1), ('train', 'test'))

    Args:
        name: the set.
        split: one of the set's splits, or ``"eval"`` for the first that exists of `EVAL_SPLITS`.
        data_dir: root of the image folder, or where TFDS sets are prepared (None: TFDS's default).
        image_size: height and width of the returned images, pixels. None: the set's own size. Sets whose
            images vary in size need it: they are resized and cropped on the host (see
            `Source.crops_on_host`).
        num_classes: of ``"fake"`` only.
        num_examples: of ``"fake"`` only.
        channels: of ``"fake"`` only.
        crop_scale: area range of the random resized crop on the host, as a fraction of the image's area; None trains on
            the centre crop.
        on_unreadable: ``"raise"`` stops at an image that cannot be decoded, naming it; ``"skip"`` counts it
            in `Source.unreadable`, takes the next record instead in training, and leaves it out in
            evaluation.

    Returns:
        The source.

    Raises:
        DataError: unknown set or split, set not prepared, or a setting that this set does not have.
    """
    shape = {"num_classes": num_classes, "num_examples": num_examples, "channels": channels}
    if name == "fake":
        return _fake(split, image_size, **shape)
    if given := [key for key, value in shape.items() if value is not None]:
        raise DataError(f"Expected {', '.join(given)} only for 'fake', got data set {name!r}, which has its own.")
    if name == "digits":
        return _digits(split, image_size)
    options = {"image_size": image_size, "crop_scale": crop_scale, "on_unreadable": on_unreadable}
    if name == "folder":
        return _folder(split, data_dir, **options)
    return _tfds(name, split, data_dir, **options)


def load_or_imitate(
    name: str, split: str, *, data_dir: str | None = None, image_size: int | None = None, **options
) -> Source:
    """Loads a source, or, for a TFDS set that is not prepared here, imitates one: random images in its shape.

    It serves to compile a run on a machine that does not have the data. How many images the set has is not known then.

    >>> source = load_or_imitate("imagenet2012", "train", data_dir="nowhere", image_size=224)
    >>> source.image_shape, source.num_classes
    ((224, 224, 3), 1000)

    Args:
        name, split, data_dir, image_size, **options: as in `load_source`.

    Raises:
        DataError: as in `load_source`, but for sets that are not prepared.
    """
    try:
        return load_source(name, split, data_dir=data_dir, image_size=image_size, **options)
    except DataError:
        if name in ("digits", "folder", "fake"):
            raise
        (height, width, channels), num_classes = tfds_shape(name, data_dir)
        if image_size is None and (height is None or height != width):
            raise
        size = image_size or height
        return FakeSource(_resolve(split, ("train", "test")), (size, size, channels), num_classes, 1_000_000)


def _fake(
    split: str,
    image_size: int | None,
    num_classes: int | None,
    num_examples: int | None,
    channels: int | None,
) -> FakeSource:
    size = image_size or 224
    shape = (size, size, channels or 3)
    return FakeSource(_resolve(split, ("train", "test")), shape, num_classes or 1000, num_examples or 50_000)


def _digits(split: str, image_size: int | None) -> ArraySource:
    source = load_digits(_resolve(split, ("train", "test")))
    if image_size not in (None, 8):
        raise DataError(
            f"Expected image_size 8 for digits, got {image_size}. Its images are 8x8; enlarging adds nothing."
        )
    return source


def _folder(split: str, data_dir: str | None, *, image_size: int | None, **options) -> EncodedSource:
    if data_dir is None:
        raise DataError("Expected data_dir=<root of the image folder> for data set 'folder', got none.")
    if image_size is None:
        raise DataError("Expected image_size for data set 'folder', whose images may vary in size, got none.")
    folder = ImageFolder(data_dir)
    split = _resolve(split, folder.splits)
    records = folder.records(split)
    shape = (image_size, image_size, 3)
    return EncodedSource(
        "folder", split, folder.splits, records, folder.label_names, shape, crops_on_host=True, **options
    )


def _tfds(name: str, split: str, data_dir: str | None, *, image_size: int | None, **options) -> Source:
    prepared = TfdsSet(name, data_dir)
    height, width, channels = prepared.image_shape
    fixed = height is not None and height == width
    if not fixed and image_size is None:
        raise DataError(f"Expected image_size for {name}, whose images are not all square and of one size, got none.")
    size = image_size or height
    split = _resolve(split, prepared.splits)
    source = EncodedSource(
        name,
        split,
        prepared.splits,
        prepared.records(split),
        prepared.label_names,
        (size, size, channels),
        crops_on_host=not fixed,
        stored_size=(height, width) if fixed else None,
        **options,
    )
    small = len(source) * math.prod(source.image_shape) <= CACHE_BYTES
    return CachedSource(source) if fixed and small else source


def _resolve(split: str, splits: Sequence[str]) -> str:
    if split != "eval":
        return split
    for name in EVAL_SPLITS:
        if name in splits:
            return name
    raise DataError(f"Expected one of the splits {EVAL_SPLITS} to evaluate on, got {tuple(splits)}. Name the split.")
