"""What measures share: float64, softmax and kurtosis."""

from typing import Any

import numpy as np

# What NumPy gives: an array, or where no axis is left a number.
NumPy = np.ndarray | np.number


def softmax(logits: np.ndarray) -> np.ndarray:
    """Weights over the last axis; SciPy's would load SciPy whenever a figure is drawn."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def wide(*arrays: Any) -> list[np.ndarray]:
    """The arrays as NumPy in float64."""
    return [np.asarray(array, np.float64) for array in arrays]


def kurtosis(x: np.ndarray, axis: int) -> np.ndarray:
    """Fourth standardised moment along an axis: 3 for normal numbers."""
    centred = x - x.mean(axis, keepdims=True)
    variance = np.mean(centred**2, axis)
    return np.mean(centred**4, axis) / np.where(variance > 0, variance, 1.0) ** 2
