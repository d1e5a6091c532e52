"""Attention maps of a whole model, on request."""

from typing import Any

import flax.nnx as nnx
import jax
from jaxtyping import Array, Float


def capture_attention(model: nnx.Module, *inputs: Any) -> tuple[Float[Array, "batch heads query key"], ...]:
    """Every block's attention maps for these inputs; the model, and how it trains, stay as they are.

    Args:
      model: a module whose call takes `return_weights=True` and then returns (output, tuple of maps), as
        `adder_flax.models.VisionTransformer` does with any mechanism.
      *inputs: what the model is called with, for example images.

    Returns:
      One array per block: what multiplies the values, without dropout. Rows sum to 1, and to 2 where the identity map
      is added (subtract `jnp.eye(tokens)` for the softmax alone).

    >>> import jax.numpy as jnp
    >>> from adder_flax.models import VisionTransformer
    >>> model = VisionTransformer(image_size=8, patch_size=4, channels=1, num_classes=10, width=16, depth=2,
    ...                           num_heads=2, score="adder", rngs=nnx.Rngs(0))
    >>> [attention_map.shape for attention_map in capture_attention(model, jnp.ones((3, 8, 8, 1)))]
    [(3, 2, 5, 5), (3, 2, 5, 5)]
    """
    graphdef, state = nnx.split(model)
    return _maps(graphdef, state, *inputs)


@jax.jit(static_argnums=0)
def _maps(graphdef: nnx.GraphDef, state: nnx.State, *inputs: Any) -> tuple[Array, ...]:
    _, maps = nnx.merge(graphdef, state)(*inputs, return_weights=True)
    return maps
