"""Additive (Bahdanau) attention: s = vᵀ tanh(W_q q + W_k k + b)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import kfac
from adder_flax import ops
from adder_flax.arrays import AnyArray
from adder_flax.attention._attend import Attended, attend, attention_function
from adder_flax.attention._curvature import project_heads, tap_heads
from adder_flax.attention._registry import Score, ScoreParameter, register_score
from adder_flax.attention._scores import dot_scores
from adder_flax.settings import AdditiveOptions

LAYER_NORM_EPSILON = 1e-6
"""Of every LayerNorm here: published ViT weights were trained with it."""

# Pairs of an example from which the second moment of its hidden units is estimated: all of them up
# to 22 tokens.
_MOST_PAIRS = 512


def additive_hidden_dim(query_dim: int, key_dim: int) -> int:
    """The hidden width d_a at which additive scores have as many parameters as bilinear ones: d_a
    (d_q + d_k + 1) = d_q d_k, rounded, and at least 1.

    >>> additive_hidden_dim(64, 128)  # 8192 / 193 = 42.4
    42
    """
    return max(1, round(query_dim * key_dim / (query_dim + key_dim + 1)))


def additive_scores(
    query: Float[AnyArray, "*#batch query query_dim"],
    key: Float[AnyArray, "*#batch key key_dim"],
    *,
    query_kernel: Float[AnyArray, "*#batch query_dim hidden"],
    key_kernel: Float[AnyArray, "*#batch key_dim hidden"],
    v: Float[AnyArray, "*#batch hidden"],
    bias: Float[AnyArray, "*#batch hidden"] | None = None,
    norm_scale: Float[AnyArray, "*#batch hidden"] | None = None,
) -> Float[Array, "*#batch query key"]:
    """vᵀ tanh(W_q q + W_k k + b) for every pair, in float32 or wider; |score| ≤ ‖v‖₁.

    With `norm_scale` the sum W_q q + W_k k goes through LayerNorm first, whose scale is
    `norm_scale` and whose shift is b: it keeps tanh out of saturation however large the inputs are.
    """
    if norm_scale is not None:
        shift = jnp.zeros_like(norm_scale) if bias is None else bias
        query, key = project_heads(query, query_kernel), project_heads(key, key_kernel)
        scores = _normalized_scores(query, key, v, norm_scale, shift)
        own = {"v": v, "norm_scale": norm_scale} | ({} if bias is None else {"bias": bias})
        return tap_heads(_NORMALIZED, own, (query, key), scores, per_head=v.ndim > 1)
    query, key = project_heads(query, query_kernel, bias), project_heads(key, key_kernel)
    scores = ops.additive_scores(query, key, v)
    return tap_heads(_READOUT, {"kernel": v}, (query, key), scores, per_head=v.ndim > 1)


def _pair_scores(
    parameters: dict[str, Array], pair: tuple[Array, Array]
) -> Float[Array, "*#batch query key 1"]:
    return ops.additive_scores(*pair, parameters["kernel"])[..., None]


def _sampled_units(pair: tuple[Array, Array]) -> Float[Array, "*batch sample key hidden"]:
    """tanh(q + k) of every key with queries at equal distances: a large sample, and yet cheap."""
    query, key = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in pair)
    step = -(-query.shape[-2] * key.shape[-2] // _MOST_PAIRS)
    return jnp.tanh(query[..., ::step, None, :] + key[..., None, :, :])


def _normalized_pair_scores(parameters: dict[str, Array], pair: tuple[Array, Array]) -> Array:
    shift = parameters.get("bias", jnp.zeros_like(parameters["norm_scale"]))
    return _normalized_scores(*pair, parameters["v"], parameters["norm_scale"], shift)[..., None]


def _normalized_scores(
    query: Array, key: Array, v: AnyArray, scale: AnyArray, shift: AnyArray
) -> Array:
    """vᵀ tanh(scale · LayerNorm(q + k) + shift), without an array of size q_length · k_length ·
    hidden.

    The mean of a sum is the sum of the means, and ‖q + k‖² of centred parts is ‖q‖² + ‖k‖² + 2 q·k,
    one matrix product; then one hidden unit at a time adds to the scores, recomputed in the
    backward pass.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    query, key = (x.astype(dtype) - x.astype(dtype).mean(-1, keepdims=True) for x in (query, key))
    energies = jnp.square(query).sum(-1)[..., :, None] + jnp.square(key).sum(-1)[..., None, :]
    variance = (energies + 2.0 * dot_scores(query, key)) / query.shape[-1]
    inverse_std = jax.lax.rsqrt(jnp.maximum(variance, 0.0) + LAYER_NORM_EPSILON)

    def add_unit(scores, unit):
        q, k, v, scale, shift = unit
        return scores + v * jnp.tanh(
            scale * inverse_std * (q[..., :, None] + k[..., None, :]) + shift
        ), None

    tokens = [jnp.moveaxis(x, -1, 0) for x in (query, key)]
    weights = [jnp.moveaxis(x.astype(dtype), -1, 0)[..., None, None] for x in (v, scale, shift)]
    body = jax.checkpoint(add_unit, prevent_cse=False)
    return jax.lax.scan(body, jnp.zeros_like(inverse_std), (*tokens, *weights))[0]


