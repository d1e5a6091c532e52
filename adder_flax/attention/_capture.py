"""Attention maps of a whole model, on request."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
from jaxtyping import Array, Float

from adder_flax.attention._recorder import recorded_maps


def capture_attention(
    model: nnx.Module | Callable[..., Any], *inputs: Any
) -> tuple[Float[Array, "*batch heads query key"], ...]:
    """Every attention map that a model computes for these inputs; the model, and how it trains, stay as they are.

    It works for every model that attends through this library: `VisionTransformer`, your own modules with
    `MultiHeadAttention`, and Flax's multi-head attention with a function from here as its `attention_fn`. Maps cost
    memory only here: kernels that never build them serve all other calls.

    Args:
      model: an NNX module, or a function such as `lambda images: model.apply(variables, images)` of a Linen module.
        Where its call takes `return_weights`, it has to return (output, maps) for `return_weights=True`.
      *inputs: what the model is called with, for example images.

    Returns:
      What multiplies the values, one array per attention layer in the order of the calls, before dropout. Rows sum to
      1, and to 2 where the identity map is added (subtract `jnp.eye(tokens)` for the softmax alone).

    Raises:
      ValueError: nothing attends through this library, or does so inside `jax.checkpoint` or an inner `jax.jit`,
        `jax.lax.scan`, … of a model whose call does not take `return_weights`.

    >>> import jax.numpy as jnp
    >>> from adder_flax.models import VisionTransformer
    >>> model = VisionTransformer(image_size=8, patch_size=4, channels=1, num_classes=10, width=16, depth=2,
    ...                           num_heads=2, score="adder", rngs=nnx.Rngs(0))
    >>> [attention_map.shape for attention_map in capture_attention(model, jnp.ones((3, 8, 8, 1)))]
    [(3, 2, 5, 5), (3, 2, 5, 5)]
    """
    try:
        if isinstance(model, nnx.Module):
            graphdef, state = nnx.split(model)
            return _module_maps(graphdef, state, *inputs)
        return jax.jit(functools.partial(_maps, model))(*inputs)
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(
            "expected attention outside of jax.checkpoint, jax.lax.scan and inner jax.jit, got a map from inside one "
            "of them; let the model's call take return_weights=True and return (output, maps), or capture without it."
        ) from error


@jax.jit(static_argnums=0)
def _module_maps(graphdef: nnx.GraphDef, state: nnx.State, *inputs: Any) -> tuple[Array, ...]:
    return _maps(nnx.merge(graphdef, state), *inputs)


def _maps(model: Callable[..., Any], *inputs: Any) -> tuple[Array, ...]:
    if "return_weights" in inspect.signature(model).parameters:
        _, maps = model(*inputs, return_weights=True)
        return maps if isinstance(maps, tuple) else (maps,)
    with recorded_maps() as maps:
        model(*inputs)
    if not maps:
        raise ValueError(
            "expected a model that attends through adder_flax.attention, got one that does not; give its layers "
            "attention_fn=adder_flax.attention.dot_product_attention, or another mechanism."
        )
    return tuple(maps)
