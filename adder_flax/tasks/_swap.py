"""Adder attention and adder layers put in the place of trained ones, close to what they replace.

What both have alike is copied. The rest is fitted, layer by layer, to what the trained layers do
with some images:

- a head of dot-product attention: with keys k − k̄ in place of k (the mean changes no map) times r,
  and both queries and keys times c, the distances −‖c q − c r (k − k̄)‖₁ are searched for the (r,
  c) whose maps have the smallest divergence from the head's own. For small r they are −c‖q‖₁ + c r
  sign(q)·(k − k̄), the product with the signs of the queries. The factors go into the layers that
  make queries and keys.
- a dense layer x W + b: prototypes μ + s σ W around the mean μ of the inputs, in units of their
  deviations σ, with the s out of a few whose distances explain the layer's outputs best, and a
  scale and offset for each output behind the LayerNorm, by least squares. A convolution of the
  stem likewise, to what the LayerNorm that it has as a dense layer makes of its outputs.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jaxtyping import Array, Float

from adder_flax import ops, recorder
from adder_flax.arrays import AnyArray
from adder_flax.attention import LAYER_NORM_EPSILON, MultiHeadAttention, get_score, resolve_scale
from adder_flax.layers import AdderLinear, half_squared_distances
from adder_flax.models import VisionTransformer
from adder_flax.parameters import has_prototypes

_RATIOS = tuple(2.0**n for n in range(-4, 2))
_FACTORS = tuple(2.0 ** (n / 2) for n in range(-8, 15))
_SPREADS = (0.25, 0.5, 1.0, 2.0)
_MOST_ROWS = 1024
_MOST_PAIRS = 2**18  # of tokens, which the distances of queries and keys are taken of


def swap(
    teacher: nnx.Module, student: nnx.Module, images: Float[AnyArray, "batch height width channels"]
) -> VisionTransformer:
    """Returns the student with what the teacher knows.

    The student is of the trained teacher's sizes, with adder attention or adder layers in some
    blocks or all; the parts which differ are fitted on images that are normalised as in training.
    If the two do not fit each other it is a ValueError.

    >>> sizes = dict(image_size=4, patch_size=2, channels=1, width=8, depth=1, num_heads=2)
    >>> teacher = VisionTransformer(**sizes, rngs=nnx.Rngs(0))
    >>> images = jax.random.normal(jax.random.key(0), (2, 4, 4, 1))
    >>> same = swap(teacher, VisionTransformer(**sizes, rngs=nnx.Rngs(1)), images)
    >>> bool((same(images) == teacher(images)).all())
    True
    """
    teacher, student = _transformer(teacher, "a teacher"), _transformer(student, "a model")
    _check(teacher, student)
    flat = lambda model: dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    known, params = flat(teacher), flat(student)
    adder = {path for path, layer in nnx.iter_modules(student) if isinstance(layer, AdderLinear)}
    fitted_heads = {
        ("blocks", index, "attention")
        for index, block in enumerate(student.blocks)
        if block.attention.settings.score == "adder"
    }
    _check_parts(set(known), set(params), adder, fitted_heads)
    linear, heads = _watch(teacher, images)
    new = {path: known[path][...] for path in params if path in known and path[:-1] not in adder}
    outputs: dict[tuple, Callable[[Array], Array]] = {}
    stems = zip(teacher.patch_embed.stem, student.patch_embed.stem, strict=True)
    for index, (old, young) in enumerate(stems):
        if old.norm is not None and young.norm is None:
            outputs["patch_embed", "stem", index, "linear"] = old.norm
    for place in fitted_heads:
        attention = student.blocks[place[1]].attention
        outputs |= _fit_heads(place, attention, heads[place[1]])
        # The maps that heads are fitted to have the teacher's temperature.
        new[*place, "log_temperature"] = np.zeros(attention.num_heads)
    squared = bool(student.annealing.end)
    for path, _ in nnx.iter_modules(student):
        if path in adder:
            rows, wanted = linear[".".join(map(str, path))]
            wanted = outputs[path](wanted) if path in outputs else wanted
            fitted = _fit_distances(rows, wanted, known[*path, "kernel"][...], squared=squared)
            new |= {(*path, *name.split(".")): value for name, value in fitted.items()}
        elif isinstance(change := outputs.get(path), _Affine):
            new[*path, "kernel"] = known[*path, "kernel"][...] * change.factor
            new[*path, "bias"] = change(known[*path, "bias"][...])
    return _with_params(student, new)


def _transformer(model: nnx.Module, what: str) -> VisionTransformer:
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"expected {what} that is a vision transformer and takes images normalised as the "
            f"task does, got a {type(model).__name__}; choose another"
        )
    return model


def _check(teacher: VisionTransformer, student: VisionTransformer) -> None:
    scores = {block.attention.settings.score for block in teacher.blocks}
    if has_prototypes(teacher) or scores != {"dot"}:
        layers = " and adder layers" if has_prototypes(teacher) else ""
        raise ValueError(
            "expected a teacher with dot-product attention and dense layers to begin from, got "
            f"scores {', '.join(sorted(scores))}{layers}; choose another"
        )
    sizes = lambda model: (
        model.image_shape,
        model.pos_embed.shape,
        len(model.blocks),
        model.blocks[0].attention.num_heads,
        model.blocks[0].mlp.fc1.out_features,
        model.head.out_features,
        model.prefix_tokens,
        model.blocks[0].norm_position,
        *((conv.linear.out_features, conv.stride) for conv in model.patch_embed.stem),
    )
    if sizes(teacher) != sizes(student):
        raise ValueError(
            "expected a teacher of the model's sizes (image, tokens and width, depth, heads, "
            "hidden units, classes, tokens in front, place of norms, stem) to begin from, "
            f"{sizes(student)}, got {sizes(teacher)}; set --config.model.* to them"
        )
    layers = [m for _, m in nnx.iter_modules(student) if isinstance(m, AdderLinear)]
    if any(layer.norm is None for layer in layers):
        raise ValueError(
            "expected adder layers with a norm to begin from dense ones, got some without; set "
            "--config.model.adder_options.norm=layernorm"
        )


def _check_parts(known: set[tuple], params: set[tuple], adder: set[tuple], heads: set[tuple]):
    """Refuses parameters that one network alone has, but for those of what is fitted."""
    stem_norms = {(*path[:-1], "norm") for path in adder if path[1] == "stem"}
    fitted = lambda path: (
        path[:-1] in adder | stem_norms
        or path[:-2] in adder
        or (path[:-1] in heads and path[-1] == "log_temperature")
    )
    alone = {path for path in known ^ params if not fitted(path)}
    dense = adder | {(*place, name) for place in heads for name in ("query", "key")}
    alone |= {(*path, "bias") for path in dense} - known
    if alone:
        raise ValueError(
            "expected a teacher with the model's parts, dense layers for adder ones and in front "
            "of adder attention, to begin from, got "
            f"{', '.join(sorted('.'.join(map(str, path)) for path in alone))}, which one of both "
            "lacks; set --config.model.* to what the teacher has"
        )


def _watch(
    model: VisionTransformer, images: AnyArray
) -> tuple[dict[str, tuple[Array, Array]], list[Mapping[str, Array]]]:
    """Returns rows in and out of each dense layer by path, and what each block's attention does."""
    wanted = {"linear": ["rows", "outputs"], "attention": ["query", "key", "weights"]}
    _, records = recorder.record(wanted, model, images)
    of_kind = lambda kind: [(r.path, r.arrays) for r in records if r.kind == kind]
    linear = {path: (arrays["rows"], arrays["outputs"]) for path, arrays in of_kind("linear")}
    return linear, [arrays for _, arrays in of_kind("attention")]


