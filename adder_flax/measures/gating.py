"""Attention scores seen as gates: a vector that opens or closes the features of another one.

Source: "Additive vs. multiplicative attention", section "Attention as gating".

    multiplicative: s = Σ_c g_c k_c,  g = Wᵀ q                     linear, unbounded, of the query
    additive:       s = Σ_h g_h v_h,  g = tanh(W_q q + W_k k + b)  in (−1, 1), of query and key

Both let features count against a key as well as for it, unlike the gates of an LSTM, which lie in
(0, 1).
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import ArrayLike, Float

from adder_flax.measures._arrays import wide
from adder_flax.measures.brownian import layer_norm


@dataclasses.dataclass(frozen=True)
class Gate:
    """A score taken apart: raw scores are the sum over features of ``values`` times ``content``.

    Attributes:
      values: the gate; the key axis is 1 long where it is the same for all keys.
      content: what it lets through, the key (multiplicative) or v (additive).
    """

    values: Float[np.ndarray, "*batch query #key feature"]
    content: Float[np.ndarray, "*#batch #query #key feature"]

    @property
    def scores(self) -> Float[np.ndarray, "*batch query key"]:
        """Raw scores, before any scale."""
        return np.sum(self.values * self.content, -1)

    @property
    def negative_share(self) -> float:
        """Share of the gate's values that are below 0."""
        return float(np.mean(self.values < 0))

    @property
    def saturated_share(self) -> float:
        """Share of the gate's values beyond 0.99, where tanh passes less than 2 % of a gradient."""
        return float(np.mean(np.abs(self.values) > 0.99))


def gate(
    score: str,
    query: Float[ArrayLike, "*batch query query_dim"],
    key: Float[ArrayLike, "*batch key key_dim"],
    parameters: Mapping[str, ArrayLike] | None = None,
) -> Gate:
    """The gate behind a score, in float64.

    Args:
      score: "dot", "bilinear" or "additive"; a distance is a ValueError.
      query, key: of one or more heads.
      parameters: the score's learned arrays under the names of ``MultiHeadAttention.score``, with
        the heads as the last of the batch axes.

    >>> found = gate("dot", np.array([[2.0, -1.0]]), np.array([[3.0, 4.0]]))
    >>> found.values.tolist(), found.scores.tolist(), found.negative_share
    ([[[2.0, -1.0]]], [[2.0]], 0.5)
    """
    learned = {name: np.asarray(value, np.float64) for name, value in (parameters or {}).items()}
    query, key = wide(query, key)
    if score in ("dot", "bilinear"):
        opened = query if score == "dot" else query @ learned["kernel"]
        return Gate(opened[..., :, None, :], key[..., None, :, :])
    if score != "additive":
        raise ValueError(
            "expected a score that gates, one of 'dot', 'bilinear' and 'additive'; got "
            f"{score!r}, which compares instead."
        )
    query, key = query @ learned["query_kernel"], key @ learned["key_kernel"]
    hidden = query[..., :, None, :] + key[..., None, :, :]
    learned = {name: x[..., None, None, :] for name, x in learned.items()}
    if "norm_scale" in learned:
        hidden = learned["norm_scale"] * layer_norm(hidden)
    return Gate(np.tanh(hidden + learned.get("bias", 0.0)), learned["v"])
