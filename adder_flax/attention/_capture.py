"""Attention maps of a whole model, on request."""

from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
from jaxtyping import Array, Float

from adder_flax import recorder


def capture_attention(
    model: nnx.Module | Callable[..., Any], *inputs: Any
) -> tuple[Float[Array, "*batch heads query key"], ...]:
    """Every attention map that a model computes for these inputs.

    It works for every model that attends through this library: `VisionTransformer`, your own
    modules with `MultiHeadAttention`, and Flax's multi-head attention with a function from here as
    its `attention_fn`. `adder_flax.recorder.record` gives queries, keys, scores and the module's
    path too.

    Args:
      model: an NNX module, or a function such as `lambda images: model.apply(variables, images)` of
        a Linen module.
      *inputs: what the model is called with, for example images.

    Returns:
      What multiplies the values, one array per attention layer in the order of the calls, before
      dropout. Rows sum to 1, and to 2 where the identity map is added (subtract `jnp.eye(tokens)`
      for the softmax alone). A layer inside of a loop (`jax.lax.scan`, an `nnx.RNN`) gives one
      array with the loop's steps as its first axis.

    Raises:
      ValueError: nothing attends through this library, or does so inside `jax.lax.cond`,
        `jax.lax.while_loop` or `jax.shard_map`.

    >>> from adder_flax.models import VisionTransformer
    >>> sizes = dict(image_size=8, patch_size=4, channels=1, width=16, depth=2, num_heads=2)
    >>> model = VisionTransformer(**sizes, score="adder", rngs=nnx.Rngs(0))
    >>> [attention_map.shape for attention_map in capture_attention(model, jnp.ones((3, 8, 8, 1)))]
    [(3, 2, 5, 5), (3, 2, 5, 5)]
    """
    _, records = recorder.record({"attention": ["map"]}, model, *inputs)
    if not records:
        raise ValueError(
            "expected a model that attends through adder_flax.attention, got one that does not; "
            "give its layers attention_fn=adder_flax.attention.dot_product_attention, or another "
            "mechanism."
        )
    return tuple(record.arrays["map"] for record in records)


def attention_map(record: recorder.Record) -> Float[Array, "*batch heads query key"]:
    """What multiplies the values of a whole sequence: weights and identity map of a record."""
    weights = record.arrays["weights"]
    return weights + jnp.eye(weights.shape[-1]) if record.facts["identity"] else weights
