"""Second-order optimization of a run.

Which layers have curvature, and an optimizer that asks for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool

import kfac


class CurvatureOptimizer(NamedTuple):
    """An optax transformation whose ``update`` also takes ``curvature=`` and ``sound=``.

    With what the training step must know.

    Attributes:
      init, update: as in ``optax.GradientTransformationExtraArgs``; the state holds a
        ``kfac.State``, and its averages are as they were where ``sound`` is false.
      layers: the layers that have curvature; printing them shows which parameters they cover.
      fisher: which Fisher matrix, see ``kfac.value_grad_and_curvature``.
      interval: steps from one curvature batch to the next.
      stride: one of so many examples gives curvature; 1: all, in the pass of the gradient
        where each step has a curvature batch.
    """

    init: Callable
    update: Callable
    layers: kfac.Layers
    fisher: str
    interval: int
    stride: int

    def refresh(self, state: Any) -> bool | Bool[Array, ""]:
        """Whether the step that this state is about to take computes curvature."""
        # By the state's own count: a step that was thrown away with its state comes
        # again.
        return True if self.interval == 1 else kfac.find_state(state).count % self.interval == 0


def find_layers(loss: Callable, params: Any, examples: Any, model_state: Any) -> kfac.Layers:
    """Returns the layers of a model that have curvature; nothing is computed.

    Args:
      loss: ``(params, examples, key, model_state) → Outcome``.
      params: nested dict of arrays or their shapes.
      examples, model_state: shapes of what the loss is given.
    """

    def loss_and_outputs(params: Any, *args: Any) -> tuple[Any, Any]:
        outcome = loss(params, *args)
        return outcome.loss, outcome.outputs

    key = jax.eval_shape(lambda: jax.random.key(0))
    size = jax.tree.leaves(examples)[0].shape[0]  # which arrays of the model's state do not have
    return kfac.find_layers(
        *(loss_and_outputs, params, examples, key, model_state), batch_size=size
    )
