"""Batched solvers for (F + γI) x = b, one independent system ("lane") per layer.

Every leaf of ``b`` has the lane as its first axis. Layers of one shape are solved under one loop,
in which each lane stops by itself. Sums run in float32 or better, whatever ``matvec`` multiplies.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from kfac._arrays import one_by_one_on_cpus

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, PyTree

    Vector = PyTree[Float[Array, "lane ..."]]
    MatVec = Callable[[Vector], Vector]


class Solution(NamedTuple):
    """What a solver returns; every field but ``x`` has one number per lane."""

    x: Vector  # the solution, shaped like ``b``
    iterations: Int[Array, " lane"]  # conjugate-gradient steps taken (0 for direct solvers)
    residual: Float[Array, " lane"]  # ‖b − (F + γI)x‖ / ‖b‖
    # q(x) = ½ xᵀ(F + γI)x − bᵀx, which equals −½ x·(b + r); never positive for x₀ = 0
    model: Float[Array, " lane"]
    slope: Float[Array, " lane"]  # bᵀx
    square: Float[Array, " lane"]  # xᵀx


def lane_dot(u: Vector, v: Vector) -> Float[Array, " lane"]:
    """Σ u·v over everything but the leading (lane) axis of every leaf, in float32 or better."""

    def dot(x: Array, y: Array) -> Array:
        dtype = jnp.promote_types(jnp.result_type(x, y), jnp.float32)
        return jnp.sum((x.astype(dtype) * y.astype(dtype)).reshape(x.shape[0], -1), axis=1)

    return jax.tree.reduce(jnp.add, jax.tree.map(dot, u, v))


def lane_axpy(scale: Float[Array, " lane"], x: Vector, y: Vector) -> Vector:
    """y + scale·x with one scale per lane."""
    return jax.tree.map(lambda u, v: v + beside(scale, u).astype(u.dtype) * u, x, y)


def _select(keep: Bool[Array, " lane"], new: Vector, old: Vector) -> Vector:
    return jax.tree.map(lambda n, o: jnp.where(beside(keep, n), n, o), new, old)


def beside(per_lane: Array, array: Float[Array, "lane ..."]) -> Array:
    """One number per lane with the axes that broadcast it over an array's."""
    return per_lane.reshape(-1, *(1,) * (array.ndim - 1))


