"""Stochastic depth."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def drop_path_factors(
    key: Array, rates: float | Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32
) -> Float[Array, "..."]:
    """Factors of residual branches: 0 with probability `rates` (dropped), else 1/(1 - rates).

    One draw for all blocks of a model compiles much faster than one per branch.

    Args:
      key: random key.
      rates: probabilities of dropping, broadcastable to `shape`.
      shape: for example (depth, 2, batch).
      dtype: dtype of the factors.

    >>> factors = drop_path_factors(jax.random.key(0), 0.25, (1000,))
    >>> sorted(set(factors.tolist()))
    [0.0, 1.3333333730697632]
    """
    keep = 1.0 - jnp.asarray(rates, jnp.float32)
    return jnp.where(jax.random.bernoulli(key, keep, shape), 1.0 / keep, 0.0).astype(dtype)


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
        factors: Float[Array, " batch"] | None = None,
    ) -> Float[Array, "batch ..."]:
        """Drops samples of the branch at random, or by `factors` drawn before (see `drop_path_factors`)."""
        if deterministic or (factors is None and self.rate == 0.0):
            return inputs
        if factors is None:
            if rngs is None:
                raise ValueError(
                    "stochastic depth expects rngs with a 'dropout' stream, got None; "
                    "pass rngs=nnx.Rngs(dropout=key) or deterministic=True."
                )
            factors = drop_path_factors(rngs.dropout(), self.rate, inputs.shape[:1], inputs.dtype)
        return inputs * factors.reshape(-1, *(1,) * (inputs.ndim - 1)).astype(inputs.dtype)