class _Affine(NamedTuple):
    """y → (y − shift) · factor, for each output of a layer."""

    factor: Float[Array, " features"]
    shift: Float[Array, " features"]

    def __call__(self, outputs: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        return (outputs - self.shift) * self.factor


def _fit_heads(
    place: tuple, attention: MultiHeadAttention, seen: Mapping[str, Array]
) -> dict[tuple, _Affine]:
    """Returns what becomes of a block's queries and keys, by the paths of the layers of both."""
    tokens = seen["key"].shape[-2]
    most = max(1, _MOST_PAIRS // tokens**2)
    names = ("query", "key", "weights")
    query, key, weights = (seen[name][:most].astype(jnp.float32) for name in names)
    mean = seen["key"].mean((0, 2))  # (heads, head_dim)
    scale = resolve_scale(get_score("adder"), attention.settings.scale, query.shape[-1])
    temperature = attention.settings.temperature
    scale = scale if isinstance(temperature, str) else scale / temperature  # learned: from 1 on
    centred = key - mean[:, None]
    divergences = jnp.stack([_divergences(query, r * centred, weights, scale) for r in _RATIOS])
    best = divergences.reshape(-1, query.shape[1]).argmin(0)
    ratio, factor = (jnp.array(values) for values in (_RATIOS, _FACTORS))
    ratio, factor = ratio[best // len(_FACTORS)], factor[best % len(_FACTORS)]
    spread = lambda by_head: jnp.repeat(by_head, query.shape[-1])
    return {
        (*place, "query"): _Affine(spread(factor), jnp.zeros(mean.size)),
        (*place, "key"): _Affine(spread(factor * ratio), mean.ravel()),
    }


@jax.jit
def _divergences(query: Array, key: Array, weights: Array, scale: float) -> Array:
    """Returns KL(weights ‖ softmax(−c ‖q − k‖₁ · scale)), means: (factors c, heads)."""
    distances = -jnp.abs(query[..., :, None, :] - key[..., None, :, :]).sum(-1) * scale
    of_factor = lambda c: divergence(weights, jax.nn.log_softmax(c * distances)).mean((0, 2))
    return jnp.stack([of_factor(c) for c in _FACTORS])


def divergence(
    weights: Float[Array, "*batch query key"], log_weights: Float[Array, "*batch query key"]
) -> Float[Array, "*batch query"]:
    """Returns KL(A ‖ B) of the rows of two maps, A and the logarithm of B, in nats."""
    logs = jnp.log(jnp.where(weights > 0, weights, 1.0))
    return (weights * (logs - log_weights)).sum(-1)


def _fit_distances(
    rows: Float[AnyArray, "rows in"],
    wanted: Float[AnyArray, "rows out"],
    kernel: Float[Array, "in out"],
    *,
    squared: bool,
) -> dict[str, Array]:
    """Returns the parameters of an adder layer by name whose outputs are close to what is wanted.

    The kernel is of the dense layer that gave these, or others from which they differ by a factor
    and an offset each; ``squared`` says whether the layer begins with the squared distance.
    """
    step, chosen = max(1, len(rows) // _MOST_ROWS), np.arange(len(rows))
    if step > 1:  # every eighth row, say, could be the edge of every image
        chosen = np.random.default_rng(0).permutation(chosen)[::step]
    rows, wanted = (x[chosen].astype(jnp.float32) for x in (rows, wanted))
    mean, deviation = rows.mean(0)[:, None], rows.std(0)[:, None]
    directions = deviation * kernel
    directions = directions * deviation.mean() / jnp.maximum(directions.std(), 1e-12)
    tried = [mean + spread * directions for spread in _SPREADS]
    errors = [float(_explained(ops.adder_matmul(rows, p), wanted)[2]) for p in tried]
    prototypes = tried[int(np.argmin(errors))]
    sums = (half_squared_distances if squared else ops.adder_matmul)(rows, prototypes)
    scale, bias, _ = _explained(sums, wanted)
    return {"kernel": prototypes, "norm.scale": scale, "norm.bias": bias}


def _explained(sums: Array, wanted: AnyArray) -> tuple[Array, Array, Array]:
    """Returns each output's scale and offset behind LayerNorm, and the mean square they leave."""
    centred = sums - sums.mean(-1, keepdims=True)
    normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + LAYER_NORM_EPSILON)
    away = normed - normed.mean(0)  # by least squares, each output alone
    scale = (away * wanted).sum(0) / jnp.maximum((away**2).sum(0), 1e-12)
    bias = wanted.mean(0) - scale * normed.mean(0)
    return scale, bias, ((scale * normed + bias - wanted) ** 2).mean()


def _with_params(model: VisionTransformer, new: Mapping[tuple, Any]) -> VisionTransformer:
    graphdef, state = nnx.split(model, nnx.Param)
    value = lambda path, leaf: np.asarray(new.get(path, leaf[...]), leaf.dtype)
    flat = {path: value(path, leaf) for path, leaf in nnx.to_flat_state(state)}
    return nnx.merge(graphdef, traverse_util.unflatten_dict(flat))
