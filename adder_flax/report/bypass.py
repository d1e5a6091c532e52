"""Does a network need its attention? Accuracy with maps made uniform, and with branches turned off.

A network that was converted to another attention can learn to do without it, and keep its accuracy
(https://arxiv.org/abs/2510.05901). What each part carries is what is lost without it.
"""

import functools
import itertools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from adder_flax.files import write_whole

# What each part is turned off by.
_LAYERS = {"maps": ("attention", "key"), "attention": ("attention", "out"), "MLP": ("mlp", "fc2")}


class Without(NamedTuple):
    """A score of a network without a part of it: "attention", "maps" (uniform ones in their place)
    or "MLP" of a block, numbered from 0, or of all (None).
    """

    part: str
    block: int | None
    score: float


def bypass(model: Any, score: Callable[[Any], float], *, each_block: bool = True) -> list[Without]:
    """Scores a transformer without all maps, all attention, and each branch of each block.

    Maps are made uniform by keys that are the same for every token, branches are turned off by a
    last layer that gives zeros: changes of parameters alone, so one compiled function scores all.

    Args:
      model: a `VisionTransformer`.
      score: of its parameters, a nested dict, such as the accuracy on a split.
      each_block: whether to turn off the parts of each block by itself too, three scores a block.

    Raises:
      ValueError: one of these layers is an adder layer without a norm.

    Example:
      >>> from adder_flax.models import VisionTransformer
      >>> sizes = dict(image_size=4, patch_size=2, channels=1, width=8, depth=1, num_heads=2)
      >>> model = VisionTransformer(**sizes, rngs=nnx.Rngs(0))
      >>> used = lambda params: float(params["blocks"][0]["attention"]["out"]["kernel"].any())
      >>> [(without.part, without.score) for without in bypass(model, used, each_block=False)]
      [('maps', 1.0), ('attention', 0.0)]
    """
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    blocks, rows = list(params["blocks"]), []
    each = [(part, block) for block in blocks for part in _LAYERS if each_block]
    turned_off = [("maps", None), ("attention", None), *each]
    for block, part in itertools.product(blocks, dict(turned_off)):
        path = ".".join(_LAYERS[part])
        layer = operator.attrgetter(path)(model.blocks[block])
        # With weights of zero it says -Σ|x|.
        if getattr(layer, "norm", layer) is None:
            raise ValueError(
                f"expected layers that zeros turn off, got an adder layer without a norm, "
                f"blocks.{block}.{path}; train the model with one"
            )
    for part, block in turned_off:
        kept = ("bias",) if part == "maps" else ()  # it says the same of every token
        zeros = lambda name, array, kept=kept: array if name in kept else np.zeros_like(array)
        changed = params
        for index in blocks if block is None else [block]:
            changed = _changed(changed, ("blocks", index, *_LAYERS[part]), zeros)
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

    def silenced(name: str, array: Any, removed: Sequence[int]) -> np.ndarray:
        array = np.array(array)
        array.reshape(*array.shape[:-1], num_heads, -1)[..., list(removed), :] = 0
        return array

    for block, removed in heads.items():
        change = functools.partial(silenced, removed=removed)
        params = _changed(params, ("blocks", block, "attention", "value"), change)
    return params


def _changed(
    params: Mapping[Any, Any], path: tuple, change: Callable[[str, Any], Any]
) -> dict[Any, Any]:
    """Returns parameters in which those of the layer at ``path`` are ``change(name, array)``."""
    if not path and "norm" in params:  # an adder layer: what it sums up goes through its norm
        path = ("norm",)
    if path:
        return {**params, path[0]: _changed(params[path[0]], path[1:], change)}
    return {name: change(name, array) for name, array in params.items()}


def bypass_text(rows: list[Without], whole: float) -> str:
    """Returns a table of what each part carries, for a person.

    >>> print(bypass_text([Without("maps", None, 0.25), Without("MLP", 0, 0.5)], 0.75))
    without                     score   carries
    nothing                    0.7500
    maps, all blocks           0.2500   +0.5000
    MLP, block 1               0.5000   +0.2500
    """
    lines = [f"{'without':24}{'score':>9}{'carries':>10}", f"{'nothing':24}{whole:9.4f}"]
    for part, block, score in rows:
        name = f"{part}, {'all blocks' if block is None else f'block {block + 1}'}"
        lines.append(f"{name:24}{score:9.4f}{whole - score:+10.4f}")
    return "\n".join(lines)


def write_bypass(rows: list[Without], whole: float, path: str | Path) -> None:
    """Writes the rows from `bypass`, and the score of the whole network, as JSON."""
    found = {"whole": whole, "without": [row._asdict() for row in rows]}
    write_whole(path, json.dumps(found, indent=1).encode())
