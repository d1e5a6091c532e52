"""Running a stack of blocks: in turn, rematerialised, or as a loop over stacked parameters."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from adder_flax import recorder
from adder_flax.layers import Block, drop_path_factors
from adder_flax.settings import is_on


def apply_blocks(
    blocks: Sequence[Block],
    tokens: Float[Array, "batch length width"],
    *,
    deterministic: bool,
    rngs: nnx.Rngs | None,
    remat: bool,
    scan: bool,
) -> Float[Array, "batch length width"]:
    """Applies the blocks in turn; neither `remat` nor `scan` change the result, dropout included.

    Args:
      blocks: the blocks; with `scan` they differ in parameters and drop path rate alone.
      tokens: their input.
      deterministic, rngs: see `Block`; each block gets a key of its own from one draw of the
        `dropout` stream.
      remat: recompute a block in the backward pass instead of storing its inner activations.
      scan: one trace for all blocks, looped over their stacked parameters; not where someone tells
        them apart.
    """
    graphdefs, states = zip(*(nnx.split(block) for block in blocks), strict=True)
    states = [nnx.to_pure_dict(state) for state in states]
    keys, factors = _draw(blocks, tokens.shape[0], None if deterministic else rngs)

    def apply(graphdef, tokens, state, key, factors):
        return nnx.merge(graphdef, state)(
            tokens,
            deterministic=deterministic,
            rngs=None if key is None else nnx.Rngs(dropout=key),
            drop_path_factors=factors,
        )

    if scan and not recorder.told_apart():
        body = functools.partial(apply, graphdefs[0])
        # Inside a loop nothing can merge the recomputation with the forward pass: no barrier is
        # needed.
        body = jax.checkpoint(body, prevent_cse=False) if remat else body
        stacked = jax.tree.map(
            lambda *leaves: jnp.stack(leaves), *zip(states, keys, factors, strict=True)
        )
        return jax.lax.scan(lambda carry, xs: (body(carry, *xs), None), tokens, stacked)[0]

    for graphdef, state, key, factor in zip(graphdefs, states, keys, factors, strict=True):
        body = functools.partial(apply, graphdef)
        body = jax.checkpoint(body) if remat else body
        tokens = body(tokens, state, key, factor)
    return tokens


def _draw(blocks: Sequence[Block], batch: Any, rngs: nnx.Rngs | None) -> tuple[list, list]:
    """A dropout key and the stochastic depth factors (2, batch) of each block, or None for each."""
    keys = factors = [None] * len(blocks)
    if rngs is None:
        return keys, factors
    if any(is_on(block.drop_path.rate) for block in blocks):
        rates = jnp.stack([jnp.asarray(block.drop_path.rate, jnp.float32) for block in blocks])
        shape = (len(blocks), 2, batch)
        factors = list(drop_path_factors(rngs.dropout(), rates[:, None, None], shape))
    if any(is_on(block.dropout.rate) or is_on(block.attention.dropout_rate) for block in blocks):
        keys = list(jax.random.split(rngs.dropout(), len(blocks)))
    return keys, factors
