"""The training step and the evaluation step: pure functions of (state, batch, hyper).

The state is a plain nested dict ``{"step", "skipped", "params", "opt_state"}``, so that checkpoints
outlive library versions; with averaged weights it also has ``"ema_params"``, of a model that
carries more than parameters ``"model_state"``, and with both ``"ema_model_state"``. All randomness
of step i follows from (seed, i): nothing random is stored. ``hyper`` holds the numbers in which
runs of one program differ: seed, rates, lengths. A step is made of its parts from them as it is
traced.
"""

import inspect
import operator
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

import kfac
from adder_flax.arrays import AnyArray
from adder_flax.errors import RunError
from adder_flax.settings import is_on
from adder_flax.tasks import Outcome, Task
from adder_flax.training.optimizers import AdamState, CurvatureOptimizer

State = dict[str, Any]
Batch = Mapping[str, AnyArray]
Metrics = dict[str, Any]
Hyper = Mapping[str, Any]

# Dropout layers fold small numbers into the same key.
_SAMPLING, _STREAMS = 1 << 20, 1 << 21
# States of optimizers that are as they were where a step was not sound.
_GUARDED = (kfac.Averages, AdamState)


class Parts(NamedTuple):
    """What a training step is made of, at given numbers, plain or traced.

    Attributes:
      seed: of all that is random.
      examples: ``(key, batch) → examples``, a tree of arrays with the batch axis first.
      loss: ``(params, examples, key, model_state) → Outcome``, with dropout.
      optimizer: with the learning rate; one that takes curvature is given it.
      learning_rate: its schedule, a function of the step.
      likelihood: see ``kfac.value_grad_and_curvature``.
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
        examples, carried = parts.examples(augment_key, batch), state.get("model_state", {})
        microbatches = examples, key, carried, accumulation_steps

        def loss_and_outcome(params: Any, *part: Any) -> tuple[Array, Outcome]:
            outcome = parts.loss(params, *part)
            return outcome.loss, outcome._replace(loss=None)

        # The gradient: a mean over microbatches.
        def gradient(*part: Any) -> tuple[Any, Outcome]:
            differentiate = jax.value_and_grad(loss_and_outcome, has_aux=True)
            (loss, outcome), grads = differentiate(params, *part)
            return (loss, outcome.metrics, grads), outcome

        def gradient_and_curvature(examples: Any, key: Array, carried: Any) -> tuple[Any, Outcome]:
            differentiate = kfac.value_grad_and_curvature(
                lambda *args: loss_and_outcome(*args, carried), **_fisher(parts)
            )
            (loss, outcome), grads, curvature = differentiate(
                *(params, examples, key), key=jax.random.fold_in(key, _SAMPLING)
            )
            value_fn = lambda params: parts.loss(params, examples, key, carried).loss
            extra.update(curvature=curvature, value=loss, value_fn=value_fn)
            return (loss, outcome.metrics, grads), outcome

        # Curvature of all examples at every step comes in the pass of the gradient, that of the
        # first microbatch: it has to be held at once. Where most steps renew nothing, a branch that
        # may pull back through that pass would have all of them keep what it needs: a sample then
        # has a pass of its own.
        together = curved and optimizer.stride == 1 and optimizer.interval == 1
        first = gradient_and_curvature if together else gradient
        (loss, metrics, grads), model_state = _mean(gradient, *microbatches, first)
        grads = optax.tree.cast_like(grads, params)
        if not together:

            def value(params: Any) -> Array:
                return _mean(lambda *part: loss_and_outcome(params, *part), *microbatches)[0]

            extra.update(value=loss, value_fn=value)
        if not curved:
            extra["grad"] = grads
        elif not together:
            sample = _first(_microbatches(examples, accumulation_steps * optimizer.stride))
            sampling_key, dropout_key = jax.random.split(jax.random.fold_in(key, _SAMPLING))
            of_sample = kfac.curvature(
                lambda *args: loss_and_outcome(*args, carried), **_fisher(parts)
            )
            extra["curvature"] = of_sample(
                *(params, sample, dropout_key),
                key=sampling_key,
                refresh=optimizer.refresh(state["opt_state"]),
            )

        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        sound = finite if skip_non_finite else finite & (state["skipped"] == 0)
        updates, opt_state, kept = _updates(optimizer, grads, state, sound, extra)
        new = {"params": optax.apply_updates(params, updates)}
        if model_state:
            new["model_state"] = model_state
        new |= _averages(new, state, opt_state, parts.ema_decay)
        new = {name: optax.tree.where(sound, value, state[name]) for name, value in new.items()}
        new["step"], new["skipped"] = state["step"] + 1, state["skipped"] + ~finite
        return new | {"opt_state": kept}, {
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


def _updates(
    optimizer: Any, grads: Any, state: State, sound: Array, extra: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Returns updates, the optimizer's state behind them, and what is kept of it and of the old.

    What knows of steps that are not sound keeps its state as it forms it: to choose here would be
    another pass over old and new.
    """
    is_guarded = lambda node: isinstance(node, _GUARDED)
    old, structure = jax.tree.flatten(state["opt_state"], is_leaf=is_guarded)
    curved = isinstance(optimizer, CurvatureOptimizer)
    # A line search hands on to the loss what it does not know.
    if curved or any(map(is_guarded, old)):
        extra = extra | {"sound": sound}
    if not curved:
        optimizer = optax.with_extra_args_support(optimizer)
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"], **extra)
    kept = [
        after if is_guarded(before) else optax.tree.where(sound, after, before)
        for after, before in zip(structure.flatten_up_to(opt_state), old, strict=True)
    ]
    return updates, opt_state, structure.unflatten(kept)


