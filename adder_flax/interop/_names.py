"""The names and layouts that three projects give to the same parameters of a vision transformer.

A *place* says where a parameter of ours is in a file: the name of its array there, which third of that array it is
(timm keeps query, key and value in one), and how its axes lie. Reading and writing both follow from the places.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from adder_flax.text import printable

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
    shown = ", ".join(printable(name, limit=80) for name in names[:3]) or "none"
    raise ValueError(
        f"expected weights of a vision transformer in the names of {', '.join(FORMATS)}, got {shown} and "
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


def find(
    stored: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], *, channels: int
) -> dict[str, _Place]:
    """Finds the parameters of a transformer among arrays in any of `FORMATS`, by their names and shapes alone.

    Not found are parameters of scores that the file does not have, and a head that is not there or for another number
    of classes.

    Args:
      stored: shapes of the arrays, by their names.
      shapes: of the wanted parameters, by our path.
      channels: of the images.

    Returns:
      Where each parameter that was found is, by our path.

    Raises:
      ValueError: names of no known format, an array that has no place here, a parameter that is missing or of another
        shape, a head or score of which only a part is there.

    >>> found = find({"blocks.0.attn.qkv.weight": (24, 8)}, {"blocks.0.attention.key.kernel": (8, 8)}, channels=3)
    >>> found["blocks.0.attention.key.kernel"].third
    1
    """
    names = format_of(stored)
    places = {path: _place(path, names) for path in shapes}
    if homeless := sorted(set(stored) - {place.name for place in places.values()}):
        raise ValueError(
            f"expected the weights of a vision transformer of {_depth(shapes)} blocks, got "
            f"{printable(homeless[0], limit=80)} and {len(homeless) - 1} more that have no place in it; choose a model "
            "of their depth, layers and pooling"
        )
    optional = [path for path in shapes if path.startswith("head.") or _OF_A_SCORE.search(path)]
    absent = {path for path in optional if places[path].name not in stored}
    for path in absent:
        part = _part(path)
        if beside := [places[other].name for other in optional if _part(other) == part and other not in absent]:
            raise ValueError(
                f"expected {places[path].name} beside {beside[0]}, got only a part of what belongs together; take "
                "weights that are whole"
            )
    found = {path: place for path, place in places.items() if path not in absent}
    for place in found.values():
        if place.name not in stored:
            raise ValueError(f"expected {place.name} among the weights, got none; choose the model that they are of")
    if _is_for_other_classes(stored, shapes, places):
        found = {path: place for path, place in found.items() if not path.startswith("head.")}
    for path, place in found.items():
        expected, got = _shape_there(shapes[path], place, channels), stored[place.name]
        if got != expected and not (path == "pos_embed" and _can_resize(got, expected, int("cls_token" in shapes))):
            raise ValueError(
                f"expected {place.name} of shape {expected}, got {printable(got, limit=80)}; choose a model of their "
                "width, patch size, number of channels and grid of patches"
            )
    return found


def from_arrays(
    arrays: Arrays, places: Mapping[str, _Place], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Lays out arrays of a file as parameters of a transformer.

    A position embedding for another square grid of patches is resized (bicubic, as DeiT does for another resolution).

    Args:
      arrays: by their names there.
      places: of the parameters, from `find`.
      shapes: of the parameters, by our path.

    Returns:
      The parameters, by our path.

    >>> place = {"blocks.0.attention.key.kernel": _Place("blocks.0.attn.qkv.weight", 1, "matrix")}
    >>> arrays = {"blocks.0.attn.qkv.weight": np.arange(3)[:, None] * np.ones((3, 2))}
    >>> from_arrays(arrays, place, {"blocks.0.attention.key.kernel": (2, 1)})["blocks.0.attention.key.kernel"].ravel()
    array([1., 1.])
    """
    found = {path: _laid_out_here(arrays[place.name], place) for path, place in places.items()}
    if "pos_embed" in found:
        class_tokens = int("cls_token" in shapes)
        found["pos_embed"] = _resize_positions(found["pos_embed"], shapes["pos_embed"], class_tokens)
    return found


def _part(path: str) -> str:
    """Returns what a parameter belongs to of which all or nothing is taken."""
    return "head" if path.startswith("head.") else re.sub(r"(\.attention\.score)\..*", r"\1", path)


def _is_for_other_classes(
    stored: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, _Place]
) -> bool:
    """Whether the file has a head that would fit, were it not for the number of its classes."""
    if "head.kernel" not in shapes or places["head.kernel"].name not in stored:
        return False
    kernel, bias = (stored[places[f"head.{part}"].name] for part in ("kernel", "bias"))
    (width, classes), transposed = shapes["head.kernel"], places["head.kernel"].layout == "matrix"
    others = bias[0] if len(bias) == 1 else 0
    return others not in (0, classes) and kernel == ((others, width) if transposed else (width, others))


def _shape_there(shape: tuple[int, ...], place: _Place, channels: int) -> tuple[int, ...]:
    """Returns the shape that the array of a parameter has in a file."""
    if place.layout == "patches":
        side = round((shape[0] / channels) ** 0.5)
        return shape[1], channels, side, side
    shape = shape[::-1] if place.layout == "matrix" else shape
    return shape if place.third is None else (3 * shape[0], *shape[1:])


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


def _can_resize(old: tuple[int, ...], new: tuple[int, ...], class_tokens: int) -> bool:
    """Whether two position embeddings are of square grids of patches, and of one width."""
    if len(old) != 3 or (old[0], old[2]) != (new[0], new[2]):
        return False
    return all(_side(shape, class_tokens) ** 2 + class_tokens == shape[1] > class_tokens for shape in (old, new))


def _side(shape: tuple[int, ...], class_tokens: int) -> int:
    return math.isqrt(max(shape[1] - class_tokens, 0))


def _resize_positions(embedding: np.ndarray, shape: tuple[int, ...], class_tokens: int) -> np.ndarray:
    """Returns the embedding of another grid of patches."""
    if embedding.shape == shape:
        return embedding
    old, new = (_side(size, class_tokens) for size in (embedding.shape, shape))
    grid = embedding[0, class_tokens:].reshape(old, old, -1)
    resized = jax.image.resize(grid, (new, new, grid.shape[-1]), "cubic", antialias=False)
    return np.concatenate([embedding[:, :class_tokens], np.asarray(resized).reshape(1, new * new, -1)], axis=1)
