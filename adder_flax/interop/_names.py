"""The names and layouts that other projects give to the same parameters of a vision transformer.

A *place* says where a parameter of ours is in a file: the name of its array there, which third of
that array it is (timm keeps query, key and value in one), how its axes lie, and what scales its
outputs. Reading and writing both follow from the places.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from adder_flax.arrays import AnyArray
from adder_flax.models import Grid, resize_grid
from adder_flax.text import printable

FORMATS = ("adder_flax", "timm", "hugging_face", "transformers_5")
"""Names of this project, of timm, of Hugging Face's files, and of what transformers 5 calls the
same in memory."""

Shapes = Mapping[str, tuple[int, ...]]

_IN_FRONT = ("cls_token", "dist_token", "reg_token")
_THIRDS = ("query", "key", "value")
_TIMM = (
    (r"\.attention\.out\.", ".attn.proj."),
    (r"\.attention\.(query|key|value)\.", ".attn.qkv."),
    (r"\.layer_scale([12])\.weight$", r".ls\1.gamma"),
)
_HUGGING_FACE = (
    (r"^cls_token$", "vit.embeddings.cls_token"),
    (r"^pos_embed$", "vit.embeddings.position_embeddings"),
    (r"^patch_embed\.proj\.", "vit.embeddings.patch_embeddings.projection."),
    (r"^norm\.", "vit.layernorm."),
    (r"^head\.", "classifier."),
    (r"^dist_token$", "vit.embeddings.distillation_token"),
    (r"^head_dist\.", "distillation_classifier."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
)
_HUGGING_FACE_FILES = (
    *_HUGGING_FACE,
    (r"^blocks\.(\d+)\.", r"vit.encoder.layer.\1."),
    (r"\.attention\.out\.", ".attention.output.dense."),
    (r"\.attention\.(query|key|value)\.", r".attention.attention.\1."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
_TRANSFORMERS_5 = (
    *_HUGGING_FACE,
    (r"^blocks\.(\d+)\.", r"vit.layers.\1."),
    (r"\.attention\.out\.", ".attention.o_proj."),
    (r"\.attention\.(q|k|v)(uery|ey|alue)\.", r".attention.\1_proj."),
)
_PATTERNS = {"timm": _TIMM, "hugging_face": _HUGGING_FACE_FILES, "transformers_5": _TRANSFORMERS_5}
# Hugging Face has a class of its own for two heads, DeiTForImageClassificationWithTeacher.
_WITH_TEACHER = ((r"^vit\.", "deit."), (r"^classifier\.", "cls_classifier."))
# How the name of one array ends that no other format has.
_TELLING = {
    "adder_flax": "patch_embed.proj.kernel",
    "timm": "blocks.0.attn.qkv.weight",
    "hugging_face": "t.encoder.layer.0.attention.attention.query.weight",
    "transformers_5": "t.layers.0.attention.q_proj.weight",
}
# Parts of networks by the names of their arrays, and what to set for a model that has them, too.
_PARTS = {
    r"(^|\.)dist(illation)?_token$|^head_dist\.|^distillation_classifier\.": (
        "a distillation token",
        "config.model.distilled (distilled=True)",
    ),
    r"^reg_token$": ("register tokens", "config.model.registers to their number"),
    r"^cls_token$": (
        "a class token",
        "config.model.pooling to 'cls', or, where the mean is read, config.model.registers to one "
        "more",
    ),
    r"^fc_norm\.": ("the last norm behind the pooling", "config.model.fc_norm"),
    r"^norm\.": ("the last norm in front of the pooling", "config.model.fc_norm to False"),
}
# Those that no model here has.
_FOREIGN_PARTS = {
    r"reg_tokens$|register_tokens$": "register tokens of another project than timm",
    r"\.mlp\.(w12|w3|fc1_g|fc1_x|gate_proj|up_proj|weights_in)\.": "a gated MLP (SwiGLU)",
    r"\.[qk]_norm\.": "norms of queries and keys",
    r"^norm_pre\.": "a norm in front of the blocks, as CLIP's",
    r"^attn_pool\.": "pooling by attention",
    r"mask_token$": "a token for masked patches",
    # A head of this name has its place: what is left over is beside a distillation token.
    r"^classifier\.": "one head for class and distillation token (DeiTForImageClassification)",
}
_HEADS = ("head.", "head_dist.")
# Learned parts of scores: the rest of a transformer may come from one that attends in another way.
_OF_A_SCORE = re.compile(r"\.attention\.(score\.|log_temperature$|key_bias$)")
_QKV_BIAS = re.compile(r"\.attention\.(query|key|value)\.bias$")
# What wrappers of PyTorch put in front of a model's own names, torch.compile anywhere in them.
_WRAPPERS = re.compile(r"^(?:(?:module|model|_orig_mod)\.)+|(?<=\.)_orig_mod\.")
_BARE = "embeddings.patch_embeddings.projection.weight"
# Of ViTModel and DeiTModel, behind the network: classifiers do without.
_POOLER = re.compile(r"(vit|deit)\.pooler\.")
_BEFORE_LAYER_SCALE = {"attention.out": 1, "mlp.fc2": 2}
_WITHOUT_LAYER_SCALE = ("hugging_face", "transformers_5")


class _Place(NamedTuple):
    """Where a parameter of ours is in a file.

    Attributes:
      name: of the array there.
      third: which third of its first axis the parameter is, or None for all of it.
      layout: "same"; "matrix", (out, in) there; "patches", a convolution (out, channels, height,
        width) there; or "zeros", not there and 0.
      factor: of an array that the outputs are multiplied by (LayerScale), its name, or None.
      front: of an array of one token that comes before it, its name, or None.
    """

    name: str
    third: int | None = None
    layout: str = "same"
    factor: str | None = None
    front: str | None = None

    def arrays(self) -> list[str]:
        """Names of all arrays there that the parameter is made of."""
        return [name for name in (self.name, self.factor, self.front) if name is not None]


def _place(path: str, names: str, *, with_teacher: bool) -> _Place:
    if names == "adder_flax":
        return _Place(path)
    name = re.sub(r"\.(kernel|scale)$", ".weight", path)
    teacher = _WITH_TEACHER if with_teacher and names != "timm" else ()
    for pattern, replacement in (*_PATTERNS[names], *teacher):
        name = re.sub(pattern, replacement, name)
    role = re.search(r"\.attention\.(query|key|value)\.", path)
    third = _THIRDS.index(role[1]) if role and names == "timm" else None
    if path == "patch_embed.proj.kernel":
        return _Place(name, third, "patches")
    return _Place(name, third, "matrix" if path.endswith(".kernel") else "same")


def _has_teacher(stored: Iterable[str]) -> bool:
    return any(name.startswith("deit.") for name in stored)


def plain_names(stored: Iterable[str]) -> dict[str, str]:
    """Returns the names that a classifier's arrays have by themselves, by those in a file.

    Without what wrappers put in front of them, and with what `ViTModel` leaves out there; its
    pooler, which no classifier has, is not among them.
    """
    names = {name: _WRAPPERS.sub("", name) for name in stored}
    if _BARE in names.values():
        of_deit = "embeddings.distillation_token" in names.values()
        front = "deit." if of_deit else "vit."
        names = {name: front + plain for name, plain in names.items()}
    return {name: plain for name, plain in names.items() if not _POOLER.match(plain)}


def format_of(names: Iterable[str]) -> str:
    """Returns which of `FORMATS` arrays of these names are in; a ValueError where in none."""
    names = sorted(names)
    for known, end in _TELLING.items():
        if any(name.endswith(end) for name in names):
            return known
    shown = ", ".join(printable(name, limit=80) for name in names[:3]) or "none"
    raise ValueError(
        f"expected weights of a vision transformer in the names of {', '.join(FORMATS)}, got "
        f"{shown} and {max(len(names) - 3, 0)} more; convert them to timm's names"
    )


def sizes_of(stored: Shapes, names: str) -> dict[str, Any]:
    """Returns the sizes of a plain vision transformer that arrays show, as arguments of ours."""
    name_of = lambda path: _place(path, names, with_teacher=_has_teacher(stored)).name
    first, patches = name_of("blocks.0.mlp.fc1.kernel"), name_of("patch_embed.proj.kernel")
    hidden, kernel = stored.get(first, ()), stored.get(patches, ())
    if len(hidden) != 2 or len(kernel) != 4 or 0 in (*hidden, *kernel):
        raise ValueError(
            f"expected {first} with 2 axes and {patches} with 4, got {printable(hidden)} and "
            f"{printable(kernel)}; take weights of a vision transformer"
        )
    ratio = hidden[0] / hidden[1]
    if int(hidden[1] * ratio) < hidden[0]:
        ratio = math.nextafter(ratio, math.inf)  # the model rounds down
    numbered = re.compile(re.escape(first).replace("0", r"\d+", 1))
    return {
        "width": hidden[1],
        "patch_size": kernel[2],
        "mlp_ratio": ratio,
        "depth": sum(numbered.fullmatch(name) is not None for name in stored),
        "distilled": name_of("dist_token") in stored,
        "registers": stored.get("reg_token", (1, 0))[1],
        "fc_norm": "fc_norm.weight" in stored,
    }


def to_arrays(
    params: Mapping[str, AnyArray], names: str, *, channels: int
) -> dict[str, np.ndarray]:
    """Renames and lays out parameters of a transformer, by our path, as another project does."""
    if names in _WITHOUT_LAYER_SCALE:
        params = _without_layer_scale(params)
    elif names == "timm":
        params = _with_positions_of_patches(params)
    own = [path for path in params if _OF_A_SCORE.search(path)]
    if names != "adder_flax" and own:
        raise ValueError(
            f"expected a score without parameters to write in the names of {names}, got {own[0]} "
            f"and {len(own) - 1} more; write in those of adder_flax"
        )
    arrays, thirds = {}, {}
    for path, array in params.items():
        place, array = _place(path, names, with_teacher="dist_token" in params), np.asarray(array)
        if place.layout == "patches":
            side = round((array.shape[0] / channels) ** 0.5)
            array = array.reshape(side, side, channels, -1).transpose(3, 2, 0, 1)
        array = np.ascontiguousarray(array.T if place.layout == "matrix" else array)
        if place.third is None:
            arrays[place.name] = array
        else:
            thirds.setdefault(place.name, {})[place.third] = array
    return arrays | {
        name: np.concatenate([parts[n] for n in range(3)]) for name, parts in thirds.items()
    }


class Match:
    """The parameters of a transformer found among arrays in any of `FORMATS`, by names and shapes.

    Not found are parameters of scores that the file does not have, and a head that is not there or
    for another number of classes. What is missing, has no place here, or has another shape is a
    ValueError.

    Attributes:
      stored: shapes of the arrays, by their names.
      shapes: of the wanted parameters, by our path.
      channels: of the images.
      places: where each parameter that was found is, by our path.
      arrays: names of the arrays that these are made of.
    """

    def __init__(self, stored: Shapes, shapes: Shapes, *, channels: int):
        self.stored, self.shapes, self.channels = stored, shapes, channels
        names, with_teacher = format_of(stored), _has_teacher(stored)
        places = {path: _place(path, names, with_teacher=with_teacher) for path in shapes}
        if not any(".layer_scale" in path for path in shapes):
            places = {path: _scaled(path, place, stored) for path, place in places.items()}
        if "cls_token" in stored and "reg_token" in shapes and "cls_token" not in shapes:
            # A class token that no head reads is a register.
            own = _Place("reg_token", front="cls_token")
            places["reg_token"] = own if "reg_token" in stored else _Place("cls_token")
        taken = {name for place in places.values() for name in place.arrays()}
        if homeless := sorted(set(stored) - taken):
            raise ValueError(_why_homeless(homeless, shapes))
        biases = [path for path in places if _QKV_BIAS.search(path)]
        if not any(places[path].name in stored for path in biases):
            places |= {path: places[path]._replace(layout="zeros") for path in biases}
        self.places = _without_absent(places, stored)
        if any(map(self._is_for_other_classes, _HEADS)):
            self.places = {p: place for p, place in self.places.items() if not p.startswith(_HEADS)}
        there = [place for place in self.places.values() if place.layout != "zeros"]
        self.arrays = list(dict.fromkeys(name for place in there for name in place.arrays()))
        for path, place in self.places.items():
            if place.layout != "zeros":
                self._check_shape(path, place)

    def _is_for_other_classes(self, head: str) -> bool:
        """Whether there is a head that would fit, were it not for the number of its classes."""
        kernel, bias = (self.places.get(f"{head}{part}") for part in ("kernel", "bias"))
        if kernel is None or bias is None:
            return False
        width, classes = self.shapes[f"{head}kernel"]
        others = self.stored[bias.name][0] if len(self.stored[bias.name]) == 1 else 0
        there = (others, width) if kernel.layout == "matrix" else (width, others)
        return others not in (0, classes) and self.stored[kernel.name] == there

    def _check_shape(self, path: str, place: _Place) -> None:
        """Refuses an array that is not of its parameter's shape, nor can be made so."""
        expected, got = self._shape_there(path, place), self.stored[place.name]
        if path == "reg_token" and len(got) == 3 and got[::2] == expected[::2] and got != expected:
            raise ValueError(
                f"expected {expected[1]} tokens in {place.name}, as the model's "
                f"config.model.registers says, got {got[1]}; set it to "
                f"{self.shapes[path][1] - expected[1] + got[1]}"
            )
        if path == "pos_embed" and len(got) == 3:  # of any number of patches
            expected = (expected[0], got[1], expected[2])
        if place.layout == "patches" and len(got) == 4 and {got[1], self.channels} == {1, 3}:
            expected = (expected[0], got[1], *expected[2:])
        if got != expected:
            self._refuse_gated(path)
            raise ValueError(
                f"expected {place.name} of shape {expected}, got {printable(got, limit=80)}; "
                "choose a model of their width, patch size, number of channels and grid of patches"
            )
        if place.factor is not None and self.stored[place.factor] != (self.shapes[path][-1],):
            raise ValueError(
                f"expected {place.factor} of shape {(self.shapes[path][-1],)}, got "
                f"{printable(self.stored[place.factor], limit=80)}; take weights that are whole"
            )

    def _shape_there(self, path: str, place: _Place) -> tuple[int, ...]:
        shape = self.shapes[path]
        if place.layout == "patches":
            side = round((shape[0] / self.channels) ** 0.5)
            return shape[1], self.channels, side, side
        if place.front is not None:
            return shape[0], shape[1] - 1, *shape[2:]
        shape = shape[::-1] if place.layout == "matrix" else shape
        return shape if place.third is None else (3 * shape[0], *shape[1:])

    def _refuse_gated(self, path: str) -> None:
        """Refuses an MLP whose first layer makes twice what its second takes: timm's SwiGLU."""
        if (block := re.match(r"(blocks\.\d+\.mlp)\.", path)) is None:
            return
        kernels = (self.places[f"{block[1]}.{layer}.kernel"].name for layer in ("fc1", "fc2"))
        first, second = (self.stored[kernel] for kernel in kernels)
        if len(first) == len(second) == 2 and first[0] == 2 * second[1]:
            raise ValueError(
                "expected weights of a network like the model, got a gated MLP (SwiGLU) in "
                f"{block[1]}, whose first layer has {first[0]} outputs where its second takes "
                f"{second[1]}; choose weights without it"
            )

    def check_positions(self, grid: Grid) -> None:
        """Refuses a position embedding that is not of this grid of patches."""
        if place := self.places.get("pos_embed"):
            _entries_in_front(self.stored[place.name][1], grid, _prefix_tokens(self.shapes))

    def parameters(
        self, arrays: Mapping[str, np.ndarray], *, grids: tuple[Grid, Grid], like: str
    ) -> dict[str, np.ndarray]:
        """Lays out the arrays as parameters, by our path.

        A position embedding for another grid of patches (of the file's and the model's ``grids``)
        is resized ``like`` a library does it, see `resize_grid`, and gets zeros for tokens in front
        of the patches that it has no entries for (timm's ``no_embed_class``). LayerScale becomes
        part of the layer in front of it where the model has none. Patches of three channels are
        summed for one, those of one are a third of each of three.
        """
        found = {path: self._made(path, place, arrays) for path, place in self.places.items()}
        if "pos_embed" in found:
            options: Any = dict(prefix_tokens=_prefix_tokens(self.shapes), like=like)
            found["pos_embed"] = resize_positions(found["pos_embed"], *grids, **options)
        return found

    def _made(self, path: str, place: _Place, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        if place.layout == "zeros":
            return np.zeros(self.shapes[path], np.float32)
        array = arrays[place.name]
        if place.third is not None:
            array = np.split(array, 3)[place.third]
        if place.layout == "matrix":
            array = array.T
        if place.layout == "patches":
            array = _of_channels(array, self.channels)
            array = array.transpose(2, 3, 1, 0).reshape(-1, array.shape[0])
        if place.front is not None:
            array = np.concatenate([arrays[place.front], array], axis=1)
        return array if place.factor is None else _product(array, arrays[place.factor])

    def changes(self, old: Grid, new: Grid) -> list[str]:
        """Returns in words what of the model, whose grid is the new one, is not as in the file."""
        absent = [path for path in self.shapes if path not in self.places]
        parts = dict.fromkeys(re.sub(r"^blocks\.\d+\.", "blocks.*.", _part(p)) for p in absent)
        words = [f"at random: {', '.join(parts) or 'nothing'}"]
        biases = [name for name in ("head.bias", "classifier.bias") if name in self.stored]
        if biases and "head.bias" in absent:
            words[0] += f" (that of the file is for {self.stored[biases[0]][0]} classes)"
        if "pos_embed" in self.places and old != new:
            resized = "positions resized from {} × {} to {} × {} patches"
            words.append(resized.format(*old, *new))
        kernel = self.places.get("patch_embed.proj.kernel")
        if kernel and kernel.layout == "patches":
            channels = self.stored[kernel.name][1]
            if channels != self.channels:
                words.append(f"patches of {channels} channels made those of {self.channels}")
        if any(place.layout == "zeros" for place in self.places.values()):
            words.append("biases of query, key and value are 0, since there are none")
        if any(place.factor for place in self.places.values()):
            words.append("LayerScale made part of the layers before it")
        return words


def _without_absent(places: Mapping[str, _Place], stored: Shapes) -> dict[str, _Place]:
    """Returns the places without heads and parameters of scores that the file lacks as a whole."""
    optional = [path for path in places if path.startswith(_HEADS) or _OF_A_SCORE.search(path)]
    absent = {path for path in optional if places[path].name not in stored}
    whole = {_part(path): places[path].name for path in optional if path not in absent}
    for path in absent:
        if beside := whole.get(_part(path)):
            raise ValueError(
                f"expected {places[path].name} beside {beside}, got only a part of what belongs "
                "together; take weights that are whole"
            )
    found = {path: place for path, place in places.items() if path not in absent}
    for place in found.values():
        if place.name not in stored and place.layout != "zeros":
            raise ValueError(
                f"expected {place.name} among the weights, got none; choose the model that they "
                "are of"
            )
    return found


def _scaled(path: str, place: _Place, stored: Shapes) -> _Place:
    """Returns a place with the LayerScale behind it, timm's ``ls1`` or ``ls2``, if there is one."""
    for part, number in _BEFORE_LAYER_SCALE.items():
        if path.startswith("blocks.") and f".{part}." in path:
            factor = f"{path.partition(f'.{part}.')[0]}.ls{number}.gamma"
            return place._replace(factor=factor) if factor in stored else place
    return place


def _without_layer_scale(params: Mapping[str, AnyArray]) -> Mapping[str, AnyArray]:
    """Returns parameters of the same function, LayerScale made part of the layers before it."""
    folded = {path: array for path, array in params.items() if ".layer_scale" not in path}
    for path in folded:
        for part, number in _BEFORE_LAYER_SCALE.items():
            block, _, rest = path.partition(f".{part}.")
            scale = params.get(f"{block}.layer_scale{number}.scale") if rest else None
            if scale is not None:
                folded[path] = _product(np.asarray(params[path]), np.asarray(scale))
    return folded


def _with_positions_of_patches(params: Mapping[str, AnyArray]) -> Mapping[str, AnyArray]:
    """Returns parameters of the same function whose positions are those of patches alone.

    That is how timm's transformers with registers are (``no_embed_class``).
    """
    if "reg_token" not in params:
        return params
    changed, first = dict(params), 0
    positions = np.asarray(params["pos_embed"])
    for name in _IN_FRONT:
        if name in params:
            token = np.asarray(params[name])
            changed[name] = token + positions[:, first : first + token.shape[1]]
            first += token.shape[1]
    return changed | {"pos_embed": positions[:, first:]}


def _product(array: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Returns a product in 32 bits or more: in 16, that of two small numbers is often 0."""
    dtype = np.result_type(array, factor, np.float32)
    return array.astype(dtype) * factor.astype(dtype)


def _why_homeless(homeless: list[str], shapes: Shapes) -> str:
    """Returns the message on arrays that have no place in the model."""
    for name in homeless:
        got = printable(name, limit=80)
        for pattern, (part, setting) in _PARTS.items():
            if re.search(pattern, name):
                return (
                    f"expected weights without {part}, as the model is, got {got}; set {setting}, "
                    "or choose weights without"
                )
        for pattern, part in _FOREIGN_PARTS.items():
            if re.search(pattern, name):
                return (
                    f"expected weights of a network like the model, got {got}, which is of one "
                    f"with {part}, which the model does not have; choose weights without it"
                )
    depth = len({path.split(".")[1] for path in shapes if path.startswith("blocks.")})
    return (
        f"expected the weights of a vision transformer of {depth} blocks, got "
        f"{printable(homeless[0], limit=80)} and {len(homeless) - 1} more that have no place in "
        "it; choose a model of their depth, layers and pooling"
    )


def _of_channels(array: np.ndarray, channels: int) -> np.ndarray:
    """Returns the kernel of a convolution for other channels, as timm's `adapt_input_conv`."""
    if array.shape[1] == channels:
        return array
    array = array.astype(np.result_type(array, np.float32))
    return array.sum(1, keepdims=True) if channels == 1 else np.repeat(array / 3, 3, axis=1)


def _prefix_tokens(shapes: Shapes) -> int:
    return sum(shapes[name][1] for name in _IN_FRONT if name in shapes)


def _part(path: str) -> str:
    """Returns what a parameter belongs to of which all or nothing is taken."""
    if path.startswith(_HEADS):
        return path.partition(".")[0]
    return re.sub(r"(\.attention\.score)\..*", r"\1", path)


def _entries_in_front(num_entries: int, grid: Grid, prefix_tokens: int) -> int:
    """Returns how many positions stand before those of the patches, all tokens in front or none."""
    rows, columns = grid
    first = num_entries - rows * columns
    if first not in (prefix_tokens, 0):
        raise ValueError(
            f"expected positions of {rows} × {columns} patches, as is said of these weights, with "
            f"or without {prefix_tokens} more, got {num_entries}; say in the config.json beside "
            "them what size of images they are of"
        )
    return first


def resize_positions(
    embedding: np.ndarray, old: Grid, new: Grid, *, prefix_tokens: int, like: str
) -> np.ndarray:
    """Returns positions (1, entries, width) for another grid, see `adder_flax.models.resize_grid`.

    Tokens in front of the patches that have no entries get zeros.
    """
    first, width = _entries_in_front(embedding.shape[1], old, prefix_tokens), embedding.shape[-1]
    front = embedding[:, :first] if first else np.zeros((1, prefix_tokens, width), embedding.dtype)
    return np.concatenate([front, resize_grid(embedding[:, first:], old, new, like=like)], axis=1)
