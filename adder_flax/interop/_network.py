"""What weights do not tell of their network, and who says it instead.

Two networks with arrays of the same names and shapes may differ in their heads, activation,
epsilon, and in where norms and averages stand: the weights of one give wrong logits in the other
without any sign of it. Hugging Face and timm keep a ``config.json`` beside their files; this
project writes the same facts into the header of its own.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from adder_flax.attention import get_score, resolve_scale
from adder_flax.interop._safetensors import Weights, read_json
from adder_flax.layers import Block
from adder_flax.models import Grid, VisionTransformer
from adder_flax.text import printable

METADATA = "adder_flax.network"
"""Name of the entry that tells of the network, in the header of this project's files or in a
``config.json`` beside others."""
_IMAGES = "adder_flax.images"
_SCORES = "adder_flax.scores"

_BESIDE = "config.json"
_MOST_ROWS = 1024

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


class Network(NamedTuple):
    """Facts of a vision transformer that its arrays do not show; None where nobody said it.

    Attributes:
      num_heads: of each block.
      activation: of the MLPs: "gelu" is the exact one.
      norms: where those of a block stand: "before" its attention and MLP, or "after" the sums.
      epsilon: of the norms of blocks and output.
      pooling: "cls", or "mean" of all patches behind the last norm.
      grid: rows and columns of patches that its position embedding is of.
    """

    num_heads: int | None = None
    activation: str | None = None
    norms: str | None = None
    epsilon: float | None = None
    pooling: str | None = None
    grid: Grid | None = None


_WORDS = {
    "num_heads": "number of heads",
    "activation": "activation",
    "norms": "place of the norms",
    "epsilon": "epsilon of the norms",
    "pooling": "pooling",
    "grid": "grid of patches",
}
_SETTINGS = {"num_heads": "num_heads", "epsilon": "norm_epsilon", "pooling": "pooling"}


def network_of(model: VisionTransformer) -> Network:
    """Returns the facts of a model."""
    block = model.blocks[0]
    norms = "before" if block.norm_position == "pre" else "after"
    return Network(
        block.attention.num_heads,
        "gelu",
        norms,
        float((model.fc_norm if model.norm is None else model.norm).epsilon),
        model.pooling,
        model.grid,
    )


def as_metadata(
    model: VisionTransformer, names: str, statistics: Statistics | None
) -> dict[str, str]:
    """Returns the entries of a file's header that tell the facts of a model and of its images."""
    entries = {METADATA: json.dumps(network_of(model)._asdict())}
    if names == "adder_flax":  # in others' the queries have taken up what is told here
        entries[_SCORES] = json.dumps(_scores_of(model))
    if statistics is not None:
        entries[_IMAGES] = json.dumps(dict(zip(("mean", "std"), statistics, strict=True)))
    return entries


def _scores_of(model: VisionTransformer) -> list[dict[str, Any]]:
    """Returns of each block's score what arrays do not show."""

    def one(block: Block) -> dict[str, Any]:
        settings, head_dim = block.attention.settings, block.attention.head_dim
        score, temperature = get_score(settings.score), settings.temperature
        return {
            "score": score.name,
            "scale": float(resolve_scale(score, settings.scale, head_dim)),
            "temperature": temperature if temperature == "learned" else float(temperature),
            "identity": score.identity if settings.identity is None else settings.identity,
        }

    return [one(block) for block in model.blocks]


def check_scores(model: VisionTransformer, weights: Weights) -> None:
    """Compares scores of one kind in weights of this project; others may take each other's place.

    Raises:
      ValueError: they differ in scale, temperature or identity map.
    """
    if _SCORES not in weights.metadata:  # of an earlier version
        return
    said = _entry(weights.metadata[_SCORES], _SCORES)
    for number, (own, got) in enumerate(zip(_scores_of(model), said, strict=False)):
        for fact in own if own["score"] == got["score"] else ():
            if own[fact] != got[fact]:
                raise ValueError(
                    f"expected weights of scores whose {fact} is {own[fact]} in block {number}, as "
                    f"the model's, got {printable(got[fact])} by the entry {_SCORES}; set "
                    f"config.model.{fact}, or choose other weights"
                )


def check_network(model: VisionTransformer, weights: Weights, names: str, patch_size: int) -> Grid:
    """Returns the grid of patches that the positions of weights are of, which may be another.

    Raises:
      ValueError: their network is not like the model, or unknown in some fact.
    """
    own, (said, by) = network_of(model), _said(weights, names, patch_size)
    for fact, word in _WORDS.items():
        expected, got = getattr(own, fact), getattr(said, fact)
        near = fact == "epsilon" and got is not None and math.isclose(expected, got, rel_tol=1e-6)
        if fact != "grid" and got is not None and expected != got and not near:
            fix = f"set config.model.{_SETTINGS[fact]}, or " if fact in _SETTINGS else ""
            raise ValueError(
                f"expected weights of a network whose {word} is {expected}, as the model's, got "
                f"{printable(got)} by {by}; {fix}choose other weights"
            )
    return _whole_network(said, by, weights, like=own).grid


