"""Dropout of single numbers and whole branches (stochastic depth), at rates that may be traced."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax.parameters import as_attribute
from adder_flax.settings import is_on

Rate = float | Float[Array, ""]


class Dropout(nnx.Module):
    """Sets numbers to 0 at random and scales the others by 1/(1 - rate).

    Source: Srivastava et al., JMLR 2014.

    Like ``flax.nnx.Dropout``, whose rate is a constant of the program.

    Args:
      rate: probability of 0, in [0, 1).

    >>> Dropout(0.5)(jnp.ones(3)).tolist()  # deterministic by default
    [1.0, 1.0, 1.0]
    """

    def __init__(self, rate: float = 0.0):
        self.rate = _checked(rate, "a dropout rate")

    def set_rate(self, rate: Rate) -> None:
        """Takes another rate, which may be traced."""
        self.rate = as_attribute(rate)

    def __call__(
        self,
        inputs: Float[Array, "*shape"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "*shape"]:
        if deterministic or not is_on(self.rate):
            return inputs
        keep = 1.0 - self.rate
        kept = jax.random.bernoulli(_key(rngs, "dropout"), keep, inputs.shape)
        # Chosen, not multiplied: 0 times what overflowed would be NaN.
        return jnp.where(kept, inputs / keep, 0).astype(inputs.dtype)


def drop_path_factors(
    key: Array, rates: float | Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
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
    # In float32 whatever the factors are: rounded to bfloat16, `keep` would shift the share that is
    # dropped.
    keep = 1.0 - jnp.asarray(rates, jnp.float32)
    return jnp.where(jax.random.bernoulli(key, keep, shape), 1.0 / keep, 0.0).astype(dtype)


class DropPath(nnx.Module):
    """Stochastic depth on a residual branch, per sample.

    Source: Huang et al., 2016, https://arxiv.org/abs/1603.09382.

    Args:
      rate: probability of dropping the branch, in [0, 1).

    >>> DropPath(0.1)(jnp.ones((2, 3))).tolist()  # deterministic by default
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    def __init__(self, rate: float = 0.0):
        self.rate = _checked(rate, "a drop path rate")

    def set_rate(self, rate: Rate) -> None:
        """Takes another rate, which may be traced."""
        self.rate = as_attribute(rate)

    def __call__(
        self,
        inputs: Float[Array, "batch ..."],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        factors: Float[Array, " batch"] | None = None,
    ) -> Float[Array, "batch ..."]:
        """Drops samples of the branch at random, or by `factors` drawn before, see
        `drop_path_factors`.
        """
        if deterministic or (factors is None and not is_on(self.rate)):
            return inputs
        if factors is None:
            key = _key(rngs, "stochastic depth")
            factors = drop_path_factors(key, self.rate, inputs.shape[:1], inputs.dtype)
        return inputs * factors.reshape(-1, *(1,) * (inputs.ndim - 1)).astype(inputs.dtype)


def _checked(rate: float, what: str) -> float:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"expected {what} in [0, 1), got {rate}; lower it.")
    return rate


def _key(rngs: nnx.Rngs | None, what: str) -> Array:
    if rngs is None:
        raise ValueError(
            f"{what} expects rngs with a 'dropout' stream, got None; "
            "pass rngs=nnx.Rngs(dropout=key) or deterministic=True."
        )
    return rngs.dropout()
