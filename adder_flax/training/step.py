"""The training step and the evaluation step: pure functions of (state, batch, hyper).

The state is a plain nested dict ``{"step", "skipped", "params", "opt_state", "ema_params"}``, so
that checkpoints outlive library versions; of a model that carries more than parameters it also has
``"model_state"`` and ``"ema_model_state"``. All randomness of step i follows from (seed, i):
nothing random is stored. ``hyper`` holds the numbers in which runs of one program differ: seed,
rates, lengths. A step is made of its parts from them as it is traced.
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
from adder_flax.training.adam import AdamState
from adder_flax.training.curvature import CurvatureOptimizer
from adder_flax.training.skeleton import Skeleton, joined

State = dict[str, Any]
Batch = Mapping[str, AnyArray]
Metrics = dict[str, Any]
Hyper = Mapping[str, Any]


class Parts(NamedTuple):
    """What a training step is made of, at given numbers, plain or traced.

    Attributes:
      seed: of all that is random.
      examples: ``(key, batch) → examples``, a tree of arrays with the batch axis first.
      arguments: examples → what the model is called with.
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
    arguments: Callable[[Any], tuple[Array, ...]]
    loss: Callable[..., Outcome]
    optimizer: optax.GradientTransformation | CurvatureOptimizer
    learning_rate: optax.Schedule
    likelihood: str | kfac.Likelihood = "categorical"
    ema_decay: float | Array = 0.0


def init_state(
    params: Any,
    *,
    optimizer: optax.GradientTransformation | CurvatureOptimizer,
    ema: bool,
    model_state: Any = None,
) -> State:
    """Returns the state before the first step.

    Args:
      params: nested dict of parameters.
      optimizer: initialises ``opt_state``.
      ema: whether a running average of the parameters is kept; that of an optimizer which
        averages them itself, ``optax.contrib.schedule_free``, always is.
      model_state: what the model carries beside its parameters, if anything.

    Raises:
      RunError: both.
    """
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
    """Returns the parameters that evaluation uses: the running average where there is one.

    With them comes what the model carries beside parameters, averaged likewise.
    """
    params = state.get("ema_params", state["params"])
    return joined(params, state.get("ema_model_state", state.get("model_state")))


def _schedule_free_state(opt_state: Any) -> optax.contrib.ScheduleFreeState | None:
    """The state of ``optax.contrib.schedule_free`` within an optimizer's, where there is one."""

    def is_one(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState)

    return next(filter(is_one, jax.tree.leaves(opt_state, is_leaf=is_one)), None)


def step_keys(seed: int | Array, step: Array | int) -> tuple[Array, Array]:
    """Returns the keys of augmentation and of dropout at one step.

    They are functions of (seed, step) alone.
    """
    augment_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    return augment_key, dropout_key


def make_loss_fn(
    skeleton: Skeleton, task: Task, model_settings: Any = None, progress: float | Array = 1.0
) -> Callable[..., Outcome]:
    """Returns ``loss(params, examples, key, model_state) → Outcome`` of the model with dropout.

    Args:
      skeleton: the model without its arrays.
      task: says what the loss is.
      model_settings: whose numbers, plain or traced, take the place of those that the model was
        built with, if given.
      progress: share of the steps that are done, for a model that changes with it.
    """

    def loss(params: Any, examples: Any, key: Array, model_state: Any = None) -> Outcome:
        model = skeleton.merge(joined(params, model_state), key)
        if model_settings is not None and hasattr(model, "set_data"):
            model.set_data(model_settings)
        if hasattr(model, "anneal"):
            model.anneal(progress)
        outcome = task.loss(model, examples, rngs=nnx.Rngs(dropout=key))
        return outcome._replace(model_state=skeleton.carried_by(model))

    return loss


# (state, examples, dropout_key) → (loss, metrics, gradient, what the model carries after it, what
# else the optimizer takes)
Differentiate = Callable[[State, Any, Array], tuple[Array, Metrics, Any, Any, dict[str, Any]]]


class _Part(NamedTuple):
    """What one microbatch gives: means, what they are over, and what the model carries after it.

    Means over all examples have no weight: every microbatch has as many.
    """

    means: Any
    weight: Array | None
    model_state: Any


def _microbatches(batch: Any, count: int) -> Any:
    # Strided, not contiguous: every device keeps its own examples when the batch axis is
    # sharded.
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch)


