"""The scores of adder attention on a grid of few levels: one for the queries and keys of a head."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from adder_flax import ops
from adder_flax.attention import Score, get_score
from adder_flax.quantized._adder import CLAMPED_SHARES, Grid, check_bits, grids_of, quantize


def byte_scores(
    query: Float[ArrayLike, "*#batch query dim"],
    key: Float[ArrayLike, "*#batch key dim"],
    *,
    lowest: Float[ArrayLike, "..."],
    step: Float[ArrayLike, "..."],
    bits: int,
) -> Float[Array, "*batch query key"]:
    r"""-‖q - k‖₁ from integer sums, up to a number for each query, which a softmax takes off.

    .. math:: s_{ij} = -\Big(\text{step} \sum_c |\hat q_{ic} - \hat k_{jc}| + \sum_c |k_{jc} -
        k'_{jc}|\Big)

    with bytes q̂ and k̂, and k' clamped to the grid.

    Args:
      query, key: heads, floating.
      lowest, step, bits: of the grid, one for each head along a first axis.

    >>> query, key = jnp.array([[0.0], [2.0]]), jnp.array([[1.0], [9.0]])
    >>> byte_scores(query, key, lowest=0.0, step=1.0, bits=2).tolist()
    [[-1.0, -9.0], [-1.0, -7.0]]
    """
    lowest, step = (jnp.asarray(x, jnp.float32)[..., None, None] for x in (lowest, step))
    grid = Grid(lowest, step, bits)
    key = jnp.asarray(key, jnp.float32)
    excess = jnp.abs(key - grid.clamp(key)).sum(-1)[..., None, :]
    return -(ops.sad_scores(quantize(query, grid), quantize(key, grid)) * step + excess)


@functools.cache
def byte_score(bits: int) -> Score:
    """The adder score in so many bits, for `attention.attend`; its parameters are the grid's.

    >>> from adder_flax.attention import attend
    >>> x, grid = jnp.ones((5, 2, 8)), {"lowest": jnp.zeros(2), "step": jnp.ones(2)}
    >>> attend(x, x, x, score=byte_score(8), parameters=grid).shape
    (5, 2, 8)
    """
    adder = get_score("adder")

    def attended(query, key, value, factor, *, lowest, step):
        ends = dict(lowest=lowest, step=step, levels=2**bits - 1)
        return ops.sad_attention(query, key, value, **ends, factor=factor)

    return Score(
        "adder",
        functools.partial(byte_scores, bits=bits),
        variance=adder.variance,
        identity=adder.identity,
        attended=attended,
    )


def calibrate_scores(
    query: Float[ArrayLike, "batch heads q_length dim"],
    key: Float[ArrayLike, "batch kv_heads k_length dim"],
    *,
    bits: int = 8,
    clamped_shares: Sequence[float] = CLAMPED_SHARES,
) -> Grid:
    """Chooses the grid of each key head by the error of its scores, as `calibrate` does a layer's.

    Args:
      query, key: of some examples; heads of queries are a multiple of those of keys.
      bits, clamped_shares: as there.

    >>> rng = np.random.default_rng(0)
    >>> heads = rng.normal(size=(2, 4, 3, 5, 8)) * np.array([1, 9, 1])[:, None, None]
    >>> steps = calibrate_scores(*heads).scale
    >>> bool(steps[1] > 5 * steps[0])
    True
    """
    check_bits(bits)
    key, query = np.asarray(key, np.float32), np.asarray(query, np.float32)
    heads, width = key.shape[-3], key.shape[-1]
    # The queries of a group lie behind one another.
    query = query.reshape(len(query), heads, -1, width)
    sums = ops.l1_scores(query, key)
    of_heads = [
        grids_of(query[:, head], key[:, head], bits, clamped_shares) for head in range(heads)
    ]
    tried = [
        (np.array([grid.lowest for grid in grids]), np.array([grid.scale for grid in grids]))
        for grids in zip(*of_heads, strict=True)
    ]

    def errors(ends: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        error = byte_scores(query, key, lowest=ends[0], step=ends[1], bits=bits) - sums
        # A query's own number changes no map.
        return np.asarray(jnp.square(error - error.mean(-1, keepdims=True)).mean((0, 2, 3)))

    best = np.argmin([errors(ends) for ends in tried], axis=0)
    lowest, step = (np.stack(arrays)[best, np.arange(heads)] for arrays in zip(*tried, strict=True))
    return Grid(jnp.asarray(lowest), jnp.asarray(step), bits)