def read_network(weights: Weights, names: str, patch_size: int) -> Network:
    """Returns all facts of the network of weights; a ValueError where one is not known."""
    return _whole_network(*_said(weights, names, patch_size), weights, like=Network())


def _whole_network(said: Network, by: str, weights: Weights, *, like: Network) -> Any:
    """Returns facts all of which are known, or tells where to write what they are."""
    if not (unknown := [word for fact, word in _WORDS.items() if getattr(said, fact) is None]):
        return said
    example = Network(3, "gelu", "before", 1e-6, "cls", (14, 14))
    entry = {
        fact: next(x for x in (getattr(said, fact), getattr(like, fact), default) if x is not None)
        for fact, default in example._asdict().items()
    }
    raise ValueError(
        "expected to know of the network of these weights what arrays do not tell, its "
        f"{', '.join(unknown)}, got {by}; put the config.json that belongs to them beside them, or "
        f"write there what is true of them, such as {json.dumps({METADATA: entry})}"
    )


def image_statistics(weights: Weights) -> Statistics | None:
    """Returns mean and deviation by which the images of a network are normalised, if it is said.

    This project keeps them in the header, timm in ``config.json``, Hugging Face in
    ``preprocessor_config.json``, both beside the weights.
    """
    if _IMAGES in weights.metadata:
        return _pair(_entry(weights.metadata[_IMAGES], _IMAGES), "mean", "std")
    timm = read_json(weights.folder / _BESIDE) or {}
    hugging_face = read_json(weights.folder / "preprocessor_config.json") or {}
    return (
        _pair(timm.get("pretrained_cfg"), "mean", "std")
        or _pair(timm, "mean", "std")  # timm's, before there were sections
        or _pair(hugging_face, "image_mean", "image_std")
    )


def _pair(fields: Any, *keys: str) -> Statistics | None:
    if not isinstance(fields, Mapping) or not all(isinstance(fields.get(k), list) for k in keys):
        return None
    mean, std = (tuple(_as("a number", value) for value in fields[key]) for key in keys)
    if not mean or len(mean) != len(std) or min(std) <= 0:
        raise ValueError(
            f"expected {' and '.join(keys)} of each channel beside the weights, deviations above "
            f"0, got {list(mean)} and {list(std)}; mend them"
        )
    return mean, std


def _said(weights: Weights, names: str, patch_size: int) -> tuple[Network, str]:
    """Returns what is known of the network of weights, and in words who says so."""
    if METADATA in weights.metadata:
        return _own(_entry(weights.metadata[METADATA], METADATA)), f"the entry {METADATA}"
    beside = weights.folder / _BESIDE
    fields = read_json(beside)
    if fields and METADATA in fields:
        return _own(fields[METADATA]), f"the entry {METADATA} of {printable(beside)}"
    if names == "adder_flax":
        return Network(), f"no entry {METADATA} in the file"
    if fields is None:
        return Network(), f"no {_BESIDE} beside them"
    read = _timm if names == "timm" else _hugging_face
    return read(fields, patch_size), f"what {printable(beside)} says"


def _entry(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"expected JSON in the entry {name} of the file, got {printable(text, limit=80)}; get "
            "or save the file again"
        ) from error


def _own(fields: Any) -> Network:
    """Reads an entry of this project's; what an earlier version did not write is not known."""
    kinds = {"num_heads": "a whole number", "epsilon": "a number"}
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"expected {', '.join(_WORDS)} in the entry {METADATA}, got "
            f"{printable(fields, limit=80)}; get or save the file again"
        )
    read: Callable[[str], Any] = lambda fact: (
        _grid(fields[fact]) if fact == "grid" else _as(kinds.get(fact, "a name"), fields[fact])
    )
    facts: dict[str, Any] = {fact: read(fact) for fact in _WORDS if fact in fields}
    return Network(**facts)


def _grid(value: Any) -> Grid:
    given = value if isinstance(value, Sequence) else ()
    sides = [_as("a whole number", side) for side in given]
    if len(sides) != 2 or not all(0 < side <= _MOST_ROWS for side in sides):
        raise ValueError(
            f"expected rows and columns of patches, from 1 to {_MOST_ROWS}, got "
            f"{printable(value, limit=80)}; mend them"
        )
    return sides[0], sides[1]


