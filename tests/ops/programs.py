"""Arrays, calls that are compiled as one program, not one for each operation, and the formulas in
float64 NumPy."""

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


def differences(x, w):
    """w - x of every row of x (..., M, K) and every row of w (..., N, K): (..., M, N, K)."""
    return np.asarray(w, np.float64)[..., None, :, :] - np.asarray(x, np.float64)[..., None, :]


def l1(x, w):
    return -np.abs(differences(x, w)).sum(-1)


def factor(rule, difference, slope=1.0):
    """What a rule puts in the place of d(-|x - w|)/dx, for difference = w - x."""
    if rule == "sign":
        return np.sign(difference)
    return difference if rule == "full" else np.clip(slope * difference, -1, 1)


def l1_gradients(x, w, g, x_rule="sign", w_rule="sign", slope=1.0):
    """Those of x and of w for the cotangent g."""
    by_x, by_w = (g[..., None] * factor(r, differences(x, w), slope) for r in (x_rule, w_rule))
    return by_x.sum(-2), -by_w.sum(-3)


def additive(query, key, v):
    hidden = np.tanh(differences(-np.asarray(query, np.float64), key))
    return (np.asarray(v, np.float64)[..., None, None, :] * hidden).sum(-1)


def additive_gradients(query, key, v, g):
    """Those of query, of key and, for each of their leading axes, of v."""
    hidden = np.tanh(differences(-np.asarray(query, np.float64), key))
    inner = g[..., None] * np.asarray(v, np.float64)[..., None, None, :] * (1 - hidden**2)
    return inner.sum(-2), inner.sum(-3), (g[..., None] * hidden).sum((-3, -2))
