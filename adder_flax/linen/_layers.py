"""Linen: linear layers and what stands beside them, with the parameters of `adder_flax.layers`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import flax.nnx as nnx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import kfac
from adder_flax import layers, ops
from adder_flax.attention import LAYER_NORM_EPSILON
from adder_flax.layers import drop_path_factors, report_adder, scale_features
from adder_flax.linen._bridge import call_nnx, fields_of
from adder_flax.linen._norm import LayerNorm
from adder_flax.settings import AdderSettings, keywords_of


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


class NormedLinear(nn.Module):
    """Linen form of `adder_flax.layers.NormedLinear`: y = LayerNorm(x W), W from N(0, 1).

    Products and LayerNorm's parameters are named as in an adder layer: `kernel` and `norm`.

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
        self.norm = LayerNorm(
            epsilon=LAYER_NORM_EPSILON,
            use_bias=self.use_bias,
            use_fast_variance=False,
            param_dtype=self.param_dtype,
        )

    def __call__(
        self, inputs: Float[Array, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        products = self.products(inputs)
        return self.norm(products).astype(products.dtype)


class AdderLinear(nn.Module):
    """Linen form of `adder_flax.layers.AdderLinear`: y[o] = -Σ_k |x[k] - W[k, o]|, LayerNorm over
    o.

    Attributes:
      features: number of outputs.
      x_gradient, w_gradient, hardtanh_slope, norm, use_bias, dtype, param_dtype, initial_scale: as
        there.

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
        outputs = ops.adder_matmul(
            rows.astype(dtype),
            kernel.astype(dtype),
            x_gradient=self.x_gradient,
            w_gradient=self.w_gradient,
            hardtanh_slope=self.hardtanh_slope,
        )
        report_adder(rows, kernel, outputs, self.x_gradient, self.w_gradient, self.hardtanh_slope)
        if self.norm is not None:
            norm = LayerNorm(
                epsilon=LAYER_NORM_EPSILON,
                use_bias=self.use_bias,
                use_fast_variance=False,
                param_dtype=self.param_dtype,
                name="norm",
            )
            outputs = norm(outputs).astype(dtype)
        elif self.use_bias:
            outputs = outputs + self.param(
                "bias", nn.initializers.zeros, (self.features,), self.param_dtype
            )
        return outputs.reshape(*inputs.shape[:-1], self.features)


class Identity(nn.Module):
    """Linen form of `adder_flax.layers.Identity`: no layer, in the place of one.

    >>> Identity(8).apply({}, jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    features: int
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    def __call__(self, inputs: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        return layers.Identity(inputs.shape[-1], self.features, dtype=self.dtype)(inputs)


def linear_class(
    kind: str | tuple[str, ...], adder_options: AdderSettings | Mapping[str, Any] | None = None
) -> Callable[..., nn.Module]:
    """Linen form of `adder_flax.layers.linear_class`: what makes a layer of a kind."""
    if kind == "dense":
        return Linear
    if kind == "normed_dense":
        return NormedLinear
    if kind == "adder":
        options = (
            vars(adder_options) if isinstance(adder_options, AdderSettings) else adder_options or {}
        )
        return functools.partial(AdderLinear, **options)
    if kind == "identity":
        return Identity
    raise ValueError(
        "expected a linear layer 'dense', 'normed_dense', 'adder' or 'identity', got "
        f"{kind!r}; choose one of these."
    )


class LayerScale(nn.Module):
    """Linen form of `adder_flax.layers.LayerScale`: y = x ∘ s, or x where there is no first value.

    >>> import jax
    >>> LayerScale(0.5).init_with_output(jax.random.key(0), jnp.ones((1, 2)))[0].tolist()
    [[0.5, 0.5]]
    """

    initial: float | None = 1e-4
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, inputs: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        if self.initial is None:
            return inputs
        initial = nn.initializers.constant(self.initial)
        return scale_features(
            inputs, self.param("scale", initial, inputs.shape[-1:], self.param_dtype), self.dtype
        )


kfac.register_layer(LayerScale, kind=kfac.Scale)


class Mlp(nn.Module):
    """Linen form of `adder_flax.layers.Mlp`: fc2(dropout(gelu(fc1(x)))), exact GELU.

    `linear` makes NNX layers, as there.

    >>> import jax
    >>> Mlp(32).init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    hidden_features: int
    linear: Callable[..., nnx.Module] = layers.Linear
    dropout_rate: float = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "*batch in_features"], *, deterministic: bool = True
    ) -> Float[Array, "*batch in_features"]:
        build = lambda rngs: layers.Mlp(inputs.shape[-1], **fields_of(self), rngs=rngs)
        return call_nnx(self, build, inputs, deterministic=deterministic)


class PatchEmbed(nn.Module):
    """Linen form of `adder_flax.layers.PatchEmbed`: a linear layer on every non-overlapping patch.

    `stem_linear` makes NNX layers, as there.

    >>> import jax
    >>> PatchEmbed(4, 16).init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 3)))[0].shape
    (2, 4, 16)
    """

    patch_size: int
    width: int
    stem_channels: Sequence[int] = ()
    stem_strides: Sequence[int] = ()
    stem_linear: Callable[..., nnx.Module] = layers.Linear
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, images: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch patches features"]:
        build = lambda rngs: layers.PatchEmbed(
            channels=images.shape[-1], **fields_of(self), rngs=rngs
        )
        return call_nnx(self, build, images)


class DropPath(nn.Module):
    """Linen form of `adder_flax.layers.DropPath`: stochastic depth, from the `dropout` stream.

    >>> DropPath(0.1).apply({}, jnp.ones((2, 3))).tolist()  # deterministic by default
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    rate: float = 0.0

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "batch ..."], *, deterministic: bool = True
    ) -> Float[Array, "batch ..."]:
        if deterministic or self.rate == 0.0:
            return inputs
        shape = (len(inputs),) + (1,) * (inputs.ndim - 1)
        return inputs * drop_path_factors(self.make_rng("dropout"), self.rate, shape, inputs.dtype)
