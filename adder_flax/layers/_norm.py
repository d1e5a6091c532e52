"""LayerNorm by this package's kernels."""

from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kfac
from adder_flax import ops
from adder_flax.arrays import AnyArray


class LayerNorm(nnx.LayerNorm):
    """Flax's LayerNorm, by `ops.layer_norm` where it is over the last axis.

    Parameters, arguments and dtypes are Flax's; so is what computes over other axes, over devices
    that split features, and under a mask.

    >>> LayerNorm(8, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def __call__(
        self, x: Float[Array | np.ndarray, "*batch features"], *, mask: Array | None = None
    ) -> Float[Array, "*batch features"]:
        if mask is not None or not is_over_last_axis(self):
            return super().__call__(x, mask=mask)
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        return normalized(x, scale, bias, self.epsilon, fast_variance=self.use_fast_variance)


kfac.register_layer(LayerNorm, kind=kfac.Scale)


def is_over_last_axis(layer: Any) -> bool:
    """Whether a LayerNorm of Flax, NNX or Linen, takes each row of the last axis by itself.

    >>> is_over_last_axis(LayerNorm(8, reduction_axes=(0, 1), rngs=nnx.Rngs(0)))
    False
    """
    return layer.reduction_axes == layer.feature_axes == -1 and layer.axis_name is None


def normalized(
    x: AnyArray,
    scale: AnyArray | None,
    bias: AnyArray | None,
    epsilon: float,
    *,
    fast_variance: bool,
) -> Array:
    """`ops.layer_norm` in the dtype of its arguments; None for no scale, or no bias.

    >>> normalized(jnp.array([1.0, 3.0]), None, None, 0.0, fast_variance=True).tolist()
    [-1.0, 1.0]
    """
    features = x.shape[-1:]
    scale = jnp.ones(features, x.dtype) if scale is None else scale
    bias = jnp.zeros(features, x.dtype) if bias is None else bias
    rows = ops.layer_norm(x, scale, bias, epsilon=epsilon, fast_variance=fast_variance)
    return rows.astype(x.dtype)
