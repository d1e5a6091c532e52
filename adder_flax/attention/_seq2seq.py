"""Single-head attention of sequence-to-sequence models, from decoder states to encoder states."""

import dataclasses

import flax.nnx as nnx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax.arrays import AnyArray
from adder_flax.attention._attend import attend
from adder_flax.attention._multi_head import value_of
from adder_flax.attention._registry import get_score
from adder_flax.attention.checks import check_broadcasts, check_temperature
from adder_flax.settings import AttentionSettings, keywords_of


class SequenceAttention(nnx.Module):
    """One head of any score, whose learned arrays, without a head axis, are the module's own
    parameters.

    The identity map is never added: position i of one sequence is not position i of the other.

    Args:
      query_features: d_s, width of the decoder states s.
      key_features: d_h, width of the encoder states h.
      settings: how queries look at keys; each of its fields can be given as a keyword instead:
        score: a registered name; "dot", "adder" and "gaussian" want equal widths.
        score_options: options of the score.
        temperature: a positive number, or "learned", exp(`log_temperature`), which starts at 1.
        scale, key_block: see `attend`.
      param_dtype: dtype of the parameters.
      rngs: initialisation keys.

    Raises:
      ValueError: an unknown score or option, or the identity map.

    >>> attention = SequenceAttention(8, 8, score="adder", rngs=nnx.Rngs(0))
    >>> attention(jnp.ones((2, 5, 8)), jnp.ones((2, 7, 8))).shape
    (2, 5, 8)
    """

    @keywords_of(AttentionSettings)
    def __init__(
        self,
        query_features: int,
        key_features: int,
        *,
        settings: AttentionSettings = AttentionSettings(),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_temperature(settings.temperature)
        if settings.identity:
            raise ValueError(
                "expected no identity map between two sequences, whose positions are not the same, "
                "got identity=True; leave it out."
            )
        contract = get_score(settings.score)
        options = contract.own_options(settings.score_options)
        self.settings = dataclasses.replace(settings, score_options=options, identity=False)
        specs = contract.learned_parameters(1, query_features, key_features, options)
        for name, spec in specs.items():
            setattr(self, name, spec.as_param(spec.init(rngs.params(), spec.shape, param_dtype)[0]))
        self.parameter_names = tuple(specs)
        self.log_temperature = nnx.data(None)
        if settings.temperature == "learned":
            self.log_temperature = nnx.Param(jnp.zeros((), param_dtype))

    def __call__(
        self,
        query: Float[AnyArray, "*batch q_length query_features"],
        key: Float[AnyArray, "*batch k_length key_features"],
        value: Float[AnyArray, "*batch k_length value_features"] | None = None,
        *,
        mask: AnyArray | None = None,
        bias: AnyArray | None = None,
        return_weights: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Mixes the values (by default the keys) for every query.

        Args:
          query, key, value: decoder states, encoder states, and what is mixed.
          mask: True where a query may see a key, broadcastable to (*batch, q_length, k_length).
          bias: added to the scaled scores, likewise; one value per key is a per-key bias.
          return_weights: also return the alignment (*batch, q_length, k_length).
        """
        value = key if value is None else value
        shape = (*query.shape[:-1], key.shape[-2])
        check_broadcasts("mask", mask, shape, axes="q_length, k_length")
        check_broadcasts("bias", bias, shape, axes="q_length, k_length")
        attended = attend(
            *(x[..., None, :] for x in (query, key, value)),
            **self.settings.options(value_of(self.log_temperature)),
            parameters={name: getattr(self, name)[...] for name in self.parameter_names},
            mask=_of_one_head(mask),
            bias=_of_one_head(bias),
            return_weights=return_weights,
        )
        if not return_weights:
            return attended[..., 0, :]
        context, weights = attended
        return context[..., 0, :], weights[..., 0, :, :]


def _of_one_head(pairs: AnyArray | None) -> AnyArray | None:
    # One that is the same for all queries broadcasts as it is.
    return jnp.expand_dims(pairs, -3) if pairs is not None and jnp.ndim(pairs) > 1 else pairs


class AdditiveAttention(SequenceAttention):
    """Additive attention: weights softmax(vᵀ tanh(W_s s + W_h h + b) / T) (Bahdanau et al., 2015).

    It has d_a (d_s + d_h + 1) parameters and d_a more for b, plus d_a for the LayerNorm's scale.
    Only v / T is identifiable: a learned temperature changes how v trains, not what the module can
    express.

    Arguments are as of `SequenceAttention`, but for `score` and `score_options`; `scale` is 1 by
    default.

    Args:
      hidden_dim: d_a; by default where the parameter count meets that of `BilinearAttention`.
      layer_norm: LayerNorm of the sum inside tanh, against saturation; b is then its shift.

    >>> attention = AdditiveAttention(6, 8, rngs=nnx.Rngs(0))
    >>> attention(jnp.ones((2, 5, 6)), jnp.ones((2, 7, 8))).shape
    (2, 5, 8)
    """

    @keywords_of(AttentionSettings, but=("score", "score_options"))
    def __init__(
        self,
        query_features: int,
        key_features: int,
        *,
        settings: AttentionSettings = AttentionSettings(),
        hidden_dim: int | None = None,
        layer_norm: bool = False,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = dict(hidden_dim=hidden_dim, layer_norm=layer_norm)
        settings = dataclasses.replace(settings, score="additive", score_options=options)
        super().__init__(
            query_features, key_features, settings=settings, param_dtype=param_dtype, rngs=rngs
        )


class BilinearAttention(SequenceAttention):
    """Multiplicative attention: weights softmax(sᵀ W h · scale / T).

    Source: Luong et al., 2015, "general".

    Arguments are as of `SequenceAttention`, but for `score` and `score_options`; `scale` is 1/√d_h
    by default.

    >>> attention = BilinearAttention(6, 8, rngs=nnx.Rngs(0))
    >>> attention(jnp.ones((2, 5, 6)), jnp.ones((2, 7, 8))).shape
    (2, 5, 8)
    """

    @keywords_of(AttentionSettings, but=("score", "score_options"))
    def __init__(
        self,
        query_features: int,
        key_features: int,
        *,
        settings: AttentionSettings = AttentionSettings(),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        settings = dataclasses.replace(settings, score="bilinear", score_options=None)
        super().__init__(
            query_features, key_features, settings=settings, param_dtype=param_dtype, rngs=rngs
        )
