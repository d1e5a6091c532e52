"""Gaussian-kernel attention: s = -‖q - k‖²/2."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from adder_flax.arrays import AnyArray
from adder_flax.attention._attend import Attended, attend, attention_function
from adder_flax.attention._dot import dot_scores
from adder_flax.attention._registry import Score, register_score
from adder_flax.attention.checks import require_equal_widths


def gaussian_scores(
    query: Float[AnyArray, "*#batch query dim"], key: Float[AnyArray, "*#batch key dim"]
) -> Float[Array, "*#batch query key"]:
    """-‖q - k‖²/2 for every pair, as q·k - ‖q‖²/2 - ‖k‖²/2: one matrix product, two sums of
    squares.
    """
    require_equal_widths("gaussian", query, key)
    scores = dot_scores(query, key)
    query_energy = jnp.sum(jnp.square(query.astype(scores.dtype)), axis=-1)
    key_energy = jnp.sum(jnp.square(key.astype(scores.dtype)), axis=-1)
    return scores - 0.5 * (query_energy[..., :, None] + key_energy[..., None, :])


# ‖q - k‖²/2 is a chi-squared variable with d degrees of freedom for unit-normal q and k: its
# variance is 2d.
register_score(Score("gaussian", gaussian_scores, variance=lambda head_dim: 2.0 * head_dim))


@attention_function
def gaussian_attention(query: AnyArray, key: AnyArray, value: AnyArray, **options) -> Attended:
    """Gaussian-kernel attention: softmax(-‖q - k‖² / (2√d)) v.

    Where all keys have one norm, as after LayerNorm without an affine part, the map is exactly that
    of scaled dot-product attention: the norms are constant in each row and cancel in the softmax.
    The row-normalised kernel is the transition matrix of a diffusion on the tokens.

    Args:
      query, key, value: (..., length, num_heads, head_dim), as in Flax.
      **options: those of `attend`.

    Returns:
      (..., q_length, num_heads, value_dim), and the weights if `return_weights`.

    >>> x = jnp.ones((2, 5, 3, 8))
    >>> gaussian_attention(x, x, x).shape
    (2, 5, 3, 8)
    """
    return attend(query, key, value, score="gaussian", **options)
