"""Attention over blocks of keys: the map of all pairs is never stored, forward or backward."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from adder_flax.arrays import AnyArray
from adder_flax.ops._arrays import accumulation_dtype, as_mask, sum_to, upcast
from adder_flax.ops._backend import expected_platform
from adder_flax.ops._functions import as_floating
from adder_flax.ops._partition import vary_alike
from adder_flax.settings import is_on

KEY_BLOCK = 256
# From how many keys on blocks are the faster way on CPUs (`benchmarks/ops.py`). On a GPU the whole
# map is the faster one even for 4,096 keys, by a third (`benchmarks/ops_device.py`): blocks begin
# where memory asks for them, as the map of a single head takes 64 MiB.
_BLOCKS_FROM_KEYS = {"cpu": 512}
_BLOCKS_FROM_KEYS_ELSEWHERE = 4096


class _Options(NamedTuple):
    """What is known when the function is traced."""

    score: Callable[..., Array]
    num_keys: int
    key_block: int
    is_causal: bool


class _Operands(NamedTuple):
    """The arrays; `bias`, `mask` and those of dropout may be None."""

    query: AnyArray
    key: AnyArray
    value: AnyArray
    parameters: tuple[AnyArray, ...]
    scale: AnyArray
    bias: AnyArray | None
    mask: AnyArray | None
    dropout_key: Array | None = None
    dropout_rate: Array | None = None


def fused_attention(
    score: Callable[..., Array],
    query: Float[AnyArray, "... Nq d"],
    key: Float[AnyArray, "... Nk d_key"],
    value: Float[AnyArray, "... Nk dv"],
    parameters: tuple[AnyArray, ...] = (),
    *,
    scale: float | Array = 1.0,
    bias: Float[AnyArray, "..."] | None = None,
    mask: Bool[AnyArray, "..."] | None = None,
    is_causal: bool = False,
    identity: bool = False,
    dropout_rate: float | Array = 0.0,
    dropout_key: Array | None = None,
    key_block: int = KEY_BLOCK,
) -> Float[Array, "*batch Nq dv"]:
    r"""Attention in memory that grows with the number of tokens, not with its square.

    .. math:: o_i = \sum_j \mathrm{softmax}_j(c\, s(q_i, k_j) + b_{ij})\, v_j \; (+ \, v_i)

    The softmax runs along blocks of keys with a running maximum (Milakov & Gimelshein, "Online
    normalizer calculation for softmax", 2018), and the backward pass computes the scores of each
    block again from the logarithm of the softmax's denominator (Dao, "FlashAttention-2", 2023). It
    has gradients of any order that the score has, but no forward-mode derivative.

    Args:
      score: `score(query, key, *parameters)` gives (..., Nq, Nk), for example `l1_scores` or
        `additive_scores`, from any number of keys.
      query, key: leading axes as `score` takes them.
      value: leading axes that broadcast against those of the scores.
      parameters: learned arrays of the score, such as `v` of `additive_scores`.
      scale: multiplies the scores; it broadcasts against them, as do bias and mask.
      bias: added to the scaled scores.
      mask: True where a query may see a key. A query that sees none gets zeros.
      is_causal: query i sees keys 0 to i only.
      identity: add the identity map to the attention map, so that each token gets its own value on
        top.
      dropout_rate: share of the map's weights (not the identity map's) that are dropped; the others
        grow to keep the mean.
      dropout_key: key of the dropout; the weights it drops depend on `key_block` as well.
      key_block: keys in a block.

    Returns:
      In the dtype of `value`, a floating one; sums are accumulated in float32 (float64 for float64
      inputs).

    >>> from adder_flax import ops
    >>> x, v = jnp.array([[0.0, 0.0], [8.0, 9.0]]), jnp.array([[1.0], [3.0]])
    >>> print(ops.fused_attention(ops.l1_scores, x, x, v, identity=True))
    [[2.]
     [6.]]
    """
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    if (identity or is_causal) and num_queries != num_keys:
        what = "the identity map" if identity else "is_causal"
        fix = "identity=False" if identity else "a mask of what each query sees"
        raise ValueError(
            f"expected as many queries as keys for {what}; got {num_queries} and {num_keys}; pass "
            f"{fix}"
        )
    (value,) = as_floating(value=value)
    drops = is_on(dropout_rate)
    if drops and dropout_key is None:
        raise ValueError(
            f"expected a dropout_key for dropout_rate = {dropout_rate}; got None; pass a "
            "jax.random key"
        )
    if key_block < 1:
        raise ValueError(
            f"expected key_block of at least 1; got {key_block}; {KEY_BLOCK} suits most sizes"
        )
    # Blocks of one size, with as little padding as their number allows.
    key_block = -(-num_keys // max(1, -(-num_keys // key_block))) or 1
    options = _Options(score, num_keys, key_block, is_causal)
    scores = jax.eval_shape(score, query, key, *parameters)
    batch = jnp.broadcast_shapes(scores.shape[:-2], value.shape[:-2])
    values = jnp.broadcast_to(value, (*batch, *value.shape[-2:]))
    # Of all sums: as wide as the widest of what goes into the logits.
    bias = None if bias is None else jnp.asarray(bias)
    logits = (scores, scale) if bias is None else (scores, scale, bias)
    scale = jnp.asarray(scale, accumulation_dtype(jnp.result_type(query, value, *logits)))
    mask = None if mask is None else as_mask(mask)
    leaves, structure = jax.tree.flatten(
        _Operands(query, key, values, tuple(parameters), scale, bias, mask)
    )
    operands = jax.tree.unflatten(structure, vary_alike(*leaves))
    if drops:
        operands = operands._replace(
            dropout_key=dropout_key, dropout_rate=jnp.asarray(dropout_rate, scale.dtype)
        )
    output = _fused(options, operands)
    # jax.custom_vjp loses the type when it is given options.
    return output + value if identity else output  # pyright: ignore[reportOperatorIssue, reportReturnType]


def preferred_key_block(num_keys: int) -> int | None:
    """Returns the block that attention to so many keys is best computed in.

    Returns None where building its map is faster and its memory is no matter.

    >>> preferred_key_block(17) is None, preferred_key_block(10_000)
    (True, 256)
    """
    if not isinstance(num_keys, int):
        return None  # a length that an exported program leaves open
    blocks_from = _BLOCKS_FROM_KEYS.get(expected_platform(), _BLOCKS_FROM_KEYS_ELSEWHERE)
    return KEY_BLOCK if num_keys >= blocks_from else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options: _Options, operands: _Operands) -> Array:
    return _fused_fwd(options, operands)[0]  # pyright: ignore[reportReturnType]


def _fused_fwd(options, operands):
    num_queries, dtype = operands.query.shape[-2], operands.scale.dtype
    lowest = jnp.finfo(dtype).min
    rows = (*operands.value.shape[:-2], num_queries)

    def add_block(running, block):
        highest, denominator, total = running
        given = operands.query, block.key, operands.parameters, operands.scale, block.bias
        logits = _logits(options.score, *given)
        visible = _visible(options, block, num_queries)
        seen = _where(visible, logits, lowest)
        new_highest = jnp.maximum(highest, seen.max(-1))
        weights = _where(visible, jnp.exp(seen - new_highest[..., None]), 0.0)
        decay = jnp.exp(highest - new_highest)
        denominator = decay * denominator + weights.sum(-1)
        kept = weights
        if block.dropout_key is not None:
            kept = weights * _keep(operands, block, weights.shape)
        total = decay[..., None] * total + kept @ upcast(block.value)[0]
        return (new_highest, denominator, total), None

    *start, _ = vary_alike(
        jnp.full(rows, lowest, dtype),
        jnp.zeros(rows, dtype),
        jnp.zeros((*rows, operands.value.shape[-1]), dtype),
        operands.query,
    )
    (highest, denominator, total), _ = jax.lax.scan(
        add_block, tuple(start), _blocks(options, operands)
    )
    denominator = jnp.where(denominator == 0, 1.0, denominator)  # of queries that see no key
    output = total / denominator[..., None]
    return output.astype(operands.value.dtype), (operands, output, highest + jnp.log(denominator))


def _fused_bwd(options, residuals, g):
    operands, output, log_denominator = residuals
    (g,) = upcast(g)
    num_queries = operands.query.shape[-2]
    g_output = (g * output).sum(-1)
    blocks = _blocks(options, operands)
    bias_is_split = operands.bias is not None and operands.bias.shape[-1:] > (1,)

    def add_block(totals, block):
        def logits_of(query, parameters, scale, bias, key, own_bias):
            bias = own_bias if bias_is_split else bias
            return _logits(options.score, query, key, parameters, scale, bias)

        biases = (None, block.bias) if bias_is_split else (block.bias, None)
        shared = operands.query, operands.parameters, operands.scale, biases[0]
        logits, pull = jax.vjp(logits_of, *shared, block.key, biases[1])
        visible = _visible(options, block, num_queries)
        seen = _where(visible, logits, jnp.finfo(logits.dtype).min)
        weights = _where(visible, jnp.exp(seen - log_denominator[..., None]), 0.0)
        keep = 1.0 if block.dropout_key is None else _keep(operands, block, weights.shape)
        d_value = jnp.swapaxes(weights * keep, -1, -2) @ g
        d_weights = keep * (g @ jnp.swapaxes(upcast(block.value)[0], -1, -2))
        d_logits = weights * (d_weights - g_output[..., None])
        *d_shared, d_key, d_own_bias = pull(sum_to(d_logits, logits.shape).astype(logits.dtype))
        totals = jax.tree.map(
            lambda total, d: total + d.astype(total.dtype), totals, tuple(d_shared)
        )
        return totals, (d_key, d_value.astype(block.value.dtype), d_own_bias)

    bias = None if bias_is_split else operands.bias
    like = operands.query, operands.parameters, operands.scale, bias
    zeros = jax.tree.map(
        lambda a: vary_alike(jnp.zeros(a.shape, accumulation_dtype(a.dtype)), a)[0], like
    )
    totals, split = jax.lax.scan(add_block, zeros, blocks)
    totals = jax.tree.map(lambda total, a: total.astype(a.dtype), totals, like)
    d_key, d_value = (_join(d, -2, options.num_keys) for d in split[:2])
    d_bias = _join(split[2], -1, options.num_keys) if bias_is_split else totals[3]
    return (_Operands(totals[0], d_key, d_value, totals[1], totals[2], d_bias, None),)


_fused.defvjp(_fused_fwd, _fused_bwd)


class _KeyBlock(NamedTuple):
    """One block of keys: its part of the operands, its first key's position, its dropout key."""

    key: Array
    value: Array
    bias: Array | None
    mask: Array | None
    first: Array
    dropout_key: Array | None


