"""Sums of absolute differences of bytes: the adder product and the adder scores in integers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int32, Integer, UInt8

from adder_flax.ops._backend import left_to_compiler, resolve_backend
from adder_flax.ops._functions import as_floating, broadcast_pairs
from adder_flax.ops._partition import keep_explicit_axes
from adder_flax.ops._primitive import call, composed

# Sums of so many terms, each up to 255, are below 2^31.
MOST_TERMS = 2**23


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SadWeights:
    """Weights of `sad_matmul` in the order in which kernels read them, made by `sad_pack`."""

    columns: UInt8[Array, "N K"]  # of w, each contiguous


def sad_pack(w: Integer[ArrayLike, "K N"] | SadWeights) -> SadWeights:
    """Puts weights into the order in which kernels read them, once for all calls.

    Raises:
      ValueError: if w is no matrix, or has more than 2²³ rows.
      TypeError: if w is not of bytes.

    >>> sad_pack(jnp.zeros((8, 3), jnp.uint8)).columns.shape
    (3, 8)
    """
    if isinstance(w, SadWeights):
        return w
    w = _as_bytes("w", w)
    if w.ndim != 2:
        raise ValueError(f"expected w of shape (K, N), got {w.shape}; reshape it to a matrix")
    return SadWeights(w.T)


def sad_matmul(
    x: Integer[ArrayLike, "*batch K"], w: Integer[ArrayLike, "K N"] | SadWeights
) -> Int32[Array, "*batch N"]:
    r"""The adder product of bytes, without its sign: exact integers, the same on every backend.

    .. math:: y_{mn} = \sum_k |x_{mk} - w_{kn}|

    Processors have an instruction for it: `psadbw` on x86, `VABSDIFF4` on NVIDIA GPUs. It has no
    gradient, as nothing of integers has; a layer that learns through it says what stands for one.

    Args:
      x, w: the last axis of the one and the first of the other are contracted. Both are uint8, or
        both int8, which is shifted by 128; w may be such bytes packed by `sad_pack`.

    Raises:
      ValueError: if the shapes do not fit, or K is over 2²³, where sums leave int32.
      TypeError: if x and w are not both of uint8 or both of int8.

    >>> x, w = jnp.array([[1, 2]], jnp.uint8), jnp.array([[0, 1], [0, 255]], jnp.uint8)
    >>> print(sad_matmul(x, w))
    [[  3 253]]
    """
    if not isinstance(w, SadWeights):
        _check_alike("x", x, "w", w)
    rows, columns = _as_bytes("x", x), sad_pack(w).columns
    _check_terms(rows, columns)

    def product(x, columns):
        flat = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])
        y = call(resolve_backend(jnp.float32), "sad", flat, columns[None])
        return y.reshape(*x.shape[:-1], columns.shape[0])

    return keep_explicit_axes(product, "...k,nk->...n", rows, columns)


def sad_scores(
    query: Integer[ArrayLike, "*#batch Nq d"], key: Integer[ArrayLike, "*#batch Nk d"]
) -> Int32[Array, "*batch Nq Nk"]:
    r"""The scores of adder attention of bytes, without their sign: exact integers.

    .. math:: s_{ij} = \sum_c |q_{ic} - k_{jc}|

    Raises:
      ValueError: if the shapes do not fit, or d is over 2²³.
      TypeError: if query and key are not both of uint8 or both of int8.

    >>> query, key = jnp.array([[0, 0], [1, 1]], jnp.uint8), jnp.array([[128, 3]], jnp.uint8)
    >>> print(sad_scores(query, key).T)
    [[131 129]]
    """
    _check_alike("query", query, "key", key)
    query, key = _as_bytes("query", query), _as_bytes("key", key)

    def scores(query, key):
        return call(resolve_backend(jnp.float32), "sad", *broadcast_pairs(query, key))

    return keep_explicit_axes(scores, "...mk,...nk->...mn", query, key)


def to_bytes(
    x: Float[ArrayLike, "..."],
    lowest: Float[ArrayLike, "..."],
    step: Float[ArrayLike, "..."],
    levels: int,
) -> UInt8[Array, "..."]:
    """Returns the byte, from 0 to `levels`, of the nearest number lowest + step · byte.

    >>> to_bytes(jnp.array([-9.0, 0.4, 1.6, 9.0]), -1.0, 1.0, 3).tolist()
    [0, 1, 3, 3]
    """
    # A product for each number, in place of a division.
    steps = jnp.round((jnp.asarray(x, jnp.float32) - lowest) * (1 / step))
    return jnp.clip(steps, 0, levels).astype(jnp.uint8)


def sad_norm(
    x: Float[ArrayLike, "*batch K"] | UInt8[ArrayLike, "*batch K"],
    w: SadWeights,
    *,
    grid: tuple[ArrayLike, ArrayLike, int],
    excess: Float[ArrayLike, " N"],
    scale: Float[ArrayLike, " N"],
    bias: Float[ArrayLike, " N"],
    epsilon: float,
    gelu: bool = False,
    to: tuple[ArrayLike, ArrayLike, int] | None = None,
) -> Float[Array, "*batch N"] | UInt8[Array, "*batch N"]:
    r"""An adder layer of bytes, the LayerNorm behind it and what follows, in one pass over rows.

    .. math:: y = \mathrm{norm}\Big(-\big(\text{step} \sum_k |\hat x_k - w_{kn}| +
        \text{excess}_n\big)\Big)

    On a CPU with native kernels what stands between two sums stays in the cache.

    Args:
      x: floating, rounded to bytes x̂ by `to_bytes`, or these bytes.
      w: from `sad_pack`, bytes of the same grid.
      grid: lowest, step and levels, see `to_bytes`.
      excess: of each output, what lies beyond the grid.
      scale, bias, epsilon: of the LayerNorm.
      gelu: whether the exact GELU follows.
      to: the grid of a next layer, whose bytes are returned then.

    Raises:
      ValueError: if the shapes do not fit.

    >>> x, w = jnp.array([[1, 2]], jnp.uint8), jnp.array([[0, 1], [0, 4]], jnp.uint8)
    >>> own = dict(excess=jnp.zeros(2), scale=jnp.ones(2), bias=jnp.zeros(2), epsilon=0.0)
    >>> sad_norm(x, sad_pack(w), grid=(0.0, 1.0, 255), **own).tolist()  # of -3 and -2
    [[-1.0, 1.0]]
    """
    x = jnp.asarray(x)
    if x.dtype != jnp.uint8:
        x = x.astype(jnp.float32)
    _check_terms(x, w.columns)
    outputs = w.columns.shape[:1]
    table = jnp.stack(
        [jnp.broadcast_to(jnp.asarray(row, jnp.float32), outputs) for row in (excess, scale, bias)]
    )
    ends = jnp.stack([jnp.asarray(end, jnp.float32) for end in (*grid[:2], *(to or grid)[:2])])
    levels, y_levels = grid[2], to[2] if to else 0
    how = dict(levels=levels, y_levels=y_levels, epsilon=float(epsilon), gelu=gelu)

    def normed(x, columns, table, ends):
        flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        y = call(resolve_backend(jnp.float32), "sad_norm", flat, columns, table, ends, **how)
        return y.reshape(*x.shape[:-1], columns.shape[0])

    return keep_explicit_axes(normed, "...k,nk,tn,e->...n", x, w.columns, table, ends)


@left_to_compiler
def norm_formula(backend, x, w, table, ends, *, levels, y_levels, epsilon, gelu):
    """`sad_norm` of operands with a leading axis, from a backend's sums."""
    excess, scale, bias = table[:, 0, None], table[:, 1], table[:, 2]
    lowest, step, y_lowest, y_step = (ends[:, end, None, None] for end in range(4))
    if x.dtype != jnp.uint8:
        x = to_bytes(x, lowest, step, levels)
    sums = -(call(backend, "sad", x, w) * step + excess)
    y = backend.layer_norm(sums, scale, bias, epsilon, fast_variance=False)
    if gelu:
        y = 0.5 * y * (1.0 + jax.lax.erf(y * 0.5**0.5))
    return to_bytes(y, y_lowest, y_step, y_levels) if y_levels else y


