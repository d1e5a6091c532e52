"""Which keys each query sees, and which of them is its own."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from adder_flax import ops
from adder_flax.arrays import AnyArray

Shape = tuple[int, ...]
"""(*batch, heads, q_length, k_length)"""


def mask_of_pairs(mask: AnyArray | None, shape: Shape) -> Bool[Array, "..."] | None:
    """The mask as booleans.

    Raises:
      ValueError: it is floating, or does not broadcast to the shape.
    """
    if mask is None:
        return None
    mask = ops.as_mask(mask)
    check_broadcasts("mask", mask, shape)
    return mask


def total_bias(bias: AnyArray | None, key_bias: AnyArray | None, shape: Shape) -> AnyArray | None:
    """The sum of both biases.

    Raises:
      ValueError: the bias is a mask, or does not broadcast to the shape.
    """
    if bias is not None:
        if jnp.issubdtype(jnp.result_type(bias), jnp.bool_):
            raise ValueError(
                "expected a bias of numbers that are added to the scores, got booleans; pass them "
                "as mask."
            )
        check_broadcasts("bias", bias, shape)
    if key_bias is None:
        return bias
    key_bias = key_bias[..., None, :]
    return key_bias if bias is None else bias + key_bias


def visible(mask: Array | None, bias: AnyArray | None) -> Array | None:
    """Which keys each query may see, causality left out; None where all."""
    if bias is None:
        return mask
    allowed = jnp.greater(bias, -jnp.inf)
    return allowed if mask is None else jnp.logical_and(mask, allowed)


def with_causal(mask: Array | None, shape: Shape, query_position: int | Array | None = None):
    """The mask of keys that do not come after a query's own."""
    own = _own_positions(shape[-2], query_position)
    causal = jnp.arange(shape[-1]) <= own[:, None]
    return causal if mask is None else jnp.logical_and(mask, causal)


def identity_map(shape: Shape, query_position: int | Array | None, dtype) -> Array:
    """1 for each query's own key, else 0."""
    own = _own_positions(shape[-2], query_position)
    return (jnp.arange(shape[-1]) == own[:, None]).astype(dtype)


def own_values(
    value: Float[Array, "*batch k_length dim"], q_length: int, query_position: int | Array | None
) -> Float[Array, "*batch q_length dim"]:
    """The value of each query's own key; NaN where there is no such key."""
    if query_position is None:
        return value
    own = _own_positions(q_length, query_position)
    return jnp.take(value, own, axis=-2, mode="fill", fill_value=jnp.nan)


def check_own_keys(shape: Shape, identity: bool, is_causal: bool) -> None:
    """Raises ValueError where queries' own keys have to be known, as in self-attention, and are
    not.
    """
    q_length, k_length = shape[-2:]
    if q_length != k_length and (identity or is_causal):
        option = "identity" if identity else "is_causal"
        raise ValueError(
            f"{option} expects self-attention, as many queries as keys, got {q_length} and "
            f"{k_length}; where keys come from a cache, pass the first query's place among them as "
            f"query_position, and between two sequences {option}=False."
        )


def _own_positions(q_length: int, query_position: int | Array | None) -> Int[Array, " q_length"]:
    return jnp.arange(q_length) + (0 if query_position is None else query_position)


def check_broadcasts(
    name: str, array: AnyArray | None, shape: Shape, *, axes: str = "heads, q_length, k_length"
) -> None:
    """Raises ValueError where a mask or bias of this name does not broadcast to the shape."""
    got = () if array is None else jnp.shape(array)
    try:
        fits = jnp.broadcast_shapes(got, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        ways = {"(batch, k_length)": f"{name}[:, None, {'None, ' * axes.startswith('heads')}:]"}
        if axes.startswith("heads"):
            ways["(batch, q_length, k_length)"] = f"{name}[:, None]"
        raise ValueError(
            f"expected a {name} that broadcasts to (*batch, {axes}) = {shape}, got {got}; "
            + ", ".join(f"one of shape {given} goes in as {way}" for given, way in ways.items())
            + "."
        )


def check_pairs(query: AnyArray, key: AnyArray, **arrays: AnyArray | None) -> None:
    """Raises ValueError where a mask or bias does not broadcast to the pairs of one head."""
    shape = (*query.shape[:-1], key.shape[-2])
    for name, array in arrays.items():
        check_broadcasts(name, array, shape, axes="q_length, k_length")
