"""Sums of absolute differences: the adder layer's matrix product and the scores of adder attention."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from adder_flax.ops._backend import Axes, Backend, resolve_backend
from adder_flax.ops._partition import call, keep_explicit_axes, vary_alike
from adder_flax.ops._reference import to_nk, upcast
from adder_flax.ops._rules import GradientRule, RuleName

# GEMM-form gradients are differences of two large sums, so they are computed in full float32 on every
# platform.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _l1(x, w, axes: Axes, x_rule: GradientRule, w_rule: GradientRule, backend: Backend):
    """-sum_k |x[..., m, k] - w[..., n, k]|, differentiated by the two rules from the inputs alone."""
    return call(backend, "l1", x, w, axes=axes)


def _l1_fwd(x, w, axes, x_rule, w_rule, backend):
    return call(backend, "l1", x, w, axes=axes), (x, w)


def _l1_bwd(axes, x_rule, w_rule, backend, residuals, g):
    x, w = residuals
    if x_rule == w_rule and x_rule.name != "full":
        dx, dw = call(backend, "l1_pullback", x, w, g, rule=x_rule, axes=axes)
    else:
        dx = _pullback_x(x, w, g, x_rule, axes, backend)
        dw = _pullback_w(x, w, g, w_rule, axes, backend)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_l1.defvjp(_l1_fwd, _l1_bwd)


def _pullback_x(x, w, g, rule, axes, backend):
    """dx[m, k] = sum_n g[m, n] rule(w[n, k] - x[m, k])."""
    if rule.name != "full":
        return call(backend, "l1_pullback_x", x, w, g, rule=rule, axes=axes)
    x, w, g = upcast(x, w, g)
    return _einsum(f"...mn,...{axes}->...mk", g, w) - x * g.sum(-1)[..., None]


def _pullback_w(x, w, g, rule, axes, backend):
    """dw[n, k] = sum_m g[m, n] rule(x[m, k] - w[n, k]), in the axes of w."""
    if rule.name != "full":
        return call(backend, "l1_pullback_w", x, w, g, rule=rule, axes=axes)
    x, w, g = upcast(x, w, g)
    column_sums = g.sum(-2)[..., None, :] if axes == "kn" else g.sum(-2)[..., None]
    return _einsum(f"...mk,...mn->...{axes}", x, g) - w * column_sums


def _pushforward_x(x, w, dx, rule, axes, backend):
    """dy[m, n] = sum_k dx[m, k] rule(w[n, k] - x[m, k]), the transpose of `_pullback_x`."""
    if rule.name != "full":
        return call(backend, "l1_pushforward", x, w, dx, rule=rule, axes=axes)
    x, w, dx = upcast(x, w, dx)
    return _einsum(f"...mk,...{axes}->...mn", dx, w) - (x * dx).sum(-1)[..., None]


def _pushforward_w(x, w, dw, rule, axes, backend):
    """dy[m, n] = sum_k dw[n, k] rule(x[m, k] - w[n, k]): as above, with the operands exchanged."""
    dy = _pushforward_x(to_nk(w, axes), x, to_nk(dw, axes), rule, "nk", backend)
    return jnp.swapaxes(dy, -1, -2)


def as_floating(name: str, array) -> jax.Array:
    """Returns `array` as a JAX array; raises TypeError unless its dtype is floating-point."""
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"expected a floating-point `{name}`; got {array.dtype}; convert it with .astype(jnp.float32)")
    return array


def _adder_operands(x, w):
    """Checks the operands of an adder product and returns them as one (1, M, K) and one (1, K, N) array."""
    x, w = as_floating("x", x), as_floating("w", w)
    if w.ndim != 2 or x.ndim == 0 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"expected x of shape (..., K) and w of shape (K, N) with the same K; got {x.shape} and {w.shape}; the "
            "last axis of x is contracted with the first axis of w, so one of them may need a transpose"
        )
    dtype = jnp.promote_types(x.dtype, w.dtype)
    return vary_alike(x.astype(dtype).reshape(1, math.prod(x.shape[:-1]), x.shape[-1]), w.astype(dtype)[None])


def adder_matmul(
    x: Float[Array, "*batch K"],
    w: Float[Array, "K N"],
    *,
    x_gradient: RuleName = "hardtanh",
    w_gradient: RuleName = "full",
    hardtanh_slope: float = 1.0,
) -> Float[Array, "*batch N"]:
    r"""The matrix product of adder networks: negative L1 distances in place of dot products.

    .. math:: y_{mn} = -\sum_k |x_{mk} - w_{kn}|

    Backward passes use the chosen rule, a function of the difference, in place of the derivative (Chen et
    al., "AdderNet", CVPR 2020, eqs. 5 to 7): with cotangent g,

    .. math:: dx_{mk} = \sum_n g_{mn} r_x(w_{kn} - x_{mk}), \qquad dw_{kn} = \sum_m g_{mn} r_w(x_{mk} -
    w_{kn})

    and r is the sign (the exact derivative, zero at zero), the difference itself (`"full"`, computed as a
    GEMM), or the difference times `hardtanh_slope` clipped to [-1, 1] (`"hardtanh"`). Only the inputs are
    kept for the backward pass.

    For standard normal x and w, y is near -1.128 K with a standard deviation of 0.853 sqrt(K): subtract the
    mean before a cast to a narrow dtype.

    Args:
      x: any leading axes; the last one is contracted.
      w: weights; the first axis is contracted.
      x_gradient: rule for the gradient of `x`: `"sign"`, `"full"` or `"hardtanh"`.
      w_gradient: rule for the gradient of `w`, likewise.
      hardtanh_slope: slope of the `"hardtanh"` rules at zero, positive.

    Returns:
      The distances, negated, accumulated in float32 and returned as float32 (float64 for float64 inputs).

    Raises:
      ValueError: if the shapes do not fit or a rule is unknown.
      TypeError: if an input is not floating-point.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> print(ops.adder_matmul(jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 1.0], [0.0, 5.0]])))
      [[-3. -3.]]
    """
    x_rule, w_rule = GradientRule(x_gradient, hardtanh_slope), GradientRule(w_gradient, hardtanh_slope)

    def product(x, w):
        rows, columns = _adder_operands(x, w)
        y = _l1(rows, columns, "kn", x_rule, w_rule, resolve_backend(rows.dtype))
        return y.reshape(*x.shape[:-1], w.shape[-1])

    x, w = as_floating("x", x), as_floating("w", w)
    leading = [f"b{axis}" for axis in range(x.ndim - 1)]
    return keep_explicit_axes(product, [x, w], [[*leading, "k"], ["k", "n"]], [*leading, "n"])


def adder_matmul_jvp(
    x: Float[Array, "*batch K"],
    w: Float[Array, "K N"],
    dx: Float[Array, "*batch K"] | None,
    dw: Float[Array, "K N"] | None,
    *,
    x_gradient: RuleName = "hardtanh",
    w_gradient: RuleName = "full",
    hardtanh_slope: float = 1.0,
) -> Float[Array, "*batch N"]:
    r"""The linear map whose transpose is the backward pass of `adder_matmul`.

    .. math:: dy_{mn} = \sum_k dx_{mk} r_x(w_{kn} - x_{mk}) + \sum_k dw_{kn} r_w(x_{mk} - w_{kn})

    Second-order methods need the Jacobian-vector product of a layer under the layer's own gradient rules, and
    forward mode (`jax.jvp`) does not reach through `jax.custom_vjp`. For every g, <g, adder_matmul_jvp(dx,
    dw)> = <dx', dx> + <dw', dw> with (dx', dw') the gradients that `adder_matmul` sends back for g.

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
    x_rule, w_rule = GradientRule(x_gradient, hardtanh_slope), GradientRule(w_gradient, hardtanh_slope)
    backend = resolve_backend(rows.dtype)
    dy = jnp.zeros((), upcast(rows)[0].dtype)
    if dx is not None:
        dx = jnp.asarray(dx, rows.dtype).reshape(rows.shape)
        dy += _pushforward_x(rows, columns, dx, x_rule, "kn", backend)
    if dw is not None:
        dw = jnp.asarray(dw, columns.dtype).reshape(columns.shape)
        dy += _pushforward_w(rows, columns, dw, w_rule, "kn", backend)
    shape = (*jnp.shape(x)[:-1], columns.shape[-1])
    return jnp.broadcast_to(dy, (1, rows.shape[1], columns.shape[2])).reshape(shape)


