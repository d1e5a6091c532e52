"""Linen: multi-head and classical attention, with the parameter names of `adder_flax.attention`."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax import attention
from adder_flax.attention import attend, get_score
from adder_flax.attention.checks import check_heads, check_temperature
from adder_flax.linen._bridge import call_nnx, fields_of
from adder_flax.linen._layers import TakesKeywords
from adder_flax.settings import AttentionSettings


class MultiHeadAttention(TakesKeywords):
    """Linen form of `adder_flax.attention.MultiHeadAttention`; arguments and parameters as there.

    The widths of the inputs are seen at the first call, as usual in Linen. `qkv_linear` and
    `out_linear` are called as `linear(features, use_bias=…, dtype=…, param_dtype=…, name=…)`.

    >>> import jax
    >>> attention = MultiHeadAttention(4, score="adder")
    >>> attention.init_with_output(jax.random.key(0), jnp.ones((2, 10, 32)))[0].shape
    (2, 10, 32)
    """

    num_heads: int
    settings: AttentionSettings = AttentionSettings()
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    key_bias_length: int | None = None
    dropout_rate: float = 0.0
    use_bias: bool = True
    qkv_linear: Callable[..., nn.Module] = nn.Dense
    out_linear: Callable[..., nn.Module] = nn.Dense
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "*batch q_length in_features"],
        inputs_k: Float[Array, "*batch k_length in_kv_features"] | None = None,
        inputs_v: Float[Array, "*batch k_length in_kv_features"] | None = None,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        is_causal: bool = False,
        deterministic: bool = True,
    ) -> Float[Array, "*batch q_length out_features"]:
        """Attends from `inputs_q` to `inputs_k`; dropout draws from the `dropout` stream."""
        settings = self._settings()
        check_temperature(settings.temperature)
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        query, key, value = self._heads(inputs_q, inputs_k, inputs_v)
        dropout = self.dropout_rate > 0.0 and not deterministic
        values = attend(
            query,
            key,
            value,
            **settings.options(self._log_temperature()),
            parameters=self._score_parameters(settings, query.shape[-1], key.shape[-1]),
            bias=bias,
            mask=mask,
            is_causal=is_causal,
            key_bias=self._key_bias(),
            dropout_rate=self.dropout_rate,
            dropout_rng=self.make_rng("dropout") if dropout else None,
            broadcast_dropout=False,
            deterministic=deterministic,
        )
        out_features = inputs_q.shape[-1] if self.out_features is None else self.out_features
        values = values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])
        return self._linear(self.out_linear, values, out_features, "out")

    def _linear(
        self, linear: Callable[..., nn.Module], inputs: Array, features: int, name: str
    ) -> Array:
        # On flattened rows: XLA's CPU backend trains a dense layer two to three times faster on
        # them.
        layer = linear(
            features,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name=name,
        )
        return layer(inputs.reshape(-1, inputs.shape[-1])).reshape(*inputs.shape[:-1], features)

    def _heads(self, inputs_q: Array, inputs_k: Array, inputs_v: Array) -> list[Array]:
        width = inputs_q.shape[-1] if self.qkv_features is None else self.qkv_features
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        check_heads(width, self.num_heads, kv_heads)
        head_dim = width // self.num_heads
        parts = (
            ("query", inputs_q, self.num_heads),
            ("key", inputs_k, kv_heads),
            ("value", inputs_v, kv_heads),
        )
        return [
            self._linear(self.qkv_linear, x, heads * head_dim, name).reshape(
                *x.shape[:-1], heads, head_dim
            )
            for name, x, heads in parts
        ]

    def _settings(self) -> AttentionSettings:
        options = get_score(self.settings.score).own_options(self.settings.score_options)
        return dataclasses.replace(self.settings, score_options=options)

    def _score_parameters(
        self, settings: AttentionSettings, query_dim: int, key_dim: int
    ) -> dict[str, Array]:
        options = settings.score_options
        specs = get_score(settings.score).learned_parameters(
            self.num_heads, query_dim, key_dim, options
        )
        if not specs:
            return {}
        # A scope of its own, as in the NNX module; a submodule could not be named like the field
        # `score`.
        scope = self.scope.push("score")  # pyright: ignore[reportOptionalMemberAccess] - bound here
        return {
            name: scope.param(name, spec.init, spec.shape, self.param_dtype)
            for name, spec in specs.items()
        }

    def _log_temperature(self) -> Array | None:
        if self.settings.temperature != "learned":
            return None
        shape = (self.num_heads,)
        return self.param("log_temperature", nn.initializers.zeros, shape, self.param_dtype)

    def _key_bias(self) -> Array | None:
        if self.key_bias_length is None:
            return None
        shape = (self.num_heads, self.key_bias_length)
        return self.param("key_bias", nn.initializers.zeros, shape, self.param_dtype)


class AdditiveAttention(TakesKeywords):
    """Linen form of `adder_flax.attention.AdditiveAttention`; arguments and parameters as there.

    >>> import jax
    >>> attention = AdditiveAttention(hidden_dim=3)
    >>> attention.init_with_output(jax.random.key(0), jnp.ones((2, 5, 6)), jnp.ones((2, 7, 8)))[
    ...     0
    ... ].shape
    (2, 5, 8)
    """

    fixed: ClassVar[tuple[str, ...]] = ("score", "score_options")
    settings: AttentionSettings = AttentionSettings()
    param_dtype: DTypeLike = jnp.float32
    hidden_dim: int | None = None
    layer_norm: bool = False

    @nn.compact
    def __call__(
        self,
        query: Float[Array, "*batch q_length query_features"],
        key: Float[Array, "*batch k_length key_features"],
        value: Float[Array, "*batch k_length value_features"] | None = None,
        **options: Any,
    ) -> Array | tuple[Array, Array]:
        """Mixes the values (by default the keys) for every query.

        Arguments are as in `adder_flax.attention`.
        """
        widths = query.shape[-1], key.shape[-1]
        build = lambda rngs: attention.AdditiveAttention(*widths, **fields_of(self), rngs=rngs)
        return call_nnx(self, build, query, key, value, **options)


class BilinearAttention(TakesKeywords):
    """Linen form of `adder_flax.attention.BilinearAttention`; arguments and parameters as there.

    >>> import jax
    >>> attention = BilinearAttention()
    >>> attention.init_with_output(jax.random.key(0), jnp.ones((2, 5, 6)), jnp.ones((2, 7, 8)))[
    ...     0
    ... ].shape
    (2, 5, 8)
    """

    fixed: ClassVar[tuple[str, ...]] = ("score", "score_options")
    settings: AttentionSettings = AttentionSettings()
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        query: Float[Array, "*batch q_length query_features"],
        key: Float[Array, "*batch k_length key_features"],
        value: Float[Array, "*batch k_length value_features"] | None = None,
        **options: Any,
    ) -> Array | tuple[Array, Array]:
        """Mixes the values (by default the keys) for every query.

        Arguments are as in `adder_flax.attention`.
        """
        widths = query.shape[-1], key.shape[-1]
        build = lambda rngs: attention.BilinearAttention(*widths, **fields_of(self), rngs=rngs)
        return call_nnx(self, build, query, key, value, **options)
