"""Scores in closed form: dot product, Gaussian kernel, bilinear form, L1 distance."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from adder_flax import ops
from adder_flax.arrays import AnyArray
from adder_flax.attention._attend import Attended, attend, attention_function
from adder_flax.attention._curvature import project_heads
from adder_flax.attention._registry import Score, ScoreParameter, register_score
from adder_flax.settings import AdderOptions


def _require_equal_widths(name: str, query: AnyArray, key: AnyArray) -> None:
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{name} scores expect query and key of one head_dim, got {query.shape[-1]} and "
            f"{key.shape[-1]}; project them to one width or use the bilinear or additive score."
        )


def adder_scores(
    query: Float[AnyArray, "*#batch query dim"],
    key: Float[AnyArray, "*#batch key dim"],
    *,
    gradient: ops.RuleName = "sign",
    bits: int | None = None,
) -> Float[Array, "*#batch query key"]:
    """-‖q - k‖₁ for every pair, in float32 or wider.

    `gradient` is as in `adder_flax.ops.l1_scores`; `bits` round both, see
    `adder_flax.ops.round_alike`.
    """
    _require_equal_widths("adder", query, key)
    if bits:
        query, key = ops.round_alike(query, key, bits=bits)
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

    The identity map lifts the low rank of L1 maps (Shu et al., "Adder Attention for Vision
    Transformer", NeurIPS 2021, Proposition 1). Rows of the map sum to 2 with it. It is defined for
    self-attention only; give `identity=False` for cross-attention, which cannot be told from it
    where both lengths are equal.

    `gradient` is the rule of the distance: "sign" (exact), "full" (differences) or "hardtanh".
    Other arguments and the result are those of `attend`; `scale="variance_matched"` gives
    1/√(2d(1 - 2/π)) (Theorem 1 there).

    >>> x = jnp.ones((2, 5, 3, 8))
    >>> float(adder_attention(x, x, x)[0, 0, 0, 0])  # the mean of the values, plus the own one
    2.0
    """
    return attend(query, key, value, score="adder", score_options={"gradient": gradient}, **options)


def dot_scores(
    query: Float[AnyArray, "*#batch query dim"], key: Float[AnyArray, "*#batch key dim"]
) -> Float[Array, "*#batch query key"]:
    """q·k for every pair, accumulated and returned in float32 or wider."""
    _require_equal_widths("dot", query, key)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=dtype)


# The variance of q·k between independent unit-normal vectors is d.
register_score(Score("dot", dot_scores, variance=lambda head_dim: float(head_dim)))


@attention_function
def dot_product_attention(query: AnyArray, key: AnyArray, value: AnyArray, **options) -> Attended:
    """Multiplicative attention: softmax(q·k / √d) v.

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762.

    Arrays (..., length, num_heads, head_dim), options and result are those of `attend`.

    >>> x = jnp.ones((2, 5, 3, 8))
    >>> dot_product_attention(x, x, x).shape
    (2, 5, 3, 8)
    """
    return attend(query, key, value, score="dot", **options)


def bilinear_scores(
    query: Float[AnyArray, "*#batch query query_dim"],
    key: Float[AnyArray, "*#batch key key_dim"],
    *,
    kernel: Float[AnyArray, "*#batch query_dim key_dim"],
) -> Float[Array, "*#batch query key"]:
    """qᵀ W k for every pair, in float32 or wider; W is per head where it has leading axes."""
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

    `kernel` is W, one matrix per head; query and key may differ in width. Other arguments and the
    result are those of `attend`.

    >>> query, key = jnp.ones((2, 5, 3, 8)), jnp.ones((2, 7, 3, 4))
    >>> bilinear_attention(query, key, key, kernel=jnp.ones((3, 8, 4))).shape
    (2, 5, 3, 4)
    """
    return attend(query, key, value, score="bilinear", parameters={"kernel": kernel}, **options)


def gaussian_scores(
    query: Float[AnyArray, "*#batch query dim"], key: Float[AnyArray, "*#batch key dim"]
) -> Float[Array, "*#batch query key"]:
    """-‖q - k‖²/2 for every pair, as q·k - ‖q‖²/2 - ‖k‖²/2: one matrix product, two sums of
    squares.
    """
    _require_equal_widths("gaussian", query, key)
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

    Arrays (..., length, num_heads, head_dim), options and result are those of `attend`.

    >>> x = jnp.ones((2, 5, 3, 8))
    >>> gaussian_attention(x, x, x).shape
    (2, 5, 3, 8)
    """
    return attend(query, key, value, score="gaussian", **options)
