"""A learned factor for each feature that a branch adds."""

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import kfac


class LayerScale(nnx.Module):
    """y = x ∘ s with a learned s for each feature.

    Source: Touvron et al., 2021, https://arxiv.org/abs/2103.17239, section 2.

    Behind attention and MLP of each block, with s small at first, deep transformers train as if
    they were shallow; DeiT III has it in all its sizes. Weight decay stays off s, as in DeiT III's
    code.

    Args:
      width: number of features.
      initial: of s; None for no factor and no parameter.
      dtype: dtype of the product; None for the inputs' and s's common one.
      param_dtype: dtype of s.

    >>> LayerScale(3, 0.5)(jnp.ones((2, 3))).tolist()
    [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    """

    def __init__(
        self,
        width: int,
        initial: float | None = 1e-4,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.scale = nnx.data(
            None if initial is None else nnx.Param(jnp.full(width, initial, param_dtype))
        )
        self.dtype = dtype

    def __call__(self, inputs: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        return inputs if self.scale is None else scale_features(inputs, self.scale[...], self.dtype)


def scale_features(
    inputs: Float[Array, "*batch width"],
    scale: Float[Array | np.ndarray, " width"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*batch width"]:
    """Multiplies features in a dtype, by default the common one of both.

    >>> scale_features(jnp.ones((2, 2), jnp.bfloat16), jnp.array([1.0, 2.0]), jnp.bfloat16).dtype
    dtype(bfloat16)
    """
    dtype = jnp.result_type(inputs, scale) if dtype is None else dtype
    return inputs.astype(dtype) * scale.astype(dtype)


kfac.register_layer(LayerScale, kind=kfac.Scale)
