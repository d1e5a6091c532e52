"""Cotangents of the network's outputs whose outer products average to the curvature of the loss.

For outputs z of one example and a negative log-likelihood ℓ(z, y) these are columns c with E[c cᵀ]
= ∇²_z ℓ: pulled back through the network they give the Fisher matrix (drawn labels) or, the same
for these likelihoods, the generalised Gauss-Newton matrix (random signs, or every column in turn).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Key

FISHERS = ("empirical", "mc", "ggn", "enumerate")


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """A negative log-likelihood ℓ(z, y), by what curvature needs of it.

    Attributes:
      sample: (key, z) → ∇_z ℓ(z, y) with y drawn from the model's own distribution at z.
      root: (z, ε) → B ε with B Bᵀ = ∇²_z ℓ, along the last axis of z.
    """

    sample: Callable[[Array, Array], Array]
    root: Callable[[Array, Array], Array]


def _sample_categorical(key: Array, logits: Array) -> Array:
    labels = jax.random.categorical(key, logits)
    return jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)


def _root_categorical(logits: Array, noise: Array) -> Array:
    # diag(p) − ppᵀ = B Bᵀ with B = diag(√p) − p √pᵀ, since √p has length 1.
    probabilities = jax.nn.softmax(logits)
    scaled = jnp.sqrt(probabilities) * noise
    return scaled - probabilities * jnp.sum(scaled, axis=-1, keepdims=True)


def _sample_bernoulli(key: Array, logits: Array) -> Array:
    probabilities = jax.nn.sigmoid(logits)
    return probabilities - jax.random.bernoulli(key, probabilities).astype(logits.dtype)


def _root_bernoulli(logits: Array, noise: Array) -> Array:
    probabilities = jax.nn.sigmoid(logits)
    return jnp.sqrt(probabilities * (1 - probabilities)) * noise


LIKELIHOODS = {
    "categorical": Likelihood(_sample_categorical, _root_categorical),
    "bernoulli": Likelihood(_sample_bernoulli, _root_bernoulli),
    # z − y for y drawn at z, whatever z is
    "gaussian": Likelihood(
        lambda key, mean: jax.random.normal(key, mean.shape, mean.dtype), lambda mean, noise: noise
    ),
}


def get_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood of this name.

    Softmax cross-entropy is ``"categorical"``, sigmoid cross-entropy summed over the last
    axis ``"bernoulli"``, ½‖z − y‖² summed over it ``"gaussian"``.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise ValueError(
            f"expected a likelihood among {', '.join(LIKELIHOODS)} or a kfac.Likelihood, got "
            f"{likelihood!r}; name the one whose negative logarithm the loss averages."
        )
    return LIKELIHOODS[likelihood]


class Weights(NamedTuple):
    """Of the losses ℓ of a batch, where the loss is Σ w ℓ / T."""

    positions: Float[Array, "*losses"]  # w
    total: Float[Array, ""]  # T

    def shares(self) -> Float[Array, "*losses"]:
        """N w / T: how much each position counts in the mean of N losses."""
        return len(self.positions) * self.positions / jnp.where(self.total > 0, self.total, 1)


def read_weights(
    weights: Array | tuple[Array, Array], num_examples: int, dtype: Any = jnp.float32
) -> Weights:
    """The weights, w or the pair (w, T), that a loss of this dtype has; T = Σ w by default."""
    w, total = weights if isinstance(weights, tuple) else (weights, None)
    w = jax.lax.stop_gradient(jnp.asarray(w))
    w = w.astype(jnp.promote_types(dtype, jnp.float32))
    if w.shape[:1] != (num_examples,):
        raise ValueError(
            f"expected weights of shape (batch, *positions) of {num_examples} examples, got "
            f"{w.shape}; give them the shape of the losses."
        )
    return Weights(w, w.sum() if total is None else jnp.asarray(total, w.dtype))


def require_outputs(outputs: Any) -> Float[Array, "batch *positions classes"]:
    """Outputs of the network, if they are an array with an axis of classes."""
    if getattr(outputs, "ndim", 0) < 2:
        raise ValueError(
            "expected outputs of shape (batch, *positions, classes), got "
            f"{getattr(outputs, 'shape', type(outputs).__name__)}; say where in the aux they are "
            "by outputs=, and give numbers without classes an axis for them, z[:, None]."
        )
    return outputs


def output_cotangents(
    fisher: str,
    likelihood: Likelihood,
    outputs: Float[Array, "batch *positions classes"],
    key: Key | None,
    num_samples: int,
    share: Float[Array, "*losses"] | None = None,
) -> Float[Array, "columns batch *positions classes"]:
    """Columns c of every example with Σ_columns E[c cᵀ] = the Hessian of its loss in its outputs.

    Positions between the batch and the class axis are independent terms over which the loss
    averages; ``share`` is that of each in an example's loss, by default 1 over their number.
    """
    if share is not None and share.shape != outputs.shape[:-1]:
        raise ValueError(
            f"expected weights of the shape of the losses, {outputs.shape[:-1]} for outputs of "
            f"shape {outputs.shape}, got {share.shape}; broadcast them."
        )
    # Of bfloat16 draws would be so coarse that rare classes never come.
    outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    # The Hessian of share · ℓ is share times that of ℓ, and c enters squared: hence the roots.
    root = outputs[0, ..., 0].size ** -0.5 if share is None else jnp.sqrt(share)[..., None]
    if fisher == "enumerate":
        if outputs.ndim != 2:
            raise ValueError(
                "fisher='enumerate' expects outputs of shape (batch, classes), got "
                f"{outputs.shape}; use fisher='ggn' or 'mc' for outputs with positions."
            )
        units = jnp.eye(outputs.shape[-1], dtype=outputs.dtype)
        pull = lambda unit: likelihood.root(outputs, jnp.broadcast_to(unit, outputs.shape))
        return jax.vmap(pull)(units) * root
    if key is None:
        raise ValueError(
            f"fisher={fisher!r} draws random numbers: expected key=, got None; pass a "
            "jax.random.key."
        )

    def draw(key: Key) -> Array:
        if fisher == "mc":
            return likelihood.sample(key, outputs)
        # Signs: of all noise with unit variance they have the least variance in c cᵀ.
        return likelihood.root(outputs, jax.random.rademacher(key, outputs.shape, outputs.dtype))

    return jax.vmap(draw)(jax.random.split(key, num_samples)) * root / num_samples**0.5