def additive_parameters(
    num_heads: int,
    query_dim: int,
    key_dim: int,
    *,
    hidden_dim: int | None = None,
    layer_norm: bool = False,
) -> dict[str, ScoreParameter]:
    """W_q, W_k, b and v for each head, and `norm_scale` with `layer_norm`."""
    hidden = additive_hidden_dim(query_dim, key_dim) if hidden_dim is None else hidden_dim
    if hidden < 1:
        raise ValueError(
            f"expected hidden_dim of at least 1, got {hidden}; leave it out for the default."
        )
    # Each half gives the pre-activation variance 1/2: tanh starts where it is not saturated.
    projection = jax.nn.initializers.variance_scaling(
        0.5, "fan_in", "normal", in_axis=-2, out_axis=-1, batch_axis=0
    )
    parameters = {
        "query_kernel": ScoreParameter((num_heads, query_dim, hidden), projection),
        "key_kernel": ScoreParameter((num_heads, key_dim, hidden), projection),
        "bias": ScoreParameter((num_heads, hidden), jax.nn.initializers.zeros),
        "v": ScoreParameter(
            (num_heads, hidden), jax.nn.initializers.normal(hidden**-0.5), is_weight=True
        ),
    }
    if layer_norm:
        parameters["norm_scale"] = ScoreParameter((num_heads, hidden), jax.nn.initializers.ones)
    return parameters


_READOUT = kfac.Readout(fn=_pair_scores, sample=_sampled_units)
_NORMALIZED = kfac.Generic(_normalized_pair_scores)

# No scale: the score is bounded by ‖v‖₁ whatever the width, and v is learned.
register_score(
    Score(
        "additive",
        additive_scores,
        additive_parameters,
        options=AdditiveOptions,
        scale=lambda head_dim: 1.0,
    )
)


@attention_function
def additive_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    *,
    query_kernel: Float[AnyArray, "heads query_dim hidden"],
    key_kernel: Float[AnyArray, "heads key_dim hidden"],
    v: Float[AnyArray, "heads hidden"],
    hidden_bias: Float[AnyArray, "heads hidden"] | None = None,
    norm_scale: Float[AnyArray, "heads hidden"] | None = None,
    **options,
) -> Attended:
    """Additive attention: softmax(vᵀ tanh(W_q q + W_k k + b)) v.

    Source: Bahdanau et al., 2015, https://arxiv.org/abs/1409.0473.

    Args:
      query, key, value: as of `attend`; query and key may differ in width.
      query_kernel, key_kernel: W_q and W_k, one matrix per head.
      v: the vector that turns hidden units into a score, one per head.
      hidden_bias: b, inside tanh (`bias` is the attention bias, outside).
      norm_scale: scale of a LayerNorm of W_q q + W_k k, whose shift is then b; None for none.
      **options: those of `attend`, whose result is given back.

    >>> query, key, kernel = jnp.ones((2, 5, 3, 8)), jnp.ones((2, 7, 3, 4)), jnp.ones((3, 8, 6))
    >>> learned = dict(query_kernel=kernel, key_kernel=kernel[:, :4], v=jnp.ones((3, 6)))
    >>> additive_attention(query, key, key, **learned).shape
    (2, 5, 3, 4)
    """
    parameters: dict[str, Any] = dict(query_kernel=query_kernel, key_kernel=key_kernel, v=v)
    parameters |= dict(bias=hidden_bias, norm_scale=norm_scale)
    return attend(query, key, value, score="additive", parameters=parameters, **options)
