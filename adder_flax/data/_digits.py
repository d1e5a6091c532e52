"""The embedded data set: scikit-learn's 1,797 handwritten digits, read without importing it.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998.
"""

import numpy as np
from jaxtyping import Bool, Int

from adder_flax.data._registry import DataSet, register_source
from adder_flax.data._source import ArraySource
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
