"""Dot-product attention: s = q·k."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from adder_flax.arrays import AnyArray
from adder_flax.attention._attend import Attended, attend, attention_function
from adder_flax.attention._registry import Score, register_score
from adder_flax.attention.checks import require_equal_widths


def dot_scores(
    query: Float[AnyArray, "*#batch query dim"], key: Float[AnyArray, "*#batch key dim"]
) -> Float[Array, "*#batch query key"]:
    """q·k for every pair, accumulated and returned in float32 or wider."""
    require_equal_widths("dot", query, key)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=dtype)


# The variance of q·k between independent unit-normal vectors is d.
register_score(Score("dot", dot_scores, variance=lambda head_dim: float(head_dim)))


@attention_function
def dot_product_attention(query: AnyArray, key: AnyArray, value: AnyArray, **options) -> Attended:
    """Multiplicative attention: softmax(q·k / √d) v.

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762.

    Args:
      query, key, value: (..., length, num_heads, head_dim), as in Flax.
      **options: those of `attend`.

    Returns:
      (..., q_length, num_heads, value_dim), and the weights if `return_weights`.

    >>> x = jnp.ones((2, 5, 3, 8))
    >>> dot_product_attention(x, x, x).shape
    (2, 5, 3, 8)
    """
    return attend(query, key, value, score="dot", **options)