def _averages(new: State, state: State, opt_state: Any, ema_decay: float | Array) -> State:
    """Returns the averages of what a step gives, by name; none where none are kept."""
    if is_on(ema_decay):
        # That of a short history would be dominated by the initial weights: its decay grows to its
        # value.
        decay = jnp.minimum(ema_decay, (1 + state["step"]) / (10 + state["step"]))
        moved = lambda name: _moved(new[name], state[f"ema_{name}"], 1 - decay)
        return {f"ema_{name}": moved(name) for name in new}
    if "ema_params" in state:
        averaged = _schedule_free_state(opt_state)
        return {"ema_params": optax.contrib.schedule_free_eval_params(averaged, new["params"])}
    return {}


def step_keys(seed: int | Array, step: Array | int) -> tuple[Array, Array]:
    """Returns the keys of augmentation and of dropout at one step, functions of (seed, step)."""
    augment_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    return augment_key, dropout_key


def _mean(
    part: Callable[..., tuple[Any, Outcome]],
    examples: Any,
    key: Array,
    carried: Any,
    count: int,
    first: Callable[..., tuple[Any, Outcome]] | None = None,
) -> tuple[Any, Any]:
    """Returns means over ``count`` microbatches, and what the model carries after the last.

    A microbatch counts for as much as what its means are over: positions that are real, say.
    ``first`` stands for ``part`` at the first one.
    """
    first = first or part
    if count == 1:
        means, outcome = first(examples, key, carried)
        return means, outcome.model_state

    def weighted(part: Callable, carried: Any, x: Any) -> tuple[Any, Any]:
        means, outcome = part(*x, carried)
        weights, weight = outcome.weights, jnp.float32(1)  # every microbatch has as many examples
        if weights is not None:
            weight = weights[1] if isinstance(weights, tuple) else weights.sum(dtype=jnp.float32)
            weight = jnp.asarray(weight, jnp.float32)
        # The product is wide: in bfloat16 a sum of equal terms stops growing after 256 of them.
        return (jax.tree.map(lambda mean: mean * weight, means), weight), outcome.model_state

    def body(total_and_carried: Any, x: Any) -> tuple[Any, None]:
        total, carried = total_and_carried
        one, carried = weighted(part, carried, x)
        return (jax.tree.map(jnp.add, total, one), carried), None

    xs = _microbatches(examples, count), jax.random.split(key, count)
    if first is part:
        # Zeros to begin with, not the first microbatch: the scan then compiles one forward
        # and backward pass, and not two.
        shapes, _ = jax.eval_shape(lambda: weighted(part, carried, _first(xs)))
        total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    else:
        total, carried = weighted(first, carried, _first(xs))
        xs = jax.tree.map(lambda x: x[1:], xs)
    ((means, weight), carried), _ = jax.lax.scan(body, (total, carried), xs)
    return jax.tree.map(lambda x: x / jnp.where(weight > 0, weight, 1), means), carried


