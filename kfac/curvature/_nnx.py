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

from kfac.curvature._capture import Adapter, current_capture
from kfac.curvature._layers import Generic, Scale
from kfac.curvature._registry import (
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
    method: Callable[..., Array]
    __name__: str

    def __call__(self, params: dict[str, Array], x: Array) -> Array:
        nested: dict = {}
        for path, value in params.items():
            *parents, last = path.split("/")
            node = nested
            for key in parents:
                node = node.setdefault(key, {})
            node[last] = value
        return self.method(nnx.merge(self.graphdef, nested), x)


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
        call = _Call(nnx.graphdef(module), original, registration.cls.__name__)
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
    params: dict[str, nnx.Variable] = {
        name: node
        for name, node in found.items()
        if isinstance(node, nnx.Param) and node.get_raw_value() is not None
    }
    return params, any(not isinstance(node, nnx.Param) for node in found.values())


def split(
    loss_fn: Callable, params: Any, args: tuple
) -> tuple[Callable, Any, tuple, Callable[[Any], None]] | None:
    """A loss function of modules as one of arrays, as ``nnx.value_and_grad`` sees it.

    Returns:
      ``(params, *args) → (result, state)`` with the state of all modules behind it, such as
      statistics and counts of random numbers; the parameters, an ``nnx.State`` where they were a
      module; the arguments; what writes a state back. None where there is no module.
    """
    nodes = [node for node in (params, *args) if isinstance(node, nnx.Pytree)]
    if not nodes:
        return None
    of_params = isinstance(params, nnx.Pytree)

    def is_own(path: tuple, value: Any) -> bool:
        return of_params and path[0] == 0 and isinstance(value, nnx.Param)

    graphdef, own, rest = nnx.split(nodes, is_own, ...)
    rest = nnx.as_pure(rest)
    places = [isinstance(node, nnx.Pytree) for node in (params, *args)]

    def of_arrays(params: Any, *args: Any) -> tuple[Any, Any]:
        own = nnx.State({0: params}) if of_params else nnx.State({})
        nodes = nnx.merge(graphdef, own, rest)
        left = iter(nodes)
        filled = [
            next(left) if is_node else a for is_node, a in zip(places, (params, *args), strict=True)
        ]
        result = loss_fn(*filled)
        return result, nnx.as_pure(nnx.split(nodes, is_own, ...)[2])

    arrays = tuple(None if isinstance(arg, nnx.Pytree) else arg for arg in args)
    params = own[0] if of_params else params
    return of_arrays, params, arrays, functools.partial(nnx.update, nodes)


ADAPTER = Adapter(_replacements, lambda capture, params: contextlib.nullcontext())
