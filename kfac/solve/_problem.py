"""The linear systems (F + γI) x = b of one step.

Running averages, damping, preconditioner, solution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from kfac._sharing import divides_lanes, over_devices
from kfac._trees import all_finite, concatenated, flatten
from kfac.curvature._blocks import Block
from kfac.curvature._gather import Curvature
from kfac.solve import _solvers as solver
from kfac.solve import _systems as systems
from kfac.solve._inverses import damped_inverses
from kfac.solve._solvers import Solution
from kfac.solve._systems import Form, System
from kfac.step._options import Options
from kfac.step._state import Averages, State

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, PyTree

    from kfac._trees import Flat
    from kfac.step._length import Vectors


_WITHOUT_INVERSES = 2
"""Iterations for the blocks without factors, where those that have them are solved by inverses."""


class Problem(NamedTuple):
    """The linear systems of one step.

    Attributes:
      owned: the blocks by name.
      b: their gradients.
      groups: the systems, blocks of equal form together.
      damping: λ.
      gamma: γ of each block's lanes.
      averages: of the curvature, this step's included.
    """

    owned: dict[str, Block]
    b: Vectors
    groups: list[System]
    damping: Float[Array, ""]
    gamma: dict[str, Array]
    averages: Averages


def to_vectors(owned: dict[str, Block], tree: PyTree[Array]) -> Vectors:
    """The blocks' parts of a tree like the parameters."""
    flat = flatten(tree)
    return {name: systems.lanes_of(block, flat) for name, block in owned.items()}


def from_vectors(owned: dict[str, Block], vectors: Vectors, like: Flat) -> Flat:
    """The inverse of ``to_vectors``, with the shapes and dtypes of ``like``."""
    flat: Flat = {}
    for name, block in owned.items():
        flat |= systems.to_flat(block, vectors[name], like)
    return flat


def pose(
    owned: dict[str, Block],
    grads: PyTree[Array],
    state: State,
    params: PyTree[Array],
    curvature: Curvature,
    sound: Bool[Array, ""],
    options: Options,
) -> Problem:
    """The systems of this step; averages change where it is sound."""
    flat = flatten(params)
    forms = options.forms(owned)
    factors, weight = _average_factors(owned, forms, flat, state, curvature, sound, options)
    # Sums begin at 0: divided by their weight they are averages from the first step on.
    # It is 0 until curvature is in.
    weight_or_tiny = jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)

    def build(names: Iterable[str]) -> list[System]:
        averages = jax.tree.map(lambda factor: factor / weight_or_tiny, factors)
        return systems.build(curvature, flat, {name: forms[name] for name in names}, averages)

    groups = build(owned)
    damping = jnp.asarray(options.damping, weight.dtype)
    traces, gamma = _damp(groups, damping, state, sound, options)
    inverses = _refresh_inverses(build, gamma, state, sound, options)
    groups = [system.preconditioned(inverses) for system in groups]
    averages = Averages(factors, traces, weight, state.averages.coherence, inverses)
    return Problem(owned, to_vectors(owned, grads), groups, damping, gamma, averages)


def _average_factors(
    owned: dict[str, Block],
    forms: dict[str, Form],
    params: Flat,
    state: State,
    curvature: Curvature,
    sound: Bool[Array, ""],
    options: Options,
) -> tuple[dict[str, tuple[Array, ...]], Array]:
    """Running sums of the Kronecker factors and their weight.

    With this batch's where its curvature is fresh. What is not finite would stay in the sums for
    ever: the average so far stands for it.
    """
    old = state.averages
    decay = jnp.asarray(options.factor_decay, old.weight.dtype)
    weight = jnp.maximum(old.weight, jnp.finfo(old.weight.dtype).tiny)

    def average(name: str, kept: tuple[Array, ...], seen: Curvature) -> tuple[Array, ...]:
        block = owned[name]
        new = systems.new_factors(
            block, seen, systems.lanes_of(block, params), forms[name], options.narrow
        )
        # Of a sum of squares what is not finite is on the diagonal.
        taken = sound & all_finite(map(systems.diagonal, new))
        stays = jnp.where(sound, decay + (1 - decay) / weight, 1)
        # Here, where they are read anyway, and not for all averages behind the step.
        share_kept, share = jnp.where(taken, decay, stays), jnp.where(taken, 1 - decay, 0)
        return tuple(
            share_kept * k + share * jnp.where(taken, n.astype(k.dtype), 0)
            for k, n in zip(kept, new, strict=True)
        )

    def update() -> tuple[dict, Array]:
        seen = curvature.in_branch()
        factors = {
            name: average(name, kept, seen) if kept else () for name, kept in old.factors.items()
        }
        return factors, jnp.where(sound, decay * old.weight + (1 - decay), old.weight)

    if curvature.fresh is None:
        return update()
    # Not jnp.where: a step between two curvature batches is to save the products, too,
    # and their cotangents are zeros.
    return jax.lax.cond(curvature.fresh, update, lambda: (old.factors, old.weight))