def _microbatches(batch: Any, count: int) -> Any:
    # Strided, not contiguous: every device keeps its own examples when the batch axis is
    # sharded.
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch)


def _first(microbatches: Any) -> Any:
    return jax.tree.map(operator.itemgetter(0), microbatches)


def _fisher(parts: Parts) -> dict[str, Any]:
    return {
        "fisher": parts.optimizer.fisher,
        "likelihood": parts.likelihood,
        "outputs": operator.attrgetter("outputs"),
        "weights": operator.attrgetter("weights"),
        "has_aux": True,
    }


def _moved(new: Any, average: Any, share: Array) -> Any:
    """Returns a running average moved towards new values; what does not average is new."""

    def move(new: Array, average: Array) -> Array:
        if not jnp.issubdtype(new.dtype, jnp.floating):
            return new
        return optax.incremental_update(new, average, share).astype(average.dtype)

    return jax.tree.map(move, new, average)


def _schedule_free_state(opt_state: Any) -> optax.contrib.ScheduleFreeState | None:
    is_one = lambda node: isinstance(node, optax.contrib.ScheduleFreeState)
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
    if averages:
        state["ema_params"] = jax.tree.map(jnp.copy, params)
    if model_state:
        state["model_state"] = model_state
    if ema:
        # Wide: shares of a narrow average are below its rounding, and it would stand still.
        for name in {"params", "model_state"} & state.keys():
            state[f"ema_{name}"] = jax.tree.map(_widened, state[name])
    return state


def _widened(array: Array) -> Array:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.array(array, jnp.promote_types(array.dtype, jnp.float32) if is_float else None)


def evaluation_params(state: State) -> Any:
    """What evaluation uses: parameters, and what else the model carries, as averaged."""

    def averaged(name: str) -> Any:
        own = state.get(name)
        cast = lambda average, like: jax.lax.convert_element_type(average, like.dtype)
        return jax.tree.map(cast, state[f"ema_{name}"], own) if f"ema_{name}" in state else own

    return joined(averaged("params"), averaged("model_state"))


def method_of(model: nnx.Module, name: str) -> Callable[..., Any] | None:
    """Returns what a model has under the name of a method of this project's, not its layers."""
    found = getattr(model, name, None)
    return found if inspect.ismethod(found) else None


def make_loss_fn(
    skeleton: "Skeleton", task: Task, model_settings: Any = None, progress: float | Array = 1.0
) -> Callable[..., Outcome]:
    """Returns ``loss(params, examples, key, model_state) → Outcome`` of the model with dropout."""

    def loss(params: Any, examples: Any, key: Array, model_state: Any = None) -> Outcome:
        model: Any = skeleton.merge(joined(params, model_state), key)
        if model_settings is not None and (set_data := method_of(model, "set_data")):
            set_data(model_settings)
        if anneal := method_of(model, "anneal"):
            anneal(progress)
        outcome = task.loss(model, examples, rngs=nnx.Rngs(dropout=key))
        return outcome._replace(model_state=skeleton.carried_by(model))

    return loss


