"""The oracle: every layer's damped Gauss-Newton step, dense, in float64 and of all examples.

    (G + γI) x = ∇L,   G = (1/N) Σ_n J_nᵀ H_n J_n,   Δ = −x

J_n is the Jacobian of the network's outputs for example n in one layer's parameters, H_n the
Hessian of its loss in these outputs: G is the layer's block of the Gauss-Newton and of the Fisher
matrix. A layer of P parameters takes 8 P² bytes, and N · C · P² multiplications with C outputs. It
is what `kfac.kfac` and `kfac.cg_fac` approximate, by mathematics of its own.

Sources: "The Potential of Second-Order Optimization for LLMs: A Study with Full Gauss-Newton",
2025, arXiv:2510.09378 ("layerwise Gauss-Newton"); Martens and Grosse, 2015, arXiv:1503.05671.

Jacobians are pulled back, never pushed forward: an adder layer's gradient is AdderNet's rule and no
derivative of its output.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np

from kfac._arrays import flatten, path_name

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree

_LEAST = 1e-30


def _log_softmax_loss(z: Array, target: Array) -> Array:
    if jnp.issubdtype(target.dtype, jnp.integer):
        target = jax.nn.one_hot(target, z.shape[-1], dtype=z.dtype)
    return -(target * jax.nn.log_softmax(z)).sum()


def _softmax_root(z: Array) -> Array:
    # Σ_c p_c (e_c − p)(e_c − p)ᵀ = diag(p) − ppᵀ
    p = jax.nn.softmax(z)
    return jnp.sqrt(p)[:, None] * (jnp.eye(len(z)) - p)


def _sigmoid_root(z: Array) -> Array:
    p = jax.nn.sigmoid(z)
    return jnp.diag(jnp.sqrt(p * (1 - p)))


# Name → the loss ℓ(z, y) of one position's outputs z, and rows R with RᵀR = ∇²_z ℓ.
_LIKELIHOODS: dict[str, tuple[Callable[..., Array], Callable[[Array], Array]]] = {
    "categorical": (_log_softmax_loss, _softmax_root),
    "bernoulli": (lambda z, y: (jax.nn.softplus(z) - y * z).sum(), _sigmoid_root),
    "gaussian": (lambda z, y: ((z - y) ** 2).sum() / 2, lambda z: jnp.eye(len(z))),
}


@dataclasses.dataclass(frozen=True)
class LayerCurvature:
    """One layer's block."""

    shapes: Mapping[str, tuple[int, ...]]  # of its parameters by path, as they are laid end to end
    matrix: Float[np.ndarray, "size size"]  # G
    gradient: Float[np.ndarray, " size"]  # ∇L

    def unpack(self, vector: Float[np.ndarray, " size"]) -> dict[str, np.ndarray]:
        """Returns the parameters that a vector holds."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])
        parts = np.split(vector, ends[:-1])
        return {p: part.reshape(s) for (p, s), part in zip(self.shapes.items(), parts, strict=True)}


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The damped step of every layer, by name."""

    layers: Mapping[str, LayerCurvature]
    damping: Mapping[str, float]  # γ
    steps: Mapping[str, np.ndarray]  # Δ = −(G + γI)⁻¹ ∇L

    def update(self, like: PyTree) -> PyTree[np.ndarray]:
        """Returns the steps as a tree like that of the parameters."""
        flat: dict[str, Any] = {}
        for name, step in self.steps.items():
            flat |= self.layers[name].unpack(step)
        return jax.tree_util.tree_map_with_path(lambda path, _: flat[path_name(path)], like)

    def predicted(self, name: str, step: Float[np.ndarray, " size"]) -> float:
        """Returns ∇Lᵀ Δ + ½ Δᵀ (G + γI) Δ of one layer, which the oracle's own Δ minimises."""
        layer = self.layers[name]
        curved = step @ layer.matrix @ step + self.damping[name] * (step @ step)
        return float(layer.gradient @ step + curved / 2)


