"""The scores of additive (Bahdanau) attention."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from adder_flax.ops._backend import resolve_backend
from adder_flax.ops._l1 import as_floating, broadcast_pairs, pair_axes, result_axes
from adder_flax.ops._partition import keep_explicit_axes
from adder_flax.ops._primitive import call


def additive_scores(
    query: Float[ArrayLike, "*#batch Nq d"],
    key: Float[ArrayLike, "*#batch Nk d"],
    v: Float[ArrayLike, "*#batch d"],
) -> Float[Array, "*batch Nq Nk"]:
    r"""The scores of additive attention, on projected queries and keys.

    .. math:: s_{ij} = \sum_c v_c \tanh(q_{ic} + k_{jc})

    (Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", ICLR
    2015, with the projections and the bias already applied.) Every score lies within the L1 norm of
    `v`. The hidden layer, of size Nq x Nk x d, is never stored: the backward pass computes it
    again.

    Args:
      query: any leading axes, broadcast against those of `key`.
      key: any leading axes, broadcast against those of `query`.
      v: the output weights of the hidden layer; its leading axes broadcast against the leading axes
        of the scores, so that (heads, d) serves queries of shape (batch, heads, Nq, d).

    Returns:
      The scores, accumulated in float32 and returned as float32 (float64 for float64 inputs).

    Raises:
      ValueError: if the shapes do not fit.
      TypeError: if an input is not floating-point.

    Example:
      >>> import jax.numpy as jnp
      >>> from adder_flax import ops
      >>> query, key, v = jnp.zeros((2, 3)), jnp.zeros((4, 3)), jnp.ones(3)
      >>> ops.additive_scores(query, key, v).shape
      (2, 4)
    """
    query, key, v = as_floating("query", query), as_floating("key", key), as_floating("v", v)
    axes = [pair_axes(query, "mk"), pair_axes(key, "nk"), pair_axes(v, "k")]
    return keep_explicit_axes(_scores, [query, key, v], axes, result_axes(query, key))


def _scores(query, key, v):
    """`additive_scores` of arrays."""
    query, key = broadcast_pairs(query, key)
    batch = query.shape[:-2]
    try:
        fits = (
            v.shape[-1:] == query.shape[-1:] and jnp.broadcast_shapes(v.shape[:-1], batch) == batch
        )
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
