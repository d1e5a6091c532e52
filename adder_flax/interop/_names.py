"""The names and layouts that three projects give to the same parameters of a vision transformer.

A *place* says where a parameter of ours is in a file: the name of its array there, which third of that array it is
(timm keeps query, key and value in one), and how its axes lie. Reading and writing both follow from the places.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np

FORMATS = ("adder_flax", "timm", "hugging_face")

Arrays = Mapping[str, np.ndarray]

_THIRDS = ("query", "key", "value")
_TIMM = (
    (r"\.attention\.out\.", ".attn.proj."),
    (r"\.attention\.(query|key|value)\.", ".attn.qkv."),
)
_HUGGING_FACE = (
    (r"^cls_token$", "vit.embeddings.cls_token"),
    (r"^pos_embed$", "vit.embeddings.position_embeddings"),
    (r"^patch_embed\.proj\.", "vit.embeddings.patch_embeddings.projection."),
    (r"^norm\.", "vit.layernorm."),
    (r"^head\.", "classifier."),
    (r"^blocks\.(\d+)\.", r"vit.encoder.layer.\1."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.attention\.out\.", ".attention.output.dense."),
    (r"\.attention\.(query|key|value)\.", r".attention.attention.\1."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
# One array that no other format has.
_TELLING = {
    "adder_flax": "blocks.0.attention.query.kernel",
    "timm": "blocks.0.attn.qkv.weight",
    "hugging_face": "vit.encoder.layer.0.attention.attention.query.weight",
}
# Learned parts of scores: the rest of a transformer may come from one that attends in another way.
_OF_A_SCORE = re.compile(r"\.attention\.(score\.|log_temperature$|key_bias$)")


class _Place(NamedTuple):
    """Where a parameter of ours is in a file.

    Attributes:
      name: of the array there.
      third: which third of its first axis the parameter is, or None for all of it.
      layout: "same"; "matrix", (out, in) there; or "patches", a convolution (out, channels, height, width) there.
    """

    name: str
    third: int | None
    layout: str


def _place(path: str, names: str) -> _Place:
    if names == "adder_flax":
        return _Place(path, None, "same")
    name = re.sub(r"\.(kernel|scale)$", ".weight", path)
    for pattern, replacement in _TIMM if names == "timm" else _HUGGING_FACE:
        name = re.sub(pattern, replacement, name)
    role = re.search(r"\.attention\.(query|key|value)\.", path)
    third = _THIRDS.index(role[1]) if role and names == "timm" else None
    layout = "patches" if path == "patch_embed.proj.kernel" else "matrix" if path.endswith(".kernel") else "same"
    return _Place(name, third, layout)


def format_of(names: Iterable[str]) -> str:
    """Returns which of `FORMATS` arrays of these names are in.

    Raises:
      ValueError: in none of them.

    >>> format_of(["blocks.0.attn.qkv.weight", "head.weight"])
    'timm'
    """
    names = sorted(names)
    for known, name in _TELLING.items():
        if name in names:
            return known
    raise ValueError(
        f"expected weights of a vision transformer in the names of {', '.join(FORMATS)}, got {names[:3]} and "
        f"{max(len(names) - 3, 0)} more; convert them to timm's names"
    )


def to_arrays(params: Arrays, names: str, *, channels: int) -> dict[str, np.ndarray]:
    """Renames and lays out the parameters of a transformer as another project does.

    Args:
      params: by our path, as `"blocks.0.mlp.fc1.kernel"`.
      names: one of `FORMATS`.
      channels: of the images.

    Returns:
      Arrays by that project's names.

    Raises:
      ValueError: a parameter of a score, for a project that has no such scores.

    >>> to_arrays({"head.kernel": np.ones((192, 10))}, "timm", channels=3)["head.weight"].shape
    (10, 192)
    """
    own = [path for path in params if _OF_A_SCORE.search(path)]
    if names != "adder_flax" and own:
        raise ValueError(
            f"expected a score without parameters to write in the names of {names}, got {own[0]} and {len(own) - 1} "
            "more; write in those of adder_flax"
        )
    arrays, thirds = {}, {}
    for path, array in params.items():
        place = _place(path, names)
        array = _laid_out_there(np.asarray(array), place.layout, channels)
        if place.third is None:
            arrays[place.name] = array
        else:
            thirds.setdefault(place.name, {})[place.third] = array
    return arrays | {name: np.concatenate([parts[n] for n in range(3)]) for name, parts in thirds.items()}


def from_arrays(arrays: Arrays, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Finds the parameters of a transformer among arrays in any of `FORMATS`.

    A position embedding for another square grid of patches is resized (bicubic, as DeiT does for another resolution).
    Not found are parameters of scores that the file does not have, and a head for another number of classes.

    Args:
      arrays: by their names.
      shapes: of the wanted parameters, by our path.

    Returns:
      The parameters that were found, by our path.

    Raises:
      ValueError: names of no known format, an array that has no place here, a parameter that is missing or of another
        shape.

    >>> arrays = {"blocks.0.attn.qkv.weight": np.ones((24, 8))}
    >>> shapes = {f"blocks.0.attention.{role}.kernel": (8, 8) for role in ("query", "key", "value")}
    >>> {path: array.shape for path, array in from_arrays(arrays, shapes).items()} == shapes
    True
    """
    names = format_of(arrays)
    places = {path: _place(path, names) for path in shapes}
    if homeless := sorted(set(arrays) - {place.name for place in places.values()}):
        raise ValueError(
            f"expected the weights of a vision transformer of {_depth(shapes)} blocks, got {homeless[0]} and "
            f"{len(homeless) - 1} more that have no place in it; choose a model of their depth, layers and pooling"
        )
    found = {}
    for path, place in places.items():
        if place.name not in arrays and _OF_A_SCORE.search(path):
            continue
        if place.name not in arrays:
            raise ValueError(f"expected {place.name} among the weights, got none; choose the model that they are of")
        array = _laid_out_here(np.asarray(arrays[place.name]), place)
        if path == "pos_embed":
            array = _resize_positions(array, shapes[path], class_tokens=int("cls_token" in shapes))
        if array.shape == shapes[path]:
            found[path] = array
        elif not path.startswith("head."):
            raise ValueError(
                f"expected {place.name} to give a parameter of shape {shapes[path]}, got {array.shape}; choose a model "
                "of their width, patch size and number of channels"
            )
    return found


