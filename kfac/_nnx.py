"""Flax NNX: finds the layers of a model and their parameters.

While the loss is traced, without touching the model.

NNX has no interceptors, so the methods that are layers are replaced on their classes while a
capture runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flax import nnx

from kfac._capture import Adapter, current_capture
from kfac._layers import Generic, Scale
from kfac._registry import (
    Registration,
    general_dense,
    neutral,
    plain_dense,
    register_layer,
    registrations,
    tap_registered,
)

if TYPE_CHECKING:
    from jaxtyping import Array

register_layer(nnx.Linear, describe=plain_dense)
register_layer(nnx.LinearGeneral, describe=general_dense)
for _cls in (nnx.Conv, nnx.ConvTranspose, nnx.Embed, nnx.Einsum):
    register_layer(_cls)
for _cls in (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm):
    register_layer(_cls, kind=Scale)
register_layer(nnx.Embed, "attend")


def _low_rank(params: dict[str, Array], x: Array) -> Array:
    return x @ params["lora_a"] @ params["lora_b"]


# What it adds to its base module, which is a layer of its own.
register_layer(nnx.LoRA, describe=lambda module: Generic(_low_rank))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A method of a module as a function of its parameters (by path) and its input."""

    graphdef: nnx.GraphDef
    method: str
    __name__: str

    def __call__(self, params: dict[str, Array], x: Array) -> Array:
        nested: dict = {}
        for path, value in params.items():
            *parents, last = path.split("/")
            node = nested
            for key in parents:
                node = node.setdefault(key, {})
            node[last] = value
        return getattr(nnx.merge(self.graphdef, nested), self.method)(x)


def _replacements() -> Iterator[tuple[Any, str, Callable[[Callable], Callable]]]:
    for registration in registrations(nnx.Module):
        tapped = functools.partial(_tapped_method, registration=registration)
        yield registration.cls, registration.method, tapped


def _tapped_method(original: Callable, registration: Registration) -> Callable:
    def method(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        capture = current_capture()
        if capture is None:
            return original(module, *args, **kwargs)
        own, has_state = _variables(module, deep=registration.describe is None)
        params = {role: variable.get_raw_value() for role, variable in own.items()}
        if not params:
            return original(module, *args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()), None)
        call = _Call(nnx.graphdef(module), registration.method, registration.cls.__name__)
        with capture.mute() if registration.describe is None else contextlib.nullcontext():
            if has_state and registration.scales_features(module):
                twin = nnx.clone(module)
                for role, value in neutral(params).items():
                    getattr(twin, role)[...] = value
                x = original(twin, *args, **kwargs)
            y = original(module, *args, **kwargs)
        layer = registration.layer(module, call, has_state)
        return tap_registered(capture, registration.cls.__name__, layer, module, x, y, params)

    return method


def _variables(module: nnx.Module, deep: bool) -> tuple[dict[str, nnx.Variable], bool]:
    """The parameters of a module, of its submodules too if deep; and whether it holds others."""
    if deep:
        graph = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(module)}
    else:
        graph = vars(module)
    found = {name: node for name, node in graph.items() if isinstance(node, nnx.Variable)}
    params = {
        name: node
        for name, node in found.items()
        if isinstance(node, nnx.Param) and node.get_raw_value() is not None
    }
    return params, any(not isinstance(node, nnx.Param) for node in found.values())


ADAPTER = Adapter(_replacements, lambda capture, params: contextlib.nullcontext())
