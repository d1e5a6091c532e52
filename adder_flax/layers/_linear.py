"""The kinds of linear layer: products, normed or not, adder (L1 distance), and none at all."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import kfac
from adder_flax import ops, recorder
from adder_flax.attention import LAYER_NORM_EPSILON
from adder_flax.layers._tokenwise import LayerNorm
from adder_flax.parameters import as_attribute, state_facts
from adder_flax.settings import AdderSettings


class Linear(nnx.Linear):
    """y = x W + b on the last axis, computed on flattened rows, on which XLA's CPU backend trains a
    dense layer two to three times faster.

    Weights start as N(0, 0.02²), the choice of ViT and DeiT.

    >>> Linear(8, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 4)
    """

    def __init__(self, in_features: int, out_features: int, **options: Any):
        super().__init__(
            in_features, out_features, **{"kernel_init": nnx.initializers.normal(0.02), **options}
        )

    def __call__(
        self, inputs: Float[Array | np.ndarray, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        rows: Any = inputs.reshape(-1, inputs.shape[-1])  # Flax asks for arrays of JAX
        outputs = super().__call__(rows)
        recorder.report("linear", {"rows": rows, "outputs": outputs})
        return outputs.reshape(*inputs.shape[:-1], outputs.shape[-1])


def _norm_of_sums(
    features: int, use_bias: bool, param_dtype: DTypeLike, rngs: nnx.Rngs
) -> LayerNorm:
    # The mean is far larger than the spread: E[y²] - E[y]², the fast variance, would cancel.
    return LayerNorm(
        features,
        epsilon=LAYER_NORM_EPSILON,
        use_bias=use_bias,
        use_fast_variance=False,
        param_dtype=param_dtype,
        rngs=rngs,
    )


class NormedLinear(Linear):
    """y = LayerNorm(x W): an adder layer's normaliser, start and want of decay around a product.

    It is the control of `AdderLinear`, whose arguments it has: what the two have in common is no
    merit of distances. W starts as N(0, 1) and does not decay, and the kernel has the path of an
    adder layer's, so both begin with the same numbers.

    >>> NormedLinear(8, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        unit = nnx.initializers.normal(1.0)
        super().__init__(in_features, out_features, use_bias=False, kernel_init=unit, **shared)
        state_facts(self.kernel, role="weight", decay=False)
        self.norm = _norm_of_sums(out_features, use_bias, param_dtype, rngs)

    def __call__(
        self, inputs: Float[Array | np.ndarray, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        products = super().__call__(inputs)
        return self.norm(products).astype(products.dtype)


class AdderLinear(nnx.Module):
    """Adder layer: y[o] = -Σ_k |x[k] - W[k, o]|, then LayerNorm over o.

    Source: Chen et al., "AdderNet", CVPR 2020.

    For unit-normal x and W the raw sums lie near -1.13 K ± 0.85 √K for K inputs, so they are
    accumulated in float32 and normalised before any cast to bfloat16. W starts at unit scale, and
    weight decay stays off it: near W = 0 every output would equal -‖x‖₁. A padded zero is not
    neutral, |0 - W| ≠ 0: mask what is padded.

    Args:
      in_features, out_features: K and the number of outputs.
      x_gradient, w_gradient, hardtanh_slope: gradient rules, see `ops.adder_matmul`.
      norm: "layernorm", or None for the raw sums, which stay float32 whatever `dtype` says.
      use_bias: whether the output has a learned offset, LayerNorm's own if there is one.
      dtype: dtype of x and W in the distance and of the normalised output; None for their common
        one.
      param_dtype: dtype of the parameters.
      initial_scale: standard deviation of W's first values.
      bits: x and W are rounded to so many, as of all rows of a call, see `ops.round_alike`: what is
        trained so goes on in few bits (`adder_flax.quantized`). Curvature is that without.
      rngs: initialisation keys.

    Raises:
      ValueError: an unknown norm.

    >>> AdderLinear(8, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        x_gradient: ops.RuleName = "hardtanh",
        w_gradient: ops.RuleName = "full",
        hardtanh_slope: float = 1.0,
        norm: str | None = "layernorm",
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        initial_scale: float = 1.0,
        bits: int | None = None,
        rngs: nnx.Rngs,
    ):
        if norm not in ("layernorm", None):
            raise ValueError(
                f"expected norm 'layernorm' or None, got {norm!r}; choose one of these."
            )
        self.in_features = in_features
        self.out_features = out_features
        self.x_gradient: ops.RuleName = x_gradient
        self.w_gradient: ops.RuleName = w_gradient
        self.hardtanh_slope = hardtanh_slope
        self.bits = bits
        # A number, not an array: off, it leaves no second product in the program.
        self.squared_share = 0.0
        self.dtype = dtype
        initialise = nnx.initializers.normal(initial_scale)
        kernel = nnx.Param(initialise(rngs.params(), (in_features, out_features), param_dtype))
        self.kernel = state_facts(kernel, role="prototype", decay=False)
        self.norm = nnx.data(None)
        self.bias = nnx.data(None)
        if norm is not None:
            self.norm = _norm_of_sums(out_features, use_bias, param_dtype, rngs)
        elif use_bias:
            self.bias = nnx.Param(jnp.zeros((out_features,), param_dtype))

    def __call__(
        self, inputs: Float[Array | np.ndarray, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        if inputs.shape[-1] != self.in_features:
            raise ValueError(
                f"expected inputs with {self.in_features} features, got shape {inputs.shape}; "
                "build the layer with in_features of that width."
            )
        rows = inputs.reshape(-1, inputs.shape[-1])
        sums = self.sums(rows)
        report_adder(rows, self.kernel[...], sums, **adder_rules(self))
        if self.norm is not None:
            outputs = self.norm(sums).astype(self._dtype(inputs))
        else:
            outputs = sums if self.bias is None else sums + self.bias[...]
        return outputs.reshape(*inputs.shape[:-1], self.out_features)

    def sums(
        self, rows: Float[Array | np.ndarray, "rows in_features"]
    ) -> Float[Array, "rows out_features"]:
        """-Σ_k |x[k] - W[k, o]|, before normaliser and bias, in float32 or wider.

        See `set_squared_share` for the squares that may stand in its place.
        """
        dtype = self._dtype(rows)
        rows, kernel = rows.astype(dtype), self.kernel[...].astype(dtype)
        if self.bits:
            rows, kernel = ops.round_alike(rows, kernel, bits=self.bits)
        share = self.squared_share

        def l1(rows: Array | np.ndarray, kernel: Array) -> Array:
            return ops.adder_matmul(rows, kernel, **adder_rules(self))

        def mixed(rows: Array | np.ndarray, kernel: Array) -> Array:
            squared = half_squared_distances(rows, kernel)
            return (1.0 - share) * l1(rows, kernel) + share * squared

        # What is not wanted is not computed, neither forward nor backward.
        ways = (l1, mixed, half_squared_distances)
        if not isinstance(share, jax.Array):
            return ways[(share > 0) + (share >= 1)](rows, kernel)
        way = (share > 0).astype(jnp.int32) + (share >= 1)
        return jax.lax.switch(way, ways, rows, kernel)

    def set_squared_share(self, share: float | Array) -> None:
        """Puts -Σ_k (x[k] - W[k, o])² / 2 in the place of a share of the sums; 1 is p = 2, 0 is p =
        1.

        The derivative of the squared distance by W, x - W, is what AdderNet's full-precision rule
        says of the L1 distance, so that what is learned with the one goes on with the other.

        Args:
          share: from 0 to 1, which may be traced.
        """
        self.squared_share = as_attribute(share)

    def _dtype(self, inputs: Array | np.ndarray) -> DTypeLike:
        return jnp.result_type(inputs, self.kernel[...]) if self.dtype is None else self.dtype


def adder_rules(layer: Any) -> dict[str, Any]:
    """The gradient rules of an adder layer, NNX or Linen, as `ops.adder_matmul` takes them."""
    return {name: getattr(layer, name) for name in ("x_gradient", "w_gradient", "hardtanh_slope")}


def report_adder(
    *arrays: Array | np.ndarray, x_gradient: str, w_gradient: str, hardtanh_slope: float
) -> None:
    """Tells the `adder_flax.recorder` the rows, kernel and sums of a layer, and a slope that
    clips.
    """
    slope = hardtanh_slope if "hardtanh" in (x_gradient, w_gradient) else None
    named: Any = dict(zip(("rows", "kernel", "sums"), arrays, strict=True))
    recorder.report("adder", named, hardtanh_slope=slope)


def half_squared_distances(
    rows: Float[Array | np.ndarray, "rows in_features"],
    kernel: Float[Array | np.ndarray, "in_features out_features"],
) -> Float[Array, "rows out_features"]:
    """-Σ_k (x[k] - w[k, o])² / 2 by one matrix product, in float32 or wider.

    >>> half_squared_distances(jnp.array([[1.0, 2.0]]), jnp.array([[0.0], [2.0]])).tolist()
    [[-0.5]]
    """
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    # Narrower terms would cancel to their rounding, as would a product in the precision that GPUs
    # and TPUs have by default.
    rows, kernel = jnp.asarray(rows, wide), jnp.asarray(kernel, wide)
    products = jnp.matmul(rows, kernel, precision=jax.lax.Precision.HIGHEST)
    return products - (rows**2).sum(-1, keepdims=True) / 2 - (kernel**2).sum(0) / 2


def adder_layers(module: nnx.Module) -> list[AdderLinear]:
    """Returns the adder layers in a module.

    >>> layers = nnx.List([AdderLinear(8, 4, rngs=nnx.Rngs(0))])
    >>> [layer.out_features for layer in adder_layers(layers)]
    [4]
    """
    return [layer for _, layer in nnx.iter_modules(module) if isinstance(layer, AdderLinear)]


def adder_curvature(layer: Any) -> kfac.L1Dense | kfac.Generic:
    """What the distances of an adder layer, NNX or Linen, are to `kfac`; their LayerNorm is a layer
    of its own.
    """
    # With the full-precision weight gradient the Jacobian is that of a dense layer behind a linear
    # map, so the layer has Kronecker factors; else its push-forward and pull-back serve it.
    if layer.w_gradient == "full":
        return kfac.L1Dense()
    return kfac.Generic(_sums, tuple(adder_rules(layer).items()), _pushforward)


def _sums(params: dict[str, Array], rows: Array, **rules: Any) -> Array:
    sums = ops.adder_matmul(rows, params["kernel"].astype(rows.dtype), **rules)
    return sums + params["bias"] if "bias" in params else sums


def _pushforward(params: dict[str, Array], rows: Array, v: dict[str, Array], **rules: Any) -> Array:
    kernel, change = (jax.lax.convert_element_type(p["kernel"], rows.dtype) for p in (params, v))
    pushed = ops.adder_matmul_jvp(rows, kernel, None, change, **rules)
    return pushed + v["bias"] if "bias" in v else pushed


kfac.register_layer(AdderLinear, "sums", adder_curvature)


class Identity(nnx.Module):
    """No layer, in the place of one: y = x, for queries, keys and values that are the tokens
    themselves.

    Args:
      in_features, out_features: equal, else a ValueError.
      dtype: of the result; None for that of the input.

    >>> Identity(8, 8)(jnp.ones((2, 5, 8))).shape
    (2, 5, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        if in_features != out_features:
            raise ValueError(
                f"expected as many features behind the identity as in front of it, got "
                f"{in_features} and {out_features}; choose 'dense', 'normed_dense' or 'adder'."
            )
        self.dtype = dtype

    def __call__(self, inputs: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        return inputs if self.dtype is None else inputs.astype(self.dtype)


_KINDS: dict[Any, Callable[..., Any]] = dict(
    dense=Linear, normed_dense=NormedLinear, adder=AdderLinear, identity=Identity
)


def linear_class(
    kind: str | tuple[str, ...], adder_options: AdderSettings | Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """What makes a linear layer of this kind: "dense", "normed_dense", "adder", whose options are
    given, or "identity".

    >>> linear_class("adder", {"hardtanh_slope": 4.0})(8, 4, rngs=nnx.Rngs(0)).hardtanh_slope
    4.0
    """
    if kind not in _KINDS:
        *others, last = map(repr, _KINDS)
        raise ValueError(
            f"expected a linear layer {', '.join(others)} or {last}, got {kind!r}; choose one of "
            "these."
        )
    if kind != "adder":
        return _KINDS[kind]
    if isinstance(adder_options, AdderSettings):
        adder_options = vars(adder_options)
    return functools.partial(AdderLinear, **(adder_options or {}))