def _blocks(options, operands) -> _KeyBlock:
    """Returns the blocks of all keys, stacked along a new leading axis."""
    count = max(1, -(-options.num_keys // options.key_block))

    def split(array, axis) -> Any:
        if array is None:
            return None
        if array.ndim == 0 or (axis == -1 and array.shape[-1] == 1):  # the same for all keys
            return jnp.broadcast_to(array, (count, *array.shape))
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, count * options.key_block - array.shape[axis])
        axis = array.ndim + axis
        array = jnp.pad(array, padding)
        parts = (*array.shape[:axis], count, options.key_block, *array.shape[axis + 1 :])
        return jnp.moveaxis(array.reshape(parts), axis, 0)

    return _KeyBlock(
        split(operands.key, -2),
        split(operands.value, -2),
        split(operands.bias, -1),
        split(operands.mask, -1),
        jnp.arange(count) * options.key_block,
        jax.random.split(operands.dropout_key, count) if operands.dropout_key is not None else None,
    )


def _join(blocks, axis, length):  # what `_blocks` has split
    axis = blocks.ndim + axis
    array = jnp.moveaxis(blocks, 0, axis - 1)
    array = array.reshape(*array.shape[: axis - 1], -1, *array.shape[axis + 1 :])
    return jax.lax.slice_in_dim(array, 0, length, axis=axis - 1)


def _logits(score, query, key, parameters, scale, bias):
    (scores,) = upcast(score(query, key, *parameters))
    logits = scores * scale
    return logits if bias is None else logits + bias


def _visible(options, block, num_queries):
    """Which keys of a block each query sees, broadcastable to the scores; None if all."""
    position = block.first + jnp.arange(options.key_block)
    conditions = []
    if options.num_keys % options.key_block or options.num_keys == 0:
        conditions.append(position < options.num_keys)
    if block.mask is not None:
        conditions.append(block.mask)
    if options.is_causal:
        conditions.append(position <= jnp.arange(num_queries)[:, None])
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def _where(visible, array, other):
    # Before the exponential as well as behind it: that of a hidden key may be infinite, whose
    # second derivative would be NaN.
    return array if visible is None else jnp.where(visible, array, other)


def _keep(operands, block, shape):
    keep = 1.0 - operands.dropout_rate
    return jax.random.bernoulli(block.dropout_key, keep, shape) / keep
