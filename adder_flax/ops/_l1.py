"""Sums of absolute differences: adder layers' matrix product, the scores of adder attention."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from adder_flax.ops._arrays import accumulation_dtype
from adder_flax.ops._backend import resolve_backend
from adder_flax.ops._partition import keep_explicit_axes, vary_alike
from adder_flax.ops._primitive import call
from adder_flax.ops._rules import GradientRule, RuleName

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def as_floating(name: str, array) -> jax.Array:
    """Returns `array` as a JAX array.

    Raises TypeError unless its dtype is a floating-point one that is computed in.
    """
    array = jnp.asarray(array)
    if array.dtype not in _DTYPES:
        raise TypeError(
            f"expected `{name}` in {', '.join(_DTYPES)}; got {array.dtype}; convert it with "
            ".astype(jnp.float32)"
        )
    return array


def _adder_operands(x, w):
    """Checks the operands of an adder product; returns them as (1, M, K) and (1, K, N) arrays."""
    x, w = as_floating("x", x), as_floating("w", w)
    if w.ndim != 2 or x.ndim == 0 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"expected x of shape (..., K) and w of shape (K, N) with the same K; got {x.shape} "
            f"and {w.shape}; the last axis of x is contracted with the first axis of w, so one of "
            "them may need a transpose"
        )
    dtype = jnp.promote_types(x.dtype, w.dtype)
    return vary_alike(
        x.astype(dtype).reshape(1, math.prod(x.shape[:-1]), x.shape[-1]), w.astype(dtype)[None]
    )


def adder_matmul(
    x: Float[ArrayLike, "*batch K"],
    w: Float[ArrayLike, "K N"],
    *,
    x_gradient: RuleName = "hardtanh",
    w_gradient: RuleName = "full",
    hardtanh_slope: float = 1.0,
) -> Float[Array, "*batch N"]:
    r"""The matrix product of adder networks: negative L1 distances in place of dot products.

    .. math:: y_{mn} = -\sum_k |x_{mk} - w_{kn}|

    Backward passes use the chosen rule, a function of the difference, in place of the derivative
    (Chen et al., "AdderNet", CVPR 2020, eqs. 5 to 7): with cotangent g,

    .. math:: dx_{mk} = \sum_n g_{mn} r_x(w_{kn} - x_{mk}), \qquad dw_{kn} = \sum_m g_{mn}
    r_w(x_{mk} - w_{kn})

    and r is the sign (the exact derivative, zero at zero), the difference itself (`"full"`,
    computed as a GEMM), or the difference times `hardtanh_slope` clipped to [-1, 1] (`"hardtanh"`).
    Only the inputs are kept for the backward pass. Forward mode follows the same rules, and second
    derivatives those of the rules.

    For standard normal x and w, y is near -1.128 K with a standard deviation of 0.853 sqrt(K):
    subtract the mean before a cast to a narrow dtype.

    Args:
      x: any leading axes; the last one is contracted.
      w: weights; the first axis is contracted.
      x_gradient: rule for the gradient of `x`: `"sign"`, `"full"` or `"hardtanh"`.
      w_gradient: rule for the gradient of `w`, likewise.
      hardtanh_slope: slope of the `"hardtanh"` rules at zero, positive.

    Returns:
      The distances, negated, accumulated in float32 and returned as float32 (float64 for float64
      inputs).

    Raises:
      ValueError: if the shapes do not fit or a rule is unknown.
      TypeError: if an input is not floating-point.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> print(ops.adder_matmul(jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 1.0], [0.0, 5.0]])))
      [[-3. -3.]]
    """
    x_rule, w_rule = (
        GradientRule(x_gradient, hardtanh_slope),
        GradientRule(w_gradient, hardtanh_slope),
    )

    def product(x, w):
        rows, columns = _adder_operands(x, w)
        backend = resolve_backend(rows.dtype)
        y = call(backend, "l1", rows, columns, axes="kn", x_rule=x_rule, w_rule=w_rule)
        return y.reshape(*x.shape[:-1], w.shape[-1])

    x, w = as_floating("x", x), as_floating("w", w)
    leading = [f"b{axis}" for axis in range(x.ndim - 1)]
    return keep_explicit_axes(product, [x, w], [[*leading, "k"], ["k", "n"]], [*leading, "n"])


def adder_matmul_jvp(
    x: Float[ArrayLike, "*batch K"],
    w: Float[ArrayLike, "K N"],
    dx: Float[ArrayLike, "*batch K"] | None,
    dw: Float[ArrayLike, "K N"] | None,
    *,
    x_gradient: RuleName = "hardtanh",
    w_gradient: RuleName = "full",
    hardtanh_slope: float = 1.0,
) -> Float[Array, "*batch N"]:
    r"""The linear map whose transpose is the backward pass of `adder_matmul`.

    .. math:: dy_{mn} = \sum_k dx_{mk} r_x(w_{kn} - x_{mk}) + \sum_k dw_{kn} r_w(x_{mk} - w_{kn})

    It is what `jax.jvp` of `adder_matmul` gives, without the product itself: second-order methods
    need the Jacobian-vector product of a layer under the layer's own gradient rules. For every g,
    <g, adder_matmul_jvp(dx, dw)> = <dx', dx> + <dw', dw> with (dx', dw') the gradients that
    `adder_matmul` sends back for g.

    Args:
      x: as in `adder_matmul`.
      w: as in `adder_matmul`.
      dx: tangent of `x`, or None for zero.
      dw: tangent of `w`, or None for zero.
      x_gradient: as in `adder_matmul`.
      w_gradient: as in `adder_matmul`.
      hardtanh_slope: as in `adder_matmul`.

    Returns:
      The tangent of the output, with its shape and dtype.

    Raises:
      ValueError: if the shapes do not fit or a rule is unknown.
      TypeError: if an input is not floating-point.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> x, w = jnp.array([[1.0, 2.0]]), jnp.array([[0.0], [5.0]])
      >>> print(ops.adder_matmul_jvp(x, w, None, jnp.ones_like(w)))  # (1 - 0) + (2 - 5)
      [[-2.]]
    """
    rows, columns = _adder_operands(x, w)
    x_rule, w_rule = (
        GradientRule(x_gradient, hardtanh_slope),
        GradientRule(w_gradient, hardtanh_slope),
    )
    backend = resolve_backend(rows.dtype)
    dy = jnp.zeros((), accumulation_dtype(rows.dtype))
    if dx is not None:
        dx = jnp.asarray(dx, rows.dtype).reshape(rows.shape)
        dy += call(backend, "l1_pushforward", rows, columns, dx, rule=x_rule, axes="kn")
    if dw is not None:
        dw = jnp.asarray(dw, columns.dtype).reshape(columns.shape)
        dy += call(backend, "l1_pushforward_w", rows, columns, dw, rule=w_rule, axes="kn")
    shape = (*jnp.shape(x)[:-1], columns.shape[-1])
    return jnp.broadcast_to(dy, (1, rows.shape[1], columns.shape[2])).reshape(shape)


def l1_scores(
    query: Float[ArrayLike, "*#batch Nq d"],
    key: Float[ArrayLike, "*#batch Nk d"],
    *,
    gradient: RuleName = "sign",
    hardtanh_slope: float = 1.0,
) -> Float[Array, "*batch Nq Nk"]:
    r"""The scores of adder attention: negative L1 distances between queries and keys.

    .. math:: s_{ij} = -\sum_c |q_{ic} - k_{jc}|

    For standard normal queries and keys the variance of a score is 2 d (1 - 2/pi) and its mean -2 d
    / sqrt(pi).

    Args:
      query: any leading axes, broadcast against those of `key`.
      key: any leading axes, broadcast against those of `query`.
      gradient: rule for the gradients of both: `"sign"` (the exact derivative, zero at zero),
        `"full"` (the difference, computed as a GEMM) or `"hardtanh"`; see `adder_matmul`.
      hardtanh_slope: slope of `"hardtanh"` at zero, positive.

    Returns:
      The scores, accumulated in float32 and returned as float32 (float64 for float64 inputs).

    Raises:
      ValueError: if the shapes do not fit or the rule is unknown.
      TypeError: if an input is not floating-point.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> print(ops.l1_scores(jnp.array([[0.0, 0.0], [1.0, 1.0]]), jnp.array([[0.0, 3.0]])))
      [[-3.]
       [-3.]]
    """
    rule = GradientRule(gradient, hardtanh_slope)

    def scores(query, key):
        query, key = broadcast_pairs(query, key)
        return call(
            resolve_backend(query.dtype), "l1", query, key, axes="nk", x_rule=rule, w_rule=rule
        )

    query, key = as_floating("query", query), as_floating("key", key)
    return keep_explicit_axes(
        scores,
        [query, key],
        [pair_axes(query, "mk"), pair_axes(key, "nk")],
        result_axes(query, key),
    )


def pair_axes(array, last: str) -> list[str]:
    """Names the axes of an array: leading ones by their distance from the end, then the `last`."""
    return [f"b{axis}" for axis in range(array.ndim - len(last), 0, -1)] + list(last)


def result_axes(query, key) -> list[str]:
    """Names the axes of the scores of queries and keys."""
    return pair_axes(max(query, key, key=lambda array: array.ndim), "mn")


def broadcast_pairs(query, key):
    """Broadcasts the leading axes of queries and keys against each other.

    Returns:
      query (..., Nq, d) and key (..., Nk, d) in their common dtype, with the same leading axes.

    Raises:
      ValueError: if the widths differ or the leading axes do not broadcast.
      TypeError: if an input is not floating-point.
    """
    query, key = as_floating("query", query), as_floating("key", key)
    try:
        batch = jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    except ValueError:
        batch = None
    if batch is None or min(query.ndim, key.ndim) < 2 or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "expected query of shape (..., Nq, d) and key of shape (..., Nk, d) with the same d "
            f"and leading axes that broadcast; got {query.shape} and {key.shape}; heads go before "
            "positions: (batch, heads, positions, d)"
        )
    dtype = jnp.promote_types(query.dtype, key.dtype)
    return [jnp.broadcast_to(a.astype(dtype), (*batch, *a.shape[-2:])) for a in (query, key)]
