"""The optax transformations, for the parameters that layers cover."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from kfac._trees import all_finite, all_fit, flatten, unflatten
from kfac.curvature._blocks import Block
from kfac.curvature._coverage import LEFT_OUT, Layers
from kfac.curvature._gather import Curvature
from kfac.solve import _systems as systems
from kfac.solve._problem import Problem, from_vectors, pose, solve, to_vectors
from kfac.solve._solvers import Solution
from kfac.solve._systems import Form
from kfac.step._length import (
    Proposal,
    clipped_step,
    is_finite,
    network_fisher,
    normalized_step,
    quadratic_forms,
    unit_norms,
    weight_norms,
)
from kfac.step._options import CgFacOptions, KfacOptions, Options, is_zero
from kfac.step._state import Averages, State, Stats, init_state

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree


def scale_by_kfac(
    layers: Layers, options: KfacOptions | None = None
) -> optax.GradientTransformationExtraArgs:
    """Replaces the gradient ∇L of every layer by −Δ, Δ the step of ``kfac``.

    As optax's other ``scale_by_…``, it is to be followed by ``optax.scale(-1)`` or
    ``optax.scale_by_learning_rate``, and takes covered parameters alone: ``layers.labels`` says to
    ``optax.partition`` which these are, and ``kfac.kfac`` is that composition ready-made.

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
    >>> layers.labels(params)
    {'fc': {'kernel': 'covered'}, 'scale': 'fallback'}
    >>> second_order = optax.chain(
    ...     kfac.scale_by_kfac(layers, kfac.KfacOptions(step="clip")),
    ...     optax.scale_by_learning_rate(0.5),
    ... )
    >>> optimizer = optax.partition(
    ...     {"covered": second_order, "fallback": optax.sgd(0.1)}, layers.labels
    ... )
    >>> (_, grads, curvature) = kfac.value_grad_and_curvature(loss_fn, fisher="empirical")(
    ...     params, jnp.ones((4, 3))
    ... )
    >>> updates, _ = optimizer.update(grads, optimizer.init(params), params, curvature=curvature)
    >>> bool((updates["fc"]["kernel"] < 0).all())
    True
    """
    return scale_by(layers, KfacOptions() if options is None else options)


def scale_by_cg_fac(
    layers: Layers, options: CgFacOptions | None = None
) -> optax.GradientTransformationExtraArgs:
    """``scale_by_kfac`` for ``cg_fac``, with ``CgFacOptions()`` by default."""
    return scale_by(layers, CgFacOptions() if options is None else options)


def scale_by(layers: Layers, options: Options) -> optax.GradientTransformationExtraArgs:
    """What both are."""
    if not layers.blocks and LEFT_OUT not in layers.reasons.values():
        left = "; ".join(f"{path}: {why}" for path, why in layers.uncovered(3).items())
        raise ValueError(
            f"expected layers with curvature, got none ({left or 'no parameters'}); mark layers of "
            "plain functions with kfac.tap, register modules with kfac.register_layer."
        )

    def init(params: PyTree[Array]) -> State:
        return init_state(params, _owned(params, layers), options)

    def update(
        grads: PyTree[Array],
        state: State,
        params: PyTree[Array] | None = None,
        *,
        curvature: Curvature | None = None,
        sound: Bool[Array, ""] | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree[Array], State]:
        del extra_args
        names = _owned(grads, layers)
        if not names:  # all of its parameters are masked
            return grads, state._replace(count=state.count + 1)
        curvature = _checked(layers, options, params, curvature)
        owned = {name: curvature.layers.blocks[name] for name in names}
        curvature = _at_hand(curvature, owned, options)
        if sound is None:
            sound = all_finite(jax.tree.leaves(grads))
        return _step(owned, grads, state, params, curvature, sound, options)

    return optax.GradientTransformationExtraArgs(init, update)


def _at_hand(curvature: Curvature, owned: dict[str, Block], options: Options) -> Curvature:
    """The curvature with the arrays that steps which renew nothing read, too."""
    forms = options.forms(owned)
    jacobians = {
        use.name for n, block in owned.items() for use in block.uses if forms[n] != "factors"
    }
    if jacobians or options.measures_coherence:
        return curvature.at_every_step(jacobians)
    return curvature


def _step(
    owned: dict[str, Block],
    grads: PyTree[Array],
    state: State,
    params: PyTree[Array],
    curvature: Curvature,
    sound: Bool[Array, ""],
    options: Options,
) -> tuple[PyTree[Array], State]:
    """The updates and the state after them."""
    sums, aims = _with_momentum(grads, state, options)
    problem = pose(owned, aims, state, params, curvature, sound, options)
    warm = to_vectors(owned, state.solution) if options.exact else None
    solved = solve(problem, warm, options)
    problem = _with_coherence(problem, solved, state, params, curvature, sound, options)
    proposal = _propose(problem, solved, state, options)
    delta = from_vectors(owned, proposal.delta, flatten(grads))
    finite = is_finite(solved, proposal, delta)
    updates = unflatten({p: jnp.where(finite, -d, 0) for p, d in delta.items()}, grads)
    # Momentum goes on from nothing after a step that was refused.
    velocity = unflatten(delta, grads) if sums is None else sums
    return updates, State(
        count=state.count + 1,
        averages=problem.averages,
        velocity=jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), velocity),
        solution=_solution(owned, solved, finite, grads) if options.exact else state.solution,
        stats=_stats(problem, solved, proposal, finite, state.stats),
    )


def _with_momentum(
    grads: PyTree[Array], state: State, options: Options
) -> tuple[PyTree[Array] | None, PyTree[Array]]:
    """The sum of gradients that is kept, if any, and what systems are solved for.

    Nesterov's look ahead, as Muon has it: gₜ + μ vₜ with vₜ = μ vₜ₋₁ + gₜ.
    """
    if options.step != "rms" or is_zero(options.momentum):
        return None, grads

    def followed(old: Array, grad: Array) -> Array:
        return (grad + options.momentum * old).astype(old.dtype)

    sums = jax.tree.map(followed, state.velocity, grads)
    return sums, jax.tree.map(followed, sums, grads)


def _owned(tree: PyTree[Array], layers: Layers) -> dict[str, Block]:
    """The blocks whose parameters a tree holds, which must be all that it holds."""
    whole = layers.whole_blocks(tree)
    covered = {param.path for block in whole.values() for param in block.params}
    others = [path for path in flatten(tree) if path not in covered]
    if others:
        raise ValueError(
            f"expected parameters that layers cover, got {', '.join(others[:4])} among them; give "
            "these to another optimizer by optax.partition(…, layers.labels), as kfac.kfac and "
            "kfac.cg_fac do."
        )
    return whole


def _checked(
    layers: Layers, options: Options, params: Any, curvature: Curvature | None
) -> Curvature:
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
    missing = sorted(set(layers.blocks) - set(curvature.layers.blocks))
    if missing:
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


def _propose(
    problem: Problem, solved: dict[str, Solution], state: State, options: Options
) -> Proposal:
    """The step that the options name."""
    rate = options.learning_rate
    rate = jnp.asarray(rate(state.count) if callable(rate) else rate, problem.damping.dtype)
    if options.step == "rms":
        return normalized_step(solved, unit_norms(problem.b), rate=rate)
    velocity = to_vectors(problem.owned, state.velocity)
    if options.step == "clip":
        return clipped_step(
            solved,
            problem.gamma,
            velocity,
            rate=rate,
            momentum=options.momentum,
            kl_clip=options.kl_clip,
            coherence=_coherence(problem.averages, options),
        )
    norms = weight_norms(problem.groups)
    return normalized_step(solved, norms, rate=rate, velocity=velocity, momentum=options.momentum)


def _with_coherence(
    problem: Problem,
    solved: dict[str, Solution],
    state: State,
    params: PyTree[Array],
    curvature: Curvature,
    sound: Bool[Array, ""],
    options: Options,
) -> Problem:
    """The problem with the average that a clip takes, today's included."""
    if not options.measures_coherence:
        return problem
    averages = problem.averages
    decay = jnp.asarray(options.factor_decay, averages.coherence.dtype)
    # Outside of the branch, where it is the same expression as in `clipped_step`: computed once.
    layers = quadratic_forms(solved, problem.gamma).fisher

    def measure() -> Array:
        x = {name: solution.x for name, solution in solved.items()}
        # Exact whatever the solve took: F of all layers together is what no factors give.
        exact: dict[str, Form] = dict.fromkeys(problem.owned, "exact")
        groups = systems.build(curvature, flatten(params), exact)
        network = network_fisher(groups, curvature.num_examples, x)
        # A gradient of zeros has no direction to measure along, and where F is nothing beside γ
        # rounding may leave no positive sum: what is known so far stands then.
        positive = (network > 0) & (layers > 0)
        known = jnp.where(state.averages.weight > 0, _coherence(state.averages, options), 1)
        ratio = jnp.where(positive, network / jnp.where(positive, layers, 1), known)
        average = decay * averages.coherence + (1 - decay) * ratio.astype(decay.dtype)
        return jnp.where(sound, average, averages.coherence)

    # Not jnp.where: between two curvature batches the cotangents are zeros.
    coherence = (
        measure()
        if curvature.fresh is None
        else jax.lax.cond(curvature.fresh, measure, lambda: averages.coherence)
    )
    return problem._replace(averages=averages._replace(coherence=coherence))