def _grid_of(image_size: Any, patch_size: int) -> Grid:
    """Returns the grid of images of a size, a number or (height, width), as others write it."""
    sides = image_size if isinstance(image_size, list) else [image_size] * 2
    return _grid([_as("a whole number", side) // patch_size for side in sides])


def _hugging_face(fields: Mapping[str, Any], patch_size: int) -> Network:
    """Reads the configuration of a ViT or DeiT, with the defaults of ``ViTConfig``."""
    kind = fields.get("model_type")
    if kind is None:
        return Network()
    if kind not in ("vit", "deit"):
        raise ValueError(
            "expected weights of Hugging Face's vit or deit, got a config.json beside them that is "
            f"of {printable(kind, limit=80)}; choose weights of one of these"
        )
    return Network(
        num_heads=_as("a whole number", fields.get("num_attention_heads", 12)),
        activation=_as("a name", fields.get("hidden_act", "gelu")),
        norms="before",
        epsilon=_as("a number", fields.get("layer_norm_eps", 1e-12)),
        pooling="cls",
        grid=_grid_of(fields.get("image_size", 224), patch_size),
    )


# Architectures of timm that are plain vision transformers, with the heads of their sizes. All have
# exact GELUs and norms in front with an epsilon of 1e-6, and read the class token, or, with "gap",
# the mean of the patches.
_PLAIN = re.compile(
    r"(?:vit|deit|deit3)_(wee|tiny|small|little|mediumd?|base|betwixt|so150m2?|large|huge)"
    r"(?:_distilled)?_patch\d+(?:_reg\d(_gap)?)?_(\d+|dinov2)"
)
_HEADS = dict(tiny=3, wee=4, little=5, small=6, medium=8, mediumd=8, betwixt=10, base=12)
_HEADS |= dict(so150m=14, so150m2=13, large=16, huge=16)
# Arguments of timm's class that change the network and not the names of its arrays, and the value
# that they may have.
_PLAIN_ARGUMENTS = {
    "block_fn": None,
    "attn_layer": None,
    "mlp_layer": None,
    "embed_layer": None,
    "embed_norm_layer": None,
    "final_norm": True,
    "pos_embed": "learn",
    "patch_drop_rate": 0.0,
    "pool_include_prefix": False,
}


def _timm(fields: Mapping[str, Any], patch_size: int) -> Network:
    """Reads the name of an architecture of timm, and the arguments that it was changed by."""
    given = fields.get("model_args") or {}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"expected model_args by name in config.json, got {printable(given, limit=80)}; mend it"
        )
    for name, plain in _PLAIN_ARGUMENTS.items():
        if given.get(name, plain) != plain:
            raise ValueError(
                f"expected weights of timm's plain VisionTransformer, got one with {name}="
                f"{printable(given[name], limit=80)} by config.json beside them; choose others"
            )
    plain = _PLAIN.fullmatch(str(fields.get("architecture")))
    activation, norm = given.get("act_layer"), given.get("norm_layer")
    pooling = given.get("global_pool", fields.get("global_pool"))
    named = int(plain[3]) if plain and plain[3].isdigit() else None
    size = given.get("img_size", _input_size(fields) or named)
    if pooling is None and plain:
        pooling = "avg" if plain[2] else "token"
    if norm and norm != "layernorm":
        raise ValueError(
            "expected weights of a network with LayerNorm, got "
            f"norm_layer={printable(norm, limit=80)} by config.json beside them; choose others"
        )
    num_heads = given.get("num_heads", plain and _HEADS[plain[1]])
    return Network(
        num_heads=_as("a whole number", num_heads) if "num_heads" in given else num_heads,
        activation=_as("a name", activation) if activation else plain and "gelu",
        norms=plain and "before",
        epsilon=1e-6 if norm or plain else None,
        pooling=pooling and {"token": "cls", "avg": "mean"}.get(_as("a name", pooling), pooling),
        grid=_grid_of(size, patch_size) if size else None,
    )


def _input_size(fields: Mapping[str, Any]) -> Any:
    """Returns height and width that timm says its images have; sections came later."""
    section = fields.get("pretrained_cfg")
    size = (section if isinstance(section, Mapping) else fields).get("input_size")
    return size[1:] if isinstance(size, list) and len(size) == 3 else None


def _as(kind: str, value: Any) -> Any:
    """Returns a value of JSON that is "a number", "a whole number" or "a name"."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    whole = number and float(value).is_integer()
    fits = {"a number": number, "a whole number": whole, "a name": isinstance(value, str)}
    if not fits[kind]:
        raise ValueError(
            f"expected {kind} in config.json, got {printable(value, limit=80)}; mend it"
        )
    return {"a number": float, "a whole number": int, "a name": str}[kind](value)
