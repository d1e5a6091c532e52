"""The learned arrays of scores as layers with curvature, one lane for each head."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import kfac
from adder_flax.arrays import AnyArray


def project_heads(
    x: Float[AnyArray, "*batch length in"],
    kernel: Float[AnyArray, "*#lanes in out"],
    bias: Float[AnyArray, "*#lanes out"] | None = None,
) -> Float[Array, "*_ length out"]:
    """x W + b with a matrix for each head where W has a leading axis; a dense layer to `kfac`."""
    y = jnp.matmul(x, kernel.astype(x.dtype))
    parameters = {"kernel": kernel}
    if bias is not None:
        y = y + bias.astype(x.dtype)[..., None, :]
        parameters["bias"] = bias
    return tap_heads(kfac.Dense(), parameters, x, y, per_head=kernel.ndim > 2)


def tap_heads(
    layer: kfac.Dense | kfac.Generic,
    parameters: dict[str, AnyArray],
    x: Any,
    y: Array,
    *,
    per_head: bool,
) -> Array:
    """Returns y, reported as what a layer makes of x where `kfac` looks for layers and knows the
    parameters.

    Args:
      layer: of one head; an output without features, such as scores, has one.
      parameters: by role; heads first with `per_head`.
      x, y: input and output, (*batch, heads, length, width), without the heads unless `per_head`.
      per_head: whether each head has parameters of its own.
    """
    known = {role: kfac.path_of(parameter) for role, parameter in parameters.items()}
    paths = {role: path for role, path in known.items() if path is not None}
    if len(paths) < len(known):
        return y

    def report(parameters: dict[str, AnyArray], x: Any, y: Array) -> Array:
        if isinstance(layer, kfac.Dense) and not isinstance(layer, kfac.Readout):
            return kfac.tap(layer, parameters, x, path=paths, y=y)
        return kfac.tap(layer, parameters, x, path=paths, y=y[..., None])[..., 0]

    return (jax.vmap(report, in_axes=(0, -3, -3), out_axes=-3) if per_head else report)(
        parameters, x, y
    )


def captures(*parameters: AnyArray | None) -> bool:
    """Whether `kfac` is looking for layers and knows one of these arrays."""
    return any(kfac.path_of(parameter) is not None for parameter in parameters)


# Scores of one head over a learned temperature, and with a learned bias of each key.
TEMPERED = kfac.Generic(lambda own, scores: (scores * jnp.exp(-own["log_temperature"]))[..., None])
KEY_BIASED = kfac.Generic(lambda own, scores: (scores + own["key_bias"])[..., None])