def sad_attention(
    query: Float[ArrayLike, "*batch Nq heads d"],
    key: Float[ArrayLike, "*batch Nk heads d"],
    value: Float[ArrayLike, "*batch Nk heads dv"],
    *,
    lowest: Float[ArrayLike, "..."],
    step: Float[ArrayLike, "..."],
    levels: int,
    factor: Float[ArrayLike, "..."] = 1.0,
) -> Float[Array, "*batch Nq heads dv"]:
    r"""Adder attention from sums of bytes, without a map in memory where a CPU has native kernels.

    .. math:: y_i = \sum_j \mathrm{softmax}_j\Big(-\text{factor} \big(\text{step} \sum_c
        |\hat q_{ic} - \hat k_{jc}| + \sum_c |k_{jc} - k'_{jc}|\big)\Big) v_j

    with q̂ and k̂ from `to_bytes`, and k' clamped to the grid.

    Args:
      query, key, value: heads in Flax's layout.
      lowest, step, levels: of the grid, one for all heads or one for each.
      factor: on the scores, likewise.

    Raises:
      ValueError: if the shapes do not fit.

    >>> x = jnp.array([[[0.0]], [[4.0]]])
    >>> y = sad_attention(x, x, x, lowest=0.0, step=1.0, levels=15, factor=99.0)
    >>> jnp.round(y[:, 0, 0], 6).tolist()
    [0.0, 4.0]
    """
    arrays = [jnp.asarray(a, jnp.float32) for a in (query, key, value)]
    shapes = [a.shape for a in arrays]
    axes = [(*shape[:-3], *shape[-2:]) for shape in shapes[:2]]
    if min(map(len, shapes)) < 3 or axes[0] != axes[1] or shapes[1][:-1] != shapes[2][:-1]:
        raise ValueError(
            "expected query (..., Nq, heads, d), key (..., Nk, heads, d) and value (..., Nk, "
            f"heads, dv) with the same leading axes, heads and d; got {shapes}; project or repeat "
            "them first"
        )
    of_head = [
        jnp.broadcast_to(jnp.asarray(a, jnp.float32), arrays[0].shape[-2])
        for a in (lowest, step, factor)
    ]
    heads = jnp.stack(of_head, -1)

    def attended(*operands):
        *arrays, heads = operands
        flat = [a.reshape(math.prod(a.shape[:-3]), *a.shape[-3:]) for a in arrays]
        y = call(resolve_backend(jnp.float32), "sad_attention", *flat, heads, levels=levels)
        return y.reshape(*arrays[0].shape[:-1], y.shape[-1])

    return keep_explicit_axes(attended, "...mhd,...nhd,...nhv,hp->...mhv", *arrays, heads)


