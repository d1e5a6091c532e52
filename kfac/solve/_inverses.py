"""Inverses of the damped factors, by which CG is preconditioned, or which stand for it."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint

from kfac._arrays import concatenated, one_by_one_on_cpus, over_devices

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxtyping import Array, Float

    from kfac.solve._systems import Factors, Lanes, System

# Rows of what is factorized at once, by one block of threads on a GPU. Its kernel is written in
# `SOURCE`; `python -m benchmarks.inverse_root --write` makes of it what is handed to XLA.
ROWS, THREADS, KERNEL = 96, 1024, "kfac_inverse_root"
SOURCE = Path(__file__).parents[1] / "kernels" / "_inverse_root.cu"
PTX = SOURCE.with_suffix(".ptx")
_ptx = functools.cache(PTX.read_text)  # a step has dozens of such blocks


def damped_inverses(groups: Iterable[System], gamma: dict[str, Array]) -> Factors:
    """By block, (𝒜 + π√γ I)⁻¹ and (𝒢 + √γ/π I)⁻¹, see ``System.damped_factors``.

    Factors of one size are inverted side by side: it is a long chain of small operations.
    """
    factors: dict[str, tuple[Lanes, Lanes]] = {}
    places: dict[Any, list[tuple[str, int]]] = {}
    for system in groups:
        of_system = system.damped_factors(gamma)
        factors |= of_system
        for name, sides in of_system.items():
            for side, (matrix, _) in enumerate(sides):
                # A stack has one place: what was averaged by the devices would give its own to
                # those that the activations of the network are on the way to.
                averaged = side == 0 and not system.program[0].layer.isometric
                key = matrix.shape[-1], matrix.dtype, averaged
                places.setdefault(key, []).append((name, side))
    inverses = {}
    for of_one_size in places.values():
        lanes = [factors[name][side] for name, side in of_one_size]
        ends = list(itertools.accumulate(len(damping) for _, damping in lanes))
        inverse = over_devices(_damped_inverse, kept=concatenated(lanes), whole=False)
        inverses |= dict(zip(of_one_size, jnp.split(inverse, ends[:-1]), strict=True))
    return {name: (inverses[name, 0], inverses[name, 1]) for name in factors}


def _damped_inverse(
    matrix: Float[Array, "lane n n"], damping: Float[Array, " lane"]
) -> Float[Array, "lane n n"]:
    """Inverses, symmetric to the last bit, as CG needs; the identity where there is none."""
    return one_by_one_on_cpus(
        _inverse,
        matrix + damping[:, None, None] * jnp.eye(matrix.shape[-1], dtype=matrix.dtype),
        # Row by row, as the state keeps them, else XLA may turn all inverses at every step.
        elsewhere=lambda lanes: with_layout_constraint(_inverse(lanes), Layout((0, 1, 2))),
    )


def _inverse(matrix: Float[Array, "*lane n n"]) -> Float[Array, "*lane n n"]:
    inverse = _root_and_inverse(matrix)[1]  # the root of all is dead code, which XLA leaves out
    eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    return jnp.where(jnp.isfinite(inverse).all((-2, -1), keepdims=True), inverse, eye)


def _root_and_inverse(
    matrix: Float[Array, "*lane n n"],
) -> tuple[Float[Array, "*lane n n"], Float[Array, "*lane n n"]]:
    """L⁻¹ and A⁻¹ of A = L Lᵀ, NaN where rounding made A indefinite.

    By products of blocks, 1.7 n³ operations for the inverse, but for the smallest blocks: products
    of a batch fill a GPU, where its libraries factorize large matrices one after the other.
    """
    if matrix.shape[-1] == 1:
        root = 1 / jnp.sqrt(matrix)
        return root, root * root
    if matrix.shape[-1] <= ROWS:
        root = _root(matrix)
        return root, _matmul(root.mT, root)
    # Largest blocks first: they come in few sizes, and the row of a bias is by itself.
    middle = ROWS
    while 2 * middle < matrix.shape[-1]:
        middle *= 2
    side = matrix[..., middle:, :middle]
    upper_root, upper = _root_and_inverse(matrix[..., :middle, :middle])
    # The Schur complement from a root of A₁₁⁻¹: by A₁₁⁻¹ itself rounding would grow with the square
    # of A's condition.
    half = _matmul(side, upper_root.mT)
    complement = matrix[..., middle:, middle:] - _matmul(half, half.mT)
    lower_root, lower = _root_and_inverse(complement)
    ratio = _matmul(half, upper_root)  # A₂₁ A₁₁⁻¹
    below = -_matmul(lower, ratio)
    corner = _matmul(ratio.mT, below)
    upper -= (corner + corner.mT) / 2
    inverse = jnp.block([[upper, below.mT], [below, lower]])
    below = -_matmul(lower_root, ratio)
    return jnp.block([[upper_root, jnp.zeros_like(side.mT)], [below, lower_root]]), inverse


def _root(matrix: Float[Array, "*lane n n"]) -> Float[Array, "*lane n n"]:
    if matrix.dtype != jnp.float32:
        return _root_by_cholesky(matrix)
    return jax.lax.platform_dependent(matrix, cuda=_root_by_kernel, default=_root_by_cholesky)


def _root_by_cholesky(matrix: Float[Array, "*lane n n"]) -> Float[Array, "*lane n n"]:
    root = jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
    eye = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    return jax.lax.linalg.triangular_solve(root, eye, left_side=True, lower=True)


@jax.custom_jvp
def _root_by_kernel(matrix: Float[Array, "*lane n n"]) -> Float[Array, "*lane n n"]:
    """L⁻¹ of A = L Lᵀ in float32, of at most ``ROWS`` rows.

    A kernel that is handed to XLA as PTX is recorded with the rest of the step, which what XLA has
    for it on NVIDIA GPUs is not: the host would wait in the midst of a step.
    """
    *_, rows = matrix.shape
    # Below A an identity, whose root is one: there is one kernel.
    filled = jnp.broadcast_to(jnp.eye(ROWS, dtype=matrix.dtype), (*matrix.shape[:-2], ROWS, ROWS))
    filled = filled.at[..., :rows, :rows].set(matrix) if rows < ROWS else matrix
    roots = _roots(filled.reshape(-1, ROWS, ROWS)).reshape(filled.shape)
    return roots[..., :rows, :rows]


@_root_by_kernel.defjvp
def _root_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (matrix,), (tangent,) = primals, tangents
    root = _root_by_kernel(matrix)
    # dL = L Φ(L⁻¹ dA L⁻ᵀ), where Φ keeps the lower half with half of the diagonal.
    inner = jnp.tril(_matmul(_matmul(root, tangent), root.mT))
    inner -= jnp.eye(inner.shape[-1], dtype=inner.dtype) * inner / 2
    return root, -_matmul(inner, root)


@custom_vmap
def _roots(matrices: Float[Array, "lane 96 96"]) -> Float[Array, "lane 96 96"]:
    if not len(matrices):
        return matrices
    numbers = {"grid_x": len(matrices), "block_x": THREADS, "shared_mem_bytes": 0}
    numbers |= dict.fromkeys(("grid_y", "grid_z", "block_y", "block_z"), 1)
    result = jax.eval_shape(lambda a: a, matrices)
    return jax.ffi.ffi_call("__gpu$xla.gpu.ptx", result)(
        matrices,
        name=KERNEL,
        kernel_type="ptx",
        kernel_data=_ptx(),
        **{name: np.int32(number) for name, number in numbers.items()},
    )


@_roots.def_vmap
def _batched(axis_size: int, in_batched: Any, matrices: Array) -> tuple[Array, bool]:
    return _roots(matrices.reshape(-1, ROWS, ROWS)).reshape(matrices.shape), True


# In float32 wherever the default is less: what is subtracted is close to what it is taken from.
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
