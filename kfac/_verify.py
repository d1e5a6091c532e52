"""Checks every product and every cheap path of a model's curvature.

Against dense algebra, layer by layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kfac._trees import flatten
from kfac.curvature._blocks import Block
from kfac.curvature._coverage import Layers
from kfac.curvature._gather import Curvature, value_grad_and_curvature
from kfac.solve import _solvers as solver
from kfac.solve import _systems as systems

if TYPE_CHECKING:
    from jaxtyping import Array, Key, PyTree


@dataclasses.dataclass(frozen=True)
class Row:
    """What ``verify`` found for one block (the worst of its lanes).

    Attributes:
      name: of the block.
      form: how ``curvature="kron"`` computes its products: ``"factors"`` or ``"kron"``.
      size: parameters of one lane.
      capture_error: ‖mean of per-example gradients − ∇L‖ / ‖∇L‖: whether every use of the
        parameters is captured.
      product_error: ‖F v − UᵀU v / N‖ / ‖UᵀU v / N‖ for a random v and per-example gradients U.
      cg_error: ‖x − x*‖ / ‖x*‖ of CG run to the end against the direct solution, on the exact
        block.
      kron_cosine: cosine between the solutions with ``"kron"`` and with ``"exact"``.
      rank: numerical rank of F.
      condition: (λ_max + γ) / (λ_min + γ).
    """

    name: str
    form: str
    size: int
    capture_error: float
    product_error: float
    cg_error: float
    kron_cosine: float
    rank: int
    condition: float


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
        head = (
            "block",
            "form",
            "size",
            "capture",
            "product",
            "cg",
            "cos kron",
            "rank",
            "condition",
        )
        lines: list[tuple[str, ...]] = [head]
        for r in self.rows:
            errors = [f"{e:.1e}" for e in (r.capture_error, r.product_error, r.cg_error)]
            lines.append(
                (
                    r.name,
                    r.form,
                    str(r.size),
                    *errors,
                    f"{r.kron_cosine:.3f}",
                    str(r.rank),
                    f"{r.condition:.1e}",
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
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
    """Compares the curvature of every layer with dense algebra.

    It is of the empirical Fisher matrix of one batch.

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
        compute = jax.jit(functools.partial(_check, block))
        found = compute(flat, flat_grads, curvature, damping, jax.random.fold_in(root, i))
        numbers = {name: np.asarray(values) for name, values in found.items()}
        worst = {k: float(v.min() if k == "kron_cosine" else v.max()) for k, v in numbers.items()}
        form = "factors" if block.factored else "kron"
        rows.append(Row(block.name, form, block.size, **{**worst, "rank": int(worst["rank"])}))
    return Report(tuple(rows), curvature.layers)


def _check(
    block: Block,
    params: dict,
    grads: dict,
    curvature: Curvature,
    damping: float | Array,
    key: Array,
) -> dict[str, Array]:
    (exact,) = systems.build(curvature, params, {block.name: "exact"})
    b = exact.pack(systems.lanes_of(block, grads))
    flat = solver.lane_flatten(b)[0]
    u = exact.example_gradients()

    def norm(a: Array) -> Array:
        return jnp.linalg.norm(a, axis=-1)

    def relative(a: Array, truth: Array) -> Array:
        return norm(a - truth) / jnp.maximum(norm(truth), jnp.finfo(flat.dtype).tiny)

    v = jax.random.normal(key, flat.shape, flat.dtype)
    unflatten = solver.lane_flatten(b)[1]
    product = solver.lane_flatten(exact.matvec(unflatten(v)))[0]
    dense_product = (
        jnp.einsum("lep,le->lp", u, jnp.einsum("lep,lp->le", u, v)) / curvature.num_examples
    )

    # UUᵀ has the eigenvalues of UᵀU that are not 0, and as many rows as there are
    # examples, not parameters.
    eigenvalues = jnp.linalg.eigvalsh(jnp.einsum("lep,lfp->lef", u, u)) / curvature.num_examples
    gamma = damping * eigenvalues.sum(1) / block.size
    direct = solver.solve_dual(u, b, gamma, curvature.num_examples)
    rows = min(u.shape[1], block.size)
    iterated = solver.cg(exact.matvec, b, gamma, max_iterations=2 * rows + 10, tolerance=1e-10)
    kron = _kron_solution(block, curvature, params, b, damping)
    x = solver.lane_flatten(direct.x)[0]
    y = solver.lane_flatten(kron)[0]
    top = eigenvalues[:, -1]
    bottom = jnp.where(u.shape[1] < block.size, 0, jnp.maximum(eigenvalues[:, -rows], 0))
    # Below it, rounding: the rule of NumPy's matrix_rank, for the squares of singular
    # values.
    threshold = top * max(u.shape[1:]) * jnp.finfo(flat.dtype).eps
    return {
        "capture_error": relative(u.sum(1) / curvature.num_examples, flat),
        "product_error": relative(product, dense_product),
        "cg_error": relative(solver.lane_flatten(iterated.x)[0], x),
        "kron_cosine": (x * y).sum(1) / (norm(x) * norm(y)),
        "rank": (eigenvalues > threshold[:, None]).sum(1),
        "condition": (top + gamma) / (bottom + gamma),
    }


def _kron_solution(
    block: Block, curvature: Curvature, params: dict, b: PyTree, damping: float | Array
) -> PyTree:
    form = "factors" if block.factored else "kron"
    factors = systems.new_factors(block, curvature, systems.lanes_of(block, params), form)
    (system,) = systems.build(curvature, params, {block.name: form}, {block.name: factors})
    gamma = damping * system.trace(jax.random.key(0)) / block.size
    return solver.cg(system.matvec, b, gamma, max_iterations=200, tolerance=1e-6).x