def _depth(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return len({path.split(".")[1] for path in shapes if path.startswith("blocks.")})


def _laid_out_there(array: np.ndarray, layout: str, channels: int) -> np.ndarray:
    if layout == "patches":
        side = round((array.shape[0] / channels) ** 0.5)
        array = array.reshape(side, side, channels, -1).transpose(3, 2, 0, 1)
    return np.ascontiguousarray(array.T if layout == "matrix" else array)


def _laid_out_here(array: np.ndarray, place: _Place) -> np.ndarray:
    if place.third is not None:
        array = np.split(array, 3)[place.third]
    if place.layout == "matrix":
        return array.T
    if place.layout == "patches":
        return array.transpose(2, 3, 1, 0).reshape(-1, array.shape[0])
    return array


def _resize_positions(embedding: np.ndarray, shape: tuple[int, ...], class_tokens: int) -> np.ndarray:
    """Returns the embedding of another grid of patches; as it is, where both are not square grids of one width."""
    sides = [round((size[1] - class_tokens) ** 0.5) for size in (embedding.shape, shape)]
    lengths = [side * side + class_tokens for side in sides]
    if embedding.shape == shape or lengths != [embedding.shape[1], shape[1]] or embedding.shape[2] != shape[2]:
        return embedding
    old, new = sides
    grid = embedding[0, class_tokens:].reshape(old, old, -1)
    resized = jax.image.resize(grid, (new, new, grid.shape[-1]), "cubic", antialias=False)
    return np.concatenate([embedding[:, :class_tokens], np.asarray(resized).reshape(1, new * new, -1)], axis=1)
