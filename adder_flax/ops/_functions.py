"""The public sums over pairs, and LayerNorm: shapes and dtypes, on top of the primitive."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from adder_flax.ops._arrays import GradientRule, RuleName, accumulation_dtype
from adder_flax.ops._backend import resolve_backend
from adder_flax.ops._partition import keep_explicit_axes
from adder_flax.ops._primitive import call

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_MOST_GROUPS = 64


def as_floating(**arrays) -> list[jax.Array]:
    """Returns the arrays as those of JAX; raises TypeError unless their dtypes are computed in."""
    found = list(map(jnp.asarray, arrays.values()))
    for name, array in zip(arrays, found, strict=True):
        if array.dtype not in _DTYPES:
            raise TypeError(
                f"expected `{name}` in {', '.join(_DTYPES)}; got {array.dtype}; convert it with "
                ".astype(jnp.float32)"
            )
    return found


def _adder_operands(x, w):
    """Checks the operands of an adder product; returns them as (1, M, K) and (1, K, N) arrays."""
    if w.ndim != 2 or x.ndim == 0 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"expected x of shape (..., K) and w of shape (K, N) with the same K; got {x.shape} "
            f"and {w.shape}; the last axis of x is contracted with the first axis of w, so one of "
            "them may need a transpose"
        )
    dtype, rows = jnp.promote_types(x.dtype, w.dtype), (1, math.prod(x.shape[:-1]), x.shape[-1])
    return x.astype(dtype).reshape(rows), w.astype(dtype)[None]


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

    Backward passes use the chosen rule in place of the derivative (Chen et al., "AdderNet", CVPR
    2020, eqs. 5 to 7): with cotangent g,

    .. math:: dx_{mk} = \sum_n g_{mn} r_x(w_{kn} - x_{mk}), \qquad dw_{kn} = \sum_m g_{mn}
    r_w(x_{mk} - w_{kn})

    and r is the sign (the exact derivative, zero at zero), the difference itself (`"full"`,
    computed as a GEMM), or the difference times `hardtanh_slope` clipped to [-1, 1] (`"hardtanh"`).
    Only the inputs are kept for the backward pass. Forward mode follows the same rules, and second
    derivatives those of the rules.

    For standard normal x and w, y is near -1.128 K with a standard deviation of 0.853 sqrt(K):
    subtract the mean before a cast to a narrow dtype.

    Args:
      x, w: the last axis of the one and the first of the other are contracted.
      x_gradient, w_gradient: `"sign"`, `"full"` or `"hardtanh"`.
      hardtanh_slope: slope of the `"hardtanh"` rules at zero, positive.

    Returns:
      In float32 (float64 for float64 inputs), in which sums are accumulated.

    >>> print(adder_matmul(jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 1.0], [0.0, 5.0]])))
    [[-3. -3.]]
    """
    x_rule = GradientRule(x_gradient, hardtanh_slope)
    w_rule = GradientRule(w_gradient, hardtanh_slope)

    def product(x, w):
        rows, columns = _adder_operands(x, w)
        backend = resolve_backend(rows.dtype)
        y = call(backend, "l1", rows, columns, axes="kn", x_rule=x_rule, w_rule=w_rule)
        return y.reshape(*x.shape[:-1], w.shape[-1])

    return keep_explicit_axes(product, "...k,kn->...n", *as_floating(x=x, w=w))


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

    It is what `jax.jvp` of `adder_matmul` gives, without the product itself.

    Args:
      x, w, x_gradient, w_gradient, hardtanh_slope: as in `adder_matmul`.
      dx, dw: tangents of `x` and `w`, or None for zero.

    >>> x, w = jnp.array([[1.0, 2.0]]), jnp.array([[0.0], [5.0]])
    >>> print(adder_matmul_jvp(x, w, None, jnp.ones_like(w)))  # (1 - 0) + (2 - 5)
    [[-2.]]
    """
    x, w = as_floating(x=x, w=w)
    rows, columns = _adder_operands(x, w)
    x_rule = GradientRule(x_gradient, hardtanh_slope)
    w_rule = GradientRule(w_gradient, hardtanh_slope)
    backend = resolve_backend(rows.dtype)
    dy = jnp.zeros((), accumulation_dtype(rows.dtype))
    if dx is not None:
        dx = jnp.asarray(dx, rows.dtype).reshape(rows.shape)
        dy += call(backend, "l1_pushforward", rows, columns, dx, rule=x_rule, axes="kn")
    if dw is not None:
        dw = jnp.asarray(dw, columns.dtype).reshape(columns.shape)
        dy += call(backend, "l1_pushforward_w", rows, columns, dw, rule=w_rule, axes="kn")
    shape = (*x.shape[:-1], columns.shape[-1])
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
      query, key: any leading axes, which broadcast.
      gradient, hardtanh_slope: rule for the gradients of both, see `adder_matmul`.

    Returns:
      In float32 (float64 for float64 inputs), in which sums are accumulated.

    >>> print(l1_scores(jnp.array([[0.0, 0.0], [1.0, 1.0]]), jnp.array([[0.0, 3.0]])))
    [[-3.]
     [-3.]]
    """
    rule = GradientRule(gradient, hardtanh_slope)

    def scores(query, key):
        query, key = broadcast_pairs(query, key)
        backend = resolve_backend(query.dtype)
        return call(backend, "l1", query, key, axes="nk", x_rule=rule, w_rule=rule)

    return keep_explicit_axes(scores, "...mk,...nk->...mn", *as_floating(query=query, key=key))


