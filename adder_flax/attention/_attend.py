"""The one path of all mechanisms: scores, scale, mask, softmax, dropout, identity, values."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from adder_flax import ops, recorder
from adder_flax.arrays import AnyArray
from adder_flax.attention._curvature import KEY_BIASED, TEMPERED, captures, tap_heads
from adder_flax.attention._registry import Score, get_score, masked_softmax
from adder_flax.attention.checks import (
    check_dropout,
    check_floating,
    check_own_keys,
    check_shapes,
    check_temperature,
    identity_map,
    mask_of_pairs,
    own_values,
    total_bias,
    visible,
    with_causal,
)
from adder_flax.settings import is_on

# A pair with `return_weights`; whoever asks for that knows.
Attended = Array | Any


def attend(
    query: Float[AnyArray, "*#batch q_length heads query_dim"],
    key: Float[AnyArray, "*#batch k_length kv_heads key_dim"],
    value: Float[AnyArray, "*#batch k_length kv_heads value_dim"],
    *,
    score: str | Score = "dot",
    parameters: Mapping[str, AnyArray | None] | None = None,
    score_options: Mapping[str, Any] | None = None,
    bias: Float[AnyArray, "..."] | None = None,
    mask: AnyArray | None = None,
    is_causal: bool = False,
    query_position: int | Array | None = None,
    key_bias: Float[AnyArray, "..."] | None = None,
    scale: str | float | Array | None = None,
    temperature: float | Array = 1.0,
    log_temperature: Float[AnyArray, "..."] | None = None,
    identity: bool | None = None,
    dropout_rate: float | Array = 0.0,
    dropout_rng: Array | None = None,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
    key_block: int | str | None = "auto",
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    module: Any = None,
    return_weights: bool = False,
    **flax_options: Any,
) -> Attended:
    """Attention with any registered score: (softmax(scores · scale / temperature + bias) + I)
    value.

    The softmax runs in float32 or wider. A query that may see no key gets zeros from the map. The
    options after `score_options` are also those of `adder_attention` and the others.

    Args:
      query, key, value: in Flax's layout; `heads` may be a multiple of `kv_heads`.
      score: a registered name or a `Score`.
      parameters: the score's learned arrays by name, heads first.
      score_options: options of the score function, for example `{"gradient": "full"}` for the adder
        score.
      bias: added to the scaled scores, broadcastable to (*batch, heads, q_length, k_length); -inf
        masks.
      mask: True where a query may see a key, broadcastable likewise; not floating, since -1e9 for
        "hidden" belongs into `bias`.
      is_causal: query i sees keys 0 … i only, or 0 … `query_position` + i.
      query_position: place of the first query's own key among keys that come from a cache, one or
        one for each sample, for the identity map and for `is_causal`. Flax's modules, when they
        decode, need not be told it.
      key_bias: one bias per key, broadcastable to (*batch, heads, k_length).
      scale: None for the score's own default, "sqrt_dim" for 1/√head_dim, "variance_matched" for
        one over the standard deviation of the score between unit-normal vectors, or a number or one
        per head.
      temperature: divides the scores; a number or one per head, positive.
      log_temperature: logarithm of a learned temperature, a number or one per head, by which they
        are divided too.
      identity: whether to add the identity map; None for the score's own default.
      dropout_rate, dropout_rng: dropout of the map's weights (not of the identity map), off where
        `deterministic`; a rate that is no plain 0 may be traced.
      broadcast_dropout: one dropout mask for all samples and heads, Flax's default.
      deterministic: no dropout.
      key_block: compute in blocks of so many keys and never build the map unless it is asked for,
        see `adder_flax.ops.fused_attention`; dropout is then independent for each sample and head.
        "auto" takes blocks where they are faster (`adder_flax.ops.preferred_key_block`), softmax
        normalises and no weights are dropped. None always builds the map, as forward-mode
        derivatives need it.
      dtype: dtype of the computation outside softmax; None for the inputs' common one.
      precision: precision of matrix products, see `jax.lax.Precision`.
      module: a Flax module (NNX or Linen) that is to `sow` the weights as "attention_weights".
      return_weights: also return the map that multiplies the values, before dropout, identity map
        included.
      **flax_options: other options of Flax's own attention functions, accepted at their defaults
        only.

    Returns:
      (*batch, q_length, heads, value_dim); with `return_weights` a pair of it and the float32 map
      (*batch, heads, q_length, k_length).

    Raises:
      ValueError: shapes that do not fit, a floating mask, or the identity map or `is_causal` where
        q_length differs from k_length and there is no `query_position`.
      TypeError: an option that neither this function nor Flax's has.

    >>> x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    >>> out, weights = attend(x, x, x, score="adder", return_weights=True)
    >>> out.shape, weights.shape, bool(jnp.allclose(weights.sum(-1), 2.0))
    ((2, 5, 3, 8), (2, 3, 5, 5), True)
    """
    _refuse_unknown(flax_options)
    contract = get_score(score)
    identity = contract.identity if identity is None else identity
    check_shapes(query, key, value)
    shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    check_own_keys(shape, identity, is_causal, query_position)
    bias, mask = total_bias(bias, key_bias, shape), mask_of_pairs(mask, shape)
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    check_floating(dtype)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    rate = 0.0 if deterministic else dropout_rate
    check_dropout(rate, dropout_rng)
    arrays = {name: array for name, array in (parameters or {}).items() if array is not None}
    raw_scores = functools.partial(contract.raw_scores, options=score_options)
    if isinstance(temperature, int | float):
        check_temperature(temperature)
    factor = _per_head(resolve_scale(contract, scale, key.shape[-1])) / _per_head(temperature)
    cooling = 1.0 if log_temperature is None else _per_head(jnp.exp(-log_temperature))
    if is_causal and query_position is not None:
        mask, is_causal = with_causal(mask, shape, query_position), False
    mask = visible(mask, bias)
    map_is_wanted = return_weights or module is not None or recorder.listening("attention")

    by_map = (
        map_is_wanted or is_causal or is_on(rate) or not (bias is mask is query_position is None)
    )
    if contract.attended and not (by_map or captures(*arrays.values(), log_temperature)):
        few_keys = ops.preferred_key_block(shape[-1]) is None
        if few_keys and dtype == jnp.float32 and query.shape[-2] == key.shape[-2]:
            factor = jnp.broadcast_to(factor * cooling, (query.shape[-2], 1, 1)).reshape(-1)
            output = contract.attended(query, key, value, factor, **arrays)
            return output + value if identity else output
    # Heads before length: both products are then plain batched matrix products.
    query, key, value = (jnp.swapaxes(x, -2, -3) for x in (query, key, value))
    own = own_values(value, shape[-2], query_position) if identity else None

    if captures(*arrays.values(), log_temperature, key_bias):
        key_block = None  # inside a block, nothing can be reported
    elif key_block == "auto":
        # Blocks draw other dropout masks than the map: the length alone should not choose.
        possible = contract.normalize is masked_softmax and not is_on(rate)
        key_block = ops.preferred_key_block(key.shape[-2]) if possible else None

    with _matmul_precision(precision):
        if key_block is not None and not map_is_wanted:
            how: dict[str, Any] = dict(
                scale=factor * cooling, bias=bias, mask=mask, is_causal=is_causal
            )
            how |= dict(dropout_rate=rate, dropout_key=dropout_rng, key_block=key_block)
            output = _in_blocks(contract, raw_scores, arrays, query, key, value, own=own, **how)
            return jnp.swapaxes(output, -2, -3)
        scores = raw_scores(query, key, arrays) * factor
        if log_temperature is not None:
            learned, per_head = {"log_temperature": log_temperature}, log_temperature.ndim > 0
            scores = tap_heads(TEMPERED, learned, scores, scores * cooling, per_head=per_head)
        biased = scores if bias is None else scores + bias
        if key_bias is not None:
            learned, per_head = {"key_bias": key_bias}, key_bias.ndim > 1
            biased = tap_heads(KEY_BIASED, learned, scores, biased, per_head=per_head)
        weights = contract.normalize(biased, with_causal(mask, biased.shape) if is_causal else mask)
        shown = weights
        if identity and map_is_wanted:
            shown = weights + identity_map(shape, query_position, weights.dtype)
        arrays = {"query": query, "key": key, "scores": scores, "weights": weights, "map": shown}
        recorder.report("attention", arrays, score=contract.name, identity=identity)
        if module is not None:
            intermediates = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
            module.sow(intermediates, "attention_weights", shown)
        if is_on(rate):
            assert dropout_rng is not None, "check_dropout has seen to it"
            weights = _dropout(weights, rate, dropout_rng, broadcast_dropout)
        output = _mix(weights.astype(dtype), value, own)
    output = jnp.swapaxes(output, -2, -3)
    return (output, shown) if return_weights else output


def attention_function(function: Callable[..., Attended]) -> Callable[..., Attended]:
    """Makes a function that hands `**options` on to `attend` one for Flax's `attention_fn`: its
    signature names them all, as Flax Linen passes only what it finds there.
    """

    @functools.wraps(function)
    def attending(*args: Any, **options: Any) -> Attended:
        query = args[0] if args else options.get("query")
        return function(*args, **options | _said_by_flax(query, options))

    own = inspect.signature(function).parameters.values()
    own = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
    fixed = {"score", "parameters", "score_options"}
    shared = [p for p in _options() if p.name not in fixed]
    others = inspect.Parameter("flax_options", inspect.Parameter.VAR_KEYWORD)
    attending.__signature__ = inspect.Signature([*own, *shared, others])  # pyright: ignore[reportAttributeAccessIssue]
    return attending


_PRECISIONS = {precision.name for precision in jax.lax.Precision}
_FILES = ("flax.nnx.nn.attention", "flax.linen.attention")


def _said_by_flax(query: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `attend` that a calling module of Flax means; none where no such module calls.

    Its masks are numbers 0 and 1, which are floating by default. What is added to scores would mean
    the opposite: of a traced mask, which nobody can look at, it makes the output NaN. When Flax's
    module decodes, the newest token is the query and all others come from a cache; of the place
    there it has a local variable, and no word for `attention_fn`. A function between the two that
    is compiled alone would keep the first token's place, so that it is not told of any.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in _FILES:
        frame = frame.f_back
    if frame is None:
        return {}
    means: dict[str, Any] = {}
    mask, bias = (options.get(name) for name in ("mask", "bias"))
    if isinstance(mask, Tracer) and mask.dtype != jnp.bool_:
        is_added = (mask < 0).any()
        poison = jnp.where(is_added, jnp.nan, 0.0)
        means |= dict(mask=(mask != 0) | is_added, bias=poison if bias is None else bias + poison)
    elif mask is not None:
        means["mask"] = ops.as_mask(mask)
    own = frame.f_locals
    if "cur_index" in own and _trace_of(query) is _trace_of(own.get("query")):
        means["query_position"] = own["cur_index"]
    return means


def _trace_of(array: Any) -> Any:
    return getattr(array, "_trace", None)  # None of what is not traced


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    """Refuses options that are none of Flax's attention functions, or not at their defaults."""
    for name, value in options.items():
        if name not in _defaults():
            known = [p.name for p in _options()]
            raise TypeError(
                f"attention expects options from {known}, got {name!r}; correct its name."
            )
        if value is not _defaults()[name] and value != _defaults()[name]:
            raise ValueError(
                f"expected {name!r} at Flax's default, got {value!r}; leave it out: this attention "
                "has no such option."
            )


