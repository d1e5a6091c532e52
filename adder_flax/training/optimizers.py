"""Optimizers by name, and what they share: schedule, clipping, decay, rates of parts."""

import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Bool, Float

import kfac
from adder_flax.errors import RunError
from adder_flax.parameters import Facts
from adder_flax.registry import Registry
from adder_flax.settings import OptimizerSettings, is_on
from adder_flax.training.sharding import leaves_by_path, tree_path
from adder_flax.training.whitening import scale_by_kl_shampoo, scale_by_soap


class CurvatureOptimizer(NamedTuple):
    """An optax transformation whose ``update`` also takes ``curvature=`` and ``sound=``.

    Curvature, of the Fisher matrix ``fisher``, comes every ``interval`` steps of one of ``stride``
    examples; with 1 and 1 it comes in the pass of the gradient.
    """

    init: Callable
    update: Callable
    layers: kfac.Layers
    fisher: str
    interval: int
    stride: int

    def refresh(self, state: Any) -> bool | Bool[Array, ""]:
        """Whether the step that this state is about to take computes curvature."""
        # By the state's own count: a step that was thrown away with its state comes again.
        return True if self.interval == 1 else kfac.find_state(state).count % self.interval == 0


def find_layers(loss: Callable, params: Any, examples: Any, model_state: Any) -> kfac.Layers:
    """Returns the layers of a model that have curvature; nothing is computed."""

    def loss_and_outputs(*args: Any) -> tuple[Any, Any]:
        outcome = loss(*args)
        return outcome.loss, outcome.outputs

    key = jax.eval_shape(lambda: jax.random.key(0))
    size = jax.tree.leaves(examples)[0].shape[0]  # which arrays of the model's state do not have
    return kfac.find_layers(
        *(loss_and_outputs, params, examples, key, model_state), batch_size=size
    )


class AdamState(optax.ScaleByAdamState):
    """Moments that are as they were where a step was not sound."""