def _divide(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, and 0 where the denominator is 0."""
    return jnp.where(denominator == 0, 0, numerator / jnp.where(denominator == 0, 1, denominator))


_MOST_WRITTEN_OUT = 3


class _State(NamedTuple):
    """Of the loop: ``p`` and ``rz`` are of the iteration before, 0 before the first."""

    x: Vector
    r: Vector
    p: Vector
    rz: Array
    rr: Array
    active: Array
    iterations: Array


def cg(
    matvec: MatVec,
    b: Vector,
    damping: Float[Array, " lane"],
    *,
    max_iterations: int,
    tolerance: float | Float[Array, ""] = 0.0,
    x0: Vector | None = None,
    safeguard: bool = True,
    precondition: MatVec | None = None,
) -> Solution:
    """Solves (F + γI) x = b by preconditioned conjugate gradients, lane by lane.

    A lane stops when ‖r‖ ≤ tolerance·‖b‖, when it meets non-positive curvature (pᵀ(F + γI)p ≤ 0) or
    a number that is not finite; it then keeps its last good iterate. With the number 0 as tolerance
    the loop has a fixed length. Source: Hestenes & Stiefel, 1952.

    A stale warm start can make truncated CG return an ascent direction. ``safeguard=True`` first
    rescales x₀ by max(0, x₀·b / x₀ᵀ(F + γI)x₀), the minimiser of q along x₀; then q(x₀) ≤ 0, and
    since CG only lowers q, bᵀx ≥ 0.

    Args:
      matvec: v → F v, without the damping; symmetric positive semidefinite in every lane.
      b: right-hand side; a tree of arrays with a common leading axis.
      damping: γ of each lane.
      max_iterations: at most this many products (one more for a warm start).
      tolerance: relative residual at which a lane stops.
      x0: warm start, or None for zero.
      safeguard: rescale ``x0`` as above; False is the plain algorithm.
      precondition: r → M⁻¹ r, symmetric positive definite in every lane.

    >>> import jax.numpy as jnp
    >>> F = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    >>> solution = cg(lambda v: v @ F, jnp.array([[1.0, 2.0]]), jnp.zeros(1), max_iterations=2)
    >>> solution.x.round(3).tolist(), solution.iterations.tolist()
    ([[0.20000000298023224, 0.6000000238418579]], [2])
    """
    fixed_length = isinstance(tolerance, numbers.Real) and bool(tolerance == 0)
    if max_iterations < 1:
        raise ValueError(
            f"cg needs max_iterations >= 1, got {max_iterations}; use at least one step."
        )
    precondition = precondition or (lambda r: r)

    def damped(v: Vector) -> Vector:
        return lane_axpy(damping, v, matvec(v))

    bb = lane_dot(b, b)
    # Squares are compared: a root in the loop would cost a pass over the lanes.
    enough = jnp.square(jnp.asarray(tolerance, bb.dtype)) * bb
    x, r = jax.tree.map(jnp.zeros_like, b), b
    if x0 is not None:
        x, r = _warm_start(x0, b, damped, safeguard)
    rr = lane_dot(r, r)
    active = jnp.isfinite(rr) & (rr > enough) & (rr > 0)
    nothing = jax.tree.map(jnp.zeros_like, r)
    start = _State(x, r, nothing, jnp.zeros_like(rr), rr, active, jnp.zeros_like(bb, jnp.int32))

    def step(state: _State) -> _State:
        return _cg_step(state, damped, precondition, enough)

    # A known number of steps is a loop without a condition, for whose answer nothing waits. Few are
    # written out: the systems of small layers then run beside each other, and none copies what a
    # loop carries.
    if fixed_length:
        unroll = max_iterations <= _MOST_WRITTEN_OUT
        end = jax.lax.fori_loop(0, max_iterations, lambda _, s: step(s), start, unroll=unroll)
    else:
        end = jax.lax.while_loop(
            lambda carry: (carry[0] < max_iterations) & jnp.any(carry[1].active),
            lambda carry: (carry[0] + 1, step(carry[1])),
            (jnp.zeros((), jnp.int32), start),
        )[1]
    return _solution(end.x, b, end.r, end.iterations, jnp.sqrt(_divide(end.rr, bb)))


def _warm_start(x0: Vector, b: Vector, damped: MatVec, safeguard: bool) -> tuple[Vector, Vector]:
    """The first iterate and its residual, zero where the factor of x₀ is 0 or not finite."""
    u = damped(x0)
    projection = lane_dot(x0, b)
    if safeguard:
        scale = jnp.maximum(_divide(projection, lane_dot(x0, u)), 0)
    else:
        scale = jnp.ones_like(projection)
    scale = jnp.where(jnp.isfinite(scale), scale, 0)
    x = _select(scale != 0, lane_axpy(scale - 1, x0, x0), jax.tree.map(jnp.zeros_like, b))
    return x, _select(scale != 0, lane_axpy(-scale, u, b), b)


def _cg_step(state: _State, damped: MatVec, precondition: MatVec, enough: Array) -> _State:
    # At the head of the loop, so that nothing is preconditioned behind its end.
    z = precondition(state.r)
    rz = lane_dot(state.r, z)
    p = lane_axpy(_divide(rz, state.rz), state.p, z)
    u = damped(p)
    s = lane_dot(p, u)
    alpha = _divide(rz, s)
    # Rounding can leave pᵀ(F + γI)p at or below 0 where F is singular and γ small; a step along p
    # would then be of any length. A lane that stops takes steps of 0 from here on.
    good = state.active & (rz > 0) & (s > 0) & jnp.isfinite(alpha)
    alpha = jnp.where(good, alpha, 0)
    u = _select(good, u, jax.tree.map(jnp.zeros_like, u))  # it may hold NaN, and 0·NaN is NaN
    r = lane_axpy(-alpha, u, state.r)
    rr = lane_dot(r, r)
    return _State(
        x=lane_axpy(alpha, p, state.x),
        r=r,
        p=p,
        rz=rz,
        rr=rr,
        active=good & (rr > enough) & jnp.isfinite(rr),
        iterations=state.iterations + good,
    )


def unchecked_solution(b: Vector, x: Vector) -> Solution:
    """A ``Solution`` for an ``x`` that is M⁻¹ b for some M near F + γI.

    No product tells how near: its residual is NaN, and its model that of M.
    """
    slope = lane_dot(x, b)
    unknown = jnp.full_like(slope, jnp.nan)
    iterations = jnp.zeros_like(slope, jnp.int32)
    return Solution(x, iterations, unknown, -0.5 * slope, slope, lane_dot(x, x))


def _solution(x: Vector, b: Vector, r: Vector, iterations: Array, residual: Array) -> Solution:
    """A ``Solution`` of known residual r = b − (F + γI) x, with which q(x) takes no product."""
    slope = lane_dot(x, b)
    model = -0.5 * (slope + lane_dot(x, r))
    return Solution(x, iterations, residual, model, slope, lane_dot(x, x))


def lane_flatten(tree: Vector) -> tuple[Float[Array, "lane size"], Callable[[Array], Vector]]:
    """A vector as one matrix with a row per lane, and the way back."""
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [leaf.shape for leaf in leaves]
    flat = jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=1)
    ends = list(itertools.accumulate([math.prod(shape[1:]) for shape in shapes]))

    def unflatten(array: Array) -> Vector:
        parts = zip(jnp.split(array, ends[:-1], axis=1), shapes, strict=True)
        return jax.tree.unflatten(treedef, [part.reshape(shape) for part, shape in parts])

    return flat, unflatten


def solve_dual(
    gradients: Float[Array, "lane example size"],
    b: Vector,
    damping: Float[Array, " lane"],
    num_examples: int,
) -> Solution:
    """Solves (UᵀU/N + γI) x = b in example space (Woodbury; TENGraD, arXiv:2106.03947).

    x = (b − Uᵀ(UUᵀ + NγI)⁻¹ U b) / γ, where the E rows of U are per-example gradients, more than N
    where several cotangents are drawn per example. O(E²·size). Where γ and all gradients of a lane
    are 0, x is, as by CG.
    """
    flat, unflatten = lane_flatten(b)
    u = gradients.astype(flat.dtype)
    nothing = (damping == 0) & ~u.any((1, 2))
    gamma = jnp.where(nothing, 1, damping).astype(flat.dtype)[:, None]
    gram = jnp.einsum("lep,lfp->lef", u, u)
    # Nγ, not γ: the rows of U are of single examples, and F is their mean.
    gram += (num_examples * gamma)[..., None] * jnp.eye(gram.shape[-1], dtype=gram.dtype)
    right = jnp.einsum("lep,lp->le", u, flat)[..., None]
    weights = one_by_one_on_cpus(jnp.linalg.solve, gram, right)[..., 0]
    x = (flat - jnp.einsum("lep,le->lp", u, weights)) / gamma
    x = jnp.where(nothing[:, None], 0, x)
    product = jnp.einsum("lep,le->lp", u, jnp.einsum("lep,lp->le", u, x)) / num_examples
    x = unflatten(x)
    r = jax.tree.map(jnp.subtract, b, lane_axpy(damping, x, unflatten(product)))
    bb = lane_dot(b, b)
    residual = jnp.sqrt(_divide(lane_dot(r, r), bb))
    return _solution(x, b, r, jnp.zeros_like(bb, jnp.int32), residual)
