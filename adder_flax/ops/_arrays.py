"""Dtypes of sums, and the two orders of the axes of weights."""

import jax.numpy as jnp


def accumulation_dtype(dtype):
    """Returns the dtype of sums: float64 for float64, float32 for everything narrower."""
    return jnp.promote_types(dtype, jnp.float32)


def upcast(*arrays):
    """Returns the arrays in their accumulation dtype."""
    return [array.astype(accumulation_dtype(array.dtype)) for array in arrays]


def to_nk(w, axes):
    """Returns `w`, whose axes are `axes`, as (B, N, K); also turns (B, N, K) into `axes`."""
    return w if axes == "nk" else jnp.swapaxes(w, -1, -2)
