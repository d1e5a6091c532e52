"""Singular values of attention maps, and what adding the identity does to them.

Source: appendix A.3 of the adder attention paper, Proposition 1. With singular values σ₁ ≥ … ≥ σ_N
of a map A and σ̃ of A + I it argues, for symmetric A:

    σ̃ = σ + 1,    f(r) = Σ_{t≤r} σ_t / Σ_t σ_t ≥ f̃(r) ≥ g(r) = r/N,

so that the rank at which f reaches 0.9 does not fall. The proof takes √λ(A²) for λ(A), which also
needs A to be positive semidefinite. In general only σ̃_t ≤ σ_t + 1 holds (Weyl), with equality
throughout exactly for symmetric positive semidefinite A. All functions take (…, N, N) and compute
in float64.
"""

import dataclasses

import numpy as np
from jaxtyping import ArrayLike, Float, Int

from adder_flax.measures._arrays import NumPy
from adder_flax.measures.maps import stochastic_part


def singular_values(maps: Float[ArrayLike, "*batch n n"]) -> Float[np.ndarray, "*batch n"]:
    """Singular values, largest first, of the maps as they are given.

    >>> singular_values(np.diag([1.0, 3.0])).tolist()
    [3.0, 1.0]
    """
    return np.linalg.svd(np.asarray(maps, np.float64), compute_uv=False)


def cumulative(sigma: Float[ArrayLike, "*batch n"]) -> Float[np.ndarray, "*batch n"]:
    """f(r) = Σ_{t≤r} σ_t / Σ_t σ_t for r = 1 … N.

    >>> cumulative(np.array([3.0, 1.0])).tolist()
    [0.75, 1.0]
    """
    sigma = np.asarray(sigma, np.float64)
    return np.cumsum(sigma, -1) / np.sum(sigma, -1, keepdims=True)


def equivalent_rank(
    sigma: Float[ArrayLike, "*batch n"], level: float = 0.9
) -> Int[NumPy, "*batch"]:
    """Smallest r with f(r) ≥ level, up to the rounding of a sum of N terms.

    >>> equivalent_rank(np.ones(10)).item()
    9
    """
    share = cumulative(sigma)
    rounding = 4 * share.shape[-1] * np.finfo(share.dtype).eps
    return 1 + np.argmax(share >= level * (1 - rounding), axis=-1)


def effective_rank(sigma: Float[np.ndarray, "*batch n"]) -> Float[NumPy, "*batch"]:
    """exp of the entropy of σ / Σ σ: N for equal values, 1 for a single one.

    Source: Roy and Vetterli, EUSIPCO 2007.

    >>> effective_rank(np.array([1.0, 1.0, 0.0])).round(6).item()
    2.0
    """
    share = sigma / np.sum(sigma, -1, keepdims=True)
    return np.exp(-np.sum(share * np.log(np.where(share > 0, share, 1.0)), -1))


def asymmetry(maps: Float[ArrayLike, "*batch n n"]) -> Float[NumPy, "*batch"]:
    """‖A − Aᵀ‖_F / ‖A‖_F: 0 for symmetric maps, at most √2 for maps without negative entries.

    >>> asymmetry(np.array([[0.0, 1.0], [0.0, 0.0]])).round(4).item()
    1.4142
    """
    maps = np.asarray(maps, np.float64)
    norm = lambda matrix: np.linalg.norm(matrix, axis=(-2, -1))
    return norm(maps - maps.mT) / norm(maps)


@dataclasses.dataclass(frozen=True)
class IdentityEffect:
    """The curves and numbers of Proposition 1 for a batch of maps A (identity taken off) and A + I.

    Attributes:
      f, f_identity: f(r) of A and f̃(r) of A + I.
      g: r / N.
      rank, rank_identity: equivalent ranks at 0.9 of A and of A + I.
      effective_rank, effective_rank_identity: the same with effective ranks.
      deviation: max_t |σ̃_t − σ_t − 1|, 0 where the proposition is exact.
      asymmetry: ‖A − Aᵀ‖ / ‖A‖, the assumption that the proof makes.
      lowest_eigenvalue: of (A + Aᵀ)/2; below 0 even a symmetric map breaks σ̃ = σ + 1.
    """

    f: Float[np.ndarray, "*batch n"]
    f_identity: Float[np.ndarray, "*batch n"]
    g: Float[np.ndarray, " n"]
    rank: Int[NumPy, "*batch"]
    rank_identity: Int[NumPy, "*batch"]
    effective_rank: Float[NumPy, "*batch"]
    effective_rank_identity: Float[NumPy, "*batch"]
    deviation: Float[NumPy, "*batch"]
    asymmetry: Float[NumPy, "*batch"]
    lowest_eigenvalue: Float[NumPy, "*batch"]

    @property
    def ratio(self) -> Float[np.ndarray, "*batch n"]:
        """R(r) = f(r) / f̃(r); the paper claims R ≥ 1."""
        return self.f / self.f_identity

    @property
    def difference(self) -> Float[np.ndarray, "*batch n"]:
        """D(r) = f(r) − g(r)."""
        return self.f - self.g

    @property
    def difference_identity(self) -> Float[np.ndarray, "*batch n"]:
        """D̃(r) = f̃(r) − g(r); the paper claims D̃ ≤ D."""
        return self.f_identity - self.g


def identity_effect(maps: Float[ArrayLike, "*batch n n"]) -> IdentityEffect:
    """What adding the identity, which is taken off first, does to the spectrum of each map.

    >>> effect = identity_effect(np.full((4, 4), 0.25))  # positive semidefinite, rank 1
    >>> effect.rank.item(), effect.rank_identity.item(), effect.deviation.round(12).item()
    (1, 4, 0.0)
    """
    maps = stochastic_part(maps)
    size = maps.shape[-1]
    sigma, shifted = (singular_values(m) for m in (maps, maps + np.eye(size)))
    return IdentityEffect(
        f=cumulative(sigma),
        f_identity=cumulative(shifted),
        g=np.arange(1, size + 1) / size,
        rank=equivalent_rank(sigma),
        rank_identity=equivalent_rank(shifted),
        effective_rank=effective_rank(sigma),
        effective_rank_identity=effective_rank(shifted),
        deviation=np.abs(shifted - sigma - 1).max(-1),
        asymmetry=asymmetry(maps),
        lowest_eigenvalue=np.linalg.eigvalsh((maps + maps.mT) / 2)[..., 0],
    )
