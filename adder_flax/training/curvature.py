"""Curvature of adder layers for second-order optimizers, under the layers' own gradient rules."""

import jax
from jaxtyping import Array

import kfac
from adder_flax import ops
from adder_flax.layers import AdderLinear


def register_adder_layers() -> None:
    """Makes ``AdderLinear`` a layer of ``kfac``: its distances are tapped, its LayerNorm is a layer of its own.

    With the full-precision weight gradient (AdderNet's choice) the Jacobian is that of a dense layer behind a linear
    map, so the layer has Kronecker factors; with the others it is served by its push-forward and pull-back.

    Example:
      >>> register_adder_layers()
    """
    kfac.register_layer(AdderLinear, "sums", _describe)


def _describe(layer: AdderLinear) -> kfac.L1Dense | kfac.Generic:
    if layer.w_gradient == "full":
        return kfac.L1Dense()
    rules = dict(x_gradient=layer.x_gradient, w_gradient=layer.w_gradient, hardtanh_slope=layer.hardtanh_slope)
    return kfac.Generic(_sums, tuple(rules.items()), _pushforward)


def _sums(params: dict[str, Array], rows: Array, **rules: str | float) -> Array:
    sums = ops.adder_matmul(rows, params["kernel"].astype(rows.dtype), **rules)
    return sums + params["bias"] if "bias" in params else sums


def _pushforward(params: dict[str, Array], rows: Array, v: dict[str, Array], **rules: str | float) -> Array:
    kernel, change = (jax.lax.convert_element_type(p["kernel"], rows.dtype) for p in (params, v))
    pushed = ops.adder_matmul_jvp(rows, kernel, None, change, **rules)
    return pushed + v["bias"] if "bias" in v else pushed
