"""The training step and the evaluation step: pure functions of (state, batch), jitted once by the loop.

The state is a plain nested dict ``{"step", "skipped", "params", "opt_state", "ema_params"}``, so that checkpoints
outlive library versions. All randomness of step i follows from (seed, i): nothing random is stored.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

import kfac
from adder_flax.training.curvature import CurvatureOptimizer

State = dict[str, Any]
Batch = Mapping[str, Array]
Metrics = dict[str, Array]
Augmentation = Callable[[Array, Array, Array], tuple[Array, Array]]


def init_state(params: Any, *, optimizer: optax.GradientTransformation, ema: bool) -> State:
    """Returns the state before the first step.

    Args:
      params: nested dict of parameters.
      optimizer: initialises ``opt_state``.
      ema: whether a running average of the parameters is kept.
    """
    zero = jnp.zeros((), jnp.int32)
    state = {"step": zero, "skipped": zero, "params": params, "opt_state": optimizer.init(params)}
    if ema:
        state["ema_params"] = jax.tree.map(jnp.copy, params)
    return state


def evaluation_params(state: State) -> Any:
    """Returns the parameters that evaluation uses: the running average where there is one."""
    return state.get("ema_params", state["params"])


def _microbatches(batch: Any, count: int) -> Any:
    # Strided, not contiguous: every device keeps its own examples when the batch axis is sharded.
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch)


def _accumulate(value_and_grad: Callable, params: Any, batch: Any, key: Array, count: int) -> tuple[Any, Any]:
    """Returns the mean over ``count`` microbatches of ``value_and_grad(params, microbatch, key)``."""

    def body(total, microbatch_and_key):
        return jax.tree.map(jnp.add, total, value_and_grad(params, *microbatch_and_key)), None

    xs = (*_microbatches(batch, count), jax.random.split(key, count))
    shapes = jax.eval_shape(value_and_grad, params, *jax.tree.map(lambda x: x[0], xs))
    total, _ = jax.lax.scan(body, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), xs)
    return jax.tree.map(lambda x: x / count, total)


def step_keys(seed: int, step: Array | int) -> tuple[Array, Array]:
    """Returns the keys of augmentation and of dropout at one step: functions of (seed, step) alone."""
    augment_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    return augment_key, dropout_key


def make_loss_fn(graphdef: nnx.GraphDef) -> Callable[[Any, Array, Array, Array], tuple[Array, Array]]:
    """Returns ``loss_fn(params, images, targets, dropout_key) → (mean cross-entropy, share of hits)``."""
    with_logits = make_logits_loss_fn(graphdef)

    def loss_fn(params, images, targets, key):
        loss, logits = with_logits(params, images, targets, key)
        return loss, _accuracy(logits, targets)

    return loss_fn


def make_logits_loss_fn(graphdef: nnx.GraphDef) -> Callable[[Any, Array, Array, Array], tuple[Array, Array]]:
    """Returns ``loss_fn(params, images, targets, dropout_key) → (mean cross-entropy, logits)``."""

    def loss_fn(params, images, targets, key):
        model = nnx.merge(graphdef, params)
        logits = model(images, deterministic=False, rngs=nnx.Rngs(dropout=key)).astype(jnp.float32)
        return optax.softmax_cross_entropy(logits, targets).mean(), logits

    return loss_fn


def _accuracy(logits: Array, targets: Array) -> Array:
    return (logits.argmax(-1) == targets.argmax(-1)).mean()


# (opt_state, params, (images, targets), dropout_key) → (loss, accuracy, gradient, what else the optimizer takes)
Differentiate = Callable[[Any, Any, tuple[Array, Array], Array], tuple[Array, Array, Any, dict[str, Any]]]


def _plain_gradient(graphdef: nnx.GraphDef, accumulation_steps: int) -> Differentiate:
    value_and_grad = jax.value_and_grad(make_loss_fn(graphdef), has_aux=True)

    def differentiate(opt_state, params, examples, key):
        if accumulation_steps == 1:
            (loss, accuracy), grads = value_and_grad(params, *examples, key)
        else:
            (loss, accuracy), grads = _accumulate(value_and_grad, params, examples, key, accumulation_steps)
        return loss, accuracy, grads, {}

    return differentiate


def _gradient_and_curvature(
    graphdef: nnx.GraphDef, optimizer: CurvatureOptimizer, accumulation_steps: int
) -> Differentiate:
    """Gradient and curvature; of several microbatches the first gives the curvature, which has to be held at once."""
    loss_fn = make_logits_loss_fn(graphdef)
    with_curvature = kfac.value_grad_and_curvature(loss_fn, fisher=optimizer.fisher, has_aux=True)
    plain = jax.value_and_grad(make_loss_fn(graphdef), has_aux=True)

    def differentiate(opt_state, params, examples, key):
        keys = jax.random.split(key, accumulation_steps) if accumulation_steps > 1 else key[None]
        parts = _microbatches(examples, accumulation_steps)
        first = (*jax.tree.map(lambda x: x[0], parts), keys[0])
        sampling_key = jax.random.fold_in(keys[0], _SAMPLING)
        (loss, logits), grads, curvature = with_curvature(
            params, *first, key=sampling_key, refresh=optimizer.refresh(opt_state)
        )
        extra = {"curvature": curvature, "value": loss, "value_fn": lambda p: loss_fn(p, *first)[0]}
        total = (loss, _accuracy(logits, first[1])), grads

        def add(total, part):
            return jax.tree.map(jnp.add, total, plain(params, *part)), None

        if accumulation_steps > 1:
            rest = jax.tree.map(lambda x: x[1:], (*parts, keys))
            total, _ = jax.lax.scan(add, total, rest)
            total = jax.tree.map(lambda x: x / accumulation_steps, total)
        (loss, accuracy), grads = total
        return loss, accuracy, grads, extra

    return differentiate


_SAMPLING = 1 << 20  # dropout layers fold small numbers into the same key


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation | CurvatureOptimizer,
    augment: Augmentation,
    *,
    seed: int,
    accumulation_steps: int = 1,
    ema_decay: float = 0.0,
    skip_non_finite: bool = False,
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """Returns ``train_step(state, batch) → (state, metrics)``.

    A step whose loss or gradient is not finite changes nothing but the counters ``step`` and ``skipped``. Unless such
    steps are to be skipped, neither does any later one, so that the loop, which looks at metrics one step late, still
    holds the state in which it happened.

    Args:
      graphdef: the model without its parameters, from ``nnx.split``.
      optimizer: an optax transformation that includes the learning rate; one that takes curvature is given it.
      augment: ``(key, images, labels) → (float images, class probabilities)``.
      seed: of augmentation, dropout and stochastic depth.
      accumulation_steps: microbatches a step; gradients are averaged before the update.
      ema_decay: decay of the running average of the parameters; 0 keeps none.
      skip_non_finite: go on after a step that is not finite.
    """
    if isinstance(optimizer, CurvatureOptimizer):
        differentiate = _gradient_and_curvature(graphdef, optimizer, accumulation_steps)
    else:
        differentiate = _plain_gradient(graphdef, accumulation_steps)

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        augment_key, dropout_key = step_keys(seed, state["step"])
        examples, params = augment(augment_key, batch["image"], batch["label"]), state["params"]
        loss, accuracy, grads, extra = differentiate(state["opt_state"], params, examples, dropout_key)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        updates, opt_state = optimizer.update(grads, state["opt_state"], params, **extra)
        new = {"params": optax.apply_updates(params, updates), "opt_state": opt_state}
        if ema_decay:
            # The average of a short history would be dominated by the initial weights: decay grows to its value.
            decay = jnp.minimum(ema_decay, (1 + state["step"]) / (10 + state["step"]))
            new["ema_params"] = optax.incremental_update(new["params"], state["ema_params"], 1 - decay)
        sound = finite if skip_non_finite else finite & (state["skipped"] == 0)
        new = {
            name: jax.tree.map(lambda n, o: jnp.where(sound, n, o), value, state[name]) for name, value in new.items()
        }
        counters = {"step": state["step"] + 1, "skipped": state["skipped"] + ~finite}
        metrics = {"loss": loss, "accuracy": accuracy, "grad_norm": grad_norm, "finite": finite}
        metrics["optimizer"] = kfac.telemetry(opt_state)  # empty for other optimizers
        return {**counters, **new}, metrics

    return train_step


def make_eval_step(graphdef: nnx.GraphDef, normalize: Callable[[Array], Array]) -> Callable[[Any, Batch], Metrics]:
    """Returns ``eval_step(params, batch) → sums`` over the examples that ``batch["mask"]`` marks as real.

    Args:
      graphdef: the model without its parameters.
      normalize: ``uint8 images → float images``, as in training but without augmentation.
    """

    def eval_step(params: Any, batch: Batch) -> Metrics:
        logits: Float[Array, "batch classes"] = nnx.merge(graphdef, params)(normalize(batch["image"]))
        logits = logits.astype(jnp.float32)
        labels: Int[Array, " batch"] = batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        # Rank of the true class among the logits. Ties and NaN count against the model.
        own = jnp.take_along_axis(logits, labels[:, None], axis=1)
        rank = (~(logits < own)).sum(-1) - 1
        mask = batch["mask"].astype(jnp.float32)
        return {
            "loss": (losses * mask).sum(),
            "accuracy": ((rank < 1) * mask).sum(),
            "top5_accuracy": ((rank < 5) * mask).sum(),
            "count": mask.sum(),
        }

    return eval_step