def _damp(
    groups: list[System],
    damping: Array,
    state: State,
    sound: Bool[Array, ""],
    options: Options,
) -> tuple[dict, dict[str, Array]]:
    """Running traces, and γ of each block."""
    if options.absolute:
        return {}, {b.name: jnp.broadcast_to(damping, (b.lanes,)) for s in groups for b in s.blocks}
    decay = options.factor_decay
    decay = decay.astype(damping.dtype) if isinstance(decay, jax.Array) else decay
    # By system and not by block: each block's own few numbers would be kernels of their own on a
    # GPU.
    traces, means = {}, []
    for i, system in enumerate(groups):
        # Signs from the number of the step: a run that resumes draws the same, and no key
        # has to be kept for it.
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), i), state.count)
        names = [block.name for block in system.blocks]
        trace = average = system.trace(key)
        if system.form != "factors":  # whose trace is that of averages
            kept = jnp.concatenate([state.averages.traces[name] for name in names])
            new = decay * kept + (1 - decay) * trace
            trace = jnp.where(sound & jnp.isfinite(trace), new, kept)
            average = trace / (1 - decay ** (state.count + 1))
            traces |= dict(zip(names, system.split(trace), strict=True))
        means.append(average.astype(damping.dtype) / system.blocks[0].size)
    # A share of the mean eigenvalue: blocks differ by orders of magnitude, and one γ would be
    # nothing to some and all that others see.
    return traces, {
        block.name: part
        for system, mean in zip(groups, means, strict=True)
        for block, part in zip(system.blocks, system.split(damping * mean), strict=True)
    }


def _refresh_inverses(
    build: Callable[[Iterable[str]], list[System]],
    gamma: dict[str, Array],
    state: State,
    sound: Bool[Array, ""],
    options: Options,
) -> dict[str, tuple[Array, ...]]:
    """Inverses of the damped factors.

    The old ones but for every ``inverse_interval``-th step and the first with curvature.
    """
    old = state.averages.inverses
    if not old:
        return old

    def invert() -> dict[str, tuple[Array, ...]]:
        # Built in here: XLA copies what a branch takes from outside at every step, stacks of all
        # factors among it, and most steps invert nothing.
        inverses = damped_inverses(build(old), gamma)
        return {n: tuple(a.astype(old[n][0].dtype) for a in pair) for n, pair in inverses.items()}

    # An old inverse costs iterations, not the solution: CG solves today's system whatever
    # it is preconditioned by.
    due = (state.count % options.inverse_interval == 0) | (state.averages.weight == 0)
    return jax.lax.cond(sound & due, invert, lambda: old)


def solve(problem: Problem, warm: Vectors | None, options: Options) -> dict[str, Solution]:
    """Solves all systems, from warm starts where there are any."""
    solved: dict[str, Solution] = {}
    for system in problem.groups:
        names = [block.name for block in system.blocks]
        b, gamma = (
            concatenated(vectors[name] for name in names) for vectors in (problem.b, problem.gamma)
        )
        x0 = None if warm is None else concatenated(warm[name] for name in names)
        solution = _share(system, b, gamma, x0, options)
        solved |= dict(zip(names, system.split(solution), strict=True))
    return solved


def _share(system: System, b: tuple, gamma: Array, x0: tuple | None, options: Options) -> Solution:
    """Solves a system.

    Of factors, which no batch divides among devices, each device solves for some lanes.
    """
    # Products of captured arrays are divided by examples already, as the batch is, and
    # XLA adds up their parts.
    if system.form != "factors" or not divides_lanes():
        return _solve_system(system, b, gamma, x0, options)

    def solve_lanes(
        params: tuple, b: tuple, gamma: Array, x0: tuple | None, state: tuple, inverses: tuple
    ) -> Solution:
        part = dataclasses.replace(system, params=params, state=state, inverses=inverses)
        return _solve_system(part, b, gamma, x0, options)

    inverses = (concatenated(system.inverses),) if system.inverses else ()
    return over_devices(solve_lanes, system.params, b, gamma, x0, kept=(system.state, inverses))


def _solve_system(
    system: System, b: tuple, gamma: Array, x0: tuple | None, options: Options
) -> Solution:
    """Solves (F + γI) x = b of every lane of a system by the solver that the options name."""
    packed = system.pack(b)
    if options.solver == "dual":
        solution = solver.solve_dual(
            system.example_gradients(), packed, gamma, system.program[0].num_examples
        )
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
            safeguard=options.safeguard,
            precondition=system.precondition,
        )
    return solution._replace(x=system.unpack(solution.x))
