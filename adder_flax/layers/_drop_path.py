"""Stochastic depth."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def drop_path(inputs: Float[Array, "batch ..."], rate: float | Array, key: Array) -> Float[Array, "batch ..."]:
    """Replaces each sample by zeros with probability `rate`, which may be traced, and scales the rest by 1/(1 - rate).

    >>> kept = drop_path(jnp.ones((1000, 2)), 0.25, jax.random.key(0))
    >>> sorted(set(kept.ravel().tolist()))
    [0.0, 1.3333333730697632]
    """
    shape = (inputs.shape[0],) + (1,) * (inputs.ndim - 1)
    keep = jax.random.bernoulli(key, 1.0 - rate, shape)
    scale = jnp.asarray(1.0 / (1.0 - rate), inputs.dtype)
    return jnp.where(keep, inputs * scale, jnp.zeros((), inputs.dtype))


class DropPath(nnx.Module):
    """Stochastic depth on a residual branch, per sample (Huang et al., 2016, https://arxiv.org/abs/1603.09382).

    Args:
      rate: probability of dropping the branch, in [0, 1).

    >>> DropPath(0.1)(jnp.ones((2, 3))).tolist()  # deterministic by default
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    def __init__(self, rate: float = 0.0):
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"expected a drop path rate in [0, 1), got {rate}; lower it.")
        self.rate = rate

    def __call__(
        self,
        inputs: Float[Array, "batch ..."],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        rate: Array | None = None,
    ) -> Float[Array, "batch ..."]:
        """Drops at `self.rate`, or at the traced `rate` where blocks of several rates share one trace."""
        if deterministic or (rate is None and self.rate == 0.0):
            return inputs
        if rngs is None:
            raise ValueError(
                "stochastic depth expects rngs with a 'dropout' stream, got None; pass rngs=nnx.Rngs(dropout=key)."
            )
        return drop_path(inputs, self.rate if rate is None else rate, rngs.dropout())
