"""Bilinear (general multiplicative) attention: s = qᵀ W k."""

import jax
from jaxtyping import Array, Float

from adder_flax.arrays import AnyArray
from adder_flax.attention._attend import Attended, attend, attention_function
from adder_flax.attention._curvature import project_heads
from adder_flax.attention._dot import dot_scores
from adder_flax.attention._registry import Score, ScoreParameter, register_score


def bilinear_scores(
    query: Float[AnyArray, "*#batch query query_dim"],
    key: Float[AnyArray, "*#batch key key_dim"],
    *,
    kernel: Float[AnyArray, "*#batch query_dim key_dim"],
) -> Float[Array, "*#batch query key"]:
    """qᵀ W k for every pair, in float32 or wider.

    W is (query_dim, key_dim), per head where it has leading axes.
    """
    if kernel.shape[-2:] != (query.shape[-1], key.shape[-1]):
        raise ValueError(
            "bilinear scores expect a kernel of shape (query_dim, key_dim) = "
            f"{(query.shape[-1], key.shape[-1])}, got {kernel.shape[-2:]}; build it with the "
            "widths of this query and key."
        )
    return dot_scores(project_heads(query, kernel), key)


def bilinear_parameters(num_heads: int, query_dim: int, key_dim: int) -> dict[str, ScoreParameter]:
    """One matrix W (query_dim, key_dim) for each head."""
    init = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
    return {"kernel": ScoreParameter((num_heads, query_dim, key_dim), init)}


register_score(Score("bilinear", bilinear_scores, bilinear_parameters))


@attention_function
def bilinear_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    *,
    kernel: Float[AnyArray, "heads query_dim key_dim"],
    **options,
) -> Attended:
    """Bilinear attention: softmax(qᵀ W k / √d) v.

    Source: Luong et al., 2015, "general", https://arxiv.org/abs/1508.04025.

    Args:
      query: (..., q_length, num_heads, query_dim).
      key: (..., k_length, num_heads, key_dim); its width may differ from the query's.
      value: (..., k_length, num_heads, value_dim).
      kernel: W, one (query_dim, key_dim) matrix per head.
      **options: those of `attend`.

    Returns:
      (..., q_length, num_heads, value_dim), and the weights if `return_weights`.

    >>> import jax.numpy as jnp
    >>> query, key = jnp.ones((2, 5, 3, 8)), jnp.ones((2, 7, 3, 4))
    >>> bilinear_attention(query, key, key, kernel=jnp.ones((3, 8, 4))).shape
    (2, 5, 3, 4)
    """
    return attend(query, key, value, score="bilinear", parameters={"kernel": kernel}, **options)
