"""What a score function has to say about itself, and the table of those that are known by name."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from adder_flax import ops
from adder_flax.arrays import AnyArray
from adder_flax.parameters import state_facts
from adder_flax.registry import Registry
from adder_flax.settings import SCORE_OPTIONS, Options, join


def masked_softmax(
    scores: Float[AnyArray, "*batch key"], mask: Bool[AnyArray, "..."] | None = None
) -> Float[Array, "*batch key"]:
    """Softmax over the keys, in the precision of `scores`, of any size; a query that may see no
    key, where the mask is False, gets zeros.

    >>> masked_softmax(jnp.array([[1e4, 1e4], [5.0, 7.0]]), jnp.array([[True], [False]])).tolist()
    [[0.5, 0.5], [0.0, 0.0]]
    """
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    mask = ops.as_mask(mask)
    lowest = jnp.finfo(scores.dtype).min
    # A finite stand-in instead of -inf: a fully masked row then has no 0/0 in it, forward or
    # backward.
    weights = jax.nn.softmax(jnp.where(mask, scores, lowest), axis=-1)
    return jnp.where(mask, weights, 0.0)


@dataclasses.dataclass(frozen=True)
class ScoreParameter:
    """A learned array of a score function.

    Attributes:
      shape: with the heads first.
      init: its initialiser.
      is_weight: whether inputs are multiplied with it although its name does not end in ``kernel``:
        it is then no less a weight to second-order optimizers, but is not decayed.
    """

    shape: tuple[int, ...]
    init: Callable[..., Array]
    is_weight: bool = False

    def as_param(self, value: AnyArray) -> nnx.Param:
        """The parameter of an NNX module that has this value."""
        parameter = nnx.Param(value)
        return state_facts(parameter, role="weight", decay=False) if self.is_weight else parameter


@dataclasses.dataclass(frozen=True)
class Score:
    """The contract of a score function.

    Registered once (`register_score`), a score is available by name in `attend`, in the NNX and
    Linen modules, in `VisionTransformer` and in `capture_attention`.

    Attributes:
      function: `function(query, key, **parameters, **options)`; query (..., num_heads, q_length,
        query_dim) and key (..., num_heads, k_length, key_dim) give raw scores (..., num_heads,
        q_length, k_length), in float32 or wider, larger for a better match. With grouped key heads
        the head axis comes as two, (num_kv_heads, group), and the key's group axis has length 1, so
        a function only relies on broadcasting.
      parameters: `parameters(num_heads, query_dim, key_dim, **options)` gives the learned arrays by
        name; each one's first axis is the heads.
      options: a frozen dataclass whose fields are declared with `adder_flax.settings.setting`: what
        users may set, as `config.model.score_options.<field>` and as `score_options={"<field>":
        …}`. Each one is a keyword of `function`, of `parameters` or of both, and shapes the
        program: none is declared with `data`.
      scale: the default factor on the raw scores as a function of the key's head_dim.
      variance: variance of a raw score between unit-normal query and key as a function of head_dim,
        for `scale="variance_matched"`; None where it depends on learned parameters.
      identity: whether the identity map is added to the attention map unless the user says
        otherwise.
      normalize: `normalize(scores, mask)` turns scaled float32 scores into weights.
      attended: `attended(query, key, value, factor, **parameters)`, softmax(scores · factor) value
        at once, in Flax's layout, with `factor` for all heads or for each; used on float32 where
        neither map, mask, bias, dropout nor grouped heads are asked for.
      rows_are_probability: whether each row that `normalize` gives is a probability distribution
        over the keys, which entropy, rollout and Markov-chain analysis rely on (before the identity
        map is added).
    """

    name: str
    function: Callable[..., Array]
    parameters: Callable[..., Mapping[str, ScoreParameter]] = lambda *_: {}
    options: type | None = None
    scale: Callable[[int], float] = lambda head_dim: head_dim**-0.5
    variance: Callable[[int], float] | None = None
    identity: bool = False
    normalize: Callable[[Array, Array | None], Array] = masked_softmax
    attended: Callable[..., Array] | None = None
    rows_are_probability: bool = True

    def __post_init__(self):
        for name, field in self._options.items():
            if name not in _keywords(self.function) | _keywords(self.parameters):
                raise ValueError(
                    f"the {self.name} score expects each of its options to be a keyword of its "
                    f"function or of its parameters, got {name!r}, which is of neither; add it "
                    "there."
                )
            if field.metadata["declared"].data:
                raise ValueError(
                    f"the {self.name} score expects options that shape the program, got {name!r}, "
                    "declared as data; leave data out, or make it a parameter."
                )

    @property
    def _options(self) -> dict[str, dataclasses.Field]:
        fields = () if self.options is None else dataclasses.fields(self.options)
        return {field.name: field for field in fields}

    def own_options(self, options: Any) -> Options:
        """All options of this score, by default where not given: of all scores' settings its own,
        of a mapping every one, which has to be.

        >>> get_score("additive").own_options({"layer_norm": True})
        Options({'hidden_dim': None, 'layer_norm': True})

        Raises:
          ValueError: an option that this score does not have.
        """
        known = {name: field.default for name, field in self._options.items()}
        if options is None or isinstance(options, Mapping):
            given = dict(options or {})
            for name in given.keys() - known:
                near = difflib.get_close_matches(name, known, n=1)
                fix = f"did you mean {near[0]!r}?" if near else "remove it or choose another score."
                raise ValueError(
                    f"the {self.name} score expects options from {tuple(known)}, got {name!r}; "
                    f"{fix}"
                )
        else:
            given = {name: value for name, value in vars(options).items() if name in known}
        return Options(known | given)

    def learned_parameters(
        self, num_heads: int, query_dim: int, key_dim: int, options: Mapping[str, Any] | None = None
    ) -> Mapping[str, ScoreParameter]:
        """The learned arrays for these widths and options."""
        chosen = self._options_of(self.parameters, options)
        return self.parameters(num_heads, query_dim, key_dim, **chosen)

    def raw_scores(
        self,
        query: AnyArray,
        key: AnyArray,
        parameters: Mapping[str, AnyArray | None],
        options: Mapping[str, Any] | None = None,
    ) -> Float[Array, "*batch heads query key"]:
        """Scores of head-major arrays, grouped key heads included; parameters that are None are
        left out.
        """
        chosen = self._options_of(self.function, options)
        parameters = {name: p for name, p in parameters.items() if p is not None}
        *batch, heads, q_length, width = query.shape
        kv_heads = key.shape[-3]
        if heads == kv_heads:
            return self.function(query, key, **parameters, **chosen)
        group = heads // kv_heads
        query = query.reshape(*batch, kv_heads, group, q_length, width)
        grouped = lambda array: array.reshape(kv_heads, group, *array.shape[1:])
        parameters = {name: grouped(array) for name, array in parameters.items()}
        scores = self.function(query, key[..., None, :, :], **parameters, **chosen)
        return scores.reshape(*batch, heads, q_length, key.shape[-2])

    def _options_of(self, function: Callable, options: Mapping[str, Any] | None) -> dict[str, Any]:
        """Options that a function of this score takes."""
        known = _keywords(function)
        return {name: x for name, x in self.own_options(options).items() if name in known}


@functools.cache
def _keywords(function: Callable) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(
        p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    )


SCORES: Registry[Score] = Registry("score", "adder_flax.attention.register_score")
"""Scores by name."""


def register_score(score: Score) -> Score:
    """Makes `score` available under its name everywhere, its options as fields of configurations;
    returns it. The same function again, as of a notebook cell, replaces what it registered.

    Raises:
      ValueError: another score already has this name, or has an option of the same name that means
        something else.
    """
    if score.options is not None:
        others = (SCORE_OPTIONS.get(name) for name in SCORE_OPTIONS if name != score.name)
        join("score", *others, score.options)
    SCORES.register(
        score.name, score, origin=(score.function.__module__, score.function.__qualname__)
    )
    if score.options is not None:
        SCORE_OPTIONS.register(score.name, score.options)
    return score


def get_score(score: str | Score) -> Score:
    """The registered score of this name; a `Score` is returned as it is.

    >>> get_score("adder").identity
    True
    """
    return score if isinstance(score, Score) else SCORES.get(score)
