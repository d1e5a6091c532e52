"""Running a stack of blocks: in turn, rematerialised, or as a loop over stacked parameters."""

import functools
import operator
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
      blocks: whose variables that are no parameters, such as statistics of a norm that someone put
        there, are those after the call.
      tokens: their input.
      deterministic, rngs: see `Block`; each block gets a key of its own from one draw.
      remat: recompute a block in the backward pass instead of storing its inner activations.
      scan: one trace for all blocks, looped over their stacked parameters, where they differ in
        these and in their rates of stochastic depth alone; not where someone tells them apart.
    """
    keys, factors = _draw(blocks, tokens.shape[0], None if deterministic else rngs)

    def call(block, tokens, key, factors):
        rngs = None if key is None else nnx.Rngs(dropout=key)
        return block(tokens, deterministic=deterministic, rngs=rngs, drop_path_factors=factors)

    def apply(graphdef, tokens, state, key, factors):
        block = nnx.merge(graphdef, state)
        before = _beside_parameters(block)
        tokens = call(block, tokens, key, factors)
        after = _beside_parameters(block).items()
        return tokens, nnx.from_flat_state(
            [(path, array) for path, array in after if array is not before.get(path)]
        )

    if scan and not recorder.told_apart() and _are_alike(blocks):
        graphdefs, states = zip(*map(_split, blocks), strict=True)
        body = functools.partial(apply, graphdefs[0])
        # Inside a loop nothing can merge the recomputation with the forward pass.
        body = jax.checkpoint(body, prevent_cse=False) if remat else body
        stacked = jax.tree.map(
            lambda *leaves: jnp.stack(leaves), *zip(states, keys, factors, strict=True)
        )
        tokens, changes = jax.lax.scan(lambda carry, xs: body(carry, *xs), tokens, stacked)
        for index, block in enumerate(blocks):
            _take(block, jax.tree.map(operator.itemgetter(index), changes))
        return tokens

    for block, key, factor in zip(blocks, keys, factors, strict=True):
        if not remat:
            tokens = call(block, tokens, key, factor)
            continue
        graphdef, state = _split(block)
        body = jax.checkpoint(functools.partial(apply, graphdef))
        tokens, changes = body(tokens, state, key, factor)
        _take(block, changes)
    return tokens


def _split(block: Block) -> tuple[nnx.GraphDef, Any]:
    graphdef, state = nnx.split(block)
    return graphdef, nnx.to_pure_dict(state)


def _are_alike(blocks: Sequence[Block]) -> bool:
    """Whether one block's program serves all, whose rates of stochastic depth are drawn before."""

    def program(block: Block) -> nnx.GraphDef:
        block = nnx.clone(block)
        block.drop_path.set_rate(0.0)
        return nnx.graphdef(block)

    first, *rest = map(program, blocks)
    return all(other == first for other in rest)


def _beside_parameters(block: Block) -> dict[Any, Array]:
    state = nnx.state(block, nnx.All(nnx.Variable, nnx.Not(nnx.Param)))
    return {path: variable[...] for path, variable in nnx.to_flat_state(state)}


def _take(block: Block, changes: nnx.State) -> None:
    if changes:
        nnx.update(block, changes)


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
