"""Numbers of single layers that are cheap enough for a running training."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from adder_flax.measures.maps import row_entropy
from adder_flax.measures.spectrum import equivalent_rank, singular_values


def attention_numbers(
    scores: Float[Array, "*batch query key"], weights: Float[Array, "*batch query key"]
) -> dict[str, Float[Array, ""]]:
    """How an attention layer is doing.

    Args:
      scores: scaled, without bias and mask.
      weights: what softmax gave, without the identity map.

    Returns:
      ``attention_entropy``, mean over rows, in nats; ``attention_max_logit``, the largest score;
      ``attention_logit_std``, of a row's scores, mean; ``attention_rank``, the equivalent rank,
      mean over maps.

    Example:
      >>> numbers = jax.jit(attention_numbers)(jnp.zeros((2, 10, 10)), jnp.full((2, 10, 10), 0.1))
      >>> {name: round(float(number), 4) for name, number in numbers.items()}
      {'attention_entropy': 2.3026, 'attention_logit_std': 0.0, 'attention_max_logit': 0.0, 'attention_rank': 1.0}
    """  # noqa: E501 - a message is one line
    return {
        "attention_entropy": row_entropy(weights).mean(),
        "attention_max_logit": scores.max(),
        "attention_logit_std": scores.std(-1).mean(),
        "attention_rank": equivalent_rank(singular_values(weights)).mean(),
    }


def adder_numbers(
    rows: Float[Array, "rows inputs"],
    kernel: Float[Array, "inputs outputs"],
    sums: Float[Array, "rows outputs"],
    hardtanh_slope: float | None,
) -> dict[str, Float[Array, ""]]:
    """How an adder layer is doing.

    Args:
      rows, kernel, sums: inputs, weights and raw sums of the layer.
      hardtanh_slope: of its HardTanh rule; None where it has none.

    Returns:
      ``adder_output_mean``, of the sums over the number K of inputs, −1.13 for unit-normal inputs
      and weights; ``adder_output_std``, of a row's sums over √K, mean, 0.85 for the same; and
      `hardtanh_saturation`.
    """
    inputs, sums = kernel.shape[0], sums.astype(jnp.float32)
    numbers = {
        "adder_output_mean": sums.mean() / inputs,
        "adder_output_std": sums.std(-1).mean() / inputs**0.5,
    }
    if hardtanh_slope is not None:
        numbers["hardtanh_saturation"] = hardtanh_saturation(rows, kernel, hardtanh_slope)
    return numbers


def hardtanh_saturation(
    x: Float[Array, "rows inputs"], w: Float[Array, "inputs outputs"], slope: float = 1.0
) -> Float[Array, ""]:
    """Share of all differences w − x with |slope · (w − x)| ≥ 1, where the HardTanh rule is flat.

    Each input's weights are sorted once, so that a row finds its neighbours by bisection: rows ·
    inputs · log(outputs) comparisons and no array of all differences.

    Args:
      x: inputs of an adder layer.
      w: its weights.
      slope: c of clip(c (w − x), −1, 1).

    Example:
      >>> float(hardtanh_saturation(jnp.zeros((1, 2)), jnp.array([[0.5, 1.0], [-3.0, 0.0]])))
      0.5
    """

    def inside(values: Array, weights: Array) -> Array:
        # The open interval: after all that are ≤ its low end, before all that are ≥ its high one.
        low = jnp.searchsorted(weights, values - 1.0 / slope, side="right")
        return jnp.searchsorted(weights, values + 1.0 / slope, side="left") - low

    x, w = x.astype(jnp.float32), jnp.sort(w.astype(jnp.float32), axis=-1)
    count = jax.vmap(inside, in_axes=(1, 0))(x, w)
    return 1.0 - (count / w.shape[-1]).mean()
