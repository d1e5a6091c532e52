"""What Flax's own attention modules hand to their `attention_fn`, and what they do not say."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import flax.nnx as nnx
from jax.core import Tracer

from adder_flax import ops

_FILES = ("flax.nnx.nn.attention", "flax.linen.attention")


def said_by_flax(mask: Any) -> dict[str, Any]:
    """Options of `attend` that a calling module of Flax means; none where no such module calls.

    Its masks are numbers 0 and 1, which are floating by default. When it decodes, the newest token
    is the query and all others come from a cache; of the place there it has a local variable, and
    no word for `attention_fn`.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in _FILES:
        frame = frame.f_back
    if frame is None:
        return {}
    means: dict[str, Any] = {}
    if mask is not None:
        means["mask"] = mask != 0 if isinstance(mask, Tracer) else ops.as_mask(mask)
    if "cur_index" in frame.f_locals:
        means["query_position"] = frame.f_locals["cur_index"]
    return means


def refuse_unknown(options: Mapping[str, Any], known: list[str]) -> None:
    """Refuses options that are none of Flax's attention functions, or not at their defaults."""
    for name, value in options.items():
        if name not in _defaults():
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