@dataclasses.dataclass(frozen=True)
class Compared:
    """One layer's update beside the oracle's step."""

    name: str  # "all layers" for them together
    size: int
    cosine: float  # of the angle between the two
    length_ratio: float  # ‖update‖ / ‖oracle's‖
    predicted: float  # what `Oracle.predicted` says of the update, negative for a decrease
    predicted_oracle: float  # and of the oracle's step
    share: float  # of that decrease; below 0 where the update is too long, NaN where there is none
    best_share: float  # the same at the length that is best for the update, in [0, 1]


def layerwise_curvature(
    outputs: Callable[[PyTree, Any], Array],
    params: PyTree,
    x: PyTree,
    targets: Any,
    likelihood: str = "categorical",
    *,
    chunk_size: int = 64,
) -> dict[str, LayerCurvature]:
    """Returns G and the gradient of every layer, means over all examples, in float64.

    A layer is what has one path but for its last part: kernel and bias together.

    Args:
      outputs: ``(params, x) → (examples, *positions, classes)``, which keeps float64 and treats
        examples alone. Pass the same function again and it is compiled once.
      params: tree of floating-point arrays.
      x: a tree of arrays, examples on the first axis; floating-point ones are widened.
      targets: classes, (examples, *positions), or their probabilities; values of the shape of the
        outputs for the other likelihoods.
      likelihood: "categorical", "bernoulli" or "gaussian" (½ ‖z − y‖²), a sum over the last axis of
        the outputs and a mean over positions and examples.
      chunk_size: examples at a time, each of which holds C numbers a parameter.

    >>> outputs = lambda params, x: x @ params["kernel"]
    >>> params, x = {"kernel": np.ones((1, 1))}, np.array([[1.0], [3.0]])
    >>> layer = layerwise_curvature(outputs, params, x, 0 * x, "gaussian")["kernel"]
    >>> layer.matrix.tolist(), layer.gradient.tolist()
    ([[5.0]], [5.0])
    """
    with jax.enable_x64(True):
        params = _wide(params)
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for path, leaf in flatten(params).items():
            shapes.setdefault(path.rpartition("/")[0] or path, {})[path] = leaf.shape
        sizes = {name: sum(map(math.prod, of.values())) for name, of in shapes.items()}
        matrices = {name: np.zeros((size, size)) for name, size in sizes.items()}
        gradient = jax.tree.map(jnp.zeros_like, flatten(params))
        count = len(targets)
        for start in range(0, count, chunk_size):
            part = jax.tree.map(lambda a, s=start: a[s : s + chunk_size], _wide((x, targets)))
            rows, of_part = _chunk_rows(outputs, likelihood, params, *part)
            gradient = jax.tree.map(lambda a, b: a + b / count, gradient, of_part)
            for name, of in shapes.items():
                parts = [np.asarray(rows[path]).reshape(-1, math.prod(s)) for path, s in of.items()]
                stacked = np.concatenate(parts, axis=1)
                matrices[name] += stacked.T @ stacked / count
    return {
        name: LayerCurvature(of, matrices[name], _packed(gradient, of))
        for name, of in shapes.items()
    }