def _mean(
    part: Callable[..., _Part],
    examples: Any,
    key: Array,
    count: int,
    model_state: Any,
    first: Callable[..., _Part] | None = None,
) -> tuple[Any, Any]:
    """Returns means over ``count`` microbatches, and what the model carries after the last.

    A microbatch counts for as much as what its means are over: positions that are real, say.

    Args:
      part: ``(microbatch, key, model_state) → _Part``.
      examples, key, model_state: of the whole batch.
      first: in place of ``part`` for the first microbatch, which is then not of the loop.
    """
    if count == 1:
        one = (first or part)(examples, key, model_state)
        return one.means, one.model_state
    xs = _microbatches(examples, count), jax.random.split(key, count)

    def body(total_and_state: Any, x: Any) -> tuple[Any, None]:
        total, model_state = total_and_state
        one = part(*x, model_state)
        return (jax.tree.map(jnp.add, total, _weighted(one)), one.model_state), None

    if first is None:
        # Zeros to begin with, not the first microbatch: the scan then compiles one forward
        # and backward pass, and not two.
        shapes = jax.eval_shape(lambda: _weighted(part(*_first(xs), model_state)))
        total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    else:
        one = first(*_first(xs), model_state)
        total, model_state = _weighted(one), one.model_state
        xs = jax.tree.map(lambda x: x[1:], xs)
    ((means, weight), model_state), _ = jax.lax.scan(body, (total, model_state), xs)
    return jax.tree.map(lambda x: x / (count if weight is None else weight), means), model_state


def _weighted(part: _Part) -> tuple[Any, Array | None]:
    if part.weight is None:
        return part.means, None
    return jax.tree.map(lambda x: x * part.weight, part.means), part.weight


def _first(microbatches: Any) -> Any:
    return jax.tree.map(lambda x: x[0], microbatches)


def _loss_and_rest(loss: Callable[..., Outcome]) -> Callable[..., tuple[Array, tuple]]:
    """Returns ``(…) → (loss, (outputs, metrics, weights, model_state))``."""

    def loss_and_rest(*args: Any) -> tuple[Array, tuple]:
        outcome = loss(*args)
        rest = dict(outcome.metrics), outcome.weights, outcome.model_state
        return outcome.loss, (outcome.outputs, *rest)

    return loss_and_rest


def _of_examples(loss: Callable[..., Outcome], model_state: Any) -> Callable[..., tuple]:
    """Returns `_loss_and_rest` at a state of the model, whose arrays have no axis of examples."""
    loss_and_rest = _loss_and_rest(loss)
    return lambda params, examples, key: loss_and_rest(params, examples, key, model_state)


def _part(means: Any, weights: Array | tuple[Array, Any] | None, model_state: Any) -> _Part:
    if weights is None:
        return _Part(means, None, model_state)
    weight = weights[1] if isinstance(weights, tuple) else weights.sum(dtype=jnp.float32)
    return _Part(means, jnp.asarray(weight, jnp.float32), model_state)


def _gradient_part(parts: Parts, params: Any) -> Callable[..., _Part]:
    differentiated = jax.value_and_grad(_loss_and_rest(parts.loss), has_aux=True)

    def part(examples: Any, key: Array, model_state: Any) -> _Part:
        (loss, (_, metrics, weights, new)), grads = differentiated(
            params, examples, key, model_state
        )
        return _part((loss, metrics, grads), weights, new)

    return part


def _plain_gradient(parts: Parts, accumulation_steps: int) -> Differentiate:
    loss_and_rest = _loss_and_rest(parts.loss)

    def differentiate(state, examples, key):
        model_state = state.get("model_state", {})
        (loss, metrics, grads), new = _mean(
            _gradient_part(parts, state["params"]), examples, key, accumulation_steps, model_state
        )

        def value_fn(params):
            def value_part(*x):
                value, (_, _, weights, new) = loss_and_rest(params, *x)
                return _part(value, weights, new)

            return _mean(value_part, examples, key, accumulation_steps, model_state)[0]

        return loss, metrics, grads, new, {"value": loss, "grad": grads, "value_fn": value_fn}

    return differentiate


def _gradient_and_curvature(parts: Parts, accumulation_steps: int) -> Differentiate:
    """Gradient and curvature, the latter of the first microbatch.

    It has to be held at once.
    """
    optimizer: CurvatureOptimizer = parts.optimizer

    def differentiate(state, examples, key):
        params, model_state, extra = state["params"], state.get("model_state", {}), {}

        def first(examples, key, model_state):
            loss_and_rest = _of_examples(parts.loss, model_state)
            with_curvature = kfac.value_grad_and_curvature(loss_and_rest, **_fisher(parts))
            sampling_key = jax.random.fold_in(key, _SAMPLING)
            (loss, (_, metrics, weights, new)), grads, curvature = with_curvature(
                *(params, examples, key),
                key=sampling_key,
                refresh=optimizer.refresh(state["opt_state"]),
            )

            # Of the microbatch that gave the curvature, as the model of the step is.
            def value_fn(params):
                return parts.loss(params, examples, key, model_state).loss

            extra.update(curvature=curvature, value=loss, value_fn=value_fn)
            return _part((loss, metrics, grads), weights, new)

        part = _gradient_part(parts, params)
        (loss, metrics, grads), new = _mean(
            part, examples, key, accumulation_steps, model_state, first
        )
        return loss, metrics, grads, new, extra

    return differentiate


