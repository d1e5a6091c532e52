"""Checks that functions and modules share, each with one clear message; which keys a query sees."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from adder_flax import ops
from adder_flax.arrays import AnyArray
from adder_flax.settings import is_on


def check_heads(qkv_features: int, num_heads: int, num_kv_heads: int) -> None:
    """Refuses a width that does not divide into heads, or query heads that do not into groups."""
    if qkv_features % num_heads:
        raise ValueError(
            f"expected a width divisible by num_heads, got width {qkv_features} and {num_heads} "
            "heads; change one of them."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"expected num_heads to be a multiple of num_kv_heads, got {num_heads} and "
            f"{num_kv_heads}; change one of them."
        )


def check_shapes(query: AnyArray, key: AnyArray, value: AnyArray) -> None:
    """Refuses arrays that are not in Flax's layout or do not belong together."""
    shapes = f"got query {query.shape}, key {key.shape}, value {value.shape}"
    layout = "(*batch, length, num_heads, head_dim)"
    if not query.ndim == key.ndim == value.ndim >= 3 or not (
        query.shape[:-3] == key.shape[:-3] == value.shape[:-3]
    ):
        raise ValueError(
            f"expected {layout} with equal batch axes, {shapes}; reshape or broadcast them first."
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"expected key and value of one length and number of heads, {shapes}; check them."
        )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"expected the number of query heads to be a multiple of that of key heads, {shapes}; "
            "change one."
        )


def check_floating(dtype: DTypeLike) -> None:
    """Refuses to compute in whole numbers, in which all weights of a map are 0 or 1."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"expected query, key and value of a floating dtype, got {jnp.dtype(dtype)}; convert "
            "them with .astype(jnp.float32)."
        )


def check_dropout(rate: float | Array, rng: Array | None) -> None:
    """Refuses a rate that is no probability, and one without a key."""
    if isinstance(rate, int | float) and not 0.0 <= rate < 1.0:
        raise ValueError(f"expected dropout_rate in [0, 1), got {rate}; lower it.")
    if is_on(rate) and rng is None:
        raise ValueError(
            f"dropout_rate = {rate} expects a dropout_rng, got None; pass a jax.random key or "
            "deterministic=True."
        )


def check_temperature(temperature: float | str) -> None:
    """Refuses what is neither a positive number nor "learned"."""
    if temperature != "learned" and (isinstance(temperature, str) or temperature <= 0):
        raise ValueError(
            f"expected a positive temperature or 'learned', got {temperature!r}; 1.0 leaves the "
            "scores alone."
        )


Shape = tuple[int, ...]
"""(*batch, heads, q_length, k_length)"""


def mask_of_pairs(mask: AnyArray | None, shape: Shape) -> Bool[Array, "..."] | None:
    """The mask as booleans."""
    if mask is None:
        return None
    mask = ops.as_mask(mask)
    check_broadcasts("mask", mask, shape)
    return mask


def total_bias(bias: AnyArray | None, key_bias: AnyArray | None, shape: Shape) -> AnyArray | None:
    """The sum of both biases."""
    if bias is not None:
        if jnp.issubdtype(jnp.result_type(bias), jnp.bool_):
            raise ValueError(
                "expected a bias of numbers that are added to the scores, got booleans; pass them "
                "as mask."
            )
        check_broadcasts("bias", bias, shape)
    if key_bias is None:
        return bias
    of_keys = (*shape[:-2], shape[-1])
    check_broadcasts("key_bias", key_bias, of_keys, axes="heads, k_length")
    key_bias = jnp.expand_dims(key_bias, -2) if jnp.ndim(key_bias) else key_bias
    return key_bias if bias is None else bias + key_bias


def visible(mask: Array | None, bias: AnyArray | None) -> Array | None:
    """Which keys each query may see, causality left out; None where all."""
    if bias is None:
        return mask
    allowed = jnp.not_equal(bias, -jnp.inf)  # NaN hides nothing, and is seen in the output
    return allowed if mask is None else jnp.logical_and(mask, allowed)


def with_causal(mask: Array | None, shape: Shape, query_position: int | Array | None = None):
    """The mask of keys that do not come after a query's own."""
    own = _own_positions(shape[-2], query_position)
    causal = jnp.arange(shape[-1]) <= own[..., None]
    return causal if mask is None else jnp.logical_and(mask, causal)


def identity_map(shape: Shape, query_position: int | Array | None, dtype) -> Array:
    """1 for each query's own key, else 0."""
    own = _own_positions(shape[-2], query_position)
    return (jnp.arange(shape[-1]) == own[..., None]).astype(dtype)


def own_values(
    value: Float[Array, "*batch k_length dim"], q_length: int, query_position: int | Array | None
) -> Float[Array, "*batch q_length dim"]:
    """The value of each query's own key; NaN where there is no such key."""
    if query_position is None:
        return value
    own = _own_positions(q_length, query_position)[..., None]
    own = own.reshape(*(1,) * (value.ndim - own.ndim), *own.shape)
    return jnp.take_along_axis(value, own, axis=-2, mode="fill", fill_value=jnp.nan)


def check_own_keys(
    shape: Shape, identity: bool, is_causal: bool, query_position: int | Array | None
) -> None:
    """Refuses what needs to know queries' own keys, as in self-attention, where they are not."""
    q_length, k_length = shape[-2:]
    known = isinstance(query_position, int | np.integer | np.ndarray)
    if known and np.any(np.less(query_position, 0)):
        raise ValueError(
            f"expected a query_position of at least 0, got {query_position}; count from the "
            "first key."
        )
    if query_position is not None:
        if jnp.shape(query_position) not in ((), shape[:-3]):
            raise ValueError(
                f"expected one query_position, or one for each sample, of shape {shape[:-3]}, got "
                f"{jnp.shape(query_position)}; give the place of the first query alone."
            )
    elif q_length != k_length and (identity or is_causal):
        option = "identity" if identity else "is_causal"
        raise ValueError(
            f"{option} expects self-attention, as many queries as keys, got {q_length} and "
            f"{k_length}; where keys come from a cache, pass the first query's place among them as "
            f"query_position, and between two sequences {option}=False."
        )


def _own_positions(
    q_length: int, query_position: int | Array | None
) -> Int[Array, "*batch 1 q_length"]:
    first = jnp.asarray(0 if query_position is None else query_position)
    return first[..., None, None] + jnp.arange(q_length)


def check_broadcasts(
    name: str, array: AnyArray | None, shape: Shape, *, axes: str = "heads, q_length, k_length"
) -> None:
    """Refuses a mask or bias of this name that does not broadcast to the shape."""
    got = () if array is None else jnp.shape(array)
    try:
        fits = jnp.broadcast_shapes(got, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        ways = {"(batch, k_length)": f"{name}[:, {'None, ' * axes.count(',')}:]"}
        if axes == "heads, q_length, k_length":
            ways["(batch, q_length, k_length)"] = f"{name}[:, None]"
        raise ValueError(
            f"expected a {name} that broadcasts to (*batch, {axes}) = {shape}, got {got}; "
            + ", ".join(f"one of shape {given} goes in as {way}" for given, way in ways.items())
            + "."
        )
