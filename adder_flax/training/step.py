"""The training step and the evaluation step: pure functions of (state, batch, hyper).

The state is a plain nested dict ``{"step", "skipped", "params", "opt_state"}``, so that checkpoints
outlive library versions; with averaged weights it also has ``"ema_params"``, of a model that
carries more than parameters ``"model_state"``, and with both ``"ema_model_state"``. All randomness
of step i follows from (seed, i): nothing random is stored. ``hyper`` holds the numbers in which
runs of one program differ: seed, rates, lengths. A step is made of its parts from them as it is
traced.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

import kfac
from adder_flax.arrays import AnyArray
from adder_flax.errors import RunError
from adder_flax.settings import is_on
from adder_flax.tasks import Outcome, Task
from adder_flax.training.optimizers import AdamState, CurvatureOptimizer
from adder_flax.training.skeleton import Skeleton, joined

State = dict[str, Any]
Batch = Mapping[str, AnyArray]
Metrics = dict[str, Any]
Hyper = Mapping[str, Any]

_SAMPLING = 1 << 20  # dropout layers fold small numbers into the same key
# States of optimizers that are as they were where a step was not sound.
_GUARDED = (kfac.Averages, AdamState)


class Parts(NamedTuple):
    """What a training step is made of, at given numbers, plain or traced.

    Attributes:
      seed: of all that is random.
      examples: ``(key, batch) → examples``, a tree of arrays with the batch axis first.
      loss: ``(params, examples, key, model_state) → Outcome``, with dropout.
      optimizer: an optax transformation that includes the learning rate; one that takes curvature
        is given it.
      learning_rate: its schedule, a function of the step.
      likelihood: what the loss averages the negative logarithm of, see
        ``kfac.value_grad_and_curvature``.
      ema_decay: decay of the running average of the parameters; 0 keeps none.
    """

    seed: int | Array
    examples: Callable[[Array, Batch], Any]
    loss: Callable[..., Outcome]
    optimizer: optax.GradientTransformation | CurvatureOptimizer
    learning_rate: optax.Schedule
    likelihood: str | kfac.Likelihood = "categorical"
    ema_decay: float | Array = 0.0


def make_train_step(
    make_parts: Callable[[Hyper], Parts],
    *,
    accumulation_steps: int = 1,
    skip_non_finite: bool = False,
) -> Callable[[State, Batch, Hyper], tuple[State, Metrics]]:
    """Returns ``train_step(state, batch, hyper) → (state, metrics)``.

    A step whose loss or gradient is not finite changes nothing but the counters ``step`` and
    ``skipped``. Unless such steps are to be skipped, neither does any later one, so that the loop,
    which looks at metrics one step late, still holds the state in which it happened.

    Args:
      make_parts: hyper → what the step is made of.
      accumulation_steps: microbatches a step; gradients are averaged before the update, each
        microbatch by what its means are over.
      skip_non_finite: go on after a step that is not finite.

    Returns:
      The step. Its metrics are ``loss``, ``grad_norm``, ``learning_rate``, ``finite``, the task's
      own under ``task`` and what ``kfac.telemetry`` names under ``optimizer``.
    """

    def train_step(state: State, batch: Batch, hyper: Hyper) -> tuple[State, Metrics]:
        parts = make_parts({**hyper, "step": state["step"]})
        optimizer, params, extra = parts.optimizer, state["params"], {}
        curved = isinstance(optimizer, CurvatureOptimizer)
        augment_key, key = step_keys(parts.seed, state["step"])
        examples = parts.examples(augment_key, batch)
        of_batch = examples, key, accumulation_steps, state.get("model_state", {})

        def loss_and_rest(params: Any, *part: Any) -> tuple[Array, tuple]:
            outcome = parts.loss(params, *part)
            rest = dict(outcome.metrics), outcome.weights, outcome.model_state
            return outcome.loss, (outcome.outputs, *rest)

        # The gradient: a mean over microbatches.
        def gradient(*part: Any) -> _Means:
            differentiate = jax.value_and_grad(loss_and_rest, has_aux=True)
            (loss, (_, metrics, weights, new)), grads = differentiate(params, *part)
            return _Means.over((loss, metrics, grads), weights, new)

        def gradient_and_curvature(examples: Any, key: Array, model_state: Any) -> _Means:
            differentiate = kfac.value_grad_and_curvature(
                lambda *args: loss_and_rest(*args, model_state), **_fisher(parts)
            )
            (loss, (_, metrics, weights, new)), grads, curvature = differentiate(
                *(params, examples, key), key=jax.random.fold_in(key, _SAMPLING)
            )
            value_fn = lambda params: parts.loss(params, examples, key, model_state).loss
            extra.update(curvature=curvature, value=loss, value_fn=value_fn)
            return _Means.over((loss, metrics, grads), weights, new)

        # Curvature of all examples at every step comes in the pass of the gradient, that of the
        # first microbatch: it has to be held at once. Where most steps renew nothing, a branch that
        # may pull back through that pass would have all of them keep what it needs: a sample then
        # has a pass of its own.
        together = curved and optimizer.stride == 1 and optimizer.interval == 1
        first = gradient_and_curvature if together else None
        (loss, metrics, grads), model_state = _mean(gradient, *of_batch, first)
        if not together:

            def value_fn(params: Any) -> Array:
                def value(*part: Any) -> _Means:
                    loss, (_, _, weights, new) = loss_and_rest(params, *part)
                    return _Means.over(loss, weights, new)

                return _mean(value, *of_batch)[0]

            extra.update(value=loss, value_fn=value_fn)
        if not curved:
            extra["grad"] = grads
        elif not together:
            sample = _first(_microbatches(examples, accumulation_steps * optimizer.stride))
            sampling_key, dropout_key = jax.random.split(jax.random.fold_in(key, _SAMPLING))
            of_sample = kfac.curvature(
                lambda *args: loss_and_rest(*args, of_batch[-1]), **_fisher(parts)
            )
            refresh = optimizer.refresh(state["opt_state"])
            extra["curvature"] = of_sample(
                *(params, sample, dropout_key), key=sampling_key, refresh=refresh
            )

        # The update. What knows of steps that are not sound keeps its state as it forms it: to
        # choose here would be another pass over old and new.
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        sound = finite if skip_non_finite else finite & (state["skipped"] == 0)
        is_guarded = lambda node: isinstance(node, _GUARDED)
        old, structure = jax.tree.flatten(state["opt_state"], is_leaf=is_guarded)
        guarded = [*map(is_guarded, old)]
        # A line search hands on to the loss what it does not know.
        if curved or any(guarded):
            extra["sound"] = sound
        if not curved:
            optimizer = optax.with_extra_args_support(optimizer)
        updates, opt_state = optimizer.update(grads, state["opt_state"], params, **extra)
        chosen = [
            after if guards else optax.tree.where(sound, after, before)
            for guards, after, before in zip(
                guarded, structure.flatten_up_to(opt_state), old, strict=True
            )
        ]

        new = {"params": optax.apply_updates(params, updates)}
        if model_state:
            new["model_state"] = model_state
        # The running average. That of a short history would be dominated by the initial weights:
        # its decay grows to its value.
        if is_on(parts.ema_decay):
            decay = jnp.minimum(parts.ema_decay, (1 + state["step"]) / (10 + state["step"]))
            for name in ("params", "model_state"):
                if name in new:
                    new[f"ema_{name}"] = _moved(new[name], state[f"ema_{name}"], 1 - decay)
        elif "ema_params" in state:
            averaged = _schedule_free_state(opt_state)
            new["ema_params"] = optax.contrib.schedule_free_eval_params(averaged, new["params"])
        new = {name: optax.tree.where(sound, value, state[name]) for name, value in new.items()}
        new["step"], new["skipped"] = state["step"] + 1, state["skipped"] + ~finite
        return new | {"opt_state": structure.unflatten(chosen)}, {
            "loss": loss,
            "grad_norm": grad_norm,
            # The optimizer's own count has no step that was left out.
            "learning_rate": jnp.asarray(
                parts.learning_rate(state["step"] - state["skipped"]), jnp.float32
            ),
            "finite": finite,
            "task": metrics,
            "optimizer": kfac.find_stats(opt_state) if curved else [],
        }

    return train_step


def step_keys(seed: int | Array, step: Array | int) -> tuple[Array, Array]:
    """Returns the keys of augmentation and of dropout at one step, functions of (seed, step)."""
    augment_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    return augment_key, dropout_key


class _Means(NamedTuple):
    """What one microbatch gives: means, what they are over, and what the model carries after it.

    Means over all examples have no weight: every microbatch has as many.
    """

    means: Any
    weight: Array | None
    model_state: Any

    @classmethod
    def over(cls, means: Any, weights: Array | tuple[Array, Any] | None, new: Any) -> "_Means":
        """Means over what ``Outcome.weights`` says."""
        if weights is None:
            return cls(means, None, new)
        weight = weights[1] if isinstance(weights, tuple) else weights.sum(dtype=jnp.float32)
        return cls(means, jnp.asarray(weight, jnp.float32), new)

    def weighted(self) -> tuple[Any, Array | None]:
        if self.weight is None:
            return self.means, None
        return jax.tree.map(lambda x: x * self.weight, self.means), self.weight


def _mean(
    part: Callable[..., _Means],
    examples: Any,
    key: Array,
    count: int,
    model_state: Any,
    first: Callable[..., _Means] | None = None,
) -> tuple[Any, Any]:
    """Returns means over ``count`` microbatches, and what the model carries after the last.

    A microbatch counts for as much as what its means are over: positions that are real, say.
    """
    if count == 1:
        one = (first or part)(examples, key, model_state)
        return one.means, one.model_state
    xs = _microbatches(examples, count), jax.random.split(key, count)

    def body(total_and_state: Any, x: Any) -> tuple[Any, None]:
        total, model_state = total_and_state
        one = part(*x, model_state)
        return (jax.tree.map(jnp.add, total, one.weighted()), one.model_state), None

    if first is None:
        # Zeros to begin with, not the first microbatch: the scan then compiles one forward
        # and backward pass, and not two.
        shapes = jax.eval_shape(lambda: part(*_first(xs), model_state).weighted())
        total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    else:
        one = first(*_first(xs), model_state)
        total, model_state = one.weighted(), one.model_state
        xs = jax.tree.map(lambda x: x[1:], xs)
    ((means, weight), model_state), _ = jax.lax.scan(body, (total, model_state), xs)
    return jax.tree.map(lambda x: x / (count if weight is None else weight), means), model_state


def _microbatches(batch: Any, count: int) -> Any:
    # Strided, not contiguous: every device keeps its own examples when the batch axis is
    # sharded.
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch)


def _first(microbatches: Any) -> Any:
    return jax.tree.map(operator.itemgetter(0), microbatches)


def _fisher(parts: Parts) -> dict[str, Any]:
    options = dict(fisher=parts.optimizer.fisher, likelihood=parts.likelihood)
    found = dict(outputs=operator.itemgetter(0), weights=operator.itemgetter(2))
    return options | found | dict(has_aux=True)


def _moved(new: Any, average: Any, share: Array) -> Any:
    """Returns a running average moved towards new values; what does not average is new."""
    return jax.tree.map(
        lambda n, a: (
            optax.incremental_update(n, a, share).astype(n.dtype)
            if jnp.issubdtype(n.dtype, jnp.floating)
            else n
        ),
        new,
        average,
    )


def _schedule_free_state(opt_state: Any) -> optax.contrib.ScheduleFreeState | None:
    def is_one(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState)

    return next(filter(is_one, jax.tree.leaves(opt_state, is_leaf=is_one)), None)


def init_state(
    params: Any,
    *,
    optimizer: optax.GradientTransformation | CurvatureOptimizer,
    ema: bool,
    model_state: Any = None,
) -> State:
    """Returns the state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    state = {"step": zero, "skipped": zero, "params": params, "opt_state": optimizer.init(params)}
    averages = _schedule_free_state(state["opt_state"]) is not None
    if ema and averages:
        raise RunError(
            "config.ema_decay: expected 0 with an optimizer that averages the parameters itself; "
            "set --config.ema_decay=0"
        )
    if ema or averages:
        state["ema_params"] = jax.tree.map(jnp.copy, params)
    if model_state:
        state["model_state"] = model_state
        if ema:
            state["ema_model_state"] = jax.tree.map(jnp.copy, model_state)
    return state


