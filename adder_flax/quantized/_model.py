"""Whole models in few bits: adder layers and adder scores exchanged, all else left as it is."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from adder_flax import attention, layers, ops, recorder
from adder_flax.attention import MultiHeadAttention, SequenceAttention
from adder_flax.quantized._adder import Grid, check_finite, quantize_weights
from adder_flax.quantized._linear import AdderLinear, Mlp, is_fused
from adder_flax.quantized._scores import byte_score, calibrate_scores

# So many rows of a layer's inputs, and pairs of a head's tokens, say enough of its grid.
_MOST_ROWS, _MOST_PAIRS = 4096, 2**18


def quantize_model(model: nnx.Module, *inputs: Any, bits: int = 8) -> nnx.Module:
    """Returns a trained model whose adder layers and adder scores are sums of integers.

    Each layer, and each head's scores, gets a grid of its own, by what reaches it from `inputs`:
    see `calibrate` and `calibrate_scores`; what learned with as many bits keeps its grid. What is
    neither stays as it is: patch embedding, norms, softmax, the product of map and values, heads.

    Args:
      model: of `layers.AdderLinear` and attention with adder scores, in some places or all; it is
        not changed.
      *inputs: what it is called with on some training examples.
      bits: from 1 to 8.

    Raises:
      ValueError: the model has neither, or as `calibrate` and `AdderLinear.from_layer` say.

    >>> from adder_flax.models import VisionTransformer
    >>> sizes = dict(image_size=4, patch_size=2, channels=1, width=16, depth=1, num_heads=2)
    >>> model = VisionTransformer(**sizes, score="adder", mlp_linear="adder", rngs=nnx.Rngs(0))
    >>> images = nnx.Rngs(1).normal((20, 4, 4, 1))
    >>> few = quantize_model(model, images)
    >>> bool(jnp.allclose(few(images), model(images), atol=0.05)), type(few.blocks[0].mlp.fc1)
    (True, <class 'adder_flax.quantized._linear.AdderLinear'>)
    """
    wanted = {"adder": ["rows"], "attention": ["query", "key"]}
    _, records = recorder.record(wanted, model, *inputs)
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        seen.setdefault(record.path, []).append(record.arrays)

    def calls(path: str, name: str, own_axes: int) -> list[np.ndarray]:
        """What each call of a module had, with one axis before its own."""
        if path not in seen:
            raise ValueError(
                f"expected examples that reach every adder layer and score, got none at {path!r}; "
                "give some that do"
            )
        found = [np.asarray(arrays[name], np.float32) for arrays in seen[path]]
        check_finite(*found)
        return [array.reshape(-1, *array.shape[-own_axes:]) for array in found]

    def layer_of(path: str, layer: layers.AdderLinear) -> AdderLinear:
        rows = np.concatenate(calls(path, "rows", 1))
        # What learned with as many bits has the grid of them all. Else at random: every so many
        # rows may be one and the same token of each example.
        if layer.bits != bits and len(rows) > _MOST_ROWS:
            rows = np.random.default_rng(0).choice(rows, _MOST_ROWS, replace=False)
        return AdderLinear.from_layer(layer, rows, bits=bits)

    def grid_of(path: str, module: Any) -> Grid:
        heads = [calls(path, name, 3) for name in ("query", "key")]
        # Of calls of several lengths, as many tokens as the shortest has.
        lengths = [min(array.shape[-2] for array in arrays) for arrays in heads]
        heads = [[a[..., :n, :] for a in arrays] for n, arrays in zip(lengths, heads, strict=True)]
        if module.settings.score_options.get("bits") == bits:
            lowest, step = (
                jnp.full(_key_heads(module), end)
                for end in ops.shared_grid(*map(np.concatenate, heads), bits=bits)
            )
            return Grid(lowest, step, bits)
        each = 1 + _MOST_PAIRS // (math.prod(lengths) * len(heads[0]))
        query, key = (np.concatenate([array[:each] for array in arrays]) for arrays in heads)
        return calibrate_scores(query, key, bits=bits)

    return _exchange(model, layer_of, grid_of)


def in_few_bits(model: nnx.Module) -> bool:
    """Whether a model has layers or scores in few bits, so that its answers move in steps.

    >>> in_few_bits(layers.AdderLinear(8, 4, rngs=nnx.Rngs(0)))
    False
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, AdderLinear):
            return True
        score = getattr(getattr(module, "settings", None), "score", None)
        if isinstance(score, attention.Score) and score.attended is not None:
            return True
    return False


