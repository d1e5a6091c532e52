"""What weights do not tell of their network, and who says it instead.

Names and shapes of arrays leave it open.

Two networks with arrays of the same names and shapes may differ in their heads, activation,
epsilon, and in where norms and averages stand: the weights of one give wrong logits in the other
without any sign of it. Hugging Face and timm keep a ``config.json`` beside their files; this
project writes the same facts into the header of its own.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from adder_flax.models import VisionTransformer
from adder_flax.text import printable

METADATA = "adder_flax.network"
"""Name of the entry in the header of this project's files."""

_BESIDE = "config.json"
_MOST_BYTES = 2**22  # those of ImageNet-21k with all names have a fifth of it


class Network(NamedTuple):
    """Facts of a vision transformer that its arrays do not show; None where nobody said it.

    Attributes:
      num_heads: of each block.
      activation: of the MLPs: "gelu" is the exact one.
      norms: where those of a block stand: "before" its attention and MLP, or "after" the sums.
      epsilon: of the norms of blocks and output.
      pooling: "cls", or "mean" of all patches behind the last norm.
    """

    num_heads: int | None = None
    activation: str | None = None
    norms: str | None = None
    epsilon: float | None = None
    pooling: str | None = None


_WORDS = {
    "num_heads": "number of heads",
    "activation": "activation",
    "norms": "place of the norms",
    "epsilon": "epsilon of the norms",
    "pooling": "pooling",
}
_SETTINGS = {"num_heads": "num_heads", "epsilon": "norm_epsilon", "pooling": "pooling"}


def network_of(model: VisionTransformer) -> Network:
    """Returns the facts of a model.

    >>> from flax import nnx
    >>> network_of(
    ...     VisionTransformer(
    ...         image_size=4, patch_size=2, width=8, depth=1, num_heads=2, rngs=nnx.Rngs(0)
    ...     )
    ... )
    Network(num_heads=2, activation='gelu', norms='before', epsilon=1e-06, pooling='cls')
    """
    block = model.blocks[0]
    norms = "before" if block.norm_position == "pre" else "after"
    return Network(
        block.attention.num_heads, "gelu", norms, float(model.norm.epsilon), model.pooling
    )


def as_metadata(model: VisionTransformer) -> dict[str, str]:
    """Returns the entry of a file's header that tells the facts of a model."""
    return {METADATA: json.dumps(network_of(model)._asdict())}


def check_network(
    model: VisionTransformer,
    path: str | Path,
    names: str,
    metadata: Mapping[str, str],
    *,
    stated: bool,
) -> None:
    """Checks that weights are of a network like the model.

    Args:
      model: that they are to be loaded into.
      path: of their file.
      names: the names that they are in, see `adder_flax.interop.FORMATS`.
      metadata: of the file's header.
      stated: whether the user says that what nobody else says is as in the model.

    Raises:
      ValueError: the network is another one, or unknown in some fact that nobody states.
    """
    own, (said, by) = network_of(model), _read_network(path, names, metadata)
    for fact, word in _WORDS.items():
        expected, got = getattr(own, fact), getattr(said, fact)
        if got is not None and not _same(expected, got):
            fix = f"set config.model.{_SETTINGS[fact]}, or " if fact in _SETTINGS else ""
            raise ValueError(
                f"expected weights of a network whose {word} is {expected}, as the model's, got "
                f"{printable(got)} by {by}; {fix}choose other weights"
            )
    if (
        unknown := [word for fact, word in _WORDS.items() if getattr(said, fact) is None]
    ) and not stated:
        raise ValueError(
            "expected to know of the network of these weights what arrays do not tell, its "
            f"{', '.join(unknown)}, got {by}; put the config.json that belongs to them beside "
            "them, or state that it is as in the model: --config.init_from_network=same, "
            "network='same'"
        )


def read_network(path: str | Path, names: str, metadata: Mapping[str, str]) -> Network:
    """Returns all facts of the network of a file.

    Args:
      path, names, metadata: as for `check_network`.

    Raises:
      ValueError: one of them is not known, or other than in any model of this project.
    """
    said, by = _read_network(path, names, metadata)
    if unknown := [word for fact, word in _WORDS.items() if getattr(said, fact) is None]:
        raise ValueError(
            f"expected to know of the network of the weights in {printable(path)} what arrays do "
            f"not tell, its {', '.join(unknown)}, got {by}; put the config.json that belongs to "
            "them beside them"
        )
    return said