def make_eval_step(
    skeleton: "Skeleton", make_task: Callable[[Hyper], Task]
) -> Callable[[Any, Batch, Hyper], Metrics]:
    """Returns ``eval_step(params, batch, hyper) → sums`` over the real examples."""
    return lambda params, batch, hyper: make_task(hyper).sums(skeleton.merge(params), batch)


Leaves = tuple[tuple[tuple, jax.ShapeDtypeStruct], ...]


class Skeleton(NamedTuple):
    """A model without its arrays; :func:`take_apart` makes it.

    What it carries beside parameters, as BatchNorm's statistics, lies in the train state. Random
    streams of its own, as those of ``nnx.Dropout(rngs=rngs)``, lie nowhere: each step gives them
    keys that follow from its own.
    """

    graphdef: nnx.GraphDef
    carried: Leaves = ()
    streams: Leaves = ()

    def merge(self, variables: Any, key: Array | None = None) -> nnx.Module:
        """Returns the model with a nested dict of its parameters and of what it carries.

        Where the latter is absent it has its shape there. A ``key`` of its random streams puts it
        into training mode; None is evaluation.
        """
        if self.carried or self.streams:
            flat = dict(self.carried) | self._keys(key) | flatten_dict(variables)
            variables = unflatten_dict(flat)
        model = nnx.merge(self.graphdef, variables)
        model.eval() if key is None else model.train()
        return model

    def carried_by(self, model: nnx.Module) -> dict[str, Any]:
        """What a model carries beside its parameters, as a nested dict."""
        if not self.carried:
            return {}
        # Not all that is there: a call may have added what it recorded.
        found: dict[Any, Any] = flatten_dict(nnx.to_pure_dict(nnx.state(model)))
        return unflatten_dict({path: found[path].astype(s.dtype) for path, s in self.carried})

    def separate(self, variables: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the parameters among variables, and what is carried beside them."""
        if not self.carried:
            return variables, {}
        params = flatten_dict(variables)
        carried = {path: params.pop(path) for path, _ in self.carried}
        return unflatten_dict(params), unflatten_dict(carried)

    def _keys(self, key: Array | None) -> dict[tuple, Array]:
        key = jax.random.fold_in(jax.random.key(0) if key is None else key, _STREAMS)

        def first(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros(leaf.shape, leaf.dtype)  # how often it was asked
            own = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
            return jax.random.split(own, leaf.shape) if leaf.shape else own

        return {path: first(path, leaf) for path, leaf in self.streams}


def take_apart(
    model: nnx.Module | tuple[nnx.GraphDef, nnx.State],
) -> tuple[Skeleton, dict[str, Any]]:
    """Returns a model's structure, and a nested dict of its parameters and of what it carries.

    Args:
      model: a module, or what ``nnx.split`` gives of it: out of ``jax.eval_shape`` the latter alone
        knows arrays that are no variables, as ``nnx.WeightNorm`` has them.

    Example:
      >>> skeleton, variables = take_apart(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
      >>> sorted(variables), [path for path, _ in skeleton.carried]
      (['bias', 'mean', 'scale', 'var'], [('mean',), ('var',)])
    """
    graphdef, state = nnx.split(model) if isinstance(model, nnx.Module) else model
    params, streams, carried = nnx.split_state(state, nnx.Param, nnx.RngState, ...)

    def leaves(state: Any) -> Leaves:
        flat: dict[Any, Any] = flatten_dict(nnx.to_pure_dict(state))
        return tuple((path, jax.ShapeDtypeStruct(x.shape, x.dtype)) for path, x in flat.items())

    skeleton = Skeleton(graphdef, leaves(carried), leaves(streams))
    return skeleton, joined(nnx.to_pure_dict(params), nnx.to_pure_dict(carried))


def joined(params: Any, carried: Any) -> Any:
    """Returns one nested dict of parameters and of what is carried beside them."""
    return unflatten_dict(flatten_dict(params) | flatten_dict(carried)) if carried else params
