"""The optax transformations, for the parameters that layers cover."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from kfac._trees import all_finite, all_fit, flatten
from kfac.curvature._blocks import Block
from kfac.curvature._coverage import LEFT_OUT, Layers
from kfac.curvature._gather import Curvature
from kfac.solve import _systems as systems
from kfac.solve._problem import Problem, Step, pose, solve
from kfac.solve._solvers import Solution
from kfac.solve._systems import Form
from kfac.step import _length as length
from kfac.step._options import CgFacOptions, KfacOptions, Options, is_zero
from kfac.step._state import Averages, State, Stats, init_state

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree

    from kfac._trees import Flat


def scale_by_kfac(
    layers: Layers, options: KfacOptions | None = None
) -> optax.GradientTransformationExtraArgs:
    """Replaces the gradient ∇L of every layer by −Δ, Δ the step of ``kfac``.

    It is to be followed by ``optax.scale(-1)`` or ``optax.scale_by_learning_rate``, and takes
    covered parameters alone: ``layers.labels`` says to ``optax.partition`` which these are.

    Args:
      layers: from ``find_layers``, all or those that ``Layers.select`` keeps.
      options: ``KfacOptions()`` by default.

    Returns:
      A transformation whose ``update`` takes ``(grads, state, params, *, curvature, sound=None)``.
      Averages change where ``sound`` is true, by default where the gradient is finite: a caller who
      refuses steps for other reasons too need not choose between all of the old state and the new.

    Raises:
      ValueError: no layer has a block; in ``init``, parameters without a layer, or layers of which
        only a part is here; in ``update``, missing or foreign curvature.

    >>> import jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((3, 2))}, "scale": jnp.ones(())}
    >>> loss_fn = lambda p, x: (p["scale"] * kfac.tap(kfac.Dense(), p["fc"], x, path="fc")).mean()
    >>> layers = kfac.find_layers(loss_fn, params, jnp.ones((4, 3)))
    >>> scale = kfac.scale_by_kfac(layers, kfac.KfacOptions(step="clip"))
    >>> second_order = optax.chain(scale, optax.scale_by_learning_rate(0.5))
    >>> parts = {"covered": second_order, "fallback": optax.sgd(0.1)}
    >>> optimizer = optax.partition(parts, layers.labels)
    >>> function = kfac.value_grad_and_curvature(loss_fn, fisher="empirical")
    >>> _, grads, curvature = function(params, jnp.ones((4, 3)))
    >>> updates, _ = optimizer.update(grads, optimizer.init(params), params, curvature=curvature)
    >>> bool((updates["fc"]["kernel"] < 0).all())
    True
    """
    return scale_by(layers, options or KfacOptions())


def scale_by_cg_fac(
    layers: Layers, options: CgFacOptions | None = None
) -> optax.GradientTransformationExtraArgs:
    """``scale_by_kfac`` for ``cg_fac``, with ``CgFacOptions()`` by default."""
    return scale_by(layers, options or CgFacOptions())


def scale_by(layers: Layers, options: Options) -> optax.GradientTransformationExtraArgs:
    if not layers.blocks and LEFT_OUT not in layers.reasons.values():
        raise ValueError(
            "expected layers with curvature, got none "
            f"({layers.uncovered() or 'no parameters'}); mark layers of plain functions with "
            "kfac.tap, register modules with kfac.register_layer."
        )

    def init(params: PyTree[Array]) -> State:
        return init_state(params, _owned(params, flatten(params), layers), options)

    def update(
        grads: PyTree[Array],
        state: State,
        params: PyTree[Array] | None = None,
        *,
        curvature: Curvature | None = None,
        sound: Bool[Array, ""] | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree[Array], State]:
        flat = flatten(grads)
        owned = _owned(grads, flat, layers)
        if not owned:  # all of its parameters are masked
            return grads, state._replace(count=state.count + 1)
        curvature = _checked(layers, options, params, curvature)
        owned = {name: curvature.layers.blocks[name] for name in owned}
        # Steps that renew nothing read some arrays, too.
        forms = options.forms(owned)
        jacobians = {u.name for n, b in owned.items() for u in b.uses if forms[n] != "factors"}
        if jacobians or options.measures_coherence:
            curvature = curvature.at_every_step(jacobians)
        if sound is None:
            sound = all_finite(flat.values())
        step = Step(owned, flatten(params), state, curvature, sound, options)
        return _take(step, grads, flat)

    return optax.GradientTransformationExtraArgs(init, update)


def _owned(tree: PyTree[Array], flat: Flat, layers: Layers) -> dict[str, Block]:
    """The blocks whose parameters a tree holds, which must be all that it holds."""
    whole = layers.whole_blocks(tree)
    covered = {param.path for block in whole.values() for param in block.params}
    if others := [path for path in flat if path not in covered]:
        raise ValueError(
            f"expected parameters that layers cover, got {', '.join(others[:4])} among them; give "
            "these to another optimizer by optax.partition(…, layers.labels), as kfac.kfac and "
            "kfac.cg_fac do."
        )
    return whole


def _checked(layers: Layers, options: Options, params: Any, curvature: Any) -> Curvature:
    """The curvature; raises ValueError unless ``update`` got what these options need."""
    if curvature is None or params is None:
        raise ValueError(
            "expected update(grads, state, params, curvature=…), got none; compute the gradient "
            "with kfac.value_grad_and_curvature and pass its third result on."
        )
    if options.fisher is not None and curvature.fisher != options.fisher:
        raise ValueError(
            f"expected curvature of fisher={options.fisher!r}, got {curvature.fisher!r}; pass the "
            "same name to the optimizer and to value_grad_and_curvature."
        )
    if missing := sorted(layers.blocks.keys() - curvature.layers.blocks.keys()):
        raise ValueError(
            "expected curvature of the layers that the optimizer was made with, got none of "
            f"{', '.join(missing[:4])}; call kfac.find_layers with the loss function that is "
            "differentiated."
        )
    if curvature.axis_name is not None and options.solver == "dual":
        raise ValueError(
            f"solver={options.solver!r} needs the gradients of all examples at one place: expected "
            f"curvature of a whole batch, got axis_name={curvature.axis_name!r}; use solver='cg'."
        )
    if curvature.fresh is not None and options.exact:
        raise ValueError(
            "cg_fac averages no curvature over steps: expected fresh curvature at every step, got "
            "refresh=; use kfac or drop refresh."
        )
    return curvature


def _take(step: Step, grads: PyTree[Array], flat: Flat) -> tuple[PyTree[Array], State]:
    """The updates and the state after them, for a gradient and its arrays by path."""
    state, options = step.state, step.options
    sums, aims = _with_momentum(grads, flat, state, options)
    problem = pose(step, aims)
    warm = step.to_vectors(flatten(state.solution)) if options.exact else None
    solved = solve(problem, warm, options)
    problem = _with_coherence(step, problem, solved)
    proposal = _propose(step, problem, solved)
    delta = step.from_vectors(proposal.delta, flat)
    finite = length.is_finite(solved, proposal, delta)
    like_grads = lambda new: jax.tree.unflatten(jax.tree.structure(grads), [new[p] for p in flat])
    updates = like_grads({p: jnp.where(finite, -d, 0) for p, d in delta.items()})
    # Momentum goes on from nothing after a step that was refused.
    velocity = like_grads(delta) if sums is None else sums
    solution = state.solution
    if options.exact:  # where the next solve starts, if the gradient's dtype can hold it
        x = step.from_vectors({name: s.x for name, s in solved.items()}, flat)
        kept = finite & all_fit(x.values())
        solution = like_grads({path: jnp.where(kept, new, 0) for path, new in x.items()})
    return updates, State(
        count=state.count + 1,
        averages=problem.averages,
        velocity=jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), velocity),
        solution=solution,
        stats=_stats(problem, solved, proposal, finite, state.stats),
    )


def _with_momentum(
    grads: PyTree[Array], flat: Flat, state: State, options: Options
) -> tuple[PyTree[Array] | None, Flat]:
    """The sum of gradients that is kept, if any, and what systems are solved for.

    Nesterov's look ahead, as Muon has it: gₜ + μ vₜ with vₜ = μ vₜ₋₁ + gₜ.
    """
    if options.step != "rms" or is_zero(options.momentum):
        return None, flat

    def followed(old: Array, grad: Array) -> Array:
        return (grad + options.momentum * old).astype(old.dtype)

    sums = jax.tree.map(followed, state.velocity, grads)
    return sums, flatten(jax.tree.map(followed, sums, grads))


def _propose(step: Step, problem: Problem, solved: dict[str, Solution]) -> length.Proposal:
    state, options = step.state, step.options
    rate = options.learning_rate
    rate = jnp.asarray(rate(state.count) if callable(rate) else rate, problem.damping.dtype)
    if options.step == "rms":
        return length.normalized_step(solved, length.unit_norms(step.owned), rate=rate)
    moving = {"rate": rate, "momentum": options.momentum}
    moving["velocity"] = step.to_vectors(flatten(state.velocity))
    if options.step == "share":
        return length.normalized_step(solved, length.weight_norms(problem.groups), **moving)
    if not options.measures_coherence:
        return length.clipped_step(solved, problem.gamma, **moving, kl_clip=None)
    clip = {"kl_clip": options.kl_clip, "coherence": _coherence(problem.averages)}
    return length.clipped_step(solved, problem.gamma, **moving, **clip)


def _with_coherence(step: Step, problem: Problem, solved: dict[str, Solution]) -> Problem:
    """The problem with the average that a clip takes, today's included."""
    if not step.options.measures_coherence:
        return problem
    averages, curvature = problem.averages, step.curvature
    decay = jnp.asarray(step.options.factor_decay, averages.coherence.dtype)
    # Outside of the branch, where it is the same expression as in `clipped_step`: computed once.
    layers = length.quadratic_forms(solved, problem.gamma)[2]

    def measure() -> Array:
        x = {name: solution.x for name, solution in solved.items()}
        # Exact whatever the solve took: F of all layers together is what no factors give.
        exact: dict[str, Form] = dict.fromkeys(step.owned, "exact")
        groups = systems.build(curvature, step.params, exact)
        network = length.network_fisher(groups, curvature.num_examples, x)
        # A gradient of zeros has no direction to measure along, and where F is nothing beside γ
        # rounding may leave no positive sum: what is known so far stands then.
        positive = (network > 0) & (layers > 0)
        known = jnp.where(step.state.averages.weight > 0, _coherence(step.state.averages), 1)
        ratio = jnp.where(positive, network / jnp.where(positive, layers, 1), known)
        average = decay * averages.coherence + (1 - decay) * ratio.astype(decay.dtype)
        return jnp.where(step.sound, average, averages.coherence)

    if curvature.fresh is None:
        coherence = measure()
    else:  # not jnp.where: between two curvature batches the cotangents are zeros
        coherence = jax.lax.cond(curvature.fresh, measure, lambda: averages.coherence)
    return problem._replace(averages=averages._replace(coherence=coherence))


def _coherence(averages: Averages) -> Array:
    """What the sum of xᵀF x over the layers is to be multiplied by for that of the network."""
    return averages.coherence / jnp.maximum(averages.weight, jnp.finfo(averages.weight.dtype).tiny)


def _stats(
    problem: Problem, solved: dict, proposal: length.Proposal, finite: Array, old: Stats
) -> Stats:
    # A state whose dtypes change from step to step is compiled twice.
    def scalar(a: Array) -> Array:
        return jnp.asarray(a, problem.damping.dtype)

    def means(name: str, blocks: tuple[str, ...]) -> Array:
        return jnp.stack([scalar(getattr(solved[block], name)).mean() for block in blocks])

    return dataclasses.replace(
        old,
        damping=problem.damping,
        step=scalar(proposal.coefficients[0]),
        momentum=scalar(proposal.coefficients[1]),
        kl_scale=scalar(proposal.kl_scale),
        coherence=scalar(proposal.coherence),
        model=scalar(proposal.model),
        rejected=scalar(~finite),
        iterations=means("iterations", old.blocks),
        residual=means("residual", old.measured) if old.measured else None,
    )