def broadcast_pairs(query, key):
    """Returns queries and keys with the same leading axes and dtype."""
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


def additive_scores(
    query: Float[ArrayLike, "*#batch Nq d"],
    key: Float[ArrayLike, "*#batch Nk d"],
    v: Float[ArrayLike, "*#batch d"],
) -> Float[Array, "*batch Nq Nk"]:
    r"""The scores of additive attention, on projected queries and keys.

    .. math:: s_{ij} = \sum_c v_c \tanh(q_{ic} + k_{jc})

    (Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", ICLR
    2015, with the projections and the bias already applied.) Every score lies within the L1 norm of
    `v`.

    Args:
      query, key: any leading axes, which broadcast.
      v: its leading axes broadcast against those of the scores, so that (heads, d) serves queries
        of shape (batch, heads, Nq, d).

    Returns:
      In float32 (float64 for float64 inputs), in which sums are accumulated.

    >>> query, key, v = jnp.zeros((2, 3)), jnp.zeros((4, 3)), jnp.ones(3)
    >>> additive_scores(query, key, v).shape
    (2, 4)
    """
    arrays = as_floating(query=query, key=key, v=v)
    return keep_explicit_axes(_additive, "...mk,...nk,...k->...mn", *arrays)


def _additive(query, key, v):
    query, key = broadcast_pairs(query, key)
    batch, width = query.shape[:-2], query.shape[-1:]
    try:
        fits = v.shape[-1:] == width and jnp.broadcast_shapes(v.shape[:-1], batch) == batch
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"expected v of shape (..., {query.shape[-1]}) whose leading axes broadcast against "
            f"{batch}; got {v.shape}; give v one entry for each hidden unit, and leading axes only "
            "where queries have them"
        )
    dtype = jnp.promote_types(query.dtype, v.dtype)
    v = jnp.broadcast_to(v.astype(dtype), (*batch, v.shape[-1]))
    return call(resolve_backend(dtype), "additive", query.astype(dtype), key.astype(dtype), v)


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

    (Ba et al., "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450). On CPUs a row is
    read from memory once, forward and backward. Elsewhere it is what Flax computes.

    Args:
      x, scale, bias, epsilon: as in the formula.
      fast_variance: whether the variance may be E[x²] - E[x]², as in Flax, which cancels where the
        mean is far larger than the spread.

    Returns:
      In float32 (float64 for float64 inputs).

    >>> layer_norm(jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.zeros(2), epsilon=0.0).tolist()
    [[-1.0, 1.0]]
    """
    x, scale, bias = as_floating(x=x, scale=scale, bias=bias)
    if x.ndim == 0 or not scale.shape == bias.shape == x.shape[-1:]:
        raise ValueError(
            f"expected scale and bias of shape {x.shape[-1:]}, one number for each feature of x of "
            f"shape {x.shape}; got {scale.shape} and {bias.shape}"
        )
    dtype = jnp.result_type(x, scale, bias)

    def on_arrays(x, scale, bias):
        grouped = x.reshape(_grouped(x.shape[:-1], x.shape[-1]))
        row = (*(1,) * (grouped.ndim - 2), -1)
        operands = grouped.astype(dtype), *(a.astype(dtype).reshape(row) for a in (scale, bias))
        options: dict[str, Any] = dict(epsilon=float(epsilon), fast_variance=fast_variance)
        return call(resolve_backend(dtype), "layer_norm", *operands, **options).reshape(x.shape)

    return keep_explicit_axes(on_arrays, "...c,c,c->...c", x, scale, bias)


def _grouped(leading: tuple[int, ...], features: int) -> tuple[int, ...]:
    """The shape with an axis before the rows, over which devices and threads divide them: kernels
    sum the gradients of scale and bias within it, and XLA over it, on however many devices.
    """
    if len(leading) > 1:
        return *leading, features
    rows = math.prod(leading)
    # Of an exported program for any number of rows that number is a symbol.
    groups = math.gcd(rows, _MOST_GROUPS) if isinstance(rows, int) and rows else 1
    return groups, rows // groups, features
