"""Does a network need its attention? Accuracy with maps made uniform, and with branches turned off.

A network that was converted to another attention can learn to do without it, and keep its accuracy
(https://arxiv.org/abs/2510.05901). What each part carries is what is lost without it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adder_flax.files import write_whole


class Without(NamedTuple):
    """A score of a network without a part of it.

    Attributes:
      part: "attention", "maps" (uniform ones in their place) or "MLP".
      block: its number from 0, or None for all.
      score: of the network without it.
    """

    part: str
    block: int | None
    score: float


def bypass(
    params: Mapping[Any, Any], score: Callable[[Any], float], *, each_block: bool = True
) -> list[Without]:
    """Scores a transformer without all maps, all attention, and each branch of each block.

    Maps are made uniform by keys that are the same for every token, branches are turned off by a
    last layer that gives zeros; both are changes of parameters alone, so that one compiled function
    scores all.

    Args:
      params: of a `VisionTransformer`, a nested dict.
      score: of parameters, such as the accuracy on a split.
      each_block: whether to turn off the parts of each block by itself too, three scores a block.

    Example:
      >>> layer = lambda: {"kernel": np.ones((1, 1)), "bias": np.ones(1)}
      >>> attention = {name: layer() for name in ("query", "key", "value", "out")}
      >>> mlp = {"fc1": layer(), "fc2": layer()}
      >>> params = {"blocks": {0: {"attention": attention, "mlp": mlp}}}
      >>> ones = lambda params: float(params["blocks"][0]["attention"]["out"]["kernel"].sum())
      >>> [(without.part, without.score) for without in bypass(params, ones, each_block=False)]
      [('maps', 1.0), ('attention', 0.0)]
    """
    blocks = list(params["blocks"])
    rows, each = [], [(part, block) for block in blocks for part in _PARTS if each_block]
    for part, block in [("maps", None), ("attention", None), *each]:
        changed = params
        for index in blocks if block is None else [block]:
            changed = _changed(changed, ("blocks", index, *_PARTS[part]), keep_bias=part == "maps")
        rows.append(Without(part, block, score(changed)))
    return rows


def without_heads(
    params: Mapping[Any, Any], heads: Mapping[Any, Sequence[int]], num_heads: int
) -> Mapping[Any, Any]:
    """Returns parameters of a `VisionTransformer` in which heads of blocks give zeros as values.

    Args:
      params: a nested dict.
      heads: by key of the block, those that are removed.
      num_heads: of each block's values.

    Example:
      >>> value = {"kernel": np.ones((1, 4)), "bias": np.ones(4)}
      >>> params = {"blocks": {0: {"attention": {"value": value}}}}
      >>> removed = without_heads(params, {0: [1]}, num_heads=2)
      >>> removed["blocks"][0]["attention"]["value"]["bias"].tolist()
      [1.0, 1.0, 0.0, 0.0]
    """
    changed = dict(params["blocks"])
    for block, removed in heads.items():
        attention = changed[block]["attention"]
        value = attention["value"]
        # What an adder layer sums up goes through its norm.
        layer = value.get("norm", value)
        silent = {name: _zeros(array, removed, num_heads) for name, array in layer.items()}
        value = {**value, "norm": silent} if "norm" in value else silent
        changed[block] = {**changed[block], "attention": {**attention, "value": value}}
    return {**params, "blocks": changed}


def _zeros(array: Any, heads: Sequence[int], num_heads: int) -> np.ndarray:
    array = np.array(array)
    array.reshape(*array.shape[:-1], num_heads, -1)[..., list(heads), :] = 0
    return array


# The layer that each part is turned off by.
_PARTS = {"maps": ("attention", "key"), "attention": ("attention", "out"), "MLP": ("mlp", "fc2")}


def _changed(params: Mapping[Any, Any], path: tuple, *, keep_bias: bool) -> dict[Any, Any]:
    """Returns parameters in which a layer says the same of every token: its bias, or nothing."""
    if path:
        return {**params, path[0]: _changed(params[path[0]], path[1:], keep_bias=keep_bias)}
    if "norm" in params:  # an adder layer: what it sums up goes through its norm
        return {**params, "norm": _changed(params["norm"], (), keep_bias=keep_bias)}
    silent = [name for name in params if name != "bias" or not keep_bias]
    return {**params, **{name: np.zeros_like(params[name]) for name in silent}}


def bypass_text(rows: list[Without], whole: float) -> str:
    """Returns a table of what each part carries, for a person.

    >>> print(bypass_text([Without("maps", None, 0.25), Without("MLP", 0, 0.5)], 0.75))
    without                     score   carries
    nothing                    0.7500
    maps, all blocks           0.2500   +0.5000
    MLP, block 1               0.5000   +0.2500
    """
    where = lambda block: "all blocks" if block is None else f"block {block + 1}"
    name = lambda row: f"{row.part}, {where(row.block)}"
    lines = [f"{'without':24}{'score':>9}{'carries':>10}", f"{'nothing':24}{whole:9.4f}"]
    lines += [f"{name(row):24}{row.score:9.4f}{whole - row.score:+10.4f}" for row in rows]
    return "\n".join(lines)


def write_bypass(rows: list[Without], whole: float, path: str | Path) -> None:
    """Writes the rows from `bypass`, and the score of the whole network, as JSON."""
    found = {"whole": whole, "without": [row._asdict() for row in rows]}
    write_whole(path, json.dumps(found, indent=1).encode())
