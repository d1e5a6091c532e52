"""From solutions of the linear systems to a step: its length and its momentum."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from kfac._sharing import mean_over
from kfac._trees import all_fit, concatenated
from kfac.curvature._blocks import Block
from kfac.solve._solvers import Solution, beside
from kfac.solve._systems import System

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    Vectors = dict[str, tuple[Array, ...]]  # block → its parameters, each with a leading lane axis
    Scalar = float | Float[Array, ""]


# Root mean square that a block's parameters are taken for at least: what starts at zero must leave
# it.
_LEAST_WEIGHT = 1e-2


class Proposal(NamedTuple):
    """A step before it is judged."""

    delta: Vectors  # change of the covered parameters
    coefficients: Float[Array, " 2"]  # (α, β) of the new direction and of the last step in it
    model: Float[Array, ""]  # predicted change of the loss by the new direction
    kl_scale: Float[Array, ""]  # factor by which the KL clip shortened it
    # of the network's xᵀF x over the sum of the layers', as the clip took it
    coherence: Float[Array, ""]


def _combined(a: Array, u: Vectors, b: Array, v: Vectors) -> Vectors:
    """a·u + b·v."""
    return {name: jax.tree.map(lambda x, y: a * x + b * y, u[name], v[name]) for name in u}


def clipped_step(
    solved: dict[str, Solution],
    gamma: dict[str, Array],
    velocity: Vectors,
    *,
    rate: Array,
    momentum: Scalar,
    kl_clip: Scalar | None,
    coherence: Scalar = 1.0,
) -> Proposal:
    """Δ = μ·(last Δ) − η ν x with ν = min(1, √(κ / c xᵀF x)).

    That is the KL clip of the new part (κ = ``kl_clip``, c = ``coherence``).

    The clip comes before the learning rate, else a step that is always clipped would undo every
    schedule of η.
    """
    x = {name: s.x for name, s in solved.items()}
    slope, damped, fisher = quadratic_forms(solved, gamma)
    kl = coherence * fisher
    scale = jnp.ones_like(kl)
    if kl_clip is not None:
        most = jnp.asarray(kl_clip, kl.dtype)
        scale = jnp.minimum(1, jnp.sqrt(most / jnp.maximum(kl, jnp.finfo(kl.dtype).tiny)))
    step = rate * scale
    model = -step * slope + 0.5 * step**2 * damped
    coefficients = jnp.stack([step, jnp.asarray(momentum, step.dtype)])
    delta = _combined(-step, x, coefficients[1], velocity)
    return Proposal(delta, coefficients, model, scale, jnp.asarray(coherence, scale.dtype))


def weight_norms(groups: list[System]) -> dict[str, Float[Array, " lane"]]:
    """‖θ‖ of each block's lanes, at least that of parameters of ``_LEAST_WEIGHT``."""
    norms = {}
    for system in groups:
        least = _LEAST_WEIGHT * system.blocks[0].size ** 0.5
        norms |= system.by_block(jnp.maximum(jnp.sqrt(system.squared_weights()), least))
    return norms


def unit_norms(blocks: Mapping[str, Block]) -> dict[str, float]:
    """Norms of vectors whose root mean square is 1."""
    return {name: block.size**0.5 for name, block in blocks.items()}


def normalized_step(
    solved: dict[str, Solution],
    norms: Mapping[str, float | Array],
    *,
    rate: Array,
    velocity: Vectors | None = None,
    momentum: Scalar = 0.0,
) -> Proposal:
    """Δ = μ·(last Δ) − (1 − μ) η r x, layer by layer, with r = ``norms`` / ‖x‖.

    Whatever the scale of its curvature, a layer then changes by η times its norm at most. With the
    norms of the parameters and momentum μ of the steps this is ``"share"``: η is a share, and
    directions that change sign from one step to the next move a layer less, as with Adam (You et
    al., 2017, arXiv:1708.03888, section 4, with x in the place of the gradient).
    With those of root mean square 1, and x of gradients with momentum, it is ``"rms"``: η is the
    change of a parameter, as Muon's steps are scaled (Liu et al., 2025, arXiv:2502.16982).
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
    share = jnp.asarray(momentum, rate.dtype)
    step = (1 - share) * rate
    # Sums and no products of matrices, which are of few digits on accelerators.
    model = -step * (ratios * slopes).sum() + 0.5 * step**2 * (ratios**2 * damped).sum()
    delta = _combined(-step, x, share, x if velocity is None else velocity)
    # Two ones, as of every number that a state holds: see `init_state`.
    kl_scale, coherence = jnp.ones_like(model), jnp.ones_like(model)
    return Proposal(delta, jnp.stack([step, share]), model, kl_scale, coherence)


def is_finite(solved: dict[str, Solution], step: Proposal, delta: dict[str, Array]) -> Array:
    """Whether a step has no entry that is infinite or not a number.

    By the squares of the solutions, which are there: a look at each array would be as many small
    kernels on a GPU. The last step, which a step may go on from, was finite when it was taken.
    ``delta`` is the step in the dtypes in which it is applied, which may have no place for it.
    """
    numbers = jnp.stack([step.model, *step.coefficients])
    finite = jnp.isfinite(_forms(solved)).all() & jnp.isfinite(numbers).all()
    return finite & all_fit(delta.values())


def quadratic_forms(solved: dict[str, Solution], gamma: dict[str, Array]) -> tuple[Array, ...]:
    """bᵀx, xᵀ(F + Γ)x and xᵀF x, of all blocks: κ bounds one step of the network."""
    slope, damped, _ = _forms(solved).sum(axis=1)
    fisher = damped - sum([(gamma[name] * s.square).sum() for name, s in solved.items()])
    return slope, damped, fisher


def _forms(solved: dict[str, Solution]) -> Float[Array, "3 lane"]:
    """bᵀx, xᵀ(F + γI)x and xᵀx of the lanes of all blocks, one after the other.

    They need no further product: xᵀ(F + γI)x = 2 bᵀx + 2 q(x).
    """
    slope, model, square = concatenated([(s.slope, s.model, s.square) for s in solved.values()])
    return jnp.stack([slope, 2 * (slope + model), square])


def network_fisher(groups: list[System], num_examples: int, x: Vectors) -> Float[Array, ""]:
    """xᵀF x with the Fisher matrix F of all blocks, whose exact systems are given, together.

    The derivative of example n's loss along x is the sum over layers of θ_n, so xᵀF x =
    Σ_n (Σ_layers θ_n)² / N costs half a product per layer and no pass through the network.
    (Martens & Grosse, 2015, section 7.)
    """
    parts = [s.derivatives(concatenated([x[b.name] for b in s.blocks])) for s in groups]
    along = functools.reduce(jnp.add, parts)
    return mean_over(groups[0].axis_name, jnp.einsum("cn,cn->", along, along) / num_examples)
