"""Additive (Bahdanau) attention: s = vᵀ tanh(W_q q + W_k k + b)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from adder_flax import ops
from adder_flax.attention._attend import attend, attention_function
from adder_flax.attention._registry import Score, ScoreParameter, register_score


def additive_hidden_dim(query_dim: int, key_dim: int) -> int:
    """The hidden width d_a at which additive scores have as many parameters as bilinear ones.

    d_a (d_q + d_k + 1) = d_q d_k, rounded, and at least 1.

    >>> additive_hidden_dim(64, 128)  # 8192 / 193 = 42.4
    42
    """
    return max(1, round(query_dim * key_dim / (query_dim + key_dim + 1)))


def additive_scores(
    query: Float[Array, "*batch query query_dim"],
    key: Float[Array, "*batch key key_dim"],
    *,
    query_kernel: Float[Array, "*#batch query_dim hidden"],
    key_kernel: Float[Array, "*#batch key_dim hidden"],
    v: Float[Array, "*#batch hidden"],
    bias: Float[Array, "*#batch hidden"] | None = None,
) -> Float[Array, "*batch query key"]:
    """vᵀ tanh(W_q q + W_k k + b) for every pair, in float32 or wider; |score| ≤ ‖v‖₁."""
    dtype = query.dtype
    query = jnp.matmul(query, query_kernel.astype(dtype))
    key = jnp.matmul(key, key_kernel.astype(dtype))
    if bias is not None:
        query = query + bias.astype(dtype)[..., None, :]
    return ops.additive_scores(query, key, v)


def additive_parameters(
    num_heads: int, query_dim: int, key_dim: int, *, hidden_dim: int | None = None
) -> dict[str, ScoreParameter]:
    """W_q, W_k, b and v for each head; `hidden_dim` is by default `additive_hidden_dim(query_dim, key_dim)`."""
    hidden = additive_hidden_dim(query_dim, key_dim) if hidden_dim is None else hidden_dim
    if hidden < 1:
        raise ValueError(f"expected hidden_dim of at least 1, got {hidden}; leave it out for the default.")
    # Each half contributes variance 1/2 to the pre-activation, so that tanh starts where it is not saturated.
    projection = jax.nn.initializers.variance_scaling(0.5, "fan_in", "normal", in_axis=-2, out_axis=-1, batch_axis=0)
    return {
        "query_kernel": ScoreParameter((num_heads, query_dim, hidden), projection),
        "key_kernel": ScoreParameter((num_heads, key_dim, hidden), projection),
        "bias": ScoreParameter((num_heads, hidden), jax.nn.initializers.zeros),
        "v": ScoreParameter((num_heads, hidden), jax.nn.initializers.normal(hidden**-0.5)),
    }


# No scale: the score is bounded by ‖v‖₁ whatever the width, and v is learned.
register_score(Score("additive", additive_scores, additive_parameters, scale=lambda head_dim: 1.0))


@attention_function
def additive_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    query_kernel: Float[Array, "heads query_dim hidden"],
    key_kernel: Float[Array, "heads key_dim hidden"],
    v: Float[Array, "heads hidden"],
    hidden_bias: Float[Array, "heads hidden"] | None = None,
    **options,
) -> Array:
    """Additive attention: softmax(vᵀ tanh(W_q q + W_k k + b)) v (Bahdanau et al., 2015, https://arxiv.org/abs/1409.0473).

    Args:
      query: (..., q_length, num_heads, query_dim).
      key: (..., k_length, num_heads, key_dim); its width may differ from the query's.
      value: (..., k_length, num_heads, value_dim).
      query_kernel, key_kernel: W_q and W_k, one matrix per head.
      v: the vector that turns hidden units into a score, one per head.
      hidden_bias: b, inside tanh (`bias` is the attention bias, outside).
      **options: those of `attend`.

    Returns:
      (..., q_length, num_heads, value_dim), and the weights if `return_weights`.

    >>> query, key, kernel = jnp.ones((2, 5, 3, 8)), jnp.ones((2, 7, 3, 4)), jnp.ones((3, 8, 6))
    >>> out = additive_attention(query, key, key, query_kernel=kernel, key_kernel=kernel[:, :4], v=jnp.ones((3, 6)))
    >>> out.shape
    (2, 5, 3, 4)
    """
    parameters = {"query_kernel": query_kernel, "key_kernel": key_kernel, "v": v, "bias": hidden_bias}
    return attend(query, key, value, score="additive", parameters=parameters, **options)
