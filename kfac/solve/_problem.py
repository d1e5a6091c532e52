"""The linear systems (F + γI) x = b of one step: averages, damping, inverses, solution."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from kfac._arrays import all_finite, concatenated, divides_lanes, over_devices
from kfac.curvature._blocks import Block
from kfac.curvature._gather import Curvature
from kfac.solve import _solvers as solver
from kfac.solve import _systems as systems
from kfac.solve._inverses import damped_inverses
from kfac.solve._solvers import Solution
from kfac.solve._systems import System
from kfac.step._state import Averages, Options, State

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

    from kfac._arrays import Flat
    from kfac.solve._systems import Factors, Lanes

    Vectors = dict[str, Lanes]  # block → its parameters


# Iterations for the blocks without factors, where those that have them are solved by inverses.
_WITHOUT_INVERSES = 2


class Step(NamedTuple):
    owned: dict[str, Block]  # the blocks by name
    params: Flat  # by path
    state: State  # of the optimizer
    curvature: Curvature  # of this step
    sound: Bool[Array, ""]  # whether averages may change
    options: Options  # of the optimizer

    def to_vectors(self, flat: Flat) -> Vectors:
        return {name: systems.lanes_of(block, flat) for name, block in self.owned.items()}

    def from_vectors(self, vectors: Vectors, like: Flat) -> Flat:
        """The inverse of ``to_vectors``, with the shapes and dtypes of ``like``."""
        flat: Flat = {}
        for name, block in self.owned.items():
            for param, array in zip(block.params, vectors[name], strict=True):
                target = like[param.path]
                flat[param.path] = param.from_lanes(array, target.shape).astype(target.dtype)
        return flat


class Problem(NamedTuple):
    b: Vectors  # the gradients of the blocks
    groups: list[System]  # the systems, blocks of equal form together
    damping: Float[Array, ""]  # λ
    gamma: dict[str, Array]  # γ of each block's lanes
    averages: Averages  # of the curvature, this step's included


def pose(step: Step, gradients: Flat) -> Problem:
    forms = step.options.forms(step.owned)
    factors, weight = _average_factors(step)
    # Sums divided by their weight, which is 0 until curvature is in, are averages.
    weight_or_tiny = jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)

    def build(names: Iterable[str]) -> list[System]:
        averages = jax.tree.map(lambda factor: factor / weight_or_tiny, factors)
        chosen: Any = {name: forms[name] for name in names}
        return systems.build(step.curvature, step.params, chosen, averages)

    groups = build(step.owned)
    damping = jnp.asarray(step.options.damping, weight.dtype)
    traces, gamma = _damp(step, groups, damping)
    inverses = _refresh_inverses(step, build, gamma)
    groups = [
        dataclasses.replace(
            system, inverses=tuple([inverses[b.name] for b in system.blocks if b.name in inverses])
        )
        for system in groups
    ]
    averages = Averages(factors, traces, weight, step.state.averages.coherence, inverses)
    return Problem(step.to_vectors(gradients), groups, damping, gamma, averages)


def _average_factors(step: Step) -> tuple[Factors, Array]:
    """Running sums of the Kronecker factors, with this batch's if it is fresh, and their weight.

    What is not finite would stay in the sums for ever: the average so far stands for it.
    """
    old, options, sound = step.state.averages, step.options, step.sound
    forms = options.forms(step.owned)
    decay = jnp.asarray(options.factor_decay, old.weight.dtype)
    weight = jnp.maximum(old.weight, jnp.finfo(old.weight.dtype).tiny)

    def average(name: str, kept: tuple[Array, ...], seen: Curvature) -> tuple[Array, ...]:
        lanes = systems.lanes_of(step.owned[name], step.params)
        new = systems.new_factors(step.owned[name], seen, lanes, forms[name], options.narrow)
        # Of a sum of squares what is not finite is on the diagonal.
        taken = sound & all_finite([systems.diagonal(factor) for factor in new])
        stays = jnp.where(sound, decay + (1 - decay) / weight, 1)
        # Here, where they are read anyway, and not for all averages behind the step.
        share_kept, share = jnp.where(taken, decay, stays), jnp.where(taken, 1 - decay, 0)
        return tuple(
            share_kept * k + share * jnp.where(taken, n.astype(k.dtype), 0)
            for k, n in zip(kept, new, strict=True)
        )

    def update() -> tuple[dict, Array]:
        seen = step.curvature.in_branch()
        factors = {n: average(n, kept, seen) if kept else () for n, kept in old.factors.items()}
        return factors, jnp.where(sound, decay * old.weight + (1 - decay), old.weight)

    if step.curvature.fresh is None:
        return update()
    # Not jnp.where: a step between two curvature batches is to save the products, too.
    return jax.lax.cond(step.curvature.fresh, update, lambda: (old.factors, old.weight))


def _damp(step: Step, groups: list[System], damping: Array) -> tuple[dict, dict[str, Array]]:
    state, decay = step.state, step.options.factor_decay
    if step.options.literal:
        return {}, {b.name: jnp.broadcast_to(damping, (b.lanes,)) for s in groups for b in s.blocks}
    decay = jnp.asarray(decay, damping.dtype)
    # By system: each block's own few numbers would be kernels of their own on a GPU.
    traces, means = {}, []
    for i, system in enumerate(groups):
        # Signs from the number of the step: a run that resumes draws the same.
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), i), state.count)
        trace = average = system.trace(key)
        if system.form != "factors":  # whose trace is that of averages
            kept = jnp.concatenate([state.averages.traces[block.name] for block in system.blocks])
            seen = jnp.stack([trace, jnp.ones_like(trace)], axis=1)
            taken = (step.sound & jnp.isfinite(trace))[:, None]
            sums = jnp.where(taken, decay * kept + (1 - decay) * seen, kept)
            average = sums[:, 0] / jnp.maximum(sums[:, 1], jnp.finfo(sums.dtype).tiny)
            traces |= system.by_block(sums)
        means.append(average.astype(damping.dtype) / system.blocks[0].size)
    # A share of the mean eigenvalue, since blocks differ by orders of magnitude.
    gamma = {}
    for system, mean in zip(groups, means, strict=True):
        gamma |= system.by_block(damping * mean)
    return traces, gamma


def _refresh_inverses(step: Step, build: Callable, gamma: dict[str, Array]) -> Factors:
    """Inverses of the factors, new every ``inverse_interval`` steps and at the first curvature."""
    count, averages = step.state.count, step.state.averages
    old = averages.inverses
    if not old:
        return old

    def invert() -> Factors:
        # Built in here: XLA copies what a branch takes from outside at every step.
        inverses = damped_inverses(build(old), gamma)
        return {n: tuple(a.astype(old[n][0].dtype) for a in pair) for n, pair in inverses.items()}

    # An old inverse costs CG iterations, not the solution.
    due = (count % step.options.inverse_interval == 0) | (averages.weight == 0)
    return jax.lax.cond(step.sound & due, invert, lambda: old)


def solve(problem: Problem, warm: Vectors | None, options: Options) -> dict[str, Solution]:
    """By block, the solution; ``warm`` is where CG starts."""
    solved: dict[str, Solution] = {}
    for system in problem.groups:
        names = [block.name for block in system.blocks]
        b = concatenated([problem.b[name] for name in names])
        gamma = jnp.concatenate([problem.gamma[name] for name in names])
        x0 = None if warm is None else concatenated([warm[name] for name in names])
        # Products of captured arrays are divided by examples already, as the batch is, and XLA adds
        # up their parts. Of factors, which no batch divides, each device solves for some lanes.
        if system.form == "factors" and divides_lanes():
            solution = _solved_by_devices(system, b, gamma, x0, options)
        else:
            solution = _solved(system, b, gamma, x0, options)
        solved |= system.by_block(solution)
    return solved


def _solved_by_devices(
    system: System, b: Lanes, gamma: Array, x0: Lanes | None, options: Options
) -> Solution:
    def solve_lanes(
        params: Any, b: Any, gamma: Any, x0: Any, state: Any, inverses: Any
    ) -> Solution:
        part = dataclasses.replace(system, params=params, state=state, inverses=inverses)
        return _solved(part, b, gamma, x0, options)

    inverses = (concatenated(system.inverses),) if system.inverses else ()
    return over_devices(solve_lanes, system.params, b, gamma, x0, kept=(system.state, inverses))


def _solved(system: System, b: Lanes, gamma: Array, x0: Lanes | None, options: Options) -> Solution:
    packed = system.pack(b)
    if options.solver == "dual":
        examples = system.program[0].num_examples
        solution = solver.solve_dual(system.example_gradients(), packed, gamma, examples)
    elif options.iterations == 0 and system.inverses:
        solution = solver.unchecked_solution(packed, system.precondition(packed))
    else:
        solution = solver.cg(
            system.matvec,
            packed,
            gamma,
            max_iterations=options.iterations or _WITHOUT_INVERSES,
            tolerance=options.tolerance,
            x0=None if x0 is None else system.pack(x0),
            safeguard=not options.literal,
            precondition=system.precondition,
        )
    return solution._replace(x=system.unpack(solution.x))