def empty_like(model: nnx.Module, bits: int) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure and shapes of what `quantize_model` makes of a model, which may be abstract."""
    graphdef, state = nnx.split(model)

    def layer_of(_: str, layer: layers.AdderLinear) -> AdderLinear:
        grid = Grid(jnp.zeros(()), jnp.ones(()), bits)
        return AdderLinear.of_weights(layer, quantize_weights(layer.kernel[...], grid))

    def grid_of(_: str, module: Any) -> Grid:
        heads = _key_heads(module)
        return Grid(jnp.zeros(heads), jnp.ones(heads), bits)

    return jax.eval_shape(
        lambda state: nnx.split(_exchange(nnx.merge(graphdef, state), layer_of, grid_of)), state
    )


def _exchange(
    model: nnx.Module,
    layer_of: Callable[[str, layers.AdderLinear], AdderLinear],
    grid_of: Callable[[str, Any], Grid],
) -> nnx.Module:
    model = nnx.clone(model)
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(model))
    exchanged, again = False, {}
    for path, module in modules:
        name = ".".join(map(str, path))
        if _is_adder(module):
            again[id(module)] = layer = layer_of(name, module)
            if not path:
                return layer
            _put(model, path, layer)
        elif _has_adder_scores(module):
            _put_score(module, grid_of(name, module))
        else:
            continue
        exchanged = True
    if not exchanged:
        raise ValueError(
            "expected a model with adder layers or adder scores, got one without; products of "
            "bytes are what other libraries do"
        )
    for _, module in list(nnx.iter_modules(model)):
        # A layer may have several names, of which it was met by one.
        for name, held in list(vars(module).items()):
            if id(held) in again:
                setattr(module, name, again[id(held)])
    for path, module in list(nnx.iter_modules(model)):
        # A subclass may have another formula.
        if path and type(module) is layers.Mlp and _is_normed(module.fc1, module.fc2):
            _put(model, path, Mlp(module.fc1, module.fc2))
    return model


def _is_adder(module: Any) -> bool:
    # A subclass may have another formula.
    own, kind = type(module), layers.AdderLinear
    return issubclass(own, kind) and (own.__call__, own.sums) == (kind.__call__, kind.sums)


def _is_normed(*linears: nnx.Module) -> bool:
    return all(isinstance(linear, AdderLinear) and is_fused(linear.norm) for linear in linears)


def _put(holder: Any, path: Sequence[Any], layer: nnx.Module) -> None:
    is_attribute = lambda name: isinstance(name, str) and not isinstance(holder, dict)
    *above, last = path
    for name in above:
        holder = getattr(holder, name) if is_attribute(name) else holder[name]
    if is_attribute(last):
        setattr(holder, last, layer)
    else:
        holder[last] = layer


def _has_adder_scores(module: Any) -> bool:
    if not isinstance(module, MultiHeadAttention | SequenceAttention):
        return False
    # That of bytes has its name.
    return attention.get_score(module.settings.score) is attention.get_score("adder")


def _key_heads(module: MultiHeadAttention | SequenceAttention) -> int:
    return module.num_kv_heads if isinstance(module, MultiHeadAttention) else 1


def _put_score(module: MultiHeadAttention | SequenceAttention, grid: Grid) -> None:
    score = byte_score(grid.bits)
    module.settings = dataclasses.replace(
        module.settings, score=score, score_options=score.own_options(None)
    )
    ends: dict[str, Any] = {"lowest": grid.lowest, "step": grid.scale}
    if isinstance(module, MultiHeadAttention):
        group = module.num_heads // module.num_kv_heads
        module.score = nnx.Dict({n: nnx.Param(jnp.repeat(x, group)) for n, x in ends.items()})
    else:
        module.parameter_names = tuple(ends)
        for name, end in ends.items():
            setattr(module, name, nnx.Param(end[0]))
