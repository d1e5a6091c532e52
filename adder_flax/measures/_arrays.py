"""Which library a measure computes with."""

from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

# What NumPy gives: an array, or where no axis is left a number.
NumPy = np.ndarray | np.number


def library_of(array: Any) -> tuple[ModuleType, Any]:
    """The library to compute with, and the array as it computes with it.

    Inside of a traced function that is JAX, in float32 or wider; everywhere else NumPy in float64.

    Example:
      >>> library, array = library_of([1.0, 2.0])
      >>> library.__name__, array.dtype.name
      ('numpy', 'float64')
    """
    if isinstance(array, Tracer):
        return jnp, array.astype(jnp.promote_types(array.dtype, jnp.float32))
    return np, np.asarray(array, np.float64)
