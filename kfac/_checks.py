"""Two looks at every layer's curvature: against dense algebra, and its eigenvalues."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kfac._arrays import flatten
from kfac.curvature._blocks import Block
from kfac.curvature._coverage import Layers
from kfac.curvature._gather import Curvature, value_grad_and_curvature
from kfac.solve import _solvers as solver
from kfac.solve import _systems as systems
from kfac.solve._systems import Form

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Key, PyTree

    from kfac._arrays import Flat
    from kfac.solve._systems import System


@dataclasses.dataclass(frozen=True)
class Row:
    """What ``verify`` found for one block (the worst of its lanes)."""

    name: str  # of the block
    form: str  # how ``curvature="kron"`` computes its products: ``"factors"`` or ``"kron"``
    size: int  # parameters of one lane
    # ‖mean of per-example gradients − ∇L‖ / ‖∇L‖: whether every use of the parameters is captured
    capture_error: float
    # ‖F v − UᵀU v / N‖ / ‖UᵀU v / N‖ for a random v and per-example gradients U
    product_error: float
    # ‖x − x*‖ / ‖x*‖ of CG run to the end against the direct solution, on the exact block
    cg_error: float
    kron_cosine: float  # cosine between the solutions with ``"kron"`` and with ``"exact"``
    rank: int  # numerical rank of F
    condition: float  # (λ_max + γ) / (λ_min + γ)


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``verify`` found; printing it gives a table."""

    rows: tuple[Row, ...]  # one per block
    layers: Layers

    def __str__(self) -> str:
        names = ("block", "form", "size", "capture", "product", "cg", "cos kron", "rank")
        lines: list[tuple[str, ...]] = [(*names, "condition")]
        for row in self.rows:
            errors = [f"{e:.1e}" for e in (row.capture_error, row.product_error, row.cg_error)]
            numbers = (*errors, f"{row.kron_cosine:.3f}", str(row.rank), f"{row.condition:.1e}")
            lines.append((row.name, row.form, str(row.size), *numbers))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [map(str.ljust, line, widths) for line in lines]
        table = ["  ".join(cells).rstrip() for cells in padded]
        return "\n".join([*table, f"{100 * self.layers.coverage:.1f} % of the parameters covered"])


def verify(
    loss_fn: Callable,
    params: PyTree,
    *args: Any,
    damping: float = 1e-2,
    has_aux: bool = False,
    batch_size: int | None = None,
    key: Key | None = None,
) -> Report:
    """Compares the curvature of every layer, of the empirical Fisher matrix, with dense algebra.

    Of N examples it holds every one's gradient of each layer in turn, N × size numbers: use few. A
    large ``capture_error`` means that a parameter is also used where no layer was met. Whose a row
    of a layer is, it takes from the capture, as ``find_layers`` has found it in the program.

    Args:
      loss_fn, params, *args, has_aux, batch_size: as for ``value_grad_and_curvature``.
      damping: λ of the solutions, relative to the mean eigenvalue of each block.
      key: for the random directions.

    >>> import jax, jax.numpy as jnp, kfac
    >>> x = jax.random.normal(jax.random.key(1), (8, 3))
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p, x, path="") ** 2).mean()
    >>> kfac.verify(loss_fn, {"kernel": jnp.ones((3, 2))}, x).rows[0].capture_error < 1e-5
    True
    """
    function = value_grad_and_curvature(
        loss_fn, fisher="empirical", has_aux=has_aux, batch_size=batch_size
    )
    _, grads, curvature = jax.jit(function)(params, *args)
    flat, flat_grads = flatten(params), flatten(grads)
    root = jax.random.key(0) if key is None else key
    rows = []
    for i, block in enumerate(curvature.layers.blocks.values()):
        form = "factors" if block.factored else "kron"
        compute = jax.jit(functools.partial(_check, block, form))
        found = compute(flat, flat_grads, curvature, damping, jax.random.fold_in(root, i))
        worst = {name: float(jnp.max(values)) for name, values in found.items()}
        worst["kron_cosine"], rank = float(found["kron_cosine"].min()), int(worst.pop("rank"))
        rows.append(Row(block.name, form, block.size, rank=rank, **worst))
    return Report(tuple(rows), curvature.layers)


