"""Where gradients vanish: the tanh of additive scores, the softmax over scores of large variance.

Source: "Additive vs. multiplicative attention", section "Training dynamics and numerical
stability". As inputs grow, the gradient of an additive score vanishes because tanh saturates,
unless LayerNorm stands before it; that of a dot product grows, but the softmax behind it saturates
unless the scores are scaled by 1/√d.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import ArrayLike, Float

from adder_flax.attention import LAYER_NORM_EPSILON
from adder_flax.measures._arrays import NumPy, softmax
from adder_flax.measures.maps import entropy
from adder_flax.measures.variance import ADDER_VARIANCE_PER_DIM


def additive_gradient_norm(
    preactivation: Float[np.ndarray, "*batch hidden"],
    v: Float[np.ndarray, "*batch hidden"],
    query_norm: Float[ArrayLike, "*batch"],
    *,
    layer_norm: bool = False,
) -> Float[NumPy, "*batch"]:
    """‖∂e/∂W_s‖_F of the additive score e = vᵀ tanh(z), z = W_sᵀ s + W_hᵀ h.

    The gradient is the outer product of s and ∂e/∂z = v (1 − tanh² z), so its norm is the product
    of theirs. With LayerNorm before tanh, e = vᵀ tanh(ẑ), ∂e/∂z = (u − mean(u) − ẑ mean(u ẑ)) /
    √(var z + ε), u = v (1 − tanh² ẑ).
    """
    scale = 1.0
    if layer_norm:
        scale = 1.0 / np.sqrt(preactivation.var(-1, keepdims=True) + LAYER_NORM_EPSILON)
        preactivation = (preactivation - preactivation.mean(-1, keepdims=True)) * scale
    gradient = v * (1.0 - np.tanh(preactivation) ** 2)
    if layer_norm:
        along = np.mean(gradient * preactivation, -1, keepdims=True)
        gradient = (gradient - gradient.mean(-1, keepdims=True) - preactivation * along) * scale
    return query_norm * np.linalg.norm(gradient, axis=-1)


def dot_product_gradient(
    query: Float[np.ndarray, "*batch dim"],
    keys: Float[np.ndarray, "*batch keys dim"],
    *,
    scale: float,
) -> tuple[Float[np.ndarray, "*batch dim"], Float[np.ndarray, "*batch keys"]]:
    """∂L/∂q = scale · Σ_j (p_j − δ_j0) k_j of L = −ln softmax(scale · q·k)₀, and the softmax p."""
    scores = np.einsum("...d,...kd->...k", query, keys) * scale
    weights = softmax(scores)
    error = weights - (np.arange(weights.shape[-1]) == 0)
    return scale * np.einsum("...k,...kd->...d", error, keys), weights


@dataclasses.dataclass(frozen=True)
class GradientNorms:
    """Medians over random draws of gradient norms, for inputs of growing norm.

    Attributes:
      input_norms: ‖s‖ = ‖h‖ in units of √d.
      additive, additive_layer_norm: ‖∂e/∂W_s‖ of the additive score, with LayerNorm before tanh.
      additive_rms: its root mean square instead of its median. A unit's pre-activation lies near
        zero, unsaturated, with probability ~ 1/‖s‖, and then contributes ‖s‖: the mean square grows
        like ‖s‖ while almost every single draw vanishes.
      dot, dot_scaled: ‖∂L/∂q‖ of L = −ln softmax(q·k)_j for one key j, and with softmax(q·k/√d).
      active, active_scaled: share of weight that these leave to all but the largest key: what can
        still learn.
    """

    input_norms: Float[np.ndarray, " norms"]
    additive: Float[np.ndarray, " norms"]
    additive_rms: Float[np.ndarray, " norms"]
    additive_layer_norm: Float[np.ndarray, " norms"]
    dot: Float[np.ndarray, " norms"]
    dot_scaled: Float[np.ndarray, " norms"]
    active: Float[np.ndarray, " norms"]
    active_scaled: Float[np.ndarray, " norms"]


_DIM, _HIDDEN, _KEYS = 64, 64, 17


def gradient_norms(
    input_norms: Sequence[float] | Float[np.ndarray, " norm"], *, draws: int = 256
) -> GradientNorms:
    """Gradient norms of additive and dot-product scores against the norm of their inputs.

    Weights are normal with variance 1/(2d), so that inputs of norm √d give pre-activations of
    variance 1; v is normal with variance 1/hidden. Queries and 17 keys, of width 64 as the hidden
    one, are independent normal vectors scaled to the given norms, which are in units of √d.

    >>> norms = gradient_norms([1.0, 1000.0])
    >>> bool(norms.additive[1] < 1e-3 * norms.additive[0])
    True
    """
    normal = np.random.default_rng(0).standard_normal
    # For normal weights W_sᵀ s + W_hᵀ h is normal with variance (‖s‖² + ‖h‖²)/(2d): they need not
    # be drawn.
    unit_preactivation, v = normal((draws, _HIDDEN)), normal((draws, _HIDDEN)) / np.sqrt(_HIDDEN)
    query, others = normal((draws, _DIM)), normal((draws, _KEYS, _DIM))
    query, others = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, others))
    columns = []
    for norm in np.asarray(input_norms, float):
        length = norm * np.sqrt(_DIM)
        additive, normed = (
            additive_gradient_norm(norm * unit_preactivation, v, length, layer_norm=on)
            for on in (False, True)
        )
        tokens, scales = (length * query, length * others), (1.0, _DIM**-0.5)
        dots = [dot_product_gradient(*tokens, scale=scale) for scale in scales]
        dot_norms = [np.median(np.linalg.norm(gradient, axis=-1)) for gradient, _ in dots]
        active = [np.median(1.0 - weights.max(-1)) for _, weights in dots]
        rms = np.sqrt(np.mean(additive**2))
        columns.append((norm, np.median(additive), rms, np.median(normed), *dot_norms, *active))
    return GradientNorms(*np.transpose(columns))


ENTROPY_SCORES = ("dot", "dot, unscaled", "adder", "adder, variance-matched", "adder, unscaled")


def entropy_by_width(
    head_dims: Sequence[int], *, keys: int = 197
) -> dict[str, Float[np.ndarray, " dims"]]:
    """Mean entropy in nats of the softmax over scores of unit-normal queries and keys, by width.

    Of each of :data:`ENTROPY_SCORES`; the largest possible is ln(keys). Without scaling it falls
    with the width, with it it does not; the adder score at 1/√d has variance 0.727 instead of 1, so
    its maps are a little flatter than the dot product's, and the variance-matched scale takes that
    back.

    >>> by_width = entropy_by_width([4, 256])
    >>> bool(by_width["dot, unscaled"][1] < 1.0 < by_width["dot"][1])
    True
    """
    rng = np.random.default_rng(0)
    result: dict[str, list[float]] = {name: [] for name in ENTROPY_SCORES}
    for dim in head_dims:
        query, key = rng.standard_normal((64, dim)), rng.standard_normal((keys, dim))
        dot = query @ key.T
        adder = -np.abs(query[:, None] - key[None]).sum(-1)
        matched = np.sqrt(ADDER_VARIANCE_PER_DIM * dim)
        scaled = (dot / np.sqrt(dim), dot, adder / np.sqrt(dim), adder / matched, adder)
        for name, scores in zip(ENTROPY_SCORES, scaled, strict=True):
            result[name].append(float(entropy(softmax(scores)).mean()))
    return {name: np.array(values) for name, values in result.items()}


def unattended_gradient(
    head_dims: Sequence[int], *, keys: int = 197, queries: int = 64
) -> dict[str, Float[np.ndarray, " dims"]]:
    """Median gradient of a loss with respect to the scores of keys that are not attended, by width.

    Of −ln p of one key that is drawn for each query, ∂L/∂e_j = p_j − δ: for all keys but that and
    the likeliest, p_j. Scores are q·k of unit-normal vectors, as they are and over √d.

    >>> by_width = unattended_gradient([4, 256])
    >>> bool(by_width["dot, unscaled"][1] < 1e-3 * by_width["dot"][1])
    True
    """
    rng = np.random.default_rng(0)
    result: dict[str, list[float]] = {"dot": [], "dot, unscaled": []}
    for dim in head_dims:
        query, key = rng.standard_normal((queries, dim)), rng.standard_normal((keys, dim))
        wanted = rng.integers(0, keys, queries)
        for name, scale in (("dot", dim**-0.5), ("dot, unscaled", 1.0)):
            weights = softmax(query @ key.T * scale)
            others = np.ones_like(weights, bool)
            others[np.arange(queries), wanted] = False
            others[np.arange(queries), weights.argmax(-1)] = False
            result[name].append(float(np.median(weights[others])))
    return {name: np.array(values) for name, values in result.items()}
