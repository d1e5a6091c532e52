"""Second-order optimization of a run: which layers have curvature, and an optimizer that asks for it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

import kfac
from adder_flax import ops
from adder_flax.layers import AdderLinear
from adder_flax.models import VisionTransformer, embed_positions


class CurvatureOptimizer(NamedTuple):
    """An optax transformation whose ``update`` also takes ``curvature=``, and what the training step must know.

    Attributes:
      init, update: as in ``optax.GradientTransformationExtraArgs``; the state is a ``kfac.CGFacState``.
      layers: the layers that have curvature; printing them shows which parameters they cover.
      fisher: which Fisher matrix, see ``kfac.value_grad_and_curvature``.
      interval: steps from one curvature batch to the next.
    """

    init: Callable
    update: Callable
    layers: kfac.Layers
    fisher: str
    interval: int

    def refresh(self, state: kfac.CGFacState) -> bool | Bool[Array, ""]:
        """Whether the step that this state is about to take computes curvature."""
        # By the state's own count: a step that was thrown away with its state comes again.
        return True if self.interval == 1 else state.count % self.interval == 0


def find_layers(
    loss_fn: Callable, params: Any, *, batch_size: int, image_shape: Sequence[int], num_classes: int
) -> kfac.Layers:
    """Returns the layers of a model that have curvature, those of `register_layers` among them; nothing is computed.

    Args:
      loss_fn: ``(params, images, targets, key) → (loss, logits)``.
      params: nested dict of arrays or their shapes.
      batch_size, image_shape, num_classes: of the batches it is given.
    """
    register_layers()
    images = jax.ShapeDtypeStruct((batch_size, *image_shape), jnp.float32)
    targets = jax.ShapeDtypeStruct((batch_size, num_classes), jnp.float32)
    return kfac.find_layers(loss_fn, params, images, targets, jax.eval_shape(lambda: jax.random.key(0)))


def register_layers() -> None:
    """Makes layers of ``kfac`` of what Flax does not have: ``AdderLinear``, and tokens' places in the models.

    An adder layer's distances are tapped, its LayerNorm is a layer of its own. With the full-precision weight gradient
    (AdderNet's choice) the Jacobian is that of a dense layer behind a linear map, so the layer has Kronecker factors;
    with the others it is served by its push-forward and pull-back. Class token and position embedding are one layer.

    Example:
      >>> register_layers()
    """
    kfac.register_layer(AdderLinear, "sums", _describe)
    kfac.register_layer(VisionTransformer, "embed_positions", lambda model: kfac.Generic(embed_positions))


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