def _gradient_beside_curvature(parts: Parts, accumulation_steps: int) -> Differentiate:
    """Gradient of the whole batch, and curvature of a sample of it in a pass of its own."""
    optimizer: CurvatureOptimizer = parts.optimizer
    gradient = _plain_gradient(parts, accumulation_steps)

    def differentiate(state, examples, key):
        loss, metrics, grads, new, extra = gradient(state, examples, key)
        sample = _first(_microbatches(examples, accumulation_steps * optimizer.stride))
        sampling_key, dropout_key = jax.random.split(jax.random.fold_in(key, _SAMPLING))
        loss_and_rest = _of_examples(parts.loss, state.get("model_state", {}))
        of_sample = kfac.curvature(loss_and_rest, **_fisher(parts))(
            *(state["params"], sample, dropout_key),
            key=sampling_key,
            refresh=optimizer.refresh(state["opt_state"]),
        )
        whole = {name: extra[name] for name in ("value", "value_fn")}
        return loss, metrics, grads, new, whole | {"curvature": of_sample}

    return differentiate


def _fisher(parts: Parts) -> dict[str, Any]:
    """Returns the options of the functions that give curvature, of losses `_loss_and_rest`."""
    options = dict(fisher=parts.optimizer.fisher, likelihood=parts.likelihood)
    found = dict(outputs=operator.itemgetter(0), weights=operator.itemgetter(2))
    return options | found | dict(has_aux=True)


_SAMPLING = 1 << 20  # dropout layers fold small numbers into the same key


def _differentiate(parts: Parts) -> Callable[[Parts, int], Differentiate]:
    optimizer = parts.optimizer
    if not isinstance(optimizer, CurvatureOptimizer):
        return _plain_gradient
    # Where most steps renew nothing, a branch that may pull back through the gradient's forward
    # pass would have all of them keep what it needs.
    together = optimizer.stride == 1 and optimizer.interval == 1
    return _gradient_and_curvature if together else _gradient_beside_curvature


def _is_guarded(node: Any) -> bool:
    """Whether a part of an optimizer's state is as it was where a step was not sound."""
    return isinstance(node, kfac.Averages | AdamState)


def _if_sound(sound: Array, new: Any, old: Any) -> Any:
    """Returns the new tree where the step is sound, else the old one."""
    # K-FAC, CG-FAC and Adam were told, and keep these where they form them: to choose here would be
    # another pass over old and new ones.
    return jax.tree.map(
        lambda n, o: n if _is_guarded(n) else jnp.where(sound, n, o), new, old, is_leaf=_is_guarded
    )


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
        curved = isinstance(parts.optimizer, CurvatureOptimizer)
        differentiate = _differentiate(parts)(parts, accumulation_steps)
        augment_key, dropout_key = step_keys(parts.seed, state["step"])
        examples, params = parts.examples(augment_key, batch), state["params"]
        loss, task_metrics, grads, model_state, extra = differentiate(state, examples, dropout_key)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        sound = finite if skip_non_finite else finite & (state["skipped"] == 0)
        update = (
            parts.optimizer.update
            if curved
            else optax.with_extra_args_support(parts.optimizer).update
        )
        # A line search hands on to the loss what it does not know.
        guarded = map(_is_guarded, jax.tree.leaves(state["opt_state"], is_leaf=_is_guarded))
        if curved or any(guarded):
            extra |= {"sound": sound}
        updates, opt_state = update(grads, state["opt_state"], params, **extra)
        new = {"params": optax.apply_updates(params, updates), "opt_state": opt_state}
        if model_state:
            new["model_state"] = model_state
        if is_on(parts.ema_decay):
            # The average of a short history would be dominated by the initial weights:
            # decay grows to its value.
            decay = jnp.minimum(parts.ema_decay, (1 + state["step"]) / (10 + state["step"]))
            new["ema_params"] = optax.incremental_update(
                new["params"], state["ema_params"], 1 - decay
            )
            if model_state:
                new["ema_model_state"] = jax.tree.map(
                    lambda n, o: (
                        optax.incremental_update(n, o, 1 - decay).astype(n.dtype)
                        if jnp.issubdtype(n.dtype, jnp.floating)
                        else n
                    ),
                    model_state,
                    state["ema_model_state"],
                )
        if averaged := _schedule_free_state(opt_state):
            new["ema_params"] = optax.contrib.schedule_free_eval_params(averaged, new["params"])
        new = {name: _if_sound(sound, value, state[name]) for name, value in new.items()}
        counters = {"step": state["step"] + 1, "skipped": state["skipped"] + ~finite}
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": jnp.asarray(parts.learning_rate(state["step"]), jnp.float32),
            "finite": finite,
            "task": task_metrics,
            "optimizer": kfac.find_stats(opt_state),  # none of other optimizers
        }
        return {**counters, **new}, metrics

    return train_step


def make_eval_step(
    skeleton: Skeleton, make_task: Callable[[Hyper], Task]
) -> Callable[[Any, Batch, Hyper], Metrics]:
    """Returns ``eval_step(params, batch, hyper) → sums`` over real examples.

    Those are the ones that ``batch["mask"]`` marks; ``params`` are those of
    :func:`evaluation_params`.

    Args:
      skeleton: the model without its arrays.
      make_task: hyper → what says what is summed.
    """

    def eval_step(params: Any, batch: Batch, hyper: Hyper) -> Metrics:
        return make_task(hyper).sums(skeleton.merge(params), batch)

    return eval_step