@left_to_compiler
def attention_formula(backend, query, key, value, heads, levels):
    """`sad_attention` of operands with two leading axes, from a backend's sums."""
    lowest, step, factor = (heads[:, None, :, None, None, part] for part in range(3))
    query, key, value = (jnp.swapaxes(a, -2, -3) for a in (query, key, value))
    clamped = jnp.clip(key, lowest, lowest + step * levels)
    excess = jnp.abs(key - clamped).sum(-1)[..., None, :]
    in_bytes = (to_bytes(a, lowest, step, levels) for a in (query, key))
    scores = -(call(backend, "sad", *in_bytes) * step + excess) * factor
    return jnp.swapaxes(jax.nn.softmax(scores, axis=-1) @ value, -2, -3)


composed.update(sad_norm=norm_formula, sad_attention=attention_formula)


def shared_grid(
    a: Float[ArrayLike, "*a"], b: Float[ArrayLike, "*b"], *, bits: int
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the least of 2^bits numbers for two arrays to be rounded to, and the step between.

    They reach as far as both arrays do, three deviations from the mean at most.

    >>> lowest, step = shared_grid(jnp.array([0.0, 3.0]), jnp.array([-1.0, 7.0]), bits=2)
    >>> float(lowest), float(step)
    (0.0, 1.0)
    """
    ends = [_reach(array.astype(jnp.float32)) for array in as_floating(a=a, b=b)]
    lowest, highest = jnp.maximum(ends[0][0], ends[1][0]), jnp.minimum(ends[0][1], ends[1][1])
    return lowest, jnp.maximum(highest - lowest, jnp.finfo(jnp.float32).tiny * 2**bits) / (
        2**bits - 1
    )


def round_alike(
    a: Float[ArrayLike, "*a"], b: Float[ArrayLike, "*b"], *, bits: int
) -> tuple[Float[Array, "*a"], Float[Array, "*b"]]:
    """Rounds two arrays to their `shared_grid`, with the derivative of no rounding.

    So that what will take sums of |a - b| in few bits learns with them: straight through (Bengio et
    al., 2013, https://arxiv.org/abs/1308.3432). Numbers beyond the grid stay as they are, as
    clamping them would take from all sums the same.

    >>> a, b = round_alike(jnp.array([0.0, 1.2, 3.0]), jnp.array([0.0, 1.8, 7.0]), bits=2)
    >>> a.tolist(), b.tolist()
    ([0.0, 1.0, 3.0], [0.0, 2.0, 7.0])
    """
    a, b = as_floating(a=a, b=b)
    lowest, step = shared_grid(a, b, bits=bits)
    highest = lowest + step * (2**bits - 1)

    def rounded(array):
        wide = jax.lax.stop_gradient(array.astype(jnp.float32))
        near = lowest + step * jnp.round((wide - lowest) / step)
        change = jnp.where((wide > lowest) & (wide < highest), near - wide, 0.0)
        return array + change.astype(array.dtype)

    return rounded(a), rounded(b)


def _reach(array):
    array = jax.lax.stop_gradient(array)
    mean, far = array.mean(), 3 * array.std()
    return jnp.maximum(array.min(), mean - far), jnp.minimum(array.max(), mean + far)


def _check_terms(x, columns):
    if x.ndim == 0 or x.shape[-1] != columns.shape[-1]:
        raise ValueError(
            f"expected x of shape (..., K) and w of shape (K, N) with the same K; got {x.shape} "
            f"and {columns.shape[::-1]}; the last axis of x is contracted with the first axis of w"
        )


def _check_alike(name, array, other_name, other):
    if (dtype := jnp.result_type(array)) != jnp.result_type(other):
        raise TypeError(
            f"expected `{name}` and `{other_name}` both of uint8 or both of int8; got {dtype} and "
            f"{jnp.result_type(other)}; round both on one scale, as adder_flax.quantized does"
        )


def _as_bytes(name: str, array) -> jax.Array:
    """Returns an array of bytes as uint8, int8 shifted by 128."""
    array = jnp.asarray(array)
    if array.dtype not in (jnp.uint8, jnp.int8):
        raise TypeError(
            f"expected `{name}` in uint8 or int8; got {array.dtype}; round it first, as "
            "adder_flax.quantized.quantize does"
        )
    terms = array.shape[0 if name == "w" else -1] if array.ndim else 0
    if terms > MOST_TERMS:
        raise ValueError(
            f"expected sums of at most 2**23 = {MOST_TERMS} bytes, which fit into int32; got "
            f"{terms} in `{name}`; cut the sum into parts"
        )
    if array.dtype == jnp.int8:
        return jax.lax.bitcast_convert_type(array, jnp.uint8) ^ jnp.uint8(128)
    return array
