"""Parameter trees of the two APIs, the same but for keys of lists, which Linen writes as text."""

from collections.abc import Mapping
from typing import Any


def from_nnx(params: Mapping[Any, Any]) -> dict[str, Any]:
    """The Linen form of an NNX parameter tree (`nnx.to_pure_dict(nnx.state(model, nnx.Param))`).

    >>> from_nnx({"blocks": {0: {"kernel": 1.0}}})
    {'blocks': {'0': {'kernel': 1.0}}}
    """
    return {
        str(key): from_nnx(value) if isinstance(value, Mapping) else value
        for key, value in params.items()
    }


def to_nnx(params: Mapping[str, Any]) -> dict[Any, Any]:
    """The NNX form of a Linen parameter tree (`variables["params"]`), for `nnx.update` or
    `nnx.merge`.

    >>> to_nnx({"blocks": {"0": {"kernel": 1.0}}})
    {'blocks': {0: {'kernel': 1.0}}}
    """
    index = lambda key: int(key) if key.isdecimal() else key
    return {
        index(key): to_nnx(value) if isinstance(value, Mapping) else value
        for key, value in params.items()
    }
