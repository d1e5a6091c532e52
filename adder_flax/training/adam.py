"""Adam whose moments change in place."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool


class AdamState(optax.ScaleByAdamState):
    """Moments that are as they were where a step was not sound."""


def scale_by_adam(
    b1: float | Array, b2: float | Array, eps: float | Array, *, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` for a training step that may have to be taken back.

    To choose between old and new moments afterwards would have XLA copy them all at every step of a
    CPU: parameters' updates compute new moments of their own from the old ones, which then cannot
    be written over. Here the decays are 1 where a step does not count, and its gradient 0.

    Args:
      b1, b2, eps, nesterov: as optax has them.

    Returns:
      A transformation whose ``update`` also takes ``sound=``, whether the step counts; by default
      it does. Where it does not, the state stays as it was, and updates mean nothing.

    >>> adam = scale_by_adam(0.9, 0.999, 1e-8)
    >>> grads = {"w": jnp.array([3.0, -0.5])}
    >>> updates, state = adam.update(grads, adam.init(grads))
    >>> updates["w"].round(3).tolist(), int(state.count)
    ([1.0, -1.0], 1)
    """

    def init(params: Any) -> AdamState:
        return AdamState(*optax.scale_by_adam().init(params))

    def update(
        grads: Any,
        state: AdamState,
        params: Any = None,
        *,
        sound: Bool[Array, ""] | bool = True,
        **_: Any,
    ) -> tuple[Any, AdamState]:
        keep1, keep2 = (jnp.where(sound, decay, 1.0) for decay in (b1, b2))
        adam = optax.scale_by_adam(keep1, keep2, eps, nesterov=nesterov)
        grads = jax.tree.map(lambda g: jnp.where(sound, g, 0), grads)
        updates, new = adam.update(grads, state)
        return updates, AdamState(jnp.where(sound, new.count, state.count), new.mu, new.nu)

    return optax.GradientTransformationExtraArgs(init, update)
