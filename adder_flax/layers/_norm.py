"""LayerNorm by this package's kernels."""

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kfac
from adder_flax import ops
from adder_flax.arrays import AnyArray


class LayerNorm(nnx.LayerNorm):
    """LayerNorm of the last axis, Flax's own but for what computes it: `ops.layer_norm`.

    Parameters, arguments and dtypes are Flax's.

    >>> LayerNorm(8, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def __call__(
        self, x: Float[Array | np.ndarray, "*batch features"]
    ) -> Float[Array, "*batch features"]:
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        return normalized(x, scale, bias, self.epsilon, fast_variance=self.use_fast_variance)


kfac.register_layer(LayerNorm, kind=kfac.Scale)


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
