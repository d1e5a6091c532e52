"""Sets that are always there: scikit-learn's 1,797 handwritten digits, read without importing it,
and random images of any shape, for benchmarks, dry runs and tests, where only shapes matter.

Source of the digits: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
Machine Learning Repository, 1998.
"""

import numpy as np
from jaxtyping import Bool, Int, UInt8

from adder_flax.data._registry import DataSet, register_source
from adder_flax.data._source import ArraySource, ImageSource
from adder_flax.extras import missing, wheel_folders

SPLITS = ("train", "test")


def load_digits(split: str, **_) -> ArraySource:
    """Handwritten digits of 8x8 pixels, 1,437 to train on and 360 to test on.

    Stored values 0..16 become round(v * 255 / 16), which maps 0 to 0 and 16 to 255 and can be
    inverted exactly. The split is stratified and the same everywhere.
    """
    # Importing scikit-learn takes longer than everything else in this module (1 to 2 s).
    folder = next(wheel_folders("sklearn"), None)
    if folder is None:
        raise missing("scikit-learn, which has the digits", "data")
    table = np.loadtxt(folder / "datasets/data/digits.csv.gz", delimiter=",", dtype=np.uint8)
    images = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = table[:, 64].astype(np.int32)
    chosen = stratified_test_mask(labels, 360 / 1797, seed=0) == (split == "test")
    names = [str(digit) for digit in range(10)]
    return ArraySource("digits", split, SPLITS, images[chosen], labels[chosen], names)


def stratified_test_mask(
    labels: Int[np.ndarray, " records"], fraction: float, seed: int
) -> Bool[np.ndarray, " records"]:
    """Chooses `fraction` of the records for a test split, each class in proportion.

    A class of n records gives floor(n * fraction), and those with the largest remainders one more,
    until the total is round(records * fraction). Within a class the order is that of raw 64-bit
    draws of PCG64, whose stream NumPy keeps from version to version, unlike those of
    `Generator.permutation`.

    >>> stratified_test_mask(np.array([0, 0, 0, 0, 1, 1]), fraction=0.5, seed=0).sum()
    np.int64(3)
    """
    draws = np.random.PCG64(seed).random_raw(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    quotas = counts * fraction
    take = np.floor(quotas).astype(int)
    short = round(len(labels) * fraction) - take.sum()
    take[np.argsort(take - quotas, kind="stable")[:short]] += 1
    mask = np.zeros(len(labels), bool)
    for label, number in zip(classes, take, strict=True):
        members = np.flatnonzero(labels == label)
        mask[members[np.argsort(draws[members], kind="stable")[:number]]] = True
    return mask


register_source(
    DataSet("digits", load_digits, SPLITS, (8, 8, 1), 10, ((0.3053,), (0.3757,)), "characters")
)


class FakeSource(ImageSource):
    """Uniform noise: record i is a function of (split, i) alone, and nothing is stored.

    Its label is i mod the number of classes. The test split has a quarter of the examples.
    """

    def __init__(
        self,
        split: str,
        image_shape: tuple[int, int, int],
        num_classes: int = 1000,
        num_examples: int = 50_000,
    ):
        super().__init__("fake", split, SPLITS)
        self._length = num_examples if split == "train" else max(num_examples // 4, 1)
        self.image_shape = image_shape
        self.label_names = tuple(str(label) for label in range(num_classes))

    def __len__(self) -> int:
        return self._length

    def read(self, indices, seeds=None, map_function=map):
        labels = np.asarray(indices, np.int32) % self.num_classes
        images = np.stack(list(map_function(self._image, indices)))
        return {"image": images, "label": labels}, np.ones(len(indices), bool)

    def _image(self, index: int) -> UInt8[np.ndarray, "height width channel"]:
        rng = np.random.default_rng((self.splits.index(self.split), index))
        size = int(np.prod(self.image_shape))
        return np.frombuffer(rng.bytes(size), np.uint8).reshape(self.image_shape)


def load_fake(split: str, *, image_size: int | None = None, **_) -> FakeSource:
    """Random images by name; see `load_source`."""
    return FakeSource(split, (image_size or 224, image_size or 224, 3))


# The standard deviation of whole numbers 0..255 that are equally likely.
register_source(DataSet("fake", load_fake, SPLITS, statistics=((0.5,), (0.2898,))))