def _coherence(averages: Averages, options: Options) -> float | Array:
    """What the sum of xᵀF x over the layers is to be multiplied by for that of the network."""
    if not options.measures_coherence:
        return 1.0
    return averages.coherence / jnp.maximum(averages.weight, jnp.finfo(averages.weight.dtype).tiny)


def _solution(
    owned: dict[str, Block],
    solved: dict[str, Solution],
    finite: Bool[Array, ""],
    grads: PyTree[Array],
) -> PyTree[Array]:
    """Where the next solve starts: the solutions, like the gradient.

    Zero after a step that is not finite, and where the gradient's dtype cannot hold them.
    """
    x = from_vectors(owned, {name: solution.x for name, solution in solved.items()}, flatten(grads))
    kept = finite & all_fit(x.values())
    return unflatten({path: jnp.where(kept, new, 0) for path, new in x.items()}, grads)


def _stats(
    problem: Problem,
    solved: dict[str, Solution],
    proposal: Proposal,
    finite: Bool[Array, ""],
    old: Stats,
) -> Stats:

    # A state whose dtypes change from step to step is compiled twice.
    def scalar(a: Array) -> Array:
        return jnp.asarray(a, problem.damping.dtype)

    def means(name: str, blocks: tuple[str, ...]) -> Array:
        return jnp.stack([scalar(getattr(solved[block], name)).mean() for block in blocks])

    return Stats(
        damping=problem.damping,
        step=scalar(proposal.coefficients[0]),
        momentum=scalar(proposal.coefficients[1]),
        kl_scale=scalar(proposal.kl_scale),
        coherence=scalar(proposal.coherence),
        model=scalar(proposal.model),
        rejected=scalar(~finite),
        iterations=means("iterations", old.blocks),
        residual=means("residual", old.measured) if old.measured else None,
        blocks=old.blocks,
        measured=old.measured,
        optimizer=old.optimizer,
    )