def evaluation_params(state: State) -> Any:
    """What evaluation uses: parameters, and what else the model carries, as averaged."""
    params = state.get("ema_params", state["params"])
    return joined(params, state.get("ema_model_state", state.get("model_state")))


def make_loss_fn(
    skeleton: Skeleton, task: Task, model_settings: Any = None, progress: float | Array = 1.0
) -> Callable[..., Outcome]:
    """Returns ``loss(params, examples, key, model_state) → Outcome`` of the model with dropout."""

    def loss(params: Any, examples: Any, key: Array, model_state: Any = None) -> Outcome:
        model: Any = skeleton.merge(joined(params, model_state), key)
        if model_settings is not None and hasattr(model, "set_data"):
            model.set_data(model_settings)
        if hasattr(model, "anneal"):
            model.anneal(progress)
        outcome = task.loss(model, examples, rngs=nnx.Rngs(dropout=key))
        return outcome._replace(model_state=skeleton.carried_by(model))

    return loss


def make_eval_step(
    skeleton: Skeleton, make_task: Callable[[Hyper], Task]
) -> Callable[[Any, Batch, Hyper], Metrics]:
    """Returns ``eval_step(params, batch, hyper) → sums`` over the real examples."""

    def eval_step(params: Any, batch: Batch, hyper: Hyper) -> Metrics:
        return make_task(hyper).sums(skeleton.merge(params), batch)

    return eval_step
