"""What a score function has to say about itself, and the table of those that are known by name."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from adder_flax.settings import Options, ScoreSettings


def masked_softmax(
    scores: Float[Array, "*batch query key"], mask: Bool[Array, "..."] | None = None
) -> Float[Array, "*batch query key"]:
    """Softmax over the keys, in the precision of `scores`; a query that may see no key gets zeros.

    Args:
      scores: logits of any size; the largest of each row is subtracted first, so none overflows.
      mask: True where a query may see a key, broadcastable to `scores`.

    Returns:
      Rows that sum to 1, or to 0 where every key is masked.

    >>> masked_softmax(jnp.array([[1e4, 1e4], [5.0, 7.0]]), jnp.array([[True], [False]])).tolist()
    [[0.5, 0.5], [0.0, 0.0]]
    """
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    lowest = jnp.finfo(scores.dtype).min
    # A finite stand-in instead of -inf: a fully masked row then has no 0/0 in it, forward or backward.
    weights = jax.nn.softmax(jnp.where(mask, scores, lowest), axis=-1)
    return jnp.where(mask, weights, 0.0)


@dataclasses.dataclass(frozen=True)
class ScoreParameter:
    """A learned array of a score function: its shape, with the heads first, and its initialiser."""

    shape: tuple[int, ...]
    init: Callable[..., Array]


def _no_parameters(num_heads: int, query_dim: int, key_dim: int) -> dict[str, ScoreParameter]:
    del num_heads, query_dim, key_dim
    return {}


def _inverse_sqrt(head_dim: int) -> float:
    return head_dim**-0.5


@dataclasses.dataclass(frozen=True)
class Score:
    """The contract of a score function.

    Registered once (`register_score`), a score is available by name in `attend`, in the NNX and Linen modules,
    in `VisionTransformer` and in `capture_attention`.

    Attributes:
      name: what modules and experiments call it.
      function: `function(query, key, **parameters, **options)`; query (..., num_heads, q_length, query_dim) and key
        (..., num_heads, k_length, key_dim) give raw scores (..., num_heads, q_length, k_length), in float32 or wider,
        larger for a better match. With grouped key heads the head axis comes as two, (num_kv_heads, group),
        and the key's group axis has length 1, so a function only relies on broadcasting.
      parameters: `parameters(num_heads, query_dim, key_dim, **options)` gives the learned arrays by name; each one's
        first axis is the heads.
      function_options, parameter_options: names of the options that `function` and `parameters` take.
      scale: the default factor on the raw scores as a function of the key's head_dim.
      variance: variance of a raw score between unit-normal query and key as a function of head_dim, for
        `scale="variance_matched"`; None where it depends on learned parameters.
      identity: whether the identity map is added to the attention map unless the user says otherwise.
      normalize: `normalize(scores, mask)` turns scaled float32 scores into weights.
      rows_are_probability: whether each row that `normalize` gives is a probability distribution over the keys,
        which entropy, rollout and Markov-chain analysis rely on (before the identity map is added).
    """

    name: str
    function: Callable[..., Array]
    parameters: Callable[..., Mapping[str, ScoreParameter]] = _no_parameters
    function_options: tuple[str, ...] = ()
    parameter_options: tuple[str, ...] = ()
    scale: Callable[[int], float] = _inverse_sqrt
    variance: Callable[[int], float] | None = None
    identity: bool = False
    normalize: Callable[[Array, Array | None], Array] = masked_softmax
    rows_are_probability: bool = True

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises ValueError for an option that this score does not have."""
        known = (*self.function_options, *self.parameter_options)
        for name in options:
            if name not in known:
                raise ValueError(
                    f"the {self.name} score expects options from {known}, got {name!r}; "
                    "remove it or choose another score."
                )

    def own_options(self, options: ScoreSettings | Mapping[str, Any] | None) -> Options:
        """Those of all scores' settings that are this score's; of a mapping every one, which has to be.

        >>> get_score("adder").own_options(ScoreSettings(gradient="full"))
        Options({'gradient': 'full'})

        Raises:
          ValueError: an option that this score does not have.
        """
        if options is None or isinstance(options, Mapping):
            self.check_options(options or {})
            return Options(options or {})
        known = (*self.function_options, *self.parameter_options)
        return Options({name: value for name, value in vars(options).items() if name in known})

    def learned_parameters(
        self, num_heads: int, query_dim: int, key_dim: int, options: Mapping[str, Any]
    ) -> Mapping[str, ScoreParameter]:
        """The learned arrays for these widths and options, by name."""
        self.check_options(options)
        chosen = {name: options[name] for name in self.parameter_options if name in options}
        return self.parameters(num_heads, query_dim, key_dim, **chosen)

    def raw_scores(
        self, query: Array, key: Array, parameters: Mapping[str, Array | None], options: Mapping[str, Any]
    ) -> Float[Array, "*batch heads query key"]:
        """Scores of head-major arrays, grouped key heads included; parameters that are None are left out."""
        self.check_options(options)
        chosen = {name: options[name] for name in self.function_options if name in options}
        parameters = {name: p for name, p in parameters.items() if p is not None}
        *batch, heads, q_length, width = query.shape
        kv_heads = key.shape[-3]
        if heads == kv_heads:
            return self.function(query, key, **parameters, **chosen)
        group = heads // kv_heads
        query = query.reshape(*batch, kv_heads, group, q_length, width)
        parameters = {name: p.reshape(kv_heads, group, *p.shape[1:]) for name, p in parameters.items()}
        scores = self.function(query, key[..., None, :, :], **parameters, **chosen)
        return scores.reshape(*batch, heads, q_length, key.shape[-2])


_SCORES: dict[str, Score] = {}


def register_score(score: Score) -> Score:
    """Makes `score` available under its name everywhere; returns it.

    The same function again, as when a notebook cell or an experiment file runs twice, replaces what it registered.

    Raises:
      ValueError: another score already has this name.
    """
    origin = lambda known: (known.function.__module__, known.function.__qualname__)
    if origin(_SCORES.get(score.name, score)) != origin(score):
        raise ValueError(
            f"expected a new name for the score, got {score.name!r}, which is registered already; "
            f"choose a name other than {score_names()}."
        )
    _SCORES[score.name] = score
    return score


def get_score(score: str | Score) -> Score:
    """The registered score of this name; a `Score` is returned as it is.

    >>> get_score("adder").identity
    True
    """
    if isinstance(score, Score):
        return score
    if score not in _SCORES:
        raise ValueError(
            f"expected a score from {score_names()}, got {score!r}; choose one of these or add yours with "
            "adder_flax.attention.register_score."
        )
    return _SCORES[score]


def score_names() -> tuple[str, ...]:
    """Names of the registered scores, in the order of registration."""
    return tuple(_SCORES)
