"""Flax Linen: finds layers by method interception. A module's path is that of its parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flax import linen as nn
from flax import serialization, traverse_util

from kfac.curvature._capture import current_capture
from kfac.curvature._layers import Scale
from kfac.curvature._registry import (
    is_hashable,
    register_standard,
    registrations,
    tap_registered,
)
from kfac.step._state import ARRAYS, Stats

if TYPE_CHECKING:
    from jaxtyping import Array

register_standard(nn, nn.Dense, nn.DenseGeneral)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A method of a module as a function of its parameters, its input and options."""

    module: nn.Module
    method: str | Callable[..., Array]

    @property
    def __name__(self) -> str:
        return type(self.module).__name__

    def __call__(self, params: dict[str, Array], x: Array, **options: Any) -> Any:
        nested = traverse_util.unflatten_dict(params, sep="/")
        return self.module.apply({"params": nested}, x, method=self.method, **options)


replacements = tuple  # none


def watch() -> contextlib.AbstractContextManager:
    """Within it, calls of registered layers are tapped."""
    layers = {(r.cls, r.method): r for r in registrations(nn.Module)}

    def intercept(
        next_fun: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext
    ) -> Any:
        run = lambda: next_fun(*args, **kwargs)
        capture, module = current_capture(), context.module
        owners = [layers.get((base, context.method_name)) for base in type(module).__mro__]
        registration = next(filter(None, owners), None)
        if capture is None or registration is None or module.is_initializing():
            return run()
        # An override comes here too, before the method that it calls by `super()`.
        registered = registration.cls.__dict__[registration.method]
        is_formula = registration.describe is not None or registration.kind is Scale
        overrides = context.orig_method.func is not inspect.unwrap(registered)  # pyright: ignore
        if is_formula and overrides:
            return run()
        # Other collections are state, such as batch statistics: no function of parameters and x.
        state = dict(module.variables)
        own = traverse_util.flatten_dict(nn.unbox(state.pop("params", {})), sep="/")
        if registration.describe is not None:  # `nn.share_scope` puts other modules' beside them
            own = {name: value for name, value in own.items() if "/" not in name}
        if not own:
            return run()
        method = registered if is_formula else context.method_name
        call = _Call(module.clone(parent=None, name=None), method)

        def rerun(params: dict[str, Array]) -> Any:
            variables = {"params": params, **state}
            made = call.module.apply(variables, *args, mutable=True, method=method, **kwargs)
            return made[0]

        base = "/".join(module.path)
        given = list(inspect.signature(context.orig_method).bind(*args, **kwargs).arguments.items())
        has_state = bool(state) or not is_hashable(call)  # as with a convolution's mask
        return tap_registered(
            capture, registration, base, module, own, call, run, rerun, has_state, given
        )

    return nn.intercept_methods(intercept)


# `flax.serialization` knows named tuples, as the rest of the optimizer's state is, alone.
serialization.register_serialization_state(
    Stats,
    lambda stats: {name: getattr(stats, name) for name in ARRAYS},
    lambda stats, state: dataclasses.replace(stats, **state),
)
