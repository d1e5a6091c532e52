"""LayerNorm of the last axis."""

import math

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from adder_flax.ops._backend import resolve_backend
from adder_flax.ops._l1 import as_floating
from adder_flax.ops._partition import keep_explicit_axes
from adder_flax.ops._primitive import call

_MOST_GROUPS = 64


def layer_norm(
    x: Float[ArrayLike, "*batch C"],
    scale: Float[ArrayLike, " C"],
    bias: Float[ArrayLike, " C"],
    *,
    epsilon: float = 1e-6,
    fast_variance: bool = True,
) -> Float[Array, "*batch C"]:
    r"""Rows with mean 0 and variance 1, scaled and shifted feature by feature.

    .. math:: y_c = s_c \frac{x_c - \mu}{\sqrt{\sigma^2 + \epsilon}} + b_c

    (Ba et al., "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450), with the mean and
    the variance of the row. On CPUs a row is read from memory once, forward and backward; XLA takes
    several passes over all rows. Elsewhere it is what Flax computes.

    Args:
      x: any leading axes.
      scale, bias: of each feature.
      epsilon: added to the variance.
      fast_variance: whether the variance may be E[x²] - E[x]², as in Flax, which cancels where the
        mean is far larger than the spread.

    Returns:
      The rows, as float32 (float64 for float64 inputs).

    Raises:
      ValueError: if the shapes do not fit.
      TypeError: if an input is not floating-point.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> ops.layer_norm(jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.zeros(2), epsilon=0.0).tolist()
      [[-1.0, 1.0]]
    """
    x, scale, bias = as_floating("x", x), as_floating("scale", scale), as_floating("bias", bias)
    if x.ndim == 0 or not scale.shape == bias.shape == x.shape[-1:]:
        raise ValueError(
            f"expected scale and bias of shape {x.shape[-1:]}, one number for each feature of x of "
            f"shape {x.shape}; got {scale.shape} and {bias.shape}"
        )
    dtype = jnp.result_type(x, scale, bias)

    def on_arrays(x, scale, bias):
        grouped = x.reshape(_grouped(x.shape[:-1], x.shape[-1]))
        leading = (1,) * (grouped.ndim - 2)
        y = call(
            resolve_backend(dtype),
            "layer_norm",
            grouped.astype(dtype),
            scale.astype(dtype).reshape(*leading, -1),
            bias.astype(dtype).reshape(*leading, -1),
            epsilon=float(epsilon),
            fast_variance=fast_variance,
        )
        return y.reshape(x.shape)

    batch = [f"b{i}" for i in range(x.ndim - 1)]
    axes = [[*batch, "C"], ["C"], ["C"]]
    return keep_explicit_axes(on_arrays, [x, scale, bias], axes, [*batch, "C"])


def _grouped(leading: tuple[int, ...], features: int) -> tuple[int, ...]:
    """The shape with an axis before the rows, over which devices and threads divide them.

    Gradients of scale and bias are summed within it by the kernel, and over it by XLA, on however
    many devices.

    >>> _grouped((2, 5), 8), _grouped((96,), 8), _grouped((5,), 8), _grouped((), 8)
    ((2, 5, 8), (32, 3, 8), (1, 5, 8), (1, 1, 8))
    """
    if len(leading) > 1:
        return *leading, features
    rows = math.prod(leading)
    # Of an exported program for any number of rows that number is a symbol.
    groups = math.gcd(rows, _MOST_GROUPS) if isinstance(rows, int) and rows else 1
    return groups, rows // groups, features
