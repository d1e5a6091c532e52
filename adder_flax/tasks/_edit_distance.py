"""How many symbols have to be changed: the error of a transcription."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from adder_flax.arrays import AnyArray


def edit_distance(
    guess: Int[Array, "*batch guess"],
    truth: Int[AnyArray, "*batch truth"],
    guess_length: Int[Array, "*batch"],
    truth_length: Int[Array, "*batch"],
) -> Int[Array, "*batch"]:
    """Least number of insertions, deletions and substitutions between two sequences.

    These turn one sequence into the other (Levenshtein, 1966).

    Row i of Wagner and Fischer's table, D[i, j] = min(D[i-1, j] + 1, D[i, j-1] + 1, D[i-1, j-1] +
    [g_i ≠ t_j]), in a scan over i. Within a row, the chain of insertions D[i, j-1] + 1 is a running
    minimum of D - j.

    Args:
      guess, truth: symbols; what stands behind a sequence's length does not count.
      guess_length, truth_length: how long each is.

    >>> one = jnp.array
    >>> int(edit_distance(one([1, 2, 3]), one([1, 3, 0, 0]), one(3), one(2)))
    1
    """
    places = jnp.arange(truth.shape[-1] + 1)
    first = jnp.broadcast_to(places, (*truth.shape[:-1], len(places)))

    def row(above, now):
        symbol, index = now
        substituted = above[..., :-1] + (symbol[..., None] != truth)
        other = jnp.minimum(above[..., 1:] + 1, substituted)
        candidates = jnp.concatenate(
            [jnp.broadcast_to(index + 1, (*above.shape[:-1], 1)), other], axis=-1
        )
        below = jax.lax.cummin(candidates - places, axis=candidates.ndim - 1) + places
        below = jnp.where(index < guess_length[..., None], below, above)
        return below, None

    steps = (jnp.moveaxis(guess, -1, 0), jnp.arange(guess.shape[-1]))
    last, _ = jax.lax.scan(row, first, steps)
    return jnp.take_along_axis(last, truth_length[..., None], axis=-1)[..., 0]


def length_to(symbols: Int[AnyArray, "*batch time"], end: int) -> Int[Array, "*batch"]:
    """How many symbols stand before the first `end`, or all of them.

    >>> length_to(jnp.array([[5, 6, 1, 7], [5, 5, 5, 5]]), end=1).tolist()
    [2, 4]
    """
    return jnp.cumprod(symbols != end, axis=-1).sum(-1)
