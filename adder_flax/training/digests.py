"""Digests of arrays: 32 bits each, by which a checkpoint is known to hold what was saved.

They are computed where the arrays are, in one pass over them that also looks for infinities and
NaN, and do not depend on how an array is split over devices and processes.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from adder_flax.arrays import AnyArray
from adder_flax.training.sharding import tree_path

# Odd, with evenly spread bits: 2³² over the golden ratio, and the factors of
# MurmurHash3's finaliser.
_SPREAD, _MIX_1, _MIX_2 = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def take_digests(tree: Any) -> tuple[dict[str, int], list[str]]:
    """Returns the digest of each array of a tree, and names of those with an infinity or NaN.

    A digest is the sum over all elements, modulo 2³², of a bijective mix of the element's bits and
    its position: the change of one element always changes it, other damage goes unseen with
    probability 2⁻³².

    Example:
      >>> digests, non_finite = take_digests({"a": jnp.arange(3), "b": [jnp.array([1.0, jnp.nan])]})
      >>> list(digests), non_finite
      (['a', 'b/0'], ['b/0'])
      >>> take_digests({"a": jnp.array([0, 1, 3])})[0]["a"] == digests["a"]
      False
    """
    leaves = {tree_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    outcomes = {name: _digest_on(_everywhere(leaf))(leaf) for name, leaf in leaves.items()}
    outcomes = {name: np.asarray(outcome).tolist() for name, outcome in outcomes.items()}
    digests = {name: digest for name, (digest, _) in outcomes.items()}
    return digests, [name for name, (_, finite) in outcomes.items() if not finite]


def compile_digests(abstract_tree: Any) -> None:
    """Compiles what `take_digests` needs, from shapes and shardings, before arrays are there."""
    distinct = {(x.shape, x.dtype, x.sharding): x for x in jax.tree.leaves(abstract_tree)}
    for leaf in distinct.values():
        _digest_on(_everywhere(leaf)).lower(leaf).compile()


def _everywhere(leaf: AnyArray) -> NamedSharding | None:
    # The sharding in which every process holds what is computed from an array.
    split = getattr(leaf, "sharding", None)
    return NamedSharding(split.mesh, P()) if isinstance(split, NamedSharding) else None


@functools.cache
def _digest_on(out: NamedSharding | None) -> Any:
    return jax.jit(_digest, out_shardings=out)


def _digest(x: Array) -> Array:
    """Returns ``[digest, whether every element is finite]``."""
    mixed = (_bits(x) + _positions(x.shape)) * _MIX_1
    mixed = (mixed ^ (mixed >> 15)) * _MIX_2
    mixed ^= mixed >> 16
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.uint32(1)])
    # One reduction of both reads the array once.
    digest, finite = jax.lax.reduce(
        (mixed, jnp.isfinite(x)),
        (np.uint32(0), np.bool_(True)),
        lambda one, other: (one[0] + other[0], one[1] & other[1]),
        tuple(range(x.ndim)),
    )
    return jnp.stack([digest, finite.astype(jnp.uint32)])


def _bits(x: Array) -> Array:
    """Returns the elements' bits as 32-bit numbers; of 64 bits, a mix."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    if x.dtype.itemsize == 8:
        bits ^= (bits >> 32) * jnp.uint64(_SPREAD)
    return bits.astype(jnp.uint32)


def _positions(shape: Sequence[int]) -> Array:
    # Each element's flat index times an odd number, modulo 2³².
    positions = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]) * int(_SPREAD) % 2**32)
        positions += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return positions
