"""The transformation of the parameters that layers cover: solve, measure, judge."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kfac._arrays import all_finite, all_fit, concatenated, flatten, mean_over
from kfac.curvature._blocks import Block
from kfac.curvature._coverage import LEFT_OUT, Layers
from kfac.curvature._gather import Curvature
from kfac.solve import _systems as systems
from kfac.solve._problem import Problem, Step, pose, solve
from kfac.solve._solvers import Solution, beside
from kfac.solve._systems import Form, System
from kfac.step._state import Averages, Options, State, Stats, init_state, is_zero

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, PyTree

    from kfac._arrays import Flat
    from kfac.solve._problem import Vectors

    Solved = dict[str, Solution]  # by block

# Root mean square that parameters are taken for at least: what starts at zero must leave it.
_LEAST_WEIGHT = 1e-2


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
    state, options = step.state, step.options
    sums, aims = _with_momentum(grads, flat, state, options)
    problem = pose(step, aims)
    warm = step.to_vectors(flatten(state.solution)) if options.exact else None
    solved = solve(problem, warm, options)
    problem = _with_coherence(step, problem, solved)
    proposal = _propose(step, problem, solved)
    delta = step.from_vectors(proposal.delta, flat)
    finite = _is_finite(solved, proposal, delta)
    like_grads = lambda new: jax.tree.unflatten(jax.tree.structure(grads), [new[p] for p in flat])
    updates = like_grads({p: jnp.where(finite, -d, 0) for p, d in delta.items()})
    # Momentum goes on from nothing after a step that was refused.
    velocity = like_grads(delta) if sums is None else sums
    solution, seen = state.solution, state.seen
    if options.exact:  # where the next solve starts, if the gradient's dtype can hold it
        x = step.from_vectors({name: s.x for name, s in solved.items()}, flat)
        kept = finite & all_fit(x.values())
        solution = like_grads({path: jnp.where(kept, new, 0) for path, new in x.items()})
        if options.measures_coherence:
            fisher = _quadratic_forms(solved, problem.gamma)[2]
            seen = jnp.where(kept, fisher, 0).astype(problem.damping.dtype)
    return updates, State(
        count=state.count + 1,
        averages=problem.averages,
        velocity=jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), velocity),
        solution=solution,
        seen=seen,
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


class _Proposal(NamedTuple):
    """A step before it is judged, and what `Stats` tells of it."""

    delta: Vectors  # −``step`` times the direction, ``momentum`` times the last one
    step: Float[Array, ""]
    momentum: Float[Array, ""]
    model: Float[Array, ""]
    kl_scale: Float[Array, ""]
    coherence: Float[Array, ""]


def _propose(step: Step, problem: Problem, solved: Solved) -> _Proposal:
    state, options = step.state, step.options
    rate = options.learning_rate
    rate = jnp.asarray(rate(state.count) if callable(rate) else rate, problem.damping.dtype)
    if options.step == "rms":
        norms = {name: block.size**0.5 for name, block in step.owned.items()}
        return _normalized(solved, norms, rate)
    velocity = step.to_vectors(flatten(state.velocity))
    if options.step == "share":
        norms = _weight_norms(problem.groups)
        return _normalized(solved, norms, rate, velocity, options.momentum)
    return _clipped(problem, solved, rate, velocity, options)


def _clipped(
    problem: Problem, solved: Solved, rate: Array, velocity: Vectors, options: Options
) -> _Proposal:
    """Δ = μ·(last Δ) − η ν x with ν = min(1, √(κ / c xᵀF x)), the KL clip of the new part.

    κ is ``kl_clip`` and c the coherence. The clip comes before the learning rate, else a step that
    is always clipped would undo every schedule.
    """
    coherence = _coherence(problem.averages) if options.measures_coherence else 1.0
    slope, damped, fisher = _quadratic_forms(solved, problem.gamma)
    kl = coherence * fisher
    scale = jnp.ones_like(kl)
    if options.measures_coherence:
        most = jnp.asarray(options.kl_clip, kl.dtype)
        scale = jnp.minimum(1, jnp.sqrt(most / jnp.maximum(kl, jnp.finfo(kl.dtype).tiny)))
    alpha = rate * scale
    beta = jnp.asarray(options.momentum, alpha.dtype)
    delta = _combined(-alpha, {name: s.x for name, s in solved.items()}, beta, velocity)
    model = -alpha * slope + 0.5 * alpha**2 * damped
    return _Proposal(delta, alpha, beta, model, scale, jnp.asarray(coherence, scale.dtype))


def _weight_norms(groups: list[System]) -> dict[str, Float[Array, " lane"]]:
    """‖θ‖ of each block's lanes, at least that of parameters of ``_LEAST_WEIGHT``."""
    norms = {}
    for system in groups:
        least = _LEAST_WEIGHT * system.blocks[0].size ** 0.5
        norms |= system.by_block(jnp.maximum(jnp.sqrt(system.squared_weights()), least))
    return norms