@functools.cache
def _defaults() -> dict[str, Any]:
    from flax import linen  # imported only when a Flax module asks for more than `attend` names

    functions: list[Callable] = [nnx.dot_product_attention, linen.dot_product_attention]
    return {p.name: p.default for f in functions for p in inspect.signature(f).parameters.values()}


def _options() -> list[inspect.Parameter]:
    parameters = inspect.signature(attend).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def resolve_scale(
    score: str | Score, scale: str | float | Array | None, head_dim: int
) -> float | Array:
    """The factor on raw scores that `scale` (see `attend`) stands for.

    >>> resolve_scale("dot", "variance_matched", 64)
    0.125
    """
    score = get_score(score)
    if scale is None:
        return score.scale(head_dim)
    if not isinstance(scale, str):
        return scale
    if scale == "sqrt_dim":
        return head_dim**-0.5
    if scale == "variance_matched" and score.variance is not None:
        return score.variance(head_dim) ** -0.5
    known = ["sqrt_dim"] + ["variance_matched"] * (score.variance is not None)
    raise ValueError(
        f"expected scale of the {score.name} score from {known} or a number, got {scale!r}; "
        "choose one of these, or None for the score's own default."
    )


def _mix(weights: Array, value: Array, own: Array | None) -> Array:
    """weights · value, plus each query's own value for the identity map, head-major.

    Each value head serves its group of query heads.
    """
    *batch, heads, q_length, k_length = weights.shape
    kv_heads = value.shape[-3]
    if heads != kv_heads:
        weights = weights.reshape(*batch, kv_heads, heads // kv_heads, q_length, k_length)
        value = value[..., None, :, :]
    output = jnp.matmul(weights, value)
    if own is not None:
        output = output + (own if heads == kv_heads else own[..., None, :, :])
    return output.reshape(*batch, heads, q_length, output.shape[-1])


def _in_blocks(
    contract: Score,
    raw_scores: Callable[..., Array],
    arrays: dict[str, AnyArray],
    query: Array,
    key: Array,
    value: Array,
    *,
    own: Array | None,
    **options: Any,
) -> Array:
    """Head-major attention without the map."""
    if contract.normalize is not masked_softmax:
        raise ValueError(
            f"key_block expects a score that softmax normalises, got {contract.name!r}, which "
            "brings its own; leave key_block out."
        )
    score = lambda q, k, *values: raw_scores(q, k, dict(zip(arrays, values, strict=True)))
    group = query.shape[-3] // value.shape[-3]
    value = jnp.repeat(value, group, axis=-3)
    output = ops.fused_attention(score, query, key, value, tuple(arrays.values()), **options)
    return output if own is None else output + jnp.repeat(own, group, axis=-3)


def _dropout(weights: Array, rate: float | Array, rng: Array, broadcast: bool) -> Array:
    shape = (1,) * (weights.ndim - 2) + weights.shape[-2:] if broadcast else weights.shape
    keep = jax.random.bernoulli(rng, 1.0 - rate, shape)
    return jnp.where(keep, weights / (1.0 - rate), 0.0)


def _per_head(number: Any) -> Any:
    return number[..., None, None] if jnp.ndim(number) else number


def _matmul_precision(precision: jax.lax.PrecisionLike):
    if precision is None:
        return contextlib.nullcontext()
    if isinstance(precision, tuple):
        raise ValueError(
            f"expected one precision for both operands of a product, got {precision}; pass one."
        )
    name: Any = getattr(precision, "name", precision)
    return jax.default_matmul_precision(name.lower() if name in _PRECISIONS else name)
