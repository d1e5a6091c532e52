"""An attention map as the transition matrix of a Markov chain on tokens.

Source: "The Brownian motion in the transformer model" (Chen, 2021), sections 2.2, 2.3 and 3.2:
softmax makes A row-stochastic, A^k walks k steps, and its spectrum gives diffusion coordinates
(Coifman and Lafon, 2006). A map with the identity, whose rows sum to 2, is the lazy walk (A + I)/2
twice over; all functions but :func:`rollout` take the identity off first. They take (…, N, N) and
compute in float64.
"""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import ArrayLike, Float, Inexact, Int

from adder_flax.measures._arrays import NumPy
from adder_flax.measures.maps import has_identity, stochastic_part


def stationary_distribution(maps: Float[ArrayLike, "*batch n n"]) -> Float[np.ndarray, "*batch n"]:
    """The distribution π with π A = π; unique, since softmax leaves no transition at zero.

    Where zeros part the tokens into several closed sets it is that of one of these. By the
    elimination of Grassmann, Taksar and Heyman ("Regenerative analysis and steady state
    distributions for Markov chains", Operations Research 33, 1985): it never subtracts, so that
    each π_i has all its digits however sharp the map is.

    >>> stationary_distribution(np.array([[0.9, 0.1], [0.3, 0.7]])).round(12).tolist()
    [0.75, 0.25]
    """
    return np.vectorize(_stationary_distribution, signature="(n,n)->(n)")(stochastic_part(maps))


def _stationary_distribution(matrix: np.ndarray) -> np.ndarray:
    matrix, smallest = matrix.copy(), np.finfo(np.float64).tiny
    # Each state is left out of the walk on those before it: a step there goes on to where it leads.
    for state in range(len(matrix) - 1, 0, -1):
        leaving = matrix[state, :state]
        onward = leaving / max(leaving.sum(), smallest)
        matrix[:state, :state] += np.outer(matrix[:state, state], onward)
    # And taken in again: as much flows into it as out of it.
    found = np.ones(1)
    for state in range(1, len(matrix)):
        into, out = found @ matrix[:state, state], matrix[state, :state].sum()
        out = out if into else 1.0  # nothing may flow either way
        found = np.append(found * out, into) / (into + out)
    return found


def eigenvalues(maps: Float[ArrayLike, "*batch n n"]) -> Inexact[np.ndarray, "*batch n"]:
    """Eigenvalues by falling modulus; the first is 1. Complex if the walk is not reversible.

    >>> eigenvalues(np.array([[0.9, 0.1], [0.3, 0.7]])).real.round(12).tolist()
    [1.0, 0.6]
    """
    values = np.linalg.eigvals(stochastic_part(maps))
    return np.take_along_axis(values, np.argsort(-np.abs(values), -1, kind="stable"), -1)


def spectral_gap(maps: Float[ArrayLike, "*batch n n"]) -> Float[NumPy, "*batch"]:
    """1 − |λ₂|: how much of what tells starting points apart one step wipes out.

    >>> spectral_gap(np.array([[0.9, 0.1], [0.3, 0.7]])).round(12).item()
    0.4
    """
    values = np.abs(eigenvalues(maps))
    return 1.0 - values[..., 1] if values.shape[-1] > 1 else np.ones(values.shape[:-1])


