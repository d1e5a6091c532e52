"""What additive and bilinear scores can tell apart: the XOR alignment task, exactly.

Source: "Additive vs. multiplicative attention", section "The limits of bilinearity". Queries and
keys are two bits each; a key belongs to a query if exactly one of their two coordinates is equal.
The paper says that no bilinear score gets this right. How much it can get right is proved here.
"""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

_Bits = Float[np.ndarray, "16 2"]


def xor_pairs() -> tuple[_Bits, _Bits, Float[np.ndarray, " 16"]]:
    """All queries, keys and targets: 1 where exactly one coordinate is equal, else 0.

    >>> queries, keys, targets = xor_pairs()
    >>> len(targets), int(targets.sum())
    (16, 8)
    """
    pairs = np.array(list(itertools.product((0.0, 1.0), repeat=4)))
    equal = pairs[:, :2] == pairs[:, 2:]
    return pairs[:, :2], pairs[:, 2:], (equal.sum(-1) == 1).astype(float)


def separable(labels: Sequence[bool | int]) -> bool:
    """Whether an affine function of two bits is positive exactly where the labels are true.

    The corners are affinely dependent in one way only, (0,0) + (1,1) = (0,1) + (1,0), so by Radon's
    theorem labels are inseparable if and only if these two diagonals are on different sides.
    """
    first, second, third, fourth = labels
    return not (first == fourth and second == third and first != second)


def xor_bound() -> Fraction:
    """Largest accuracy of a bilinear score with all biases on the XOR task: 12 of 16 pairs, 75 %.

    Upper bound, by enumeration: for a fixed query the score qᵀ W k + qᵀ u + wᵀ k + c is an affine
    function of the key. Of the 16 ways to label four keys an affine function realises 14; a query's
    own labelling is one of the other two (its keys lie on a diagonal), so the nearest realisable
    one differs in at least one key. Four queries: at least four errors. Attained: with bits a, b =
    ±1 for q and k, the score a₁b₁ − a₂b₂ − ½ makes exactly one error a query. Without the biases
    the score is zero for q = 0 and does not do better.

    >>> xor_bound()
    Fraction(3, 4)
    """
    *_, targets = xor_pairs()
    realisable = [labels for labels in itertools.product((0, 1), repeat=4) if separable(labels)]
    right = [max((row == labels).sum() for labels in realisable) for row in targets.reshape(4, 4)]
    return Fraction(int(sum(right)), len(targets))


def train_xor(
    score: str, *, seeds: int = 8, hidden: int = 16, steps: int = 800, learning_rate: float = 0.05
) -> Float[np.ndarray, " seeds"]:
    """Final accuracies of a score on all 16 pairs of the XOR task, by logistic loss with Adam.

    The score is "additive", vᵀ tanh(W_s q + W_h k + b) + c of a hidden width, or "bilinear",
    [1, q]ᵀ W [1, k]; ``seeds`` says how many initialisations.

    >>> bool(np.all(train_xor("bilinear", seeds=2, steps=50) <= 0.75))
    True
    """
    queries, keys, targets = map(jnp.asarray, xor_pairs())
    shapes, apply = {
        "additive": ([(2, hidden), (2, hidden), (1, hidden), (hidden, 1), (1, 1)], _additive),
        "bilinear": ([(3, 3)], _bilinear),
    }[score]
    rng, optimizer = np.random.default_rng(0), optax.adam(learning_rate)
    # One axis for the initialisations; Adam treats every number by itself, so they train
    # independently of each other.
    params = [jnp.asarray(rng.standard_normal((seeds, *shape)), jnp.float32) for shape in shapes]

    def loss(params: list[Array]) -> Array:
        losses = optax.sigmoid_binary_cross_entropy(apply(queries, keys, *params), targets)
        return losses.mean(-1).sum()

    def update(carry: tuple, _: None) -> tuple[tuple, None]:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params: list[Array]) -> Array:
        (params, _), _ = jax.lax.scan(update, (params, optimizer.init(params)), None, length=steps)
        return apply(queries, keys, *params)

    return np.mean((np.asarray(run(params)) > 0) == (np.asarray(targets) > 0.5), axis=-1)


# Both give scores (initialisation, pair).
def _additive(query: Array, key: Array, w_s: Array, w_h: Array, b: Array, v: Array, c: Array):
    return (jnp.tanh(query @ w_s + key @ w_h + b) @ v + c)[..., 0]


def _bilinear(query: Array, key: Array, w: Array) -> Array:
    left, right = (jnp.pad(x, ((0, 0), (1, 0)), constant_values=1.0) for x in (query, key))
    return jnp.sum((left @ w) * right, axis=-1)


def score_parameters(query_dim: int, key_dim: int, hidden: int) -> tuple[int, int]:
    """Parameters of a bilinear and an additive score, no biases: d_q d_k, d_a (d_q + d_k + 1).

    >>> score_parameters(64, 128, 42)
    (8192, 8106)
    """
    return query_dim * key_dim, hidden * (query_dim + key_dim + 1)


def hessian_blocks(
    score: Callable[[Array, Array], Array], query: Float[Array, " q"], key: Float[Array, " k"]
) -> tuple[float, float, float]:
    """Returns the norms of a score's second derivatives: within the query, across, within the key.

    They are the blocks of Q in e = xᵀ Q x, x = [query, key] ("Defining the Core Mechanisms").

    >>> hessian_blocks(lambda q, k: q @ k, jnp.ones(3), jnp.ones(3))[::2]
    (0.0, 0.0)
    """
    (within, across), (_, of_key) = jax.hessian(score, (0, 1))(query, key)
    norm = lambda block: float(jnp.linalg.norm(block))
    return norm(within), norm(across), norm(of_key)


def bilinear_as_additive(
    weight: Float[np.ndarray, "q k"], size: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns W_s, W_h, b and v of an additive score that approximates queryᵀ W key.

    With W = Σ σ p qᵀ, x = p·query and y = q·key, 4xy = (x + y)² − (x − y)², and a square is a
    second difference of tanh: z² ≈ (tanh(b + εz) + tanh(b − εz) − 2 tanh b) / (ε² tanh″(b)). So
    four hidden units for each rank of W, and an error in proportion to ε².

    ``size`` is ε: the smaller, the better, until float64 rounds the differences away (some 1e-4).

    >>> weight = np.array([[1.0, 2.0], [0.0, -1.0]])
    >>> w_s, w_h, b, v = bilinear_as_additive(weight, 1e-2)
    >>> query, key = np.array([0.3, -0.2]), np.array([0.5, 0.1])
    >>> score = v @ np.tanh(w_s @ query + w_h @ key + b)
    >>> bool(abs(score - query @ weight @ key) < 1e-4)
    True
    """
    left, values, right = np.linalg.svd(weight)
    bend = np.arctanh(1 / np.sqrt(3))  # where |tanh″| is largest
    second = -2 * np.tanh(bend) * (1 - np.tanh(bend) ** 2)
    rank = len(values)
    signs = np.array([(1, 1, 1), (-1, -1, 1), (1, -1, -1), (-1, 1, -1)])  # of x, of y, of v
    w_s = size * (signs[:, :1, None] * left.T[None, :rank]).reshape(4 * rank, -1)
    w_h = size * (signs[:, 1:2, None] * right[None, :rank]).reshape(4 * rank, -1)
    v = (signs[:, 2:] * values / (4 * size**2 * second)).reshape(-1)
    return w_s, w_h, np.full(4 * rank, bend), v