def image_statistics(path: str | Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Returns mean and deviation of each channel that a file's network wants.

    Its images are normalised by them. None where it is not known.

    timm keeps them in ``config.json``, Hugging Face in ``preprocessor_config.json``, both beside
    the weights.
    """
    for name, section, keys in (
        (_BESIDE, "pretrained_cfg", ("mean", "std")),
        ("preprocessor_config.json", None, ("image_mean", "image_std")),
    ):
        fields = _read_json(Path(path).with_name(name)) or {}
        fields = fields.get(section, {}) if section else fields
        if isinstance(fields, Mapping) and all(isinstance(fields.get(key), list) for key in keys):
            mean, std = (tuple(map(_number, fields[key])) for key in keys)
            return mean, std
    return None


def _same(expected: Any, got: Any) -> bool:
    return (
        math.isclose(expected, got, rel_tol=1e-6)
        if isinstance(expected, float)
        else expected == got
    )


def _read_network(path: str | Path, names: str, metadata: Mapping[str, str]) -> tuple[Network, str]:
    """Returns what is known of the network of a file, and in words who says so."""
    if METADATA in metadata:
        return _own(metadata[METADATA]), f"the entry {METADATA} of the file"
    readers: dict[str, Callable[[Mapping[str, Any]], Network]] = {
        "timm": _timm,
        "hugging_face": _hugging_face,
        "transformers_5": _hugging_face,
    }
    beside = Path(path).with_name(_BESIDE)
    if names not in readers:
        return Network(), f"no entry {METADATA} in the file"
    if (fields := _read_json(beside)) is None:
        return Network(), f"no {_BESIDE} beside them"
    return readers[names](fields), f"what {printable(beside)} says"


def _read_json(beside: Path) -> dict[str, Any] | None:
    """Returns what a file in JSON beside weights says, None where there is none."""
    if not beside.exists():
        return None
    try:
        with open(beside, "rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
        fields = json.loads(text)
        if len(text) > _MOST_BYTES or not isinstance(fields, dict):
            raise ValueError("no object of at most 4 MiB")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"expected a configuration in JSON in {printable(beside)}, which lies beside the "
            f"weights, got: {printable(error)}; put the one there that belongs to them, or take it "
            "away"
        ) from error
    return fields


def _own(text: str) -> Network:
    kinds = {"num_heads": int, "activation": str, "norms": str, "epsilon": float, "pooling": str}
    try:
        fields = json.loads(text)
        return Network(**{fact: kind(fields[fact]) for fact, kind in kinds.items()})
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"expected {', '.join(kinds)} in the entry {METADATA} of the file, got "
            f"{printable(text, limit=80)}; get or save the file again"
        ) from error


def _hugging_face(fields: Mapping[str, Any]) -> Network:
    """Reads the configuration of a ViT or DeiT.

    What it leaves out has the defaults of ``ViTConfig``.
    """
    kind = fields.get("model_type")
    if kind is None:
        return Network()
    if kind not in ("vit", "deit"):
        raise ValueError(
            "expected weights of Hugging Face's vit or deit, got a config.json beside them that is "
            f"of {printable(kind, limit=80)}; choose weights of one of these"
        )
    return Network(
        num_heads=_whole(fields.get("num_attention_heads", 12)),
        activation=_word(fields.get("hidden_act", "gelu")),
        norms="before",
        epsilon=_number(fields.get("layer_norm_eps", 1e-12)),
        pooling="cls",
    )


# Architectures of timm that are plain vision transformers, with the heads of their sizes. All have
# exact GELUs, norms in front with an epsilon of 1e-6, and read the class token.
_PLAIN = re.compile(
    r"(?:vit|deit|deit3)_(tiny|small|medium|base|large|huge)(?:_distilled)?_patch\d+_\d+"
)
_HEADS = {"tiny": 3, "small": 6, "medium": 8, "base": 12, "large": 16, "huge": 16}
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
}


def _timm(fields: Mapping[str, Any]) -> Network:
    """Reads timm's configuration.

    The name of an architecture, and the arguments that it was changed by.
    """
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
    return Network(
        num_heads=_whole(given["num_heads"])
        if "num_heads" in given
        else plain and _HEADS[plain[1]],
        activation=_word(activation) if activation else plain and "gelu",
        norms=plain and "before",
        epsilon=_epsilon_of(norm) if norm else plain and 1e-6,
        pooling=_pooling(pooling, given) if pooling is not None else plain and "cls",
    )


def _pooling(pooling: Any, given: Mapping[str, Any]) -> str:
    """Returns our pooling for timm's.

    With ``avg`` and no norm behind it, and no class token, it is the mean.
    """
    if pooling == "token":
        return "cls"
    behind = pooling == "avg" and given.get("fc_norm") is False
    return "mean" if behind and given.get("class_token") is False else _word(pooling)


def _epsilon_of(norm: Any) -> float:
    if norm != "layernorm":
        raise ValueError(
            "expected weights of a network with LayerNorm, got "
            f"norm_layer={printable(norm, limit=80)} by config.json beside them; choose others"
        )
    return 1e-6


def _whole(value: Any) -> int:
    if not (number := _number(value)).is_integer():
        raise ValueError(
            f"expected a whole number in config.json, got {printable(value, limit=80)}; mend it"
        )
    return int(number)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"expected a number in config.json, got {printable(value, limit=80)}; mend it"
        )
    return float(value)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"expected a name in config.json, got {printable(value, limit=80)}; mend it"
        )
    return value
