"""Adder attention: s = -‖q - k‖₁, with the identity map added to the attention map."""

import math

from jaxtyping import Array, Float

from adder_flax import ops
from adder_flax.arrays import AnyArray
from adder_flax.attention._attend import Attended, attend, attention_function
from adder_flax.attention._registry import Score, register_score
from adder_flax.attention.checks import require_equal_widths
from adder_flax.settings import AdderOptions


def adder_scores(
    query: Float[AnyArray, "*#batch query dim"],
    key: Float[AnyArray, "*#batch key dim"],
    *,
    gradient: ops.RuleName = "sign",
) -> Float[Array, "*#batch query key"]:
    """-‖q - k‖₁ for every pair, in float32 or wider.

    `gradient` is as in `adder_flax.ops.l1_scores`.
    """
    require_equal_widths("adder", query, key)
    return ops.l1_scores(query, key, gradient=gradient)


register_score(
    Score(
        "adder",
        adder_scores,
        options=AdderOptions,
        # |q - k| of two unit-normal numbers is a half-normal variable of scale √2: its variance is
        # 2(1 - 2/π).
        variance=lambda head_dim: 2.0 * head_dim * (1.0 - 2.0 / math.pi),
        identity=True,
    )
)


@attention_function
def adder_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    *,
    gradient: ops.RuleName = "sign",
    **options,
) -> Attended:
    """Adder attention: (softmax(-‖q - k‖₁ / √d) + I) v, whose scores need no multiplication.

    The identity map raises every singular value of a symmetric positive semidefinite map by one and
    so lifts the low rank of L1 maps (Shu et al., "Adder Attention for Vision Transformer", NeurIPS
    2021, Proposition 1). It is defined for self-attention only; give `identity=False` for
    cross-attention. Rows of the map sum to 2 with it.

    Args:
      query, key, value: (..., length, num_heads, head_dim), as in Flax.
      gradient: gradient rule of the distance: "sign" (exact), "full" (differences) or "hardtanh".
      **options: those of `attend`; `scale="variance_matched"` gives 1/√(2d(1 - 2/π)) (Theorem 1
        there).

    Returns:
      (..., q_length, num_heads, value_dim), and the weights if `return_weights`.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 5, 3, 8))
    >>> float(
    ...     adder_attention(x, x, x)[0, 0, 0, 0]
    ... )  # the mean of the values, plus the token's own value
    2.0
    """
    return attend(query, key, value, score="adder", score_options={"gradient": gradient}, **options)
