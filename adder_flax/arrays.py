"""What public functions take where they ask for an array: JAX's and NumPy's alike."""

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray
