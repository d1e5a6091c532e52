"""Attention: scores, normaliser, values, as pure functions; then NNX modules.

Layout as in Flax: query, key and value are (..., length, num_heads, head_dim).
"""

from adder_flax.attention._additive import (
    LAYER_NORM_EPSILON,
    additive_attention,
    additive_hidden_dim,
    additive_scores,
)
from adder_flax.attention._attend import attend, attention_function, resolve_scale
from adder_flax.attention._capture import attention_map, capture_attention
from adder_flax.attention._multi_head import MultiHeadAttention
from adder_flax.attention._registry import (
    SCORES,
    Score,
    ScoreParameter,
    get_score,
    masked_softmax,
    register_score,
)
from adder_flax.attention._scores import (
    adder_attention,
    adder_scores,
    bilinear_attention,
    bilinear_scores,
    dot_product_attention,
    dot_scores,
    gaussian_attention,
    gaussian_scores,
)
from adder_flax.attention._seq2seq import AdditiveAttention, BilinearAttention, SequenceAttention

__all__ = [
    "LAYER_NORM_EPSILON",
    "SCORES",
    "AdditiveAttention",
    "BilinearAttention",
    "MultiHeadAttention",
    "Score",
    "ScoreParameter",
    "SequenceAttention",
    "adder_attention",
    "adder_scores",
    "additive_attention",
    "additive_hidden_dim",
    "additive_scores",
    "attend",
    "attention_function",
    "attention_map",
    "bilinear_attention",
    "bilinear_scores",
    "capture_attention",
    "dot_product_attention",
    "dot_scores",
    "gaussian_attention",
    "gaussian_scores",
    "get_score",
    "masked_softmax",
    "register_score",
    "resolve_scale",
]
