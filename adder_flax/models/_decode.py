"""Writing a sequence along several beams, with any model that predicts the next symbol."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# (state, symbols before) → (next state, logits of the next symbol); every leaf of the state begins
# with the batch.
Step = Callable[[Any, Int[Array, " batch"]], tuple[Any, Float[Array, "batch symbols"]]]


class _Beams(NamedTuple):
    state: Any  # leaves (batch · beams, …)
    symbols: Int[Array, "batch beams length"]
    log_probability: Float[Array, "batch beams"]
    done: Array  # bool (batch, beams)


def beam_search(
    step: Step, state: Any, batch_size: int, *, end_symbol: int, max_length: int, num_beams: int
) -> tuple[Int[Array, "batch num_beams {max_length}"], Float[Array, "batch num_beams"]]:
    """Keeps the `num_beams` likeliest beginnings at every step, finished ones with their chances.

    Args:
      step: one step of the model.
      state: before the first symbol, of `batch_size` rows.
      end_symbol: ends a sequence, and stands before its first symbol.
      max_length: where a sequence that does not end is cut.
      num_beams: how many are kept; with 1 each symbol is the likeliest next one.

    Returns:
      The sequences, likeliest first, filled up with `end_symbol`, and their log-probabilities (of
      those that did not end within `max_length`: of what is there).
    """
    rows = batch_size * num_beams
    flat = lambda x: x.reshape(rows, *x.shape[2:])
    beams = lambda x: x.reshape(batch_size, num_beams, *x.shape[1:])
    # At first all beams are the same empty beginning: all but one have probability 0.
    alive = jnp.where(jnp.arange(num_beams) == 0, 0.0, -jnp.inf)
    start = _Beams(
        jax.tree.map(lambda x: jnp.repeat(x, num_beams, axis=0), state),
        jnp.full((batch_size, num_beams, max_length), end_symbol, jnp.int32),
        jnp.broadcast_to(alive, (batch_size, num_beams)),
        jnp.zeros((batch_size, num_beams), bool),
    )

    def grow(now: _Beams, index: Array) -> tuple[_Beams, None]:
        last = jnp.where(index == 0, end_symbol, now.symbols[:, :, index - 1])
        state, logits = step(now.state, flat(last))
        # In bfloat16 a sum of many would no longer tell beams apart.
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        following = beams(jax.nn.log_softmax(wide))
        only_end = jnp.where(jnp.arange(following.shape[-1]) == end_symbol, 0.0, -jnp.inf)
        following = jnp.where(now.done[..., None], only_end, following)
        total = now.log_probability[..., None] + following
        best, place = jax.lax.top_k(total.reshape(batch_size, -1), num_beams)
        parent, symbol = jnp.divmod(place, following.shape[-1])
        chosen = lambda x: jnp.take_along_axis(
            x, parent.reshape(*parent.shape, *[1] * (x.ndim - 2)), axis=1
        )
        symbols = chosen(now.symbols).at[:, :, index].set(symbol)
        state = jax.tree.map(lambda x: flat(chosen(beams(x))), state)
        return _Beams(state, symbols, best, chosen(now.done) | (symbol == end_symbol)), None

    last, _ = jax.lax.scan(grow, start, jnp.arange(max_length))
    return last.symbols, last.log_probability
