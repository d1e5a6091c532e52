"""Watching the submodules of a model at work, without a change to the model."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from adder_flax.models._vit import VisionTransformer

Watch = Callable[..., Any]


def instrument(model: nnx.Module, watch: Watch) -> nnx.Module:
    """Routes every call of a submodule through ``watch(path, call, *args, **kwargs)``.

    Args:
      model: a copy of the watched model, made for this (``nnx.merge``): its modules change their class.
      watch: has to return ``call(*args, **kwargs)``; ``path`` is the module's, joined by dots, "" for the model.

    Returns:
      The same model.
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, VisionTransformer):
            # A loop over blocks would show all of them as one, and nothing watched inside of it could get out.
            module.scan_blocks = False
            module.remat = False
        module.__class__ = _watched(type(module), ".".join(map(str, path)), watch)
    return model


def _watched(cls: type, path: str, watch: Watch) -> type:
    if not hasattr(cls, "__call__"):  # noqa: B004 - whether instances can be called, not the class
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return watch(path, lambda *a, **k: cls.__call__(self, *a, **k), *args, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": __call__})