def scale_by_adam(
    b1: float | Array, b2: float | Array, eps: float | Array, *, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` whose ``update`` also takes ``sound=``, whether the step counts.

    Where it does not, the state stays as it was and updates mean nothing. To choose between old and
    new moments afterwards would have XLA copy them all at every step of a CPU: parameters' updates
    compute new moments of their own from the old ones, which then cannot be written over. Here the
    decays are 1 where a step does not count, and its gradient 0.
    """

    def init(params: Any) -> AdamState:
        return AdamState(*optax.scale_by_adam().init(params))

    def update(
        grads: Any, state: AdamState, params: Any = None, *, sound: Any = True, **_: Any
    ) -> tuple[Any, AdamState]:
        keep1, keep2 = jnp.where(sound, b1, 1.0), jnp.where(sound, b2, 1.0)
        adam = optax.scale_by_adam(keep1, keep2, eps, nesterov=nesterov)
        grads = optax.tree.where(sound, grads, optax.tree.zeros_like(grads))
        updates, new = adam.update(grads, state)
        return updates, AdamState(jnp.where(sound, new.count, state.count), new.mu, new.nu)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_adder_rate(eta: float) -> optax.GradientTransformation:
    """AdderNet's adaptive rate: the gradient g of a weight of k elements becomes η·√k·g/‖g‖₂.

    Source: Chen et al., "AdderNet: Do We Really Need Multiplications in Deep Learning?", CVPR 2020,
    eq. 12-13 (η = 0.2 in the authors' code). It stands in the optimizer, not in the backward pass,
    so that sharding and gradient accumulation do not change it.

    Example:
      >>> transform = scale_by_adder_rate(0.2)
      >>> updates, _ = transform.update({"w": jnp.array([[3.0, 4.0]])}, transform.init(None))
      >>> [round(float(u), 4) for u in updates["w"][0]]
      [0.1697, 0.2263]
    """

    def scale(gradient: Array, _: Any) -> Array:
        wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
        # Elements of at most 1, by a power of two in two halves: no square, and no reciprocal,
        # leaves the type's range.
        exponent = jnp.frexp(jnp.abs(wide).max(initial=0))[1]
        unit = jnp.ldexp(jnp.ldexp(wide, -(exponent // 2)), exponent // 2 - exponent)
        # Below 1/2 only where the gradient is zero.
        norm = jnp.maximum(jnp.linalg.norm(unit.ravel()), 0.5)
        return (unit * (eta * gradient.size**0.5 / norm)).astype(gradient.dtype)

    return optax.stateless_with_tree_map(scale)


class OptimizerSpec(NamedTuple):
    """What an optimizer is built from.

    Attributes:
      settings: of the optimizer.
      learning_rate: the run's schedule.
      facts: of the parameters, see :func:`adder_flax.parameters.parameter_facts`.
      find_layers: (stride, interval) → the layers that have curvature, and of how many examples one
        gives it: ``stride``, or in place of None what ``kfac.curvature_stride`` says of curvature
        that is renewed so often.
    """

    settings: OptimizerSettings
    learning_rate: optax.Schedule
    facts: Any
    find_layers: Callable[[int | None, int], tuple[kfac.Layers, int]]

    def mask(self, chosen: Callable[[Facts], Any]) -> Any:
        """The tree of what is chosen by the facts of each parameter."""
        return jax.tree.map(chosen, self.facts)

    @property
    def decayed(self) -> Any:
        """The tree that is True where weight decay shrinks a parameter."""
        chosen = {"prototype"} if self.settings.decay_prototypes else set()
        return self.mask(lambda facts: facts.decay or facts.role in chosen)


_EPS = 1e-8  # of Adam's denominator


def _adam(spec: OptimizerSpec, *, nesterov: bool = False) -> optax.GradientTransformation:
    return scale_by_adam(spec.settings.b1, spec.settings.b2, _EPS, nesterov=nesterov)


def _decoupled(
    spec: OptimizerSpec,
    direction: optax.GradientTransformation,
    *behind: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """A direction, the decay beside it, what comes behind both, and the rate."""
    # Nested, so that a checkpoint holds the optimizer's own state in one place, whatever stages
    # come before it.
    optimizer = optax.chain(
        direction,
        optax.add_decayed_weights(spec.settings.weight_decay, mask=spec.decayed),
        *behind,
        optax.scale_by_learning_rate(spec.learning_rate),
    )
    return optax.chain(*_gradient_stages(spec), optimizer)


def _for_matrices(
    spec: OptimizerSpec, stage: optax.GradientTransformation
) -> optax.GradientTransformation:
    """A stage for what inputs are multiplied with, Adam for all else.

    That includes prototypes: for distances an orthogonal or whitened step means nothing.
    """
    adam, stage = _adam(spec), _as_matrices(stage, spec.facts)
    return optax.partition(
        {"weight": stage, "prototype": adam, "other": adam}, spec.mask(operator.attrgetter("role"))
    )


def _as_matrices(stage: optax.GradientTransformation, facts: Any) -> optax.GradientTransformation:
    """A stage that sees kernels with several axes of inputs or outputs as the matrices they are."""
    is_masked = lambda node: isinstance(node, optax.MaskedNode)

    def flat(leaf: Any, of: Facts) -> Any:
        if is_masked(leaf) or of.matrix == (1, 1):
            return leaf
        first = leaf.ndim - sum(of.matrix)
        stack, inputs = leaf.shape[:first], leaf.shape[first : first + of.matrix[0]]
        return leaf.reshape(*stack, math.prod(inputs), -1)

    def matrices(tree: Any) -> Any:
        return None if tree is None else jax.tree.map(flat, tree, facts, is_leaf=is_masked)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = stage.update(matrices(updates), state, matrices(params))
        return jax.tree.map(lambda u, like: u.reshape(like.shape), new, updates), state

    return optax.GradientTransformation(lambda params: stage.init(matrices(params)), update)


def _adamw(spec: OptimizerSpec, *, nesterov: bool = False) -> optax.GradientTransformation:
    """AdamW; with Nesterov's momentum (Dozat, 2016) the baseline of AlgoPerf."""
    return _decoupled(spec, _adam(spec, nesterov=nesterov))


def _schedule_free_adamw(spec: OptimizerSpec) -> optax.GradientTransformation:
    """AdamW on an average of the weights, with a rate that does not fall (Defazio et al., 2024)."""
    c = spec.settings
    adamw = optax.chain(
        optax.scale_by_rms(decay=c.b2, eps=_EPS, bias_correction=True),
        optax.add_decayed_weights(c.weight_decay, mask=spec.decayed),
        optax.scale_by_learning_rate(spec.learning_rate),
    )
    averaged = optax.contrib.schedule_free(adamw, spec.learning_rate, b1=c.b1)
    return optax.chain(*_gradient_stages(spec), averaged)


def _whitened(scale: Callable, spec: OptimizerSpec) -> optax.GradientTransformation:
    return _decoupled(spec, _for_matrices(spec, scale(spec.settings.b1, spec.settings.b2)))


def _lamb(spec: OptimizerSpec) -> optax.GradientTransformation:
    """LAMB: Adam's steps, decay included, each scaled to the norm of its parameter.

    Source: You et al., 2020, https://arxiv.org/abs/1904.00962, algorithm 2.

    As in NVIDIA's and timm's code, which trained DeiT III, what is not decayed takes the steps as
    they are: biases, norms, embeddings; and prototypes of adder layers.
    """
    trust = optax.masked(optax.scale_by_trust_ratio(), spec.decayed)
    return _decoupled(spec, _adam(spec), trust)


# Root mean square of Muon's steps per learning rate: about AdamW's, so that one rate serves both.
_MUON_RMS = 0.2


def _muon(spec: OptimizerSpec) -> optax.GradientTransformation:
    """Muon, its steps scaled to the size of Adam's.

    Sources: Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; for the
    scale Liu et al., 2025, https://arxiv.org/abs/2502.16982, section 2.2.
    """
    c = spec.settings
    # Of kernels with an axis of heads in front, as bilinear scores have, each head is a matrix.
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)

    # An orthogonal step has a root mean square of 1/√(longer side).
    def scale(update: Array, _: Any) -> Array:
        return _MUON_RMS * max(update.shape[-2:]) ** 0.5 * update

    muon = optax.chain(
        optax.contrib.scale_by_muon(
            beta=c.momentum,
            eps=_EPS,
            weight_dimension_numbers=functools.partial(jax.tree.map, lambda _: matrix),
        ),
        optax.stateless_with_tree_map(scale),
    )
    return _decoupled(spec, _for_matrices(spec, muon))


def _gradient_stages(spec: OptimizerSpec) -> list[optax.GradientTransformation]:
    c, stages = spec.settings, []
    if is_on(limit := c.clip_norm):
        clip = lambda g, _: g * (limit / jnp.maximum(limit, optax.tree.norm(g)))
        stages.append(
            optax.clip_by_global_norm(limit)
            if c.clip_scope == "all"
            else optax.stateless_with_tree_map(clip)
        )
    if is_on(c.adder_rate):
        prototypes = spec.mask(lambda facts: facts.role == "prototype")
        stages.append(optax.masked(scale_by_adder_rate(c.adder_rate), prototypes))
    return stages


def _second_order(make: Callable, spec: OptimizerSpec) -> CurvatureOptimizer:
    """K-FAC or CG-FAC for what inputs are multiplied with, AdamW for the rest, one decay for both.

    Steps of "rms" have the root mean square that the learning rate says; others follow the schedule
    relative to its peak. Clipping by norm is for AdamW's share alone: ``kl_clip`` bounds the other.
    """
    c, section = spec.settings, spec.settings.second_order
    if section is None:
        raise ValueError(f"expected settings of kfac or cg_fac, got those of {c.name!r}")
    options = dict(vars(section))
    rate, peak = options.pop("learning_rate"), 1.0 if section.step == "rms" else c.learning_rate
    interval = options.pop("curvature_interval", 1)
    layers, stride = spec.find_layers(options.pop("curvature_stride"), interval)
    # Norms and embeddings are AdamW's.
    facts = leaves_by_path(spec.facts)
    layers = layers.select(
        lambda block: any(facts[param.path].role != "other" for param in block.params)
    )
    try:
        transformation = make(
            lambda count: rate * spec.learning_rate(count) / peak,
            layers,
            **options,
            weight_decay=c.weight_decay,
            weight_decay_mask=spec.decayed,
            fallback=_adamw(spec),
            fallback_learning_rate=spec.learning_rate,
        )
    except (TypeError, ValueError) as error:
        raise RunError(f"config.optimizer.{c.name}: {error}") from error
    return CurvatureOptimizer(
        transformation.init, transformation.update, layers, section.fisher, interval, stride
    )


OPTIMIZERS: Registry[
    Callable[[OptimizerSpec], optax.GradientTransformation | CurvatureOptimizer]
] = Registry("config.optimizer.name", "adder_flax.training.register_optimizer")


def register_optimizer(name: str) -> Callable[[Callable], Callable]:
    """Makes ``--config.optimizer.name=<name>`` stand for what the decorated function builds.

    It is called inside of the compiled step, where the numbers of its settings are traced: what
    branches on them asks ``adder_flax.settings.is_on``. What it returns may take ``value``,
    ``grad`` and ``value_fn`` (the loss of the batch as a function of the parameters), as optax's
    line searches do.

    Example:
      >>> with OPTIMIZERS.temporary():
      ...
      ...     @register_optimizer("lion")
      ...     def lion(spec: OptimizerSpec) -> optax.GradientTransformation:
      ...         decay = spec.settings.weight_decay
      ...         return optax.lion(spec.learning_rate, weight_decay=decay, mask=spec.decayed)
    """
    return lambda build: OPTIMIZERS.register(name, build)


register_optimizer("adamw")(_adamw)
register_optimizer("cg_fac")(functools.partial(_second_order, kfac.cg_fac))
register_optimizer("kfac")(functools.partial(_second_order, kfac.kfac))
register_optimizer("kl_shampoo")(functools.partial(_whitened, scale_by_kl_shampoo))
register_optimizer("lamb")(_lamb)
# With a line search in place of schedule, clipping and decay.
register_optimizer("lbfgs")(lambda spec: optax.lbfgs())
register_optimizer("muon")(_muon)
register_optimizer("nadamw")(functools.partial(_adamw, nesterov=True))
register_optimizer("schedule_free_adamw")(_schedule_free_adamw)
register_optimizer("sgd")(lambda spec: _decoupled(spec, optax.trace(decay=spec.settings.momentum)))
register_optimizer("soap")(functools.partial(_whitened, scale_by_soap))


def learning_rate(
    settings: OptimizerSettings,
    step: Array | int,
    *,
    warmup_steps: float | Array,
    num_steps: float | Array,
) -> Float[Array, ""]:
    """What ``optax.warmup_cosine_decay_schedule`` computes, whose lengths cannot be traced.

    Steps are counted from 0, the first with the rate 0 if there is a warm-up, the last with one
    just above the final one. With the schedule ``"constant"`` the rate stays at its peak.
    """
    peak = settings.learning_rate
    end = peak if settings.schedule == "constant" else settings.final_learning_rate
    rising = peak * step / jnp.maximum(warmup_steps, 1)
    progress = jnp.clip((step - warmup_steps) / (num_steps - warmup_steps), 0, 1)
    falling = end + (peak - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return jnp.where(step < warmup_steps, rising, falling)


_FIRST = ("patch_embed", "stem", "cls_token", "dist_token", "reg_token", "pos_embed")
_LAST = ("norm", "fc_norm", "head", "head_dist")
_BLOCK = re.compile(r"blocks\.(\d+)")


def rate_factors(params: Any, settings: OptimizerSettings) -> Any:
    """Returns what the rate of each parameter is multiplied by, 0 where it is frozen.

    With ``layer_decay`` d and n blocks that of the head is 1, of block i (from 0) d^(n - i), of the
    norm behind them that of the last, of the embeddings d^(n + 1): the rule of BEiT (Bao et al.,
    2022, https://arxiv.org/abs/2106.08254), as timm's `param_groups_layer_decay` has it.

    >>> params = {"blocks": {"0": 1, "1": 1}, "head": 1, "patch_embed": 1}
    >>> rate_factors(params, OptimizerSettings(layer_decay=0.5, freeze="blocks.1"))
    {'blocks': {'0': 0.25, '1': 0.0}, 'head': 1.0, 'patch_embed': 0.125}
    """
    paths = [path.replace("/", ".") for path in leaves_by_path(params)]
    numbers = [int(block[1]) for path in paths if (block := _BLOCK.match(path))]
    if settings.layer_decay != 1 and not numbers:
        raise RunError(
            "expected a model with blocks for config.optimizer.layer_decay, got "
            f"{', '.join(paths[:3])} and more; set it to 1.0"
        )
    known = ("blocks", *_FIRST, *_LAST)
    if settings.layer_decay != 1 and (odd := {path.split(".")[0] for path in paths} - {*known}):
        raise RunError(
            f"expected a model made of {', '.join(known)} for config.optimizer.layer_decay, got "
            f"{', '.join(sorted(odd))}, whose depth that does not say; set it to 1.0"
        )
    frozen = [name.strip() for name in settings.freeze.split(",") if name.strip()]
    for name in frozen:
        if not any(_is_in(path, name) for path in paths):
            raise RunError(
                f"expected config.optimizer.freeze to name parameters, got {name}, which is none "
                f"of {', '.join(dict.fromkeys(path.split('.')[0] for path in paths))} and what is "
                "in them; correct it"
            )
    last = max(numbers, default=0) + 2

    def factor(path: Any, _: Any) -> float:
        name = tree_path(path).replace("/", ".")
        if any(_is_in(name, other) for other in frozen):
            return 0.0
        if block := _BLOCK.match(name):
            layer = int(block[1]) + 1
        else:
            layer = 0 if name.split(".")[0] in _FIRST else last - _is_in(name, "norm")
        return float(settings.layer_decay) ** (last - layer)

    return jax.tree_util.tree_map_with_path(factor, params)


def with_rate_factors(optimizer: Any, params: Any, settings: OptimizerSettings) -> Any:
    """An optimizer whose steps are multiplied by `rate_factors`; what is frozen has no gradient."""
    if settings.layer_decay == 1 and not settings.freeze:
        return optimizer
    factors = rate_factors(params, settings)

    def update(gradients: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        kept = lambda gradient, factor: gradient if factor else jnp.zeros_like(gradient)
        gradients = jax.tree.map(kept, gradients, factors)
        updates, state = optimizer.update(gradients, state, params, **more)
        return jax.tree.map(jnp.multiply, updates, factors), state

    return optimizer._replace(update=update)


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")
