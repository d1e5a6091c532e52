"""Arrays, and calls that are compiled as one program, not one for each operation."""

import jax
import numpy as np

# Those that are held to NumPy on the default device.
BACKENDS = ("reference", "xla", "cuda" if jax.default_backend() == "gpu" else "cpu_native")


def normal(*shapes, seed=0, dtype=np.float32):
    """Arrays of normal numbers."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def value_and_gradients(function, g, *arrays):
    """Returns the output of ``function`` and the gradients of all ``arrays`` for the cotangent
    ``g``."""

    @jax.jit
    def both(g, *arrays):
        output, vjp = jax.vjp(function, *arrays)
        return output, *vjp(g)

    return both(g, *arrays)