def k_step(maps: Float[ArrayLike, "*batch n n"], steps: int) -> Float[np.ndarray, "*batch n n"]:
    """A^k, the transition matrix of k steps.

    >>> k_step(np.array([[0.0, 1.0], [1.0, 0.0]]), 2).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return np.linalg.matrix_power(stochastic_part(maps), steps)


def mixing_time(
    maps: Float[ArrayLike, "*batch n n"], epsilon: float = 0.25
) -> Int[NumPy, "*batch"]:
    """Steps after which the walk has forgotten where it began.

    t_mix(ε) = min {k : max_i ½ Σ_j |A^k_ij − π_j| ≤ ε} (Levin, Peres and Wilmer, section 4.5). The
    distance never grows with k, so k is found by doubling and then bit by bit. Walks that have not
    mixed after 2^20 steps, such as periodic ones, have −1.

    >>> mixing_time(np.array([[0.9, 0.1], [0.3, 0.7]])).item()  # the distance is 0.75 · 0.6^k
    3
    """
    return np.vectorize(_mixing_time, signature="(n,n),()->()")(stochastic_part(maps), epsilon)


def _mixing_time(matrix: np.ndarray, epsilon: float) -> int:
    stationary = stationary_distribution(matrix)
    mixed = lambda power: np.abs(power - stationary).sum(-1).max() / 2 <= epsilon
    if mixed(np.eye(len(matrix))):
        return 0
    powers = [matrix]  # A^(2^i)
    while not mixed(powers[-1]):
        if len(powers) > 20:
            return -1
        powers.append(powers[-1] @ powers[-1])
    # The largest k that is not mixed, bit by bit; one more step mixes.
    steps, reached = 0, np.eye(len(matrix))
    for bit in range(len(powers) - 1, -1, -1):
        further = reached @ powers[bit]
        if not mixed(further):
            steps, reached = steps + 2**bit, further
    return steps + 1


def irreversibility(maps: Float[ArrayLike, "*batch n n"]) -> Float[NumPy, "*batch"]:
    """½ Σ_ij |π_i A_ij − π_j A_ji|: the probability flow that goes round in circles, at most 1.

    It is 0 for a reversible walk. Diffusion maps are made for these, so this says how far to trust
    them.

    >>> irreversibility(np.eye(3)[[1, 2, 0]]).item()  # round and round
    1.0
    """
    maps = stochastic_part(maps)
    flow = stationary_distribution(maps)[..., None] * maps
    return np.abs(flow - flow.mT).sum((-2, -1)) / 2


def diffusion_map(
    maps: Float[ArrayLike, "*batch n n"], *, steps: int = 1, dims: int = 2
) -> Float[np.ndarray, "*batch n dims"]:
    """Places tokens so that those between which the walk moves easily are close.

    Source: Coifman and Lafon, 2006. For a walk that is not reversible its additive
    reversibilisation ½(A + Π⁻¹ Aᵀ Π) is taken, Π = diag(π), which has the same stationary
    distribution; for a reversible one that is A itself.

    Returns coordinates λ_j^k ψ_j, j = 1 … dims ≤ N − 1, by falling |λ_j| and without the constant
    ψ₀. Their Euclidean distance is the diffusion distance after k ≥ 0 steps; more show coarser
    structure.

    >>> places = diffusion_map(np.array([[0.9, 0.1], [0.3, 0.7]]), dims=1)
    >>> abs(places[0] - places[1]).round(4).item()  # 0.6 √(1/π₀ + 1/π₁)
    1.3856
    """
    maps = stochastic_part(maps)
    root = np.sqrt(stationary_distribution(maps))
    # Π^½ A Π^−½; its symmetric part reverses the walk.
    similar = root[..., :, None] * maps / root[..., None, :]
    values, vectors = np.linalg.eigh((similar + similar.mT) / 2)
    order = np.argsort(-np.abs(values), -1, kind="stable")[..., 1 : dims + 1]
    values = np.take_along_axis(values, order, -1)
    vectors = np.take_along_axis(vectors, order[..., None, :], -1) / root[..., None]
    return vectors * values[..., None, :] ** steps


def rollout(maps: Sequence[Float[ArrayLike, "*batch head n n"]]) -> Float[np.ndarray, "*batch n n"]:
    """Attention rollout: how much of each input token is in each output token, rows summing to 1.

    Source: Abnar and Zuidema, ACL 2020. Maps are of every block, first to last. A block adds the
    attention branch to its input, x + A x, so with heads averaged the mixing matrix is (A + I) / 2.
    With the identity map the branch is (A + I) x itself, the block x + (A + I) x, and the matrix
    (A + 2I) / 3: the residual counts once, and rows are divided by what they sum to. Blocks
    multiply, the last from the left.

    >>> rollout([np.full((1, 2, 2), 0.5)]).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    >>> rollout([np.full((1, 2, 2), 0.5) + np.eye(2)]).round(4).tolist()
    [[0.8333, 0.1667], [0.1667, 0.8333]]
    """

    def mixing(block: ArrayLike) -> np.ndarray:
        shortcuts, mean = 2.0 if has_identity(block) else 1.0, stochastic_part(block).mean(-3)
        return (mean + shortcuts * np.eye(mean.shape[-1])) / (1.0 + shortcuts)

    return functools.reduce(lambda below, above: above @ below, map(mixing, maps))