def _check(
    block: Block,
    form: Form,
    params: dict,
    grads: dict,
    curvature: Curvature,
    damping: float,
    key: Array,
) -> dict[str, Array]:
    (exact,) = systems.build(curvature, params, {block.name: "exact"})
    b = exact.pack(systems.lanes_of(block, grads))
    flat, unflatten = solver.lane_flatten(b)
    u, examples = exact.example_gradients(), curvature.num_examples
    norm = functools.partial(jnp.linalg.norm, axis=-1)

    def relative(a: Array, truth: Array) -> Array:
        return norm(a - truth) / jnp.maximum(norm(truth), jnp.finfo(flat.dtype).tiny)

    v = jax.random.normal(key, flat.shape, flat.dtype)
    product = solver.lane_flatten(exact.matvec(unflatten(v)))[0]
    dense_product = jnp.einsum("lep,le->lp", u, jnp.einsum("lep,lp->le", u, v)) / examples
    # UUᵀ has the eigenvalues of UᵀU that are not 0, and as many rows as there are examples, not
    # parameters.
    eigenvalues = jnp.linalg.eigvalsh(jnp.einsum("lep,lfp->lef", u, u)) / examples
    gamma = damping * eigenvalues.sum(1) / block.size
    direct = solver.solve_dual(u, b, gamma, examples)
    rows = min(u.shape[1], block.size)
    iterated = solver.cg(exact.matvec, b, gamma, max_iterations=2 * rows + 10, tolerance=1e-10)
    factors = systems.new_factors(block, curvature, systems.lanes_of(block, params), form)
    (kron,) = systems.build(curvature, params, {block.name: form}, {block.name: factors})
    own = damping * kron.trace(jax.random.key(0)) / block.size
    by_kron = solver.cg(kron.matvec, b, own, max_iterations=200, tolerance=1e-6)
    x, y = solver.lane_flatten(direct.x)[0], solver.lane_flatten(by_kron.x)[0]
    top = eigenvalues[:, -1]
    bottom = jnp.where(u.shape[1] < block.size, 0, jnp.maximum(eigenvalues[:, -rows], 0))
    # Below it, rounding: the rule of NumPy's matrix_rank, for the squares of singular values.
    threshold = top * max(u.shape[1:]) * jnp.finfo(flat.dtype).eps
    return {
        "capture_error": relative(u.sum(1) / examples, flat),
        "product_error": relative(product, dense_product),
        "cg_error": relative(solver.lane_flatten(iterated.x)[0], x),
        "kron_cosine": (x * y).sum(1) / (norm(x) * norm(y)),
        "rank": (eigenvalues > threshold[:, None]).sum(1),
        "condition": (top + gamma) / (bottom + gamma),
    }


# ---- Eigenvalues by Lanczos' method: from products, no matrix is formed.


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
    block keeps ``iterations`` vectors of its own size at a time. Source: Golub and Meurant,
    "Matrices, Moments and Quadrature", 2010, chapters 6 and 11; for networks Ghorbani et al., 2019,
    arXiv:1901.10159.

    Args:
      curvature: of a batch, from ``kfac.curvature`` or ``kfac.value_grad_and_curvature``.
      params: the tree of which it was taken.
      iterations: of Lanczos' method.
      probes: random starts for each block, drawn by ``key``.

    Returns:
      Block name → spectrum.

    Raises:
      ValueError: ``iterations`` or ``probes`` below 1.

    >>> import jax.numpy as jnp, kfac
    >>> params, x = {"kernel": jnp.ones((2, 1))}, jnp.array([[2.0, 0.0], [0.0, 4.0]])
    >>> loss_fn = lambda p, x: kfac.tap(kfac.Dense(), p, x, path="").mean()
    >>> curvature = kfac.curvature(loss_fn, fisher="empirical")(params, x)
    >>> kfac.spectrum(curvature, params, iterations=2)["model"].largest.round(3).tolist()
    [8.0]
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
