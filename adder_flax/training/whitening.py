"""SOAP and KL-Shampoo: gradients of matrices in the eigenbases of their Kronecker factors.

Both keep a factor for the rows and one for the columns of each gradient G, find their eigenvectors
Q_L and Q_R now and then, and scale Q_Lᵀ G Q_R elementwise. They differ in what the factors are and
in what the scale is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

# The largest of KL-Shampoo's eigenvalues is at most so many times the smallest, squared: the number
# of rows or columns, but no less and no more than these.
_SMALLEST_CLAMP, _LARGEST_CLAMP = 10.0, 4000.0

Pair = tuple[Array, Array]  # of the rows and of the columns of a matrix, or of a stack of them


class Whitening(NamedTuple):
    """What is kept of one matrix of m rows and n columns, or of a stack of them.

    Attributes:
      mean: running mean of the gradients.
      factors: running means of the factors of rows (m, m) and columns (n, n).
      bases: their eigenvectors, in columns.
      scales: of SOAP the running mean of squares in the bases, (m, n); of KL-Shampoo eigenvalues,
        (m,) and (n,).
    """

    mean: Float[Array, "*stack m n"]
    factors: Pair
    bases: Pair
    scales: Any


class WhiteningState(NamedTuple):
    """Steps that were done, and a :class:`Whitening` for each parameter."""

    count: Int[Array, ""]
    matrices: Any


def scale_by_soap(
    b1: float | Array = 0.95,
    b2: float | Array = 0.95,
    eps: float | Array = 1e-8,
    interval: int = 10,
) -> optax.GradientTransformation:
    """Adam in the eigenbases of Shampoo's factors, which are renewed every ``interval`` steps.

    Source: Vyas et al., 2024, https://arxiv.org/abs/2409.11321, algorithm 3.

    The factors are running means of G Gᵀ and Gᵀ G, of the decay ``b2`` as the squares. As in the
    authors' code the first step only begins the factors, and new bases are one step of power
    iteration from the old, in the order of their eigenvalues.
    """

    def later(
        count: Array, gradient: Array, kept: Whitening, b1: Array, b2: Array, eps: Array
    ) -> tuple[Array, Whitening]:
        left, right = kept.bases
        mean = _mix(kept.mean, gradient, b1)
        squares = _mix(kept.scales, (left.T @ gradient @ right) ** 2, b2)
        corrected = (left.T @ mean @ right) / (1 - b1**count)
        update = left @ (corrected / (jnp.sqrt(squares / (1 - b2**count)) + eps)) @ right.T
        factors = _mix_all(kept.factors, (gradient @ gradient.T, gradient.T @ gradient), b2)

        def renew() -> tuple[Any, Array]:
            orders = [
                jnp.argsort(-jnp.einsum("ji,jk,ki->i", q, f, q))
                for q, f in zip(kept.bases, factors, strict=True)
            ]
            ordered = [q[:, o] for q, o in zip(kept.bases, orders, strict=True)]
            return _power_steps(factors, ordered), squares[orders[0]][:, orders[1]]

        bases, squares = jax.lax.cond(count % interval == 0, renew, lambda: (kept.bases, squares))
        return update, Whitening(mean, factors, bases, squares)

    def first(gradient: Array, b2: Array) -> Whitening:
        factors = ((1 - b2) * (gradient @ gradient.T), (1 - b2) * (gradient.T @ gradient))
        zeros = jnp.zeros_like(gradient)
        return Whitening(zeros, factors, _eigenvectors(factors), zeros)

    return _stage(first, later, b1, b2, eps)


def scale_by_kl_shampoo(
    b1: float | Array = 0.9, b2: float | Array = 0.98, eps: float | Array = 1e-8, interval: int = 10
) -> optax.GradientTransformation:
    """KL-Shampoo (Lin et al., 2025, https://arxiv.org/abs/2509.03378; the authors' ``kl_opt.py``).

    The factors are those of the normal distribution closest to the gradients: running means of G
    S_R⁻¹ Gᵀ / n and Gᵀ S_L⁻¹ G / m. Eigenvalues follow every step, in bases that are renewed now
    and then by a step of power iteration; the update is Q_L (Q_Lᵀ M Q_R / (√λ_L √λ_Rᵀ + ε)) Q_Rᵀ
    with M the running mean of the gradients. Nothing of the size of Adam's second moments is kept.

    The authors begin all eigenvalues at 0.1 and keep them above 1 / side². Here they begin at the
    first gradient's root mean square, so that their products are its square, and stay above the
    largest of their side divided by side²: whatever scale the gradients have, as long as their
    squares are numbers, the steps are the same.
    """

    def later(
        count: Array, gradient: Array, kept: Whitening, b1: Array, b2: Array, eps: Array
    ) -> tuple[Array, Whitening]:
        left, right = kept.bases
        began = (_begin(kept.scales[0], gradient), _begin(kept.scales[1], gradient))
        # A layer without a gradient so far has eigenvalues of 0.
        rows, columns = (jnp.sqrt(jnp.maximum(v, jnp.finfo(v.dtype).tiny)) for v in began)
        mean = _mix(kept.mean, gradient, b1)
        update = left @ (left.T @ mean @ right / (jnp.outer(rows, columns) + eps)) @ right.T
        whitened_rows = (left.T @ gradient) / rows[:, None]
        whitened_columns = (gradient @ right) / columns
        m, n = gradient.shape
        found = whitened_columns @ whitened_columns.T / n, whitened_rows.T @ whitened_rows / m
        rotated = left.T @ gradient @ right
        values = ((rotated / columns) ** 2).mean(1), ((rotated / rows[:, None]) ** 2).mean(0)
        scales = tuple(
            jnp.maximum(
                value, value.max() / jnp.clip(value.size, _SMALLEST_CLAMP, _LARGEST_CLAMP) ** 2
            )
            for value in _mix_all(began, values, b2)
        )
        factors = _mix_all(kept.factors, found, b2)
        bases = jax.lax.cond(
            count % interval == 0, lambda: _power_steps(factors, kept.bases), lambda: kept.bases
        )
        return update, Whitening(mean, factors, bases, scales)

    def first(gradient: Array, b2: Array) -> Whitening:
        m, n = gradient.shape
        share = 1 - b2
        factors = (share * (gradient @ gradient.T / n), share * (gradient.T @ gradient / m))
        scales = tuple(_begin(jnp.zeros(side, gradient.dtype), gradient) for side in (m, n))
        return Whitening(jnp.zeros_like(gradient), factors, _eigenvectors(factors), scales)

    return _stage(first, later, b1, b2, eps)


def _stage(
    first: Callable[[Array, Array], Whitening], later: Callable, *numbers: float | Array
) -> optax.GradientTransformation:
    """Of b1, b2 and ε as arrays of the gradient's dtype: else they may widen what is kept."""

    def begun(gradient: Array) -> Whitening:
        b2 = jnp.asarray(numbers[1], gradient.dtype)
        return _stacked(lambda g: first(g, b2))(gradient)

    def init(params: Any) -> WhiteningState:
        begin = lambda parameter: jax.tree.map(jnp.zeros_like, begun(_wide(parameter)))
        return WhiteningState(jnp.zeros((), jnp.int32), jax.tree.map(begin, params))

    def update(
        updates: Any, state: WhiteningState, params: Any = None
    ) -> tuple[Any, WhiteningState]:
        def of_one(gradient: Array, kept: Whitening) -> tuple[Array, Whitening]:
            wide = _wide(gradient)
            typed = [jnp.asarray(number, wide.dtype) for number in numbers]
            result, new = jax.lax.cond(
                state.count == 0,
                lambda: (jnp.zeros_like(wide), begun(wide)),
                lambda: _stacked(lambda g, k: later(state.count, g, k, *typed))(wide, kept),
            )
            return result.astype(gradient.dtype), new

        leaves, structure = jax.tree.flatten(updates)
        kept = structure.flatten_up_to(state.matrices)
        done = [of_one(*pair) for pair in zip(leaves, kept, strict=True)]
        new = WhiteningState(
            optax.safe_increment(state.count), structure.unflatten([k for _, k in done])
        )
        return structure.unflatten([result for result, _ in done]), new

    return optax.GradientTransformation(init, update)


def _stacked(function: Callable) -> Callable:
    """Applies a function of matrices to stacks of them, one axis of a stack after the other."""
    return lambda first, *others: (
        function(first, *others)
        if first.ndim == 2
        else jax.vmap(_stacked(function))(first, *others)
    )


def _wide(array: Array) -> Array:
    # Eigenvectors of sums of squares mean nothing in half precision.
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _mix(mean: Array, new: Array, decay: float | Array) -> Array:
    return decay * mean + (1 - decay) * new


def _mix_all(means: Pair, new: Pair, decay: float | Array) -> Pair:
    rows, columns = (_mix(*pair, decay) for pair in zip(means, new, strict=True))
    return rows, columns


def _begin(values: Array, gradient: Array) -> Array:
    # The gradient's root mean square where none is known yet.
    return jnp.where(values.max() > 0, values, jnp.sqrt((gradient**2).mean()))


def _eigenvectors(factors: Pair) -> Pair:
    # Those of the largest eigenvalues first.
    rows, columns = (jnp.linalg.eigh(factor)[1][:, ::-1] for factor in factors)
    return rows, columns


def _power_steps(factors: Pair, bases: Any) -> Pair:
    rows, columns = (jnp.linalg.qr(f @ q)[0] for f, q in zip(factors, bases, strict=True))
    return rows, columns