def _packed(flat: Mapping[str, Any], paths: Iterable[str]) -> Float[np.ndarray, " size"]:
    return np.concatenate([np.ravel(np.asarray(flat[path], np.float64)) for path in paths])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _chunk_rows(
    outputs: Callable, likelihood: str, params: PyTree, x: PyTree, targets: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Rows R_n J_n by path, (examples, rows, *shape), and the sum of the gradients."""
    loss_of, root_of = _LIKELIHOODS[likelihood]

    def of_example(x: PyTree, target: Array) -> tuple[PyTree, PyTree]:
        def one(params: PyTree) -> Array:
            return outputs(params, jax.tree.map(lambda a: a[None], x))[0]

        z, pull = jax.vjp(one, params)
        positions = z.reshape(-1, z.shape[-1])
        target = target.reshape(len(positions), *target.shape[z.ndim - 1 :])
        residual = jax.vmap(jax.grad(loss_of))(positions, target) / len(positions)
        roots = jax.vmap(root_of)(positions) / jnp.sqrt(len(positions))
        # One position's loss is curved in its own outputs alone.
        cotangents = jnp.einsum("pcd,pq->pcqd", roots, jnp.eye(len(positions)))
        (rows,) = jax.vmap(pull)(cotangents.reshape(-1, *z.shape))
        return rows, pull(residual.reshape(z.shape))[0]

    rows, gradients = jax.vmap(of_example)(x, targets)
    return flatten(rows), flatten(jax.tree.map(lambda g: g.sum(0), gradients))


def mean_loss(
    outputs: Callable[[PyTree, Any], Array],
    params: PyTree,
    x: PyTree,
    targets: Any,
    likelihood: str = "categorical",
) -> float:
    """Returns the loss of all examples in float64; arguments as of `layerwise_curvature`."""
    with jax.enable_x64(True):
        return float(_mean_loss(outputs, likelihood, *_wide((params, x, targets))))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mean_loss(outputs: Callable, likelihood: str, params: PyTree, x: PyTree, y: Array) -> Array:
    z = outputs(params, x)
    losses = jax.vmap(_LIKELIHOODS[likelihood][0])
    positions = z.reshape(-1, z.shape[-1])
    return losses(positions, y.reshape(len(positions), *y.shape[z.ndim - 1 :])).mean()


def layerwise_step(
    layers: Mapping[str, LayerCurvature], damping: float, *, relative: bool = False
) -> Oracle:
    """Solves (G + γI) x = ∇L of every layer by Cholesky's factorization.

    ``damping`` is γ; with ``relative`` γ is it times the layer's mean eigenvalue.

    Raises:
      ValueError: a matrix is not positive definite in float64.
    """
    gammas, steps = {}, {}
    with jax.enable_x64(True):
        for name, layer in layers.items():
            size = len(layer.matrix)
            # A layer that is saturated has no curvature, and no gradient: its step is 0.
            scale = max(np.trace(layer.matrix) / size, _LEAST) if relative else 1.0
            gamma = damping * scale
            factor = jax.scipy.linalg.cho_factor(layer.matrix + gamma * np.eye(size), lower=True)
            step = -np.asarray(jax.scipy.linalg.cho_solve(factor, layer.gradient))
            if not np.isfinite(step).all():
                raise ValueError(
                    f"expected a positive definite G + γI of {name}, got γ = {gamma:.1e} with "
                    f"eigenvalues of up to {np.linalg.norm(layer.matrix, 2):.1e}; raise damping"
                )
            gammas[name], steps[name] = float(gamma), step
    return Oracle(layers, gammas, steps)


def compare_step(update: PyTree, oracle: Oracle) -> list[Compared]:
    """Returns a row for each layer, and one for all of them together.

    ``update`` is an optimizer's, what is added to the oracle's parameters.
    """
    flat = flatten(update)
    updates = {name: _packed(flat, layer.shapes) for name, layer in oracle.layers.items()}
    rows = [_compared(oracle, name, {name: own}) for name, own in updates.items()]
    return [*rows, _compared(oracle, "all layers", updates)]


def _compared(oracle: Oracle, name: str, updates: dict[str, np.ndarray]) -> Compared:
    ours = np.concatenate([*updates.values()])
    theirs = np.concatenate([oracle.steps[n] for n in updates])
    predicted = sum(oracle.predicted(n, u) for n, u in updates.items())
    least = sum(oracle.predicted(n, oracle.steps[n]) for n in updates)
    slope = sum(float(oracle.layers[n].gradient @ u) for n, u in updates.items())
    curved = 2 * (predicted - slope)
    lengths = np.linalg.norm(ours), np.linalg.norm(theirs)
    tiny = np.finfo(np.float64).tiny
    # Where an update ascends, its best length is 0.
    best = -(min(slope, 0.0) ** 2) / max(2 * curved, tiny)
    return Compared(
        name=name,
        size=len(ours),
        cosine=float(ours @ theirs / max(lengths[0] * lengths[1], tiny)),
        length_ratio=float(lengths[0] / max(lengths[1], tiny)),
        predicted=predicted,
        predicted_oracle=least,
        share=predicted / least if least < 0 else math.nan,
        best_share=best / least if least < 0 else math.nan,
    )


def _wide(tree: PyTree) -> PyTree[Array]:
    def widen(leaf: Array) -> Array:
        return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(widen, jax.tree.map(jnp.asarray, tree))