def l1_scores(
    query: Float[Array, "*batch Nq d"],
    key: Float[Array, "*batch Nk d"],
    *,
    gradient: RuleName = "sign",
    hardtanh_slope: float = 1.0,
) -> Float[Array, "*batch Nq Nk"]:
    r"""The scores of adder attention: negative L1 distances between queries and keys.

    .. math:: s_{ij} = -\sum_c |q_{ic} - k_{jc}|

    For standard normal queries and keys the variance of a score is 2 d (1 - 2/pi) and its mean -2 d /
    sqrt(pi).

    Args:
      query: any leading axes, broadcast against those of `key`.
      key: any leading axes, broadcast against those of `query`.
      gradient: rule for the gradients of both: `"sign"` (the exact derivative, zero at zero), `"full"` (the
        difference, computed as a GEMM) or `"hardtanh"`; see `adder_matmul`.
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
        return _l1(*vary_alike(query, key), "nk", rule, rule, resolve_backend(query.dtype))

    query, key = as_floating("query", query), as_floating("key", key)
    return keep_explicit_axes(
        scores, [query, key], [pair_axes(query, "mk"), pair_axes(key, "nk")], result_axes(query, key)
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
            "expected query of shape (..., Nq, d) and key of shape (..., Nk, d) with the same d and leading axes "
            f"that broadcast; got {query.shape} and {key.shape}; heads go before positions: (batch, heads, "
            "positions, d)"
        )
    dtype = jnp.promote_types(query.dtype, key.dtype)
    return [jnp.broadcast_to(a.astype(dtype), (*batch, *a.shape[-2:])) for a in (query, key)]
