"""Checks every product of a model's curvature against dense algebra, layer by layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kfac._trees import flatten
from kfac.curvature._blocks import Block
from kfac.curvature._coverage import Layers
from kfac.curvature._gather import Curvature, value_grad_and_curvature
from kfac.solve import _solvers as solver
from kfac.solve import _systems as systems
from kfac.solve._systems import Form

if TYPE_CHECKING:
    from jaxtyping import Array, Key, PyTree


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
    """The rows of ``verify``; printing it gives a table.

    Attributes:
      rows: one per block.
      layers: the layers, with their coverage.
    """

    rows: tuple[Row, ...]
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

    For a batch of N examples it holds every example's gradient of each layer in turn, N × size
    numbers: use a small batch. A large ``capture_error`` means that a parameter is also used where
    no layer was met.

    Args:
      loss_fn: ``loss_fn(params, *args) → loss`` or ``(loss, aux)``, the mean over examples.
      params: the differentiated tree.
      *args: the loss function's further arguments.
      damping: λ of the solutions, relative to the mean eigenvalue of each block.
      has_aux: whether ``loss_fn`` returns an aux.
      batch_size: as for ``value_grad_and_curvature``.
      key: for the random directions.

    Returns:
      A printable report.

    >>> import jax, jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jax.random.normal(jax.random.key(0), (3, 2))}}
    >>> loss_fn = lambda p, x: (kfac.tap(kfac.Dense(), p["fc"], x, path="fc") ** 2).mean()
    >>> report = kfac.verify(loss_fn, params, jax.random.normal(jax.random.key(1), (8, 3)))
    >>> report.rows[0].capture_error < 1e-5, report.rows[0].product_error < 1e-5
    (True, True)
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
