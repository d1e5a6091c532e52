"""Flax Linen: finds the layers of a model by method interception.

A module's path is that of its parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flax import linen as nn
from flax import serialization, traverse_util

from kfac.curvature._capture import Adapter, Capture, current_capture
from kfac.curvature._layers import Scale
from kfac.curvature._registry import (
    general_dense,
    neutral,
    plain_dense,
    register_layer,
    registrations,
    tap_registered,
)
from kfac.step._state import Stats

if TYPE_CHECKING:
    from jaxtyping import Array

register_layer(nn.Dense, describe=plain_dense)
register_layer(nn.DenseGeneral, describe=general_dense)
for _cls in (nn.Conv, nn.ConvTranspose, nn.Embed, nn.Einsum):
    register_layer(_cls)
for _cls in (nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm):
    register_layer(_cls, kind=Scale)
register_layer(nn.Embed, "attend")


@dataclasses.dataclass(frozen=True)
class _Call:
    """A method of a module as a function of its parameters and its input."""

    module: nn.Module
    method: str | Callable[..., Array]

    @property
    def __name__(self) -> str:
        return type(self.module).__name__

    def __call__(self, params: dict[str, Array], x: Array) -> Any:
        nested = traverse_util.unflatten_dict(params, sep="/")
        return self.module.apply({"params": nested}, x, method=self.method)


def _interception() -> contextlib.AbstractContextManager:
    """Within it, calls of registered layers are tapped."""
    layers = {(r.cls, r.method): r for r in registrations(nn.Module)}

    def intercept(
        next_fun: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext
    ) -> Any:
        capture, module = current_capture(), context.module
        owners = (layers.get((base, context.method_name)) for base in type(module).__mro__)
        registration = next((r for r in owners if r is not None), None)
        if capture is None or registration is None or module.is_initializing():
            return next_fun(*args, **kwargs)
        # An override comes here too, before the method that it calls by `super()`.
        registered = registration.cls.__dict__[registration.method]
        is_formula = registration.describe is not None or registration.kind is Scale
        overrides = context.orig_method.func is not inspect.unwrap(registered)  # pyright: ignore
        if is_formula and overrides:
            return next_fun(*args, **kwargs)
        collections = dict(module.variables)
        own = traverse_util.flatten_dict(nn.unbox(collections.pop("params", {})), sep="/")
        if registration.describe is not None:  # `nn.share_scope` puts other modules' beside them
            own = {name: value for name, value in own.items() if "/" not in name}
        if not own:
            return next_fun(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()), None)
        method = registered if is_formula else context.method_name
        call = _Call(module.clone(parent=None, name=None), method)
        with capture.mute() if registration.describe is None else contextlib.nullcontext():
            # Collections besides the parameters are state, such as batch statistics: no function of
            # the parameters and x.
            if collections and registration.scales_features(module):
                x = call.module.apply(
                    {"params": neutral(own), **collections},
                    *args,
                    mutable=True,
                    method=call.method,
                    **kwargs,
                )[0]
            y = next_fun(*args, **kwargs)
        layer = registration.layer(module, call, bool(collections))
        base = "/".join(module.path)
        return tap_registered(capture, base, layer, module, x, y, own)

    return nn.intercept_methods(intercept)


def _watch(capture: Capture, params: Any) -> contextlib.AbstractContextManager:
    return _interception()


def _to_state_dict(stats: Stats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in stats.arrays}


def _from_state_dict(stats: Stats, state: dict[str, Any]) -> Stats:
    return dataclasses.replace(stats, **state)


# `flax.serialization` knows named tuples, as the rest of the optimizer's state is, but no other
# classes.
serialization.register_serialization_state(Stats, _to_state_dict, _from_state_dict)

ADAPTER = Adapter(lambda: (), _watch)
