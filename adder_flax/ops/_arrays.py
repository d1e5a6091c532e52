"""Dtypes of sums, the two orders of the axes of weights, and arrays with names for their axes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Operand(NamedTuple):
    """An array (B, ...) and the names of its axes after the batch.

    These are `i`, `j`, or `c`, the axis summed over.

    Operands with a `c` are read for each term of the sum, the others once before it; one number for
    all has no axes.
    """

    array: jax.Array
    axes: str


def axis_lengths(operands: Sequence[Operand]) -> dict[str, int]:
    """Returns the length of each axis: `b`, `i`, `j` and `c`."""
    return {
        name: length
        for array, axes in operands
        for name, length in zip("b" + axes, array.shape, strict=True)
    }


def accumulation_dtype(dtype):
    """Returns the dtype of sums: float64 for float64, float32 for everything narrower."""
    return jnp.promote_types(dtype, jnp.float32)


def upcast(*arrays):
    """Returns the arrays in their accumulation dtype."""
    return [array.astype(accumulation_dtype(array.dtype)) for array in arrays]


def to_nk(w, axes):
    """Returns `w`, whose axes are `axes`, as (B, N, K); also turns (B, N, K) into `axes`."""
    return w if axes == "nk" else jnp.swapaxes(w, -1, -2)
