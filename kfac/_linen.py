"""Flax Linen: finds the layers of a model by method interception.

A module's path is that of its parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flax import linen as nn
from flax.core import axes_scan

from kfac._capture import Adapter, Capture, current_capture
from kfac._layers import Scale
from kfac._registry import (
    general_dense,
    is_array,
    plain_dense,
    register_layer,
    registrations,
    tap_registered,
)

if TYPE_CHECKING:
    from jaxtyping import Array

register_layer(nn.Dense, describe=plain_dense)
register_layer(nn.DenseGeneral, describe=general_dense)
for _cls in (nn.Conv, nn.ConvTranspose, nn.Embed, nn.Einsum):
    register_layer(_cls)
for _cls in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm):
    register_layer(_cls, kind=Scale)
register_layer(nn.Embed, "attend")


@dataclasses.dataclass(frozen=True)
class _Call:
    """A method of a module as a function of its parameters and its input."""

    module: nn.Module
    method: str

    @property
    def __name__(self) -> str:
        return type(self.module).__name__

    def __call__(self, params: dict[str, Array], x: Array) -> Any:
        return self.module.apply({"params": params}, x, method=self.method)


class _PartialEvaluation:
    """JAX's partial evaluation as ``nn.scan`` sees it while a capture runs.

    ``nn.scan`` traces its body once to find constants, and throws the trace away: layers must not
    report from there.
    """

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._original, name)
        return _muted(attribute) if name.startswith("trace_to_jaxpr") else attribute


def _muted(function: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        capture = current_capture()
        with contextlib.nullcontext() if capture is None else capture.mute():
            return function(*args, **kwargs)

    return call


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
        with capture.mute():  # what is called inside belongs to this layer
            y = next_fun(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()), None)
        collections = dict(module.variables)
        own = nn.unbox(collections.pop("params", {}))
        if registration.describe is not None:
            layer = registration.describe(module)
        else:
            layer = registration.layer(
                module, _Call(module.clone(parent=None, name=None), context.method_name)
            )
        # Collections besides the parameters are state, such as batch statistics: no
        # function of W and x.
        flat = all(is_array(p) for p in own.values())
        if layer is None or not own or not flat or collections or not is_array(x):
            return y
        params = {
            role: (_find_path(capture, (*module.path, role)), p.shape, True)
            for role, p in own.items()
        }
        return tap_registered(
            capture, "/".join(module.path) or "model", layer, module, x, y, params
        )

    return nn.intercept_methods(intercept)


def _find_path(capture: Capture, keys: tuple[str, ...]) -> str | None:
    """Path of a parameter in the differentiated tree.

    This may be one collection or all, boxed or not.
    """
    name = "/".join(keys)
    candidates = [p for p in capture.shapes if f"/{p}/".endswith((f"/{name}/", f"/{name}/value/"))]
    return (
        candidates[0]
        if len(candidates) == 1
        else next((p for p in candidates if p in (name, f"params/{name}")), None)
    )


def _replacements() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    yield axes_scan, "pe", _PartialEvaluation


def _watch(capture: Capture, params: Any) -> contextlib.AbstractContextManager:
    return _interception()


ADAPTER = Adapter(_replacements, _watch)
