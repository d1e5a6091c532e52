"""From solutions of the linear systems to a step.

Its length, its momentum, and whether to take it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from kfac._sharing import mean_over
from kfac._solver import Solution, lane_dot
from kfac._systems import System
from kfac._trees import all_fit, concatenated

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

    Vectors = dict[str, tuple[Array, ...]]  # block → its parameters, each with a leading lane axis


STEPS = ("quadratic", "fixed", "trust_ratio", "rms")
NORMALIZED = ("trust_ratio", "rms")
"""Those that take the direction of a solution alone."""
_LEAST_WEIGHT = 1e-2
"""Root mean square that a block's parameters are taken for at least: what starts at zero must leave
it."""


class Proposal(NamedTuple):
    """A step before it is judged.

    Attributes:
      delta: change of the covered parameters.
      coefficients: (α, β) of the new direction and of the last step in it.
      model: predicted change of the loss.
      kl_scale: factor by which the KL clip shortened it.
      coherence: of the network's xᵀF x over the sum of the layers', as the clip took it.
    """

    delta: Vectors
    coefficients: Float[Array, " 2"]
    model: Float[Array, ""]
    kl_scale: Float[Array, ""]
    coherence: Float[Array, ""]


def dot(u: Vectors, v: Vectors) -> Float[Array, ""]:
    """Σ u·v over all blocks."""
    return functools.reduce(jnp.add, (lane_dot(u[name], v[name]).sum() for name in u))


def combine(a: Array, u: Vectors, b: Array, v: Vectors) -> Vectors:
    """a·u + b·v."""
    return {name: jax.tree.map(lambda x, y: a * x + b * y, u[name], v[name]) for name in u}


def fixed_step(
    solved: dict[str, Solution],
    gamma: dict[str, Array],
    velocity: Vectors,
    *,
    rate: Array,
    momentum: float | Float[Array, ""],
    kl_clip: float | Float[Array, ""] | None,
    coherence: float | Float[Array, ""] = 1.0,
) -> Proposal:
    """Δ = μ·(last Δ) − η ν x with ν = min(1, √(κ / c xᵀF x)).

    That is the KL clip of the new part (κ = ``kl_clip``, c = ``coherence``).

    The clip comes before the learning rate, else a step that is always clipped would undo every
    schedule of η.
    """
    x = {name: s.x for name, s in solved.items()}
    forms = quadratic_forms(solved, gamma)
    scale = _kl_scale(coherence * forms.fisher, kl_clip)
    step = rate * scale
    model = -step * forms.slope + 0.5 * step**2 * forms.damped
    coefficients = jnp.stack([step, jnp.asarray(momentum, step.dtype)])
    delta = combine(-step, x, coefficients[1], velocity)
    return Proposal(delta, coefficients, model, scale, jnp.asarray(coherence, scale.dtype))


def weight_norms(groups: list[System]) -> dict[str, Float[Array, ""]]:
    """‖θ‖ of each block, at least that of parameters of ``_LEAST_WEIGHT``."""
    norms = {}
    for system in groups:
        squares = system.split(system.squared_weights())
        for block, part in zip(system.blocks, squares, strict=True):
            least = _LEAST_WEIGHT * (block.lanes * block.size) ** 0.5
            norms[block.name] = jnp.maximum(jnp.sqrt(part.sum()), least)
    return norms


def unit_norms(like: Vectors) -> dict[str, float]:
    """Norms of vectors whose root mean square is 1.

    >>> unit_norms({"fc": (jnp.zeros((1, 4)),)})
    {'fc': 2.0}
    """
    return {name: sum(leaf.size for leaf in vectors) ** 0.5 for name, vectors in like.items()}


def normalized_step(
    solved: dict[str, Solution],
    norms: Mapping[str, float | Array],
    *,
    rate: Array,
    velocity: Vectors | None = None,
    momentum: float | Float[Array, ""] = 0.0,
) -> Proposal:
    """Δ = μ·(last Δ) − (1 − μ) η r x, block by block, with r = ``norms`` / ‖x‖.

    Whatever the scale of its curvature, a block then changes by η times its norm at most. With the
    norms of the parameters and momentum μ of the steps this is ``"trust_ratio"``: η is a share, and
    directions that change sign from one step to the next move a block less, as with Adam (You et
    al., 2017, arXiv:1708.03888, section 4, with CG-FAC's direction in the place of the gradient).
    With those of root mean square 1, and x of gradients with momentum, it is ``"rms"``: η is the
    change of a parameter, as Muon's steps are scaled (Liu et al., 2025, arXiv:2502.16982).

    Args:
      solved: x of each block.
      norms: of each block.
      rate: η.
      velocity: the last Δ; None for none.
      momentum: μ.

    >>> from kfac._solver import unchecked_solution
    >>> x = (jnp.array([[3.0, 4.0]]),)
    >>> solved = {"fc": unchecked_solution(x, x)}
    >>> step = normalized_step(solved, {"fc": 1.0}, rate=jnp.array(0.1))
    >>> [[round(change, 3) for change in lane] for lane in step.delta["fc"][0].tolist()]
    [[-0.06, -0.08]]
    """
    # All blocks in one array: each block's own scalars would be kernels of their own on a GPU.
    slopes, damped, squares = _forms(solved)
    lengths = jnp.stack([jnp.asarray(norms[name], squares.dtype) for name in solved])
    ratios = jnp.where(squares > 0, lengths / jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
    x: Vectors = {
        name: jax.tree.map(lambda leaf, ratio=ratio: (ratio * leaf).astype(leaf.dtype), solution.x)
        for (name, solution), ratio in zip(solved.items(), ratios, strict=True)
    }
    share = jnp.asarray(momentum, rate.dtype)
    step = (1 - share) * rate
    # Sums and no products of matrices, which are of few digits on accelerators.
    model = -step * (ratios * slopes).sum() + 0.5 * step**2 * (ratios**2 * damped).sum()
    delta = combine(-step, x, share, x if velocity is None else velocity)
    # Two ones, as of every number that a state holds: see `init_state`.
    kl_scale, coherence = jnp.ones_like(model), jnp.ones_like(model)
    return Proposal(delta, jnp.stack([step, share]), model, kl_scale, coherence)


def is_finite(
    solved: dict[str, Solution], proposal: Proposal, delta: dict[str, Array]
) -> Bool[Array, ""]:
    """Whether a step has no entry that is infinite or not a number.

    By the squares of the solutions, which are there: a look at each array would be as many small
    kernels on a GPU. The last step, which a step may go on from, was finite when it was taken.
    ``delta`` is the step in the dtypes in which it is applied, which may have no place for it.
    """
    numbers = jnp.stack([proposal.model, *proposal.coefficients])
    finite = jnp.isfinite(_forms(solved)).all() & jnp.isfinite(numbers).all()
    return finite & all_fit(delta.values())


class QuadraticForms(NamedTuple):
    """What solutions x are to the model of the loss, summed over all blocks.

    κ bounds one step of the network, not a step of each layer.

    Attributes:
      slope: bᵀx.
      damped: xᵀ(F + Γ)x.
      fisher: xᵀF x.
    """

    slope: Float[Array, ""]
    damped: Float[Array, ""]
    fisher: Float[Array, ""]


def quadratic_forms(solved: dict[str, Solution], gamma: dict[str, Array]) -> QuadraticForms:
    """Those of all blocks."""
    slope, damped, _ = _forms(solved).sum(axis=1)
    fisher = damped - sum((gamma[name] * s.square).sum() for name, s in solved.items())
    return QuadraticForms(slope, damped, fisher)


def _forms(solved: dict[str, Solution]) -> Float[Array, "3 block"]:
    """bᵀx, xᵀ(F + γI)x and xᵀx of all blocks, whose lanes are summed.

    They need no further product: xᵀ(F + γI)x = 2 bᵀx + 2 q(x).
    """
    slope, model, square = (
        jnp.stack([getattr(solution, name).sum() for solution in solved.values()])
        for name in ("slope", "model", "square")
    )
    return jnp.stack([slope, 2 * (slope + model), square])


def fisher_of(
    groups: list[System], num_examples: int, *directions: Vectors
) -> Float[Array, "direction direction"]:
    """uᵀF v for all pairs of directions, F the Fisher matrix of all blocks together.

    The derivative of example n's loss along u is the sum over layers of θ_n, so uᵀF u =
    Σ_n (Σ_layers θ_n)² / N costs half a product per layer and no pass through the network.
    (Martens & Grosse, 2015, section 7.)

    Args:
      groups: exact systems of all blocks.
      num_examples: N.
      *directions: changes of the blocks' parameters.
    """
    along = _derivatives(groups, *directions)
    fisher = jnp.einsum("pcn,qcn->pq", along, along) / num_examples
    return mean_over(groups[0].axis_name, fisher)


def quadratic_step(
    solved: dict[str, Solution],
    b: Vectors,
    gamma: dict[str, Array],
    velocity: Vectors,
    *,
    groups: list[System],
    num_examples: int,
    rate: Array,
    kl_clip: float | Float[Array, ""] | None,
) -> Proposal:
    """Δ = η ν (α d + β v), d = −x the new direction, v the last step.

    (α, β) minimise a quadratic model of the loss.

    The model is q(Δ) = ∇L·Δ + ½ Δᵀ(F + Γ)Δ with the Fisher matrix of *all* covered parameters,
    layers together, see ``fisher_of``. Γ holds each block's γ. (Martens & Grosse, 2015, section 7.)
    """
    d = {name: jax.tree.map(jnp.negative, s.x) for name, s in solved.items()}
    slope = -jnp.stack([dot(b, d), dot(b, velocity)])
    fisher = fisher_of(groups, num_examples, d, velocity)

    def damping(u: Vectors, v: Vectors) -> Array:
        return functools.reduce(jnp.add, ((gamma[n] * lane_dot(u[n], v[n])).sum() for n in u))

    matrix = fisher + jnp.array([[damping(u, v) for v in (d, velocity)] for u in (d, velocity)])
    coefficients = minimise_2x2(matrix, slope)
    # Without γ: κ bounds what the step does to the predictions, which damping knows
    # nothing of.
    scale = _kl_scale(coefficients @ fisher @ coefficients, kl_clip)
    taken = rate * scale * coefficients
    model = 0.5 * taken @ matrix @ taken - slope @ taken
    delta = combine(taken[0], d, taken[1], velocity)
    # F is the network's own here.
    return Proposal(delta, coefficients, model, scale, jnp.ones_like(scale))


def minimise_2x2(matrix: Float[Array, "2 2"], slope: Float[Array, " 2"]) -> Float[Array, " 2"]:
    """The minimiser of ½ zᵀMz − slope·z.

    Along the first axis alone where M is singular or the second is empty.

    >>> minimise_2x2(jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.array([2.0, 2.0])).tolist()
    [1.0, 0.5]
    >>> minimise_2x2(jnp.array([[2.0, 0.0], [0.0, 0.0]]), jnp.array([2.0, 0.0])).tolist()
    [1.0, 0.0]
    """
    (a, c), (_, e) = matrix
    determinant = a * e - c * c
    # 1 − cos² of the angle between both directions: a thousandth of a radian apart they are one
    # direction in float32, and their coefficients would be large numbers that cancel.
    regular = determinant > 1e-6 * a * e
    safe = jnp.where(regular, determinant, 1)
    both = jnp.stack([e * slope[0] - c * slope[1], a * slope[1] - c * slope[0]]) / safe
    single = jnp.stack([slope[0] / jnp.where(a > 0, a, 1), jnp.zeros_like(a)])
    return jnp.where(regular, both, jnp.where(a > 0, single, 0))


def _derivatives(
    groups: list[System], *directions: Vectors
) -> Float[Array, "direction column example"]:
    parts = []
    for system in groups:
        lanes = [[vectors[block.name] for block in system.blocks] for vectors in directions]
        lanes = [concatenated(vectors) for vectors in lanes]
        parts.append(jax.vmap(system.derivatives)(jax.tree.map(lambda *a: jnp.stack(a), *lanes)))
    return functools.reduce(jnp.add, parts)


def _kl_scale(kl: Array, kl_clip: float | Array | None) -> Array:
    if kl_clip is None:
        return jnp.ones_like(kl)
    kl_clip = jnp.asarray(kl_clip, kl.dtype)
    return jnp.minimum(1, jnp.sqrt(kl_clip / jnp.maximum(kl, jnp.finfo(kl.dtype).tiny)))


class Verdict(NamedTuple):
    """Whether a step is taken, and what damping grows by.

    With actual over predicted change of the loss.

    The ratio is NaN where the loss was not measured.
    """

    accept: Bool[Array, ""]
    growth: Float[Array, ""]
    ratio: Float[Array, ""]


def judge(
    finite: Bool[Array, ""],
    model: Float[Array, ""],
    damping: Float[Array, ""],
    count: Array,
    *,
    change: Callable[[], Array] | None,
    interval: int,
    reject: bool,
    min_damping: float | Float[Array, ""],
) -> Verdict:
    """Levenberg-Marquardt adaptation and step rejection.

    Every ``interval`` steps ρ = (L(θ + Δ) − L(θ)) / q(Δ) is compared on this very batch: λ shrinks
    by 0.95^interval where ρ > 3/4 and grows by its inverse where ρ < 1/4. A step that is not finite
    is never taken, with ``reject`` neither is one that raises the loss; λ is then multiplied by 4.

    Args:
      finite: whether the step is.
      model: q(Δ).
      damping: λ.
      count: number of the step.
      change: () → L(θ + Δ) − L(θ); None where the loss is not measured.
      interval: steps between adaptations; 0 is never.
      reject: whether to refuse steps that raise the loss; measures it at every step.
      min_damping: λ is not lowered further.
    """
    unknown = jnp.full_like(damping, jnp.nan)
    adapt = (count + 1) % interval == 0 if interval else jnp.zeros((), bool)

    difference = unknown
    if change is not None:
        measure = lambda: change().astype(damping.dtype)
        # A forward pass, which most steps are to do without.
        difference = measure() if reject else jax.lax.cond(adapt, measure, lambda: unknown)
    # Where the model promises nothing, any descent is more than it said and any ascent
    # less.
    ratio = difference / jnp.where(model < 0, model, -jnp.finfo(damping.dtype).tiny)
    # "At most 0", not "not more than 0": a loss that is not a number refuses the step
    # too.
    accept = finite & (difference <= 0) if reject else finite
    omega = 0.95**interval
    # Applied to the factor and not to λ, so that the bound holds for the product of both.
    floor = jnp.minimum(min_damping / jnp.maximum(damping, jnp.finfo(damping.dtype).tiny), 1)
    adapted = jnp.where(
        ratio > 0.75, jnp.maximum(omega, floor), jnp.where(ratio < 0.25, 1 / omega, 1)
    )
    growth = jnp.where(accept, jnp.where(adapt, adapted, 1), 4).astype(damping.dtype)
    return Verdict(accept, growth, ratio)
