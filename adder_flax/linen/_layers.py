"""Linen: linear layers and what stands beside them, with the parameters of `adder_flax.layers`."""

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import kfac
from adder_flax import layers, ops
from adder_flax.attention import LAYER_NORM_EPSILON
from adder_flax.settings import keywords_of


class TakesKeywords(nn.Module):
    """A module with a field ``settings``, whose own fields can be given as keywords instead.

    Flax derives classes from a module, in `nn.remat` for example, and makes a constructor for each:
    all take them.

    Attributes:
      fixed: fields of the settings that are no keywords.
    """

    fixed: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        settings = type(cls.settings)  # pyright: ignore[reportAttributeAccessIssue]  a subclass has it
        cls.__init__ = keywords_of(settings, but=cls.fixed)(cls.__init__)


class LayerNorm(nn.LayerNorm):
    """Flax Linen's LayerNorm, by `adder_flax.ops.layer_norm` where it is over the last axis.

    >>> import jax
    >>> LayerNorm().init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch features"], *, mask: Array | None = None
    ) -> Float[Array, "*batch features"]:
        if mask is not None or not layers.is_over_last_axis(self):
            return super().__call__(x, mask=mask)

        def parameter(name, initializer):
            return self.param(name, initializer, x.shape[-1:], self.param_dtype)

        scale = parameter("scale", self.scale_init) if self.use_scale else None
        bias = parameter("bias", self.bias_init) if self.use_bias else None
        # Rounded behind the statistics, as Linen does; NNX does it in front of them.
        dtype = canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        fast = self.use_fast_variance
        rows = layers.normalized(x, scale, bias, self.epsilon, fast_variance=fast)
        return rows.astype(dtype)


kfac.register_layer(LayerNorm, kind=kfac.Scale)


class Linear(nn.Dense):
    """Linen form of `adder_flax.layers.Linear`: y = x W + b, computed on flattened rows.

    >>> import jax
    >>> Linear(4).init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 4)
    """

    kernel_init: Callable[..., Array] = nn.initializers.normal(0.02)

    def __call__(
        self, inputs: Float[Array, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        outputs = super().__call__(inputs.reshape(-1, inputs.shape[-1]))
        return outputs.reshape(*inputs.shape[:-1], self.features)


def _norm_of_sums(layer: "NormedLinear | AdderLinear", name: str | None = None) -> LayerNorm:
    return LayerNorm(
        epsilon=LAYER_NORM_EPSILON,
        use_bias=layer.use_bias,
        use_fast_variance=False,
        param_dtype=layer.param_dtype,
        name=name,
    )


class NormedLinear(nn.Module):
    """Linen form of `adder_flax.layers.NormedLinear`: y = LayerNorm(x W), W from N(0, 1).

    >>> import jax
    >>> NormedLinear(4).init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 4)
    """

    features: int
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        self.products = Linear(
            self.features,
            use_bias=False,
            kernel_init=nn.initializers.normal(1.0),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )
        nn.share_scope(self, self.products)
        self.norm = _norm_of_sums(self)

    def __call__(
        self, inputs: Float[Array, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        products = self.products(inputs)
        return self.norm(products).astype(products.dtype)


class AdderLinear(nn.Module):
    """Linen form of `adder_flax.layers.AdderLinear`: y[o] = -Σ_k |x[k] - W[k, o]|, LayerNorm over
    o.

    Its fields are as there.

    >>> import jax
    >>> AdderLinear(4).init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 4)
    """

    features: int
    x_gradient: ops.RuleName = "hardtanh"
    w_gradient: ops.RuleName = "full"
    hardtanh_slope: float = 1.0
    norm: str | None = "layernorm"
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    initial_scale: float = 1.0
    bits: int | None = None

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        if self.norm not in ("layernorm", None):
            raise ValueError(
                f"expected norm 'layernorm' or None, got {self.norm!r}; choose one of these."
            )
        kernel = self.param(
            "kernel",
            nn.initializers.normal(self.initial_scale),
            (inputs.shape[-1], self.features),
            self.param_dtype,
        )
        dtype = jnp.result_type(inputs, kernel) if self.dtype is None else self.dtype
        rows = inputs.reshape(-1, inputs.shape[-1])
        outputs = self.sums(rows, kernel, dtype)
        layers.report_adder(rows, kernel, outputs, **layers.adder_rules(self))
        if self.norm is not None:
            outputs = _norm_of_sums(self, name="norm")(outputs).astype(dtype)
        elif self.use_bias:
            outputs = outputs + self.param(
                "bias", nn.initializers.zeros, (self.features,), self.param_dtype
            )
        return outputs.reshape(*inputs.shape[:-1], self.features)

    def sums(
        self,
        rows: Float[Array, "rows in_features"],
        kernel: Float[Array, "in_features out_features"],
        dtype: DTypeLike,
    ) -> Float[Array, "rows out_features"]:
        """-Σ_k |x[k] - W[k, o]|, before normaliser and bias, in float32 or wider."""
        compared = rows.astype(dtype), kernel.astype(dtype)
        if self.bits:
            compared = ops.round_alike(*compared, bits=self.bits)
        return ops.adder_matmul(*compared, **layers.adder_rules(self))


kfac.register_layer(AdderLinear, "sums", layers.adder_curvature)