def _normalized(
    solved: Solved,
    norms: dict[str, Any],
    rate: Array,
    velocity: Vectors | None = None,
    momentum: Any = 0.0,
) -> _Proposal:
    """Δ = μ·(last Δ) − (1 − μ) η r x, layer by layer, with r = ``norms`` / ‖x‖.

    With the norms of the parameters and momentum of the steps it is ``"share"``: directions that
    change sign from step to step move a layer less, as with Adam (You et al., 2017,
    arXiv:1708.03888, section 4, with x in the place of the gradient). With those of root mean
    square 1, and x of gradients with momentum, it is ``"rms"``: η is the change of a parameter, as
    Muon's steps are scaled (Liu et al., 2025, arXiv:2502.16982).
    """
    # All lanes in one array: each block's own few numbers would be kernels of their own on a GPU.
    slopes, damped, squares = _forms(solved)
    lanes = [solution.square.shape for solution in solved.values()]
    lengths = [jnp.broadcast_to(norms[n], s) for n, s in zip(solved, lanes, strict=True)]
    lengths = jnp.concatenate(lengths).astype(squares.dtype)
    ratios = jnp.where(squares > 0, lengths / jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
    ends = list(itertools.accumulate([count for (count,) in lanes]))
    x: Vectors = {
        name: tuple([(beside(ratio, leaf) * leaf).astype(leaf.dtype) for leaf in solution.x])
        for (name, solution), ratio in zip(
            solved.items(), jnp.split(ratios, ends[:-1]), strict=True
        )
    }
    beta = jnp.asarray(momentum, rate.dtype)
    alpha = (1 - beta) * rate
    # Sums and no products of matrices, which are of few digits on accelerators.
    model = -alpha * (ratios * slopes).sum() + 0.5 * alpha**2 * (ratios**2 * damped).sum()
    delta = _combined(-alpha, x, beta, x if velocity is None else velocity)
    # Two ones, as of every number that a state holds: see `init_state`.
    return _Proposal(delta, alpha, beta, model, jnp.ones_like(model), jnp.ones_like(model))


def _combined(a: Array, u: Vectors, b: Array, v: Vectors) -> Vectors:
    return {name: jax.tree.map(lambda x, y: a * x + b * y, u[name], v[name]) for name in u}


def _is_finite(solved: Solved, proposal: _Proposal, delta: Flat) -> Array:
    """Whether a step, in the dtypes in which it is applied, has only numbers that are finite.

    By the squares of the solutions, since a look at each array would be as many kernels on a GPU.
    The last step, which a step may go on from, was finite when it was taken.
    """
    numbers = jnp.stack([proposal.model, proposal.step, proposal.momentum])
    finite = jnp.isfinite(_forms(solved)).all() & jnp.isfinite(numbers).all()
    return finite & all_fit(delta.values())


def _quadratic_forms(solved: Solved, gamma: dict[str, Array]) -> tuple[Array, ...]:
    """bᵀx, xᵀ(F + Γ)x and xᵀF x, of all blocks: κ bounds one step of the network."""
    slope, damped, _ = _forms(solved).sum(axis=1)
    fisher = damped - sum([(gamma[name] * s.square).sum() for name, s in solved.items()])
    return slope, damped, fisher


def _forms(solved: Solved) -> Float[Array, "3 lane"]:
    """bᵀx, xᵀ(F + γI)x = 2 bᵀx + 2 q(x) and xᵀx of the lanes of all blocks, one after the other."""
    slope, model, square = concatenated([(s.slope, s.model, s.square) for s in solved.values()])
    return jnp.stack([slope, 2 * (slope + model), square])


def _with_coherence(step: Step, problem: Problem, solved: Solved) -> Problem:
    if not step.options.measures_coherence:
        return problem
    averages, curvature = problem.averages, step.curvature
    decay = jnp.asarray(step.options.factor_decay, averages.coherence.dtype)
    # Outside of the branch, where it is the same expression as in `_clipped`: computed once.
    layers = _quadratic_forms(solved, problem.gamma)[2]
    x = {name: solution.x for name, solution in solved.items()}
    if step.options.exact:
        # The last solution, of which this batch knows nothing: x is short along what the examples
        # see that it was solved for, and they tell too little of what it changes.
        begun = step.state.seen > 0
        last = step.to_vectors(flatten(step.state.solution))
        x = jax.tree.map(functools.partial(jnp.where, begun), last, x)
        layers = jnp.where(begun, step.state.seen, layers)

    def measure() -> Array:
        # Exact whatever the solve took: F of all layers together is what no factors give.
        exact: dict[str, Form] = dict.fromkeys(step.owned, "exact")
        network = _network_fisher(systems.build(curvature, step.params, exact), curvature, x)
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


def _network_fisher(groups: list[System], curvature: Curvature, x: Vectors) -> Float[Array, ""]:
    """xᵀF x with the Fisher matrix F of all blocks, whose exact systems are given, together.

    It is Σ_n (Σ_layers θ_n)² / N: half a product per layer, and no pass through the network.
    (Martens & Grosse, 2015, section 7.)
    """
    parts = [s.derivatives(concatenated([x[b.name] for b in s.blocks])) for s in groups]
    along = functools.reduce(jnp.add, parts)
    squares = jnp.einsum("cn,cn->", along, along)
    return mean_over(curvature.axis_name, squares / curvature.num_examples)


def _coherence(averages: Averages) -> Array:
    """What the sum of xᵀF x over the layers is to be multiplied by for that of the network."""
    return averages.coherence / jnp.maximum(averages.weight, jnp.finfo(averages.weight.dtype).tiny)


def _stats(
    problem: Problem, solved: Solved, proposal: _Proposal, finite: Array, old: Stats
) -> Stats:
    # A state whose dtypes change from step to step is compiled twice.
    def scalar(a: Array) -> Array:
        return jnp.asarray(a, problem.damping.dtype)

    def means(name: str, blocks: tuple[str, ...]) -> Array:
        return jnp.stack([scalar(getattr(solved[block], name)).mean() for block in blocks])

    told = {name: scalar(a) for name, a in proposal._asdict().items() if name != "delta"}
    return dataclasses.replace(
        old,
        **told,
        damping=problem.damping,
        rejected=scalar(~finite),
        iterations=means("iterations", old.blocks),
        residual=means("residual", old.measured) if old.measured else None,
    )
