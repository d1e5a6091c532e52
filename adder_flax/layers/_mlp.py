"""The feed-forward part of a transformer block."""

from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax.arrays import AnyArray
from adder_flax.layers._dropout import Dropout
from adder_flax.layers._linear import Linear
from adder_flax.parameters import name_axis


def gelu(inputs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The exact GELU, x Φ(x) = x (1 + erf(x/√2)) / 2, computed in float32 or wider.

    `jax.nn.gelu(approximate=False)` goes through erfc, which keeps relative precision far in the
    negative tail and takes more than twice as long on a CPU.

    >>> [f"{y:.4f}" for y in gelu(jnp.array([-1.0, 0.0, 1.0]))]
    ['-0.1587', '0.0000', '0.8413']
    """
    wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * 0.5**0.5))).astype(inputs.dtype)


class Mlp(nnx.Module):
    """fc2(dropout(gelu(fc1(x)))) with the exact (erf) GELU, as in ViT.

    Args:
      in_features: width of input and output.
      hidden_features: width between the layers.
      linear: what makes the two layers, `Linear` or `AdderLinear` with its options bound.
      dropout_rate: dropout after the activation and after the second layer.
      dtype, param_dtype: see `Linear`.
      rngs: initialisation keys.

    >>> Mlp(8, 32, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        linear: Callable[..., nnx.Module] = Linear,
        dropout_rate: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.fc1: Any = linear(in_features, hidden_features, **shared)
        self.fc2: Any = linear(hidden_features, in_features, **shared)
        # Columns of the one and rows of the other belong to a hidden unit: where these are split
        # over devices, GELU needs nothing from another device, and one sum behind fc2 puts the
        # parts together.
        name_axis(getattr(self.fc1, "kernel", None), -1, "hidden")
        name_axis(getattr(self.fc2, "kernel", None), 0, "hidden")
        self.dropout = Dropout(dropout_rate)

    def __call__(
        self,
        inputs: Float[AnyArray, "*batch in_features"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "*batch in_features"]:
        hidden = gelu(self.fc1(inputs.reshape(-1, inputs.shape[-1])))
        hidden = self.dropout(hidden, deterministic=deterministic, rngs=rngs)
        outputs = self.dropout(self.fc2(hidden), deterministic=deterministic, rngs=rngs)
        return outputs.reshape(inputs.shape)
