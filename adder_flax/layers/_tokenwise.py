"""What acts on each token or feature alone: normalisation, scale, activation, dropout."""

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import kfac
from adder_flax import ops
from adder_flax.arrays import AnyArray
from adder_flax.parameters import as_attribute
from adder_flax.settings import is_on

Rate = float | Float[Array, ""]


class LayerNorm(nnx.LayerNorm):
    """Flax's LayerNorm, by `ops.layer_norm` where it is over the last axis, without a mask.

    >>> LayerNorm(8, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def __call__(
        self, x: Float[Array | np.ndarray, "*batch features"], *, mask: Array | None = None
    ) -> Float[Array, "*batch features"]:
        if mask is not None or not is_over_last_axis(self):
            return super().__call__(x, mask=mask)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
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


class LayerScale(nnx.Module):
    """y = x ∘ s with a learned s for each feature.

    Source: Touvron et al., 2021, https://arxiv.org/abs/2103.17239, section 2.

    Behind attention and MLP of each block, with s small at first, deep transformers train as if
    they were shallow. Weight decay stays off s, as in DeiT III's code.

    Args:
      width: number of features.
      initial: of s; None for no factor and no parameter.
      dtype: of the product; None for the common one.
      param_dtype: of s.

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
        if self.scale is None:
            return inputs
        scale = self.scale[...]
        dtype = jnp.result_type(inputs, scale) if self.dtype is None else self.dtype
        return inputs.astype(dtype) * scale.astype(dtype)


kfac.register_layer(LayerScale, kind=kfac.Scale)


def gelu(inputs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The exact GELU, x Φ(x) = x (1 + erf(x/√2)) / 2, computed in float32 or wider.

    `jax.nn.gelu(approximate=False)`, by erfc, takes more than twice as long on a CPU.

    >>> [f"{y:.4f}" for y in gelu(jnp.array([-1.0, 0.0, 1.0]))]
    ['-0.1587', '0.0000', '0.8413']
    """
    wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * 0.5**0.5))).astype(inputs.dtype)


class _Random(nnx.Module):
    _name: str  # of the rate

    def __init__(self, rate: float = 0.0):
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"expected {self._name} in [0, 1), got {rate}; lower it.")
        self.rate = rate

    def set_rate(self, rate: Rate) -> None:
        """Takes another rate, which may be traced."""
        self.rate = as_attribute(rate)


class Dropout(_Random):
    """Sets numbers to 0 at random and scales the others by 1/(1 - rate).

    Source: Srivastava et al., JMLR 2014. Like ``flax.nnx.Dropout``, whose rate is a constant of the
    program.

    Args:
      rate: probability of 0, in [0, 1).

    >>> Dropout(0.5)(jnp.ones(3)).tolist()  # deterministic by default
    [1.0, 1.0, 1.0]
    """

    _name = "a dropout rate"

    def __call__(
        self,
        inputs: Float[Array, "*shape"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "*shape"]:
        if deterministic or not is_on(self.rate):
            return inputs
        keep = 1.0 - self.rate
        kept = jax.random.bernoulli(_key(rngs, "dropout"), keep, inputs.shape)
        # Chosen, not multiplied: 0 times what overflowed would be NaN.
        return jnp.where(kept, inputs / keep, 0).astype(inputs.dtype)


def drop_path_factors(
    key: Array, rates: float | Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> Float[Array, "..."]:
    """Factors of residual branches: 0 with probability `rates` (dropped), else 1/(1 - rates).

    One draw for all blocks of a model compiles much faster than one per branch.

    Args:
      key: random key.
      rates: probabilities of dropping, broadcastable to `shape`, such as (depth, 2, batch).
      shape, dtype: of the factors.

    >>> factors = drop_path_factors(jax.random.key(0), 0.25, (1000,))
    >>> sorted(set(factors.tolist()))
    [0.0, 1.3333333730697632]
    """
    # In float32: rounded to bfloat16, `keep` would shift the share that is dropped.
    keep = 1.0 - jnp.asarray(rates, jnp.float32)
    return jnp.where(jax.random.bernoulli(key, keep, shape), 1.0 / keep, 0.0).astype(dtype)


class DropPath(_Random):
    """Stochastic depth on a residual branch, per sample.

    Source: Huang et al., 2016, https://arxiv.org/abs/1603.09382.

    Args:
      rate: probability of dropping the branch, in [0, 1).

    >>> DropPath(0.1)(jnp.ones((2, 3))).tolist()  # deterministic by default
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    _name = "a drop path rate"

    def __call__(
        self,
        inputs: Float[Array, "batch ..."],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        factors: Float[Array, " batch"] | None = None,
    ) -> Float[Array, "batch ..."]:
        """Drops samples of the branch at random, or by `factors` drawn before, see
        `drop_path_factors`.
        """
        if deterministic or (factors is None and not is_on(self.rate)):
            return inputs
        if factors is None:
            key = _key(rngs, "stochastic depth")
            factors = drop_path_factors(key, self.rate, inputs.shape[:1], inputs.dtype)
        return inputs * factors.reshape(-1, *(1,) * (inputs.ndim - 1)).astype(inputs.dtype)


def _key(rngs: nnx.Rngs | None, what: str) -> Array:
    if rngs is None:
        raise ValueError(
            f"{what} expects rngs with a 'dropout' stream, got None; "
            "pass rngs=nnx.Rngs(dropout=key) or deterministic=True."
        )
    return rngs.dropout()
