"""`layers.AdderLinear` in few bits."""

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, UInt8

from adder_flax import layers, ops
from adder_flax.quantized import _adder
from adder_flax.quantized._adder import AdderWeights, Grid, adder_linear


class AdderLinear(nnx.Module):
    """An adder layer whose sums are integers, for inference: it has no gradient by its inputs.

    Args:
      weights: from `quantize_weights`.
      norm: behind the sums, or None.
      bias: added to the sums where there is no norm, or None.
      dtype: of the normalised output; None for the common one of inputs and norm.

    >>> layer = layers.AdderLinear(8, 4, rngs=nnx.Rngs(0))
    >>> x = nnx.Rngs(1).normal((100, 8))
    >>> bool(jnp.allclose(AdderLinear.from_layer(layer, x)(x), layer(x), atol=0.1))
    True
    """

    def __init__(
        self,
        weights: AdderWeights,
        *,
        norm: layers.LayerNorm | None = None,
        bias: Float[Array, " out_features"] | None = None,
        dtype: DTypeLike | None = jnp.float32,
    ):
        self.weights = nnx.data(weights)
        self.norm = nnx.data(norm)
        self.bias = nnx.data(bias)
        self.dtype = dtype

    @classmethod
    def from_layer(
        cls,
        layer: layers.AdderLinear,
        inputs: Float[ArrayLike, "*batch in_features"],
        bits: int = 8,
        **options: Any,
    ) -> "AdderLinear":
        """Returns a trained layer in few bits; what stands behind its sums stays as it is.

        Args:
          layer: which is not changed.
          inputs: what it is called with on some training examples, for `calibrate`.
          bits: of its grid. A layer that was trained with as many keeps the grid that it has for
            these inputs.
          **options: of `calibrate`.

        Raises:
          ValueError: the layer sums squares, or as `calibrate` says.
        """
        if not isinstance(layer.squared_share, float) or layer.squared_share:
            raise ValueError(
                f"expected a layer of absolute differences, got one with squared_share "
                f"{layer.squared_share}; call set_squared_share(0.0) and train it so"
            )
        kernel = layer.kernel[...]
        if layer.bits == bits:
            grid = Grid(*ops.shared_grid(inputs, kernel, bits=bits), bits)
        else:
            grid = _adder.calibrate(inputs, kernel, bits=bits, **options)
        return cls.of_weights(layer, _adder.quantize_weights(kernel, grid))

    @classmethod
    def of_weights(cls, layer: layers.AdderLinear, weights: AdderWeights) -> "AdderLinear":
        """Returns a layer with weights of its own and the rest of another."""
        return cls(
            weights,
            norm=None if layer.norm is None else nnx.clone(layer.norm),
            bias=None if layer.bias is None else layer.bias[...],
            dtype=layer.dtype,
        )

    def __call__(
        self, inputs: Float[Array, "*batch in_features"] | UInt8[Array, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        norm: Any = self.norm
        if norm is None:
            sums = adder_linear(inputs, self.weights)
            return sums if self.bias is None else sums + self.bias
        own = jax.tree.leaves(nnx.state(norm))
        dtype = jnp.result_type(inputs, *own) if self.dtype is None else self.dtype
        if is_fused(norm):
            outputs = _nan_as(inputs, self.normed(inputs))
        else:
            outputs = norm(adder_linear(inputs, self.weights))
        return outputs.astype(dtype)

    def normed(
        self,
        inputs: Float[Array, "*batch in_features"] | UInt8[Array, "*batch in_features"],
        *,
        gelu: bool = False,
        to: Grid | None = None,
    ) -> Float[Array, "*batch out_features"] | UInt8[Array, "*batch out_features"]:
        """The normalised sums in one pass, with GELU and as bytes of a next layer's grid if wished.

        The norm takes off what is the same for all outputs, as an excess of the inputs is. Inputs
        that are not finite have bytes like any others.
        """
        norm: Any = self.norm
        weights, features = self.weights, self.weights.packed.columns.shape[:1]
        return ops.sad_norm(
            inputs,
            weights.packed,
            grid=_ends(weights.grid),
            excess=weights.excess,
            scale=jnp.ones(features) if norm.scale is None else norm.scale[...],
            bias=jnp.zeros(features) if norm.bias is None else norm.bias[...],
            epsilon=norm.epsilon,
            gelu=gelu,
            to=None if to is None else _ends(to),
        )


class Mlp(nnx.Module):
    """`layers.Mlp` of two layers in few bits with norms: bytes are all that stands between them.

    It has no dropout.

    Args:
      fc1, fc2: the layers.
    """

    def __init__(self, fc1: AdderLinear, fc2: AdderLinear):
        self.fc1, self.fc2 = fc1, fc2

    def __call__(
        self,
        inputs: Float[Array, "*batch in_features"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "*batch in_features"]:
        outputs = self.fc2(self.fc1.normed(inputs, gelu=True, to=self.fc2.weights.grid))
        return _nan_as(inputs, outputs)


def is_fused(norm: Any) -> bool:
    """Whether a norm is the one that `ops.sad_norm` computes with the sums in front of it."""
    own = type(norm)
    return (
        issubclass(own, layers.LayerNorm)
        and own.__call__ is layers.LayerNorm.__call__
        and layers.is_over_last_axis(norm)
    )


def _nan_as(inputs: Array, outputs: Array) -> Array:
    """Returns outputs with NaN where a row of inputs is not finite, of which no byte tells."""
    return jnp.where(jnp.isfinite(inputs).all(-1, keepdims=True), outputs, jnp.nan)


def _ends(grid: Grid) -> tuple[ArrayLike, ArrayLike, int]:
    return grid.lowest, grid.scale, grid.levels
