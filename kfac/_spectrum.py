"""Eigenvalues of every layer's curvature by Lanczos' method: from products, no matrix is formed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kfac._trees import flatten
from kfac.curvature._gather import Curvature
from kfac.solve import _solvers as solver
from kfac.solve import _systems as systems

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Key, PyTree

    from kfac._trees import Flat
    from kfac.solve._systems import System


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """What ``spectrum`` found of one block, for each of its lanes (layers that share a program).

    The weights of a probe sum to 1: mass w at eigenvalue λ says that this share of the block's
    directions has an eigenvalue near λ, and Σ w f(λ) estimates tr f(F) / size.

    Attributes:
      size: parameters of a lane.
      eigenvalues: Ritz values, ascending; the outermost ones are the block's own first.
      weights: their shares of each probe.
    """

    size: int
    eigenvalues: Float[Array, "lane probe iteration"]
    weights: Float[Array, "lane probe iteration"]

    @property
    def largest(self) -> Float[Array, " lane"]:
        """Estimates of the largest eigenvalues, from below."""
        return self.eigenvalues.max((1, 2))

    @property
    def trace(self) -> Float[Array, " lane"]:
        """Estimates of the traces."""
        return self.size * self.mean(lambda eigenvalues: eigenvalues)

    def mean(self, function: Callable[[Array], Array]) -> Float[Array, " lane"]:
        """Estimates of tr f(F) / size, with f = ``function`` of the eigenvalues.

        ``spectrum.mean(lambda x: x > damping)`` is the share of directions that a damping leaves.
        """
        return (self.weights * function(self.eigenvalues)).sum(2).mean(1)


def spectrum(
    curvature: Curvature,
    params: PyTree,
    *,
    iterations: int = 32,
    probes: int = 1,
    key: Key | None = None,
) -> dict[str, Spectrum]:
    """Finds the density of eigenvalues of every block's Fisher matrix, and its largest ones.

    Stochastic Lanczos quadrature with full reorthogonalization. An iteration takes one product; a
    block keeps ``iterations`` vectors of its own size at a time.

    Source: Golub and Meurant, "Matrices, Moments and Quadrature", 2010, chapters 6 and 11; for
    networks Ghorbani et al., 2019, arXiv:1901.10159.

    Args:
      curvature: of a batch, from ``kfac.curvature`` or ``kfac.value_grad_and_curvature``.
      params: the tree of which it was taken.
      iterations: of Lanczos' method.
      probes: random starts for each block.
      key: for them.

    Returns:
      Block name → spectrum.

    Raises:
      ValueError: ``iterations`` or ``probes`` below 1.

    >>> import jax, jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((2, 1))}}
    >>> loss_fn = lambda p, x: kfac.tap(kfac.Dense(), p["fc"], x, path="fc").mean()
    >>> x = jnp.array([[2.0, 0.0], [0.0, 4.0]])  # whose squares have the means 2 and 8
    >>> curvature = kfac.curvature(loss_fn, fisher="empirical")(params, x)
    >>> found = kfac.spectrum(curvature, params, iterations=2)["fc"]
    >>> found.eigenvalues[0, 0].round(3).tolist(), found.trace.round(3).tolist()
    ([2.0, 8.0], [10.0])
    """
    if min(iterations, probes) < 1:
        raise ValueError(f"expected iterations and probes from 1 on, got {iterations} and {probes}")
    root, flat, found = jax.random.key(0) if key is None else key, flatten(params), {}
    for i, block in enumerate(curvature.layers.blocks.values()):
        keys = jax.random.split(jax.random.fold_in(root, i), probes)
        compute = jax.jit(functools.partial(_densities, block.name, iterations))
        values, weights = compute(curvature, flat, keys)
        found[block.name] = Spectrum(block.size, values.swapaxes(0, 1), weights.swapaxes(0, 1))
    return found


def _densities(
    name: str, iterations: int, curvature: Curvature, flat: Flat, keys: Array
) -> tuple[Array, Array]:
    (system,) = systems.build(curvature, flat, {name: "exact"})
    return jax.lax.map(functools.partial(_quadrature, system, iterations), keys)


def _quadrature(system: System, iterations: int, key: Array) -> tuple[Array, Array]:
    """Ritz values of every lane from one random start, and the squares of its parts along them."""
    # Not packed: rows of zeros that fill a matrix are no directions of the block.
    like, unflatten = solver.lane_flatten(system.params)
    start = jax.random.rademacher(key, like.shape, like.dtype) / jnp.sqrt(like.shape[1])
    product = lambda v: solver.lane_flatten(system.product(unflatten(v)))[0]
    dot = lambda u, v: (u * v).sum(1)
    # Below it a remainder is rounding: the space is used up, and what follows would be noise.
    least = 10 * like.shape[1] ** 0.5 * jnp.finfo(like.dtype).eps

    def step(carry: tuple, i: Array) -> tuple[tuple, tuple[Array, Array]]:
        basis, v, scale = carry
        basis = basis.at[i].set(v)
        w = product(v)
        diagonal = dot(v, w)
        scale = jnp.maximum(scale, jnp.sqrt(dot(w, w)))
        for _ in range(2):  # once leaves what rounding brought back
            w -= jnp.einsum("ilp,il->lp", basis, jnp.einsum("ilp,lp->il", basis, w))
        beside = jnp.sqrt(dot(w, w))
        beside = jnp.where(beside > least * scale, beside, 0)
        v = jnp.where(beside > 0, 1 / jnp.where(beside > 0, beside, 1), 0)[:, None] * w
        return (basis, v, scale), (diagonal, beside)

    basis = jnp.zeros((iterations, *like.shape), like.dtype)
    carry = basis, start, jnp.zeros(len(like), like.dtype)
    _, (diagonal, beside) = jax.lax.scan(step, carry, jnp.arange(iterations))
    whole = jax.vmap(lambda d, b: jnp.diag(d) + jnp.diag(b[:-1], 1) + jnp.diag(b[:-1], -1))
    values, vectors = jnp.linalg.eigh(whole(diagonal.T, beside.T))
    return values, jnp.square(vectors[:, 0])
