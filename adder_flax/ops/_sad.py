"""Sums of absolute differences of bytes: the adder product and the adder scores in integers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int32, Integer, UInt8

from adder_flax.ops._backend import resolve_backend
from adder_flax.ops._functions import (
    as_floating,
    broadcast_pairs,
    pair_axes,
    result_axes,
)
from adder_flax.ops._partition import keep_explicit_axes, vary_alike
from adder_flax.ops._primitive import call

# Sums of so many terms, each up to 255, are below 2^31.
MOST_TERMS = 2**23


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SadWeights:
    """Weights of `sad_matmul` in the order in which kernels read them, made by `sad_pack`.

    Attributes:
      columns: those of w, each contiguous.
    """

    columns: UInt8[Array, "N K"]


def sad_pack(w: Integer[ArrayLike, "K N"] | SadWeights) -> SadWeights:
    """Puts weights into the order in which kernels read them, once for all calls.

    Args:
      w: uint8, or int8, which is shifted by 128.

    Raises:
      ValueError: if w is no matrix, or has more than 2²³ rows.
      TypeError: if w is not of bytes.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> ops.sad_pack(jnp.zeros((8, 3), jnp.uint8)).columns.shape
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
      x: any leading axes; the last one is contracted. uint8, or int8.
      w: weights; the first axis is contracted. uint8 where x is, int8 where x is (both are then
        shifted by 128, which changes no difference), or either packed by `sad_pack`.

    Raises:
      ValueError: if the shapes do not fit, or K is over 2²³, where sums leave int32.
      TypeError: if x and w are not both of uint8 or both of int8.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> x, w = jnp.array([[1, 2]], jnp.uint8), jnp.array([[0, 1], [0, 255]], jnp.uint8)
      >>> print(ops.sad_matmul(x, w))
      [[  3 253]]
    """
    if not isinstance(w, SadWeights):
        _check_alike("x", x, "w", w)
    rows, columns = _as_bytes("x", x), sad_pack(w).columns
    if rows.ndim == 0 or rows.shape[-1] != columns.shape[-1]:
        raise ValueError(
            f"expected x of shape (..., K) and w of shape (K, N) with the same K; got {rows.shape} "
            f"and {columns.shape[::-1]}; the last axis of x is contracted with the first axis of w"
        )

    def product(x, columns):
        flat = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])
        y = call(resolve_backend(jnp.float32), "sad", *vary_alike(flat, columns[None]))
        return y.reshape(*x.shape[:-1], columns.shape[0])

    leading = [f"b{axis}" for axis in range(rows.ndim - 1)]
    axes = [[*leading, "k"], ["n", "k"]]
    return keep_explicit_axes(product, [rows, columns], axes, [*leading, "n"])


def sad_scores(
    query: Integer[ArrayLike, "*#batch Nq d"], key: Integer[ArrayLike, "*#batch Nk d"]
) -> Int32[Array, "*batch Nq Nk"]:
    r"""The scores of adder attention of bytes, without their sign: exact integers.

    .. math:: s_{ij} = \sum_c |q_{ic} - k_{jc}|

    Args:
      query: any leading axes, broadcast against those of `key`. uint8, or int8.
      key: of the same dtype.

    Raises:
      ValueError: if the shapes do not fit, or d is over 2²³.
      TypeError: if query and key are not both of uint8 or both of int8.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> query, key = jnp.array([[0, 0], [1, 1]], jnp.int8), jnp.array([[-128, 3]], jnp.int8)
      >>> print(ops.sad_scores(query, key).T)
      [[131 131]]
    """
    _check_alike("query", query, "key", key)
    query, key = _as_bytes("query", query), _as_bytes("key", key)

    def scores(query, key):
        return call(resolve_backend(jnp.float32), "sad", *broadcast_pairs(query, key))

    axes = [pair_axes(query, "mk"), pair_axes(key, "nk")]
    return keep_explicit_axes(scores, [query, key], axes, result_axes(query, key))


def shared_grid(
    a: Float[ArrayLike, "*a"], b: Float[ArrayLike, "*b"], *, bits: int
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the least of 2^bits numbers for two arrays to be rounded to, and the step between.

    They reach as far as both arrays do, three deviations from the mean at most.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> lowest, step = ops.shared_grid(jnp.array([0.0, 3.0]), jnp.array([-1.0, 7.0]), bits=2)
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

    Args:
      a, b: what is to be compared.
      bits: from 1 to 8.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> a, b = ops.round_alike(jnp.array([0.0, 1.2, 3.0]), jnp.array([0.0, 1.8, 7.0]), bits=2)
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
