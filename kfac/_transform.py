"""CG-FAC as one optax transformation, for the parameters that layers cover."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from kfac import _systems as systems
from kfac._blocks import Block
from kfac._coverage import Layers
from kfac._curvature import Curvature
from kfac._options import Options, is_zero
from kfac._problem import Problem, from_vectors, pose, solve, to_vectors
from kfac._sharing import mean_over
from kfac._solver import Solution
from kfac._state import Averages, CGFacState, init_state
from kfac._stats import Stats
from kfac._step import (
    Proposal,
    Verdict,
    fisher_of,
    fixed_step,
    is_finite,
    judge,
    normalized_step,
    quadratic_forms,
    quadratic_step,
    unit_norms,
    weight_norms,
)
from kfac._systems import Form
from kfac._trees import add, all_finite, all_fit, flatten, unflatten

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree

    from kfac._trees import Flat


def scale_by_cg_fac(
    layers: Layers, options: Options | None = None
) -> optax.GradientTransformationExtraArgs:
    """Replaces the gradient ∇L of every layer by −Δ, Δ the step of CG-FAC.

    Δ points along −x, where x solves (F̂ + γI) x = ∇L, and has the length that the options say.

    As optax's other ``scale_by_…``, it is to be followed by ``optax.scale(-1)`` or
    ``optax.scale_by_learning_rate``, and takes covered parameters alone: ``layers.labels`` says to
    ``optax.partition`` which these are, and ``cg_fac`` is that composition ready-made.

    Args:
      layers: from ``find_layers``, all or those that ``Layers.select`` keeps.
      options: settings; ``Options()`` by default.

    Returns:
      A transformation whose ``update`` takes ``(grads, state, params, *, curvature, value=None,
      value_fn=None, sound=None)``; ``value_fn`` is called with parameters as ``update`` sees them.
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
    {'fc': {'kernel': 'cg_fac'}, 'scale': 'fallback'}
    >>> second_order = optax.chain(
    ...     kfac.scale_by_cg_fac(layers, kfac.Options(damping=0.1)),
    ...     optax.scale_by_learning_rate(0.5),
    ... )
    >>> optimizer = optax.partition(
    ...     {"cg_fac": second_order, "fallback": optax.sgd(0.1)}, layers.labels
    ... )
    >>> (_, grads, curvature) = kfac.value_grad_and_curvature(loss_fn, fisher="empirical")(
    ...     params, jnp.ones((4, 3))
    ... )
    >>> updates, _ = optimizer.update(grads, optimizer.init(params), params, curvature=curvature)
    >>> bool((updates["fc"]["kernel"] < 0).all())
    True
    """
    options = Options() if options is None else options
    if not layers.blocks:
        left = "; ".join(f"{path}: {why}" for path, why in layers.uncovered(3).items())
        raise ValueError(
            f"expected layers with curvature, got none ({left or 'no parameters'}); mark layers of "
            "plain functions with kfac.tap, register modules with kfac.register_layer."
        )

    def init(params: PyTree[Array]) -> CGFacState:
        return init_state(params, _owned(params, layers), options)

    def update(
        grads: PyTree[Array],
        state: CGFacState,
        params: PyTree[Array] | None = None,
        *,
        curvature: Curvature | None = None,
        value: Array | None = None,
        value_fn: Callable[[PyTree[Array]], Array] | None = None,
        sound: Bool[Array, ""] | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree[Array], CGFacState]:
        del extra_args
        names = _owned(grads, layers)
        if not names:  # all of its parameters are masked
            return grads, state._replace(count=state.count + 1)
        curvature = _checked(layers, options, params, curvature, value, value_fn)
        owned = {name: curvature.layers.blocks[name] for name in names}
        curvature = _at_hand(curvature, owned, options)

        def change(delta: Flat) -> Array:  # whose arguments `_checked` looked for
            new = value_fn(add(params, delta))  # pyright: ignore[reportOptionalCall]
            return mean_over(curvature.axis_name, new) - value  # pyright: ignore[reportOperatorIssue]

        if sound is None:
            sound = all_finite(jax.tree.leaves(grads))
        return _step(owned, grads, state, params, curvature, sound, change, options)

    return optax.GradientTransformationExtraArgs(init, update)


def _at_hand(curvature: Curvature, owned: dict[str, Block], options: Options) -> Curvature:
    """The curvature with the arrays that steps which renew nothing read, too."""
    jacobians = {
        use.name
        for block in owned.values()
        for use in block.uses
        if options.form(block).name != "factors"
    }
    if jacobians or options.measures_coherence:
        return curvature.at_every_step(jacobians)
    return curvature


def _step(
    owned: dict[str, Block],
    grads: PyTree[Array],
    state: CGFacState,
    params: PyTree[Array],
    curvature: Curvature,
    sound: Bool[Array, ""],
    change: Callable[[Flat], Array],
    options: Options,
) -> tuple[PyTree[Array], CGFacState]:
    """The updates and the state after them; ``change`` tells what a step does to the loss."""
    sums, aims = _with_momentum(grads, state, options)
    problem = pose(owned, aims, state, params, curvature, sound, options)
    warm = to_vectors(owned, state.solution) if options.warm_start else None
    solved = solve(problem, warm, options)
    problem = _with_coherence(problem, solved, state, params, curvature, sound, options)
    proposal = _propose(problem, solved, state, params, curvature, options)
    delta = from_vectors(owned, proposal.delta, flatten(grads))
    finite = is_finite(solved, proposal, delta)
    measured = functools.partial(change, delta) if options.measures_loss else None
    verdict = _judge(finite, proposal, problem, state, measured, options)
    updates = unflatten({p: jnp.where(verdict.accept, -d, 0) for p, d in delta.items()}, grads)
    return updates, CGFacState(
        count=state.count + 1,
        damping_factor=state.damping_factor * verdict.growth,
        averages=problem.averages,
        velocity=_velocity(verdict, unflatten(delta, grads) if sums is None else sums),
        solution=_solution(owned, solved, finite, grads) if options.warm_start else state.solution,
        stats=_stats(problem, solved, proposal, verdict, state.stats),
    )


def _with_momentum(
    grads: PyTree[Array], state: CGFacState, options: Options
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


def _velocity(verdict: Verdict, new: PyTree[Array]) -> PyTree[Array]:
    """What momentum goes on from: nothing after a step that was refused."""
    return jax.tree.map(lambda leaf: jnp.where(verdict.accept, leaf, 0), new)


def _owned(tree: PyTree[Array], layers: Layers) -> dict[str, Block]:
    """The blocks whose parameters a tree holds, which must be all that it holds."""
    whole = layers.whole_blocks(tree)
    covered = {param.path for block in whole.values() for param in block.params}
    others = [path for path in flatten(tree) if path not in covered]
    if others:
        raise ValueError(
            f"scale_by_cg_fac expects parameters that layers cover, got {', '.join(others[:4])} "
            "among them; give the others to another optimizer by optax.partition(…, "
            "layers.labels), as kfac.cg_fac does."
        )
    return whole


def _checked(
    layers: Layers,
    options: Options,
    params: Any,
    curvature: Curvature | None,
    value: Any,
    value_fn: Any,
) -> Curvature:
    """The curvature; raises ValueError unless ``update`` got what these options need."""
    if curvature is None or params is None:
        raise ValueError(
            "cg_fac expects update(grads, state, params, curvature=…), got none; compute the "
            "gradient with kfac.value_grad_and_curvature and pass its third result on."
        )
    if options.fisher is not None and curvature.fisher != options.fisher:
        raise ValueError(
            f"expected curvature of fisher={options.fisher!r}, got {curvature.fisher!r}; pass the "
            "same name to cg_fac and value_grad_and_curvature."
        )
    missing = sorted(set(layers.blocks) - set(curvature.layers.blocks))
    if missing:
        raise ValueError(
            "expected curvature of the layers that cg_fac was made with, got none of "
            f"{', '.join(missing[:4])}; call kfac.find_layers with the loss function that is "
            "differentiated."
        )
    if curvature.axis_name is not None and options.solver in ("dual", "auto"):
        raise ValueError(
            f"solver={options.solver!r} needs the gradients of all examples at one place: expected "
            f"curvature of a whole batch, got axis_name={curvature.axis_name!r}; use solver='cg'."
        )
    if curvature.fresh is not None and options.curvature != "kron":
        raise ValueError(
            f"curvature={options.curvature!r} is not averaged over steps: expected fresh curvature "
            "at every step, got refresh=; use curvature='kron' or drop refresh."
        )
    if curvature.fresh is not None and options.step == "quadratic":
        raise ValueError(
            "step='quadratic' measures the curvature along each step: expected fresh curvature at "
            "every step, got refresh=; use another step, or drop refresh."
        )
    if options.measures_loss and (value is None or value_fn is None):
        raise ValueError(
            "reject and damping_interval compare losses: expected update(…, value=loss, "
            "value_fn=params → loss on the same batch), got none; pass them, or set reject=False "
            "and damping_interval=0."
        )
    return curvature


def _propose(
    problem: Problem,
    solved: dict[str, Solution],
    state: CGFacState,
    params: PyTree[Array],
    curvature: Curvature,
    options: Options,
) -> Proposal:
    """The step that the options name."""
    rate = options.learning_rate
    rate = jnp.asarray(rate(state.count) if callable(rate) else rate, problem.damping.dtype)
    if options.step == "rms":
        return normalized_step(solved, unit_norms(problem.b), rate=rate)
    velocity = to_vectors(problem.owned, state.velocity)
    if options.step == "fixed":
        return fixed_step(
            solved,
            problem.gamma,
            velocity,
            rate=rate,
            momentum=options.momentum,
            kl_clip=options.kl_clip,
            coherence=_coherence(problem.averages, options),
        )
    if options.step == "trust_ratio":
        norms = weight_norms(problem.groups)
        return normalized_step(
            solved, norms, rate=rate, velocity=velocity, momentum=options.momentum
        )
    return quadratic_step(
        solved,
        problem.b,
        problem.gamma,
        velocity,
        groups=_exact_systems(problem, params, curvature),
        num_examples=curvature.num_examples,
        rate=rate,
        kl_clip=options.kl_clip,
    )


def _exact_systems(
    problem: Problem, params: PyTree[Array], curvature: Curvature
) -> list[systems.System]:
    """Exact whatever the solve took: F of all layers together is what no factors give."""
    return systems.build(
        curvature, flatten(params), {name: Form("exact") for name in problem.owned}
    )


def _with_coherence(
    problem: Problem,
    solved: dict[str, Solution],
    state: CGFacState,
    params: PyTree[Array],
    curvature: Curvature,
    sound: Bool[Array, ""],
    options: Options,
) -> Problem:
    """The problem with the average that ``kl_scope="network"`` takes, today's included."""
    if not options.measures_coherence:
        return problem
    averages = problem.averages
    decay = jnp.asarray(options.factor_decay, averages.coherence.dtype)
    # Outside of the branch, where it is the same expression as in `fixed_step`: computed once.
    layers = quadratic_forms(solved, problem.gamma).fisher

    def measure() -> Array:
        x = {name: solution.x for name, solution in solved.items()}
        groups = _exact_systems(problem, params, curvature)
        network = fisher_of(groups, curvature.num_examples, x)[0, 0]
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


def _judge(
    finite: Bool[Array, ""],
    proposal: Proposal,
    problem: Problem,
    state: CGFacState,
    change: Callable[[], Array] | None,
    options: Options,
) -> Verdict:
    """Whether the step is taken, and what becomes of the damping."""
    return judge(
        finite,
        proposal.model,
        problem.damping,
        state.count,
        change=change,
        interval=options.damping_interval,
        reject=options.reject,
        min_damping=options.min_damping,
    )


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
    verdict: Verdict,
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
        ratio=jnp.where(jnp.isnan(verdict.ratio), old.ratio, scalar(verdict.ratio)),
        rejected=scalar(~verdict.accept),
        iterations=means("iterations", old.blocks),
        residual=means("residual", old.measured) if old.measured else None,
        blocks=old.blocks,
        measured=old.measured,
    )
