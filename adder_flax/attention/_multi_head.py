"""Multi-head attention with any registered score, as an NNX module."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax.arrays import AnyArray
from adder_flax.attention._attend import attend, resolve_scale
from adder_flax.attention._registry import get_score
from adder_flax.attention.checks import check_heads, check_temperature
from adder_flax.parameters import as_attribute, name_axis
from adder_flax.settings import AttentionSettings, is_on, keywords_of


class MultiHeadAttention(nnx.Module):
    """Multi-head attention: out(concat_h (softmax(s(q_h, k_h) · scale / T + bias) + I) v_h).

    Four projections `query`, `key`, `value` and `out` with two-dimensional kernels (in_features,
    num_heads · head_dim), and the learned arrays of the score, one per head, under `score`.

    Args:
      num_heads: divides `qkv_features`.
      in_features: width of the queries' inputs.
      settings: how queries look at keys; each of its fields can be given as a keyword instead:
        score: a registered name: "dot", "bilinear", "additive", "adder", "gaussian" or your own.
        score_options: options of the score, such as `{"hidden_dim": 32}` (additive), `{"gradient":
        "full"}` (adder). temperature: a positive number, or "learned" for one per head,
        exp(`log_temperature`), which starts at 1. scale, identity, key_block: see `attend`.
      qkv_features, out_features, in_kv_features: width of all heads together, of the output, and of
        the keys' and values' inputs; `in_features` by default.
      num_kv_heads: of keys and values, a divisor of `num_heads`, by default equal (no grouping).
      key_bias_length: learn one bias per head and key position, for inputs of exactly this length;
        None for none.
      dropout_rate: dropout of attention weights, independent for each sample and head.
      use_bias: whether the projections have a bias.
      qkv_linear, out_linear: what makes the projections:
        `qkv_linear(in_features, out_features, use_bias=…, dtype=…, param_dtype=…, rngs=…)`.
      dtype: dtype of the computation; None for the inputs' and parameters' common one.
      param_dtype: dtype of the parameters.
      rngs: initialisation keys.

    Raises:
      ValueError: an unknown score or option, or numbers of heads that do not divide.

    >>> attention = MultiHeadAttention(4, 32, score="adder", rngs=nnx.Rngs(0))
    >>> attention(jnp.ones((2, 10, 32))).shape
    (2, 10, 32)
    """

    @keywords_of(AttentionSettings)
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        settings: AttentionSettings = AttentionSettings(),
        qkv_features: int | None = None,
        out_features: int | None = None,
        in_kv_features: int | None = None,
        num_kv_heads: int | None = None,
        key_bias_length: int | None = None,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        qkv_linear: Callable[..., nnx.Module] = nnx.Linear,
        out_linear: Callable[..., nnx.Module] = nnx.Linear,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        qkv_features = in_features if qkv_features is None else qkv_features
        out_features = in_features if out_features is None else out_features
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(qkv_features, num_heads, self.num_kv_heads)
        self.head_dim = qkv_features // num_heads
        contract = get_score(settings.score)
        options = contract.own_options(settings.score_options)
        self.settings = dataclasses.replace(settings, score_options=options)
        resolve_scale(contract, settings.scale, self.head_dim)
        check_temperature(settings.temperature)
        self.set_dropout_rate(dropout_rate)
        self.dtype = dtype

        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        shared["use_bias"] = use_bias
        kv_features = self.num_kv_heads * self.head_dim
        self.query = qkv_linear(in_features, qkv_features, **shared)
        self.key = qkv_linear(in_kv_features, kv_features, **shared)
        self.value = qkv_linear(in_kv_features, kv_features, **shared)
        self.out = out_linear(qkv_features, out_features, **shared)
        # Heads stay whole on every device: half a head has no scores of its own.
        for linear, axis, parts in (
            (self.query, -1, num_heads),
            (self.key, -1, self.num_kv_heads),
            (self.value, -1, self.num_kv_heads),
            (self.out, 0, num_heads),
        ):
            name_axis(getattr(linear, "kernel", None), axis, "heads", parts)

        specs = contract.learned_parameters(num_heads, self.head_dim, self.head_dim, options)
        self.score = nnx.Dict(
            {n: s.as_param(s.init(rngs.params(), s.shape, param_dtype)) for n, s in specs.items()}
        )
        self.log_temperature = nnx.data(None)
        if settings.temperature == "learned":
            self.log_temperature = nnx.Param(jnp.zeros((num_heads,), param_dtype))
        self.key_bias = nnx.data(None)
        if key_bias_length is not None:
            self.key_bias = nnx.Param(jnp.zeros((num_heads, key_bias_length), param_dtype))

    def __call__(
        self,
        inputs_q: Float[AnyArray, "*batch q_length in_features"],
        inputs_k: Float[AnyArray, "*batch k_length in_kv_features"] | None = None,
        inputs_v: Float[AnyArray, "*batch k_length in_kv_features"] | None = None,
        *,
        mask: AnyArray | None = None,
        bias: AnyArray | None = None,
        is_causal: bool = False,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "*batch q_length out_features"]:
        """Attends from `inputs_q` to `inputs_k`, by default the same, and mixes `inputs_v`, by
        default the keys; other arguments are as of `attend`, `rngs` have a stream `dropout`.
        """
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        drops = is_on(self.dropout_rate) and not deterministic
        values = attend(
            _project(self.query, inputs_q, self.num_heads),
            _project(self.key, inputs_k, self.num_kv_heads),
            _project(self.value, inputs_v, self.num_kv_heads),
            **self.settings.options(value_of(self.log_temperature)),
            parameters=_arrays_of(self.score),
            bias=bias,
            mask=mask,
            is_causal=is_causal,
            key_bias=value_of(self.key_bias),
            dropout_rate=self.dropout_rate,
            dropout_rng=rngs.dropout() if drops and rngs is not None else None,
            broadcast_dropout=False,
            deterministic=deterministic,
        )
        values = values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])
        output = self.out(values.reshape(-1, values.shape[-1]))
        return output.reshape(*values.shape[:-1], output.shape[-1])

    def set_dropout_rate(self, rate: float | Array) -> None:
        """Takes another rate of dropout, which may be traced."""
        self.dropout_rate = as_attribute(rate)


def value_of(parameter: nnx.Param | None) -> Array | None:
    """Its array, by which `kfac` knows it, or None."""
    return None if parameter is None else parameter[...]


def _arrays_of(parameters: Any) -> dict[str, Array]:
    # Not by `items`: as a method of a module it would be a row of `nnx.tabulate`, which fails then.
    return {n: p[...] for n, p in vars(parameters).items() if isinstance(p, nnx.Variable)}


def _project(linear: nnx.Module, inputs: AnyArray, num_heads: int) -> Array:
    # On flattened rows: XLA's CPU backend trains a dense layer two to three times faster on them.
    outputs = linear(inputs.reshape(-1, inputs.shape[-1]))
    # In two steps: where the batch is split over an explicit axis, JAX asks for them.
    outputs = outputs.reshape(*inputs.shape[:-1], outputs.shape[-1])
    return outputs.reshape(*inputs.shape[:-1], num_heads, outputs.shape[-1] // num_heads)
