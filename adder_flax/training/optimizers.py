"""Optimizers by name: AdamW and SGD with warm-up, cosine decay, clipping, a weight-decay mask and AdderNet's rate."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from adder_flax.layers import AdderLinear
from adder_flax.training._errors import RunError
from adder_flax.training.sharding import tree_path

Labels = Any  # a tree like the parameters with "adder", "matrix" or "other" at each leaf


def label_parameters(model: nnx.Module) -> Labels:
    """Labels each parameter by how optimizers treat it.

    ``"adder"`` marks the weights of adder layers, ``"matrix"`` the other weights (``kernel`` of two or more axes)
    and ``"other"`` all that weight decay leaves alone: norms, biases, class token, position embedding.

    Args:
      model: a module, or its abstract form from ``nnx.eval_shape``.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> label_parameters(model)
      {'bias': 'other', 'kernel': 'matrix'}
    """
    adder = {
        "/".join(map(str, (*path, "kernel")))
        for path, module in nnx.iter_modules(model)
        if isinstance(module, AdderLinear)
    }

    def label(path, leaf):
        name = tree_path(path)
        if name in adder:
            return "adder"
        return "matrix" if name.endswith("kernel") and leaf.ndim >= 2 else "other"

    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return jax.tree_util.tree_map_with_path(label, params)


def scale_by_adder_rate(eta: float) -> optax.GradientTransformation:
    """AdderNet's adaptive rate: each weight's gradient g becomes η·√k·g/‖g‖₂, k its number of elements.

    Source: Chen et al., "AdderNet: Do We Really Need Multiplications in Deep Learning?", CVPR 2020, eq. 12-13 (η = 0.2
    in the authors' code). It stands in the optimizer, not in the backward pass, so that sharding and gradient
    accumulation do not change it. Adam divides by the gradient's own scale, so under AdamW it changes little.

    Args:
      eta: the hyper-parameter η > 0.

    Example:
      >>> transform = scale_by_adder_rate(0.2)
      >>> updates, _ = transform.update({"w": jnp.array([[3.0, 4.0]])}, transform.init(None))
      >>> [round(float(u), 4) for u in updates["w"][0]]
      [0.1697, 0.2263]
    """

    def scale(gradient):
        norm = jnp.linalg.norm(gradient.astype(jnp.float32).ravel())
        return (gradient * (eta * gradient.size**0.5 / jnp.maximum(norm, 1e-12))).astype(gradient.dtype)

    return optax.stateless(lambda updates, params: jax.tree.map(scale, updates))


class OptimizerSpec(NamedTuple):
    """What an optimizer is built from: its configuration, the run's learning-rate schedule, the parameters' labels."""

    config: Any
    learning_rate: optax.Schedule
    labels: Labels

    def mask(self, *chosen: str) -> Any:
        """Returns the tree that is True where the label is one of those chosen."""
        return jax.tree.map(lambda label: label in chosen, self.labels)


def _adamw(spec: OptimizerSpec) -> optax.GradientTransformation:
    c = spec.config
    return optax.chain(
        optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=c.eps),
        optax.add_decayed_weights(c.weight_decay, mask=spec.mask("matrix")),
        optax.scale_by_learning_rate(spec.learning_rate),
    )


def _sgd(spec: OptimizerSpec) -> optax.GradientTransformation:
    c = spec.config
    return optax.chain(
        optax.add_decayed_weights(c.weight_decay, mask=spec.mask("matrix")),
        optax.trace(decay=c.momentum),
        optax.scale_by_learning_rate(spec.learning_rate),
    )


# A new optimizer is one function and one line here; --config.optimizer.name chooses among them.
OPTIMIZERS: Mapping[str, Callable[[OptimizerSpec], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}


def learning_rate_schedule(config: Any, steps_per_epoch: int, num_steps: int) -> optax.Schedule:
    """Returns linear warm-up from 0 followed by cosine decay to ``final_learning_rate`` at ``num_steps``."""
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), num_steps - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=num_steps,
        end_value=config.final_learning_rate,
    )


def make_optimizer(config: Any, learning_rate: optax.Schedule, labels: Labels) -> optax.GradientTransformation:
    """Builds the optimizer that ``config.name`` names.

    Order: global-norm clipping (``clip_norm``, 0 is off), AdderNet's rate on adder weights (``adder_rate``, 0 is
    off), then the optimizer with decoupled weight decay on multiplicative weights alone.

    Raises:
      RunError: unknown name.
    """
    if config.name not in OPTIMIZERS:
        raise RunError(
            f"expected config.optimizer.name to be one of {sorted(OPTIMIZERS)}, got {config.name!r}; "
            "set --config.optimizer.name"
        )
    spec = OptimizerSpec(config, learning_rate, labels)
    stages = []
    if config.clip_norm:
        stages.append(optax.clip_by_global_norm(config.clip_norm))
    if config.adder_rate:
        stages.append(optax.masked(scale_by_adder_rate(config.adder_rate), spec.mask("adder")))
    return optax.chain(*stages, OPTIMIZERS[config.name](spec))
