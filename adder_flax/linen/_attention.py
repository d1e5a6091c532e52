"""Linen: multi-head attention, with the parameter names of `adder_flax.attention`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax.attention import attend, get_score
from adder_flax.attention.checks import check_heads, check_temperature
from adder_flax.linen._layers import TakesKeywords
from adder_flax.settings import AttentionSettings


class MultiHeadAttention(TakesKeywords):
    """Linen form of `adder_flax.attention.MultiHeadAttention`; arguments and parameters as there.

    `qkv_linear` and `out_linear` are called as `linear(features, use_bias=…, dtype=…,
    param_dtype=…, name=…)`.

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
        options = get_score(self.settings.score).own_options(self.settings.score_options)
        settings = dataclasses.replace(self.settings, score_options=options)
        check_temperature(settings.temperature)
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        query, key, value = self._heads(inputs_q, inputs_k, inputs_v)
        learned = settings.temperature == "learned"
        log_temperature = self._zeros("log_temperature") if learned else None
        dropout = self.dropout_rate > 0.0 and not deterministic
        values = attend(
            query,
            key,
            value,
            **settings.options(log_temperature),
            parameters=self._score_parameters(settings, query.shape[-1], key.shape[-1]),
            bias=bias,
            mask=mask,
            is_causal=is_causal,
            key_bias=self._zeros("key_bias", self.key_bias_length),
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
        shared: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype, name=name)
        layer = linear(features, use_bias=self.use_bias, **shared)
        # On flattened rows, as in the NNX module.
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
        project = lambda name, x, heads: self._linear(self.qkv_linear, x, heads * head_dim, name)
        split = lambda name, x, heads: (*x.shape[:-1], heads, head_dim)
        return [project(*part).reshape(split(*part)) for part in parts]

    def _score_parameters(
        self, settings: AttentionSettings, query_dim: int, key_dim: int
    ) -> dict[str, Array]:
        sizes = self.num_heads, query_dim, key_dim
        specs = get_score(settings.score).learned_parameters(*sizes, settings.score_options)
        if not specs:
            return {}
        # As in the NNX module; a submodule could not be named like the field `score`.
        scope = self.scope.push("score")  # pyright: ignore[reportOptionalMemberAccess] - bound here
        return {
            name: scope.param(name, spec.init, spec.shape, self.param_dtype)
            for name, spec in specs.items()
        }

    def _zeros(self, name: str, *lengths: int | None) -> Array | None:
        """A parameter of each head that starts at zero; None where it has no length."""
        if None in lengths:
            return None
        shape = (self.num_heads, *lengths)
        return self.param(name, nn.initializers.zeros, shape, self.param_dtype)
