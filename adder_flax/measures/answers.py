"""A classifier's answers against what is right: confusions, accuracy of each class, calibration."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from adder_flax.arrays import AnyArray


def confusion_matrix(
    labels: Int[AnyArray, " image"], predicted: Int[AnyArray, " image"], classes: int
) -> Int[np.ndarray, "true predicted"]:
    """Returns how many images of each class are taken for each class.

    Numbers that are no class are a ValueError.

    >>> confusion_matrix(np.array([0, 0, 1]), np.array([0, 1, 1]), 2)
    array([[1, 1],
           [0, 1]])
    """
    pairs = np.stack([np.asarray(numbers, np.int64) for numbers in (labels, predicted)])
    if ((pairs < 0) | (pairs >= classes)).any():
        raise ValueError(
            f"expected labels and predicted classes from 0 to {classes - 1}, got some from "
            f"{pairs.min()} to {pairs.max()}; leave images of no class out, or give the number of "
            "all classes"
        )
    places = pairs[0] * classes + pairs[1]
    return np.bincount(places, minlength=classes**2).reshape(classes, classes)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How often answers of about the same confidence are right.

    Attributes:
      count: of answers in each bin; bin m of M holds confidences in ((m − 1)/M, m/M].
      confidence, accuracy: their mean, and the share that is right; nan in an empty bin.
      error: the expected calibration error, Σ count/n |accuracy − confidence|.
    """

    count: Int[np.ndarray, " bin"]
    confidence: Float[np.ndarray, " bin"]
    accuracy: Float[np.ndarray, " bin"]
    error: float


def calibration(
    probabilities: Float[AnyArray, "image class"], labels: Int[AnyArray, " image"], bins: int = 15
) -> Calibration:
    """Compares a classifier's confidence, its largest probability, with how often it is right.

    The reliability diagram and expected calibration error of Guo et al. (2017,
    https://arxiv.org/abs/1706.04599, section 2).

    >>> found = calibration(np.array([[0.9, 0.1], [0.8, 0.2]]), np.array([0, 1]), bins=2)
    >>> round(found.error, 6)
    0.35
    """
    probabilities = np.asarray(probabilities, float)
    confidence, right = probabilities.max(-1), probabilities.argmax(-1) == np.asarray(labels)
    bin_of = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(bin_of, minlength=bins)
    total = lambda values: np.bincount(bin_of, values.astype(float), minlength=bins)
    mean = lambda values: np.where(count, total(values) / np.maximum(count, 1), np.nan)
    gap = np.abs(total(right) - total(confidence)).sum() / len(confidence)
    return Calibration(count, mean(confidence), mean(right), float(gap))
