"""Traces of a loss function in which layers report to a capture.

Whichever way the model is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from kfac._trees import flatten
from kfac.curvature._capture import Adapter, Capture, Tap
from kfac.curvature._locations import located
from kfac.curvature._provenance import read

if TYPE_CHECKING:
    from jaxtyping import PyTree

# Library → module with its ADAPTER, which is imported only in programs that use the
# library.
ADAPTERS = {
    "jax": "kfac.curvature._plain",
    "flax.linen": "kfac.curvature._linen",
    "flax.nnx": "kfac.curvature._nnx",
}


@dataclasses.dataclass(frozen=True)
class OfArrays:
    """A loss function of Flax NNX modules as one of arrays, with its arguments.

    Attributes:
      loss_fn: ``(params, *args) → (loss, (aux, state))``.
      params, args: its arguments; of a module of parameters an ``nnx.State``.
      write: puts the state after the call into the modules.
    """

    loss_fn: Callable
    params: PyTree
    args: tuple
    write: Callable[[Any], None]


def without_modules(
    loss_fn: Callable, params: PyTree, args: tuple, has_aux: bool = False
) -> OfArrays | None:
    """The loss function without the modules among its arguments; None if there are none."""
    if "flax.nnx" not in sys.modules:
        return None
    parts = importlib.import_module("kfac.curvature._nnx").split(loss_fn, params, args)
    if parts is None:
        return None
    inner, params, args, write = parts

    def with_state(params: PyTree, *args: Any) -> tuple[Any, tuple]:
        result, state = inner(params, *args)
        loss, aux = result if has_aux else (result, None)
        return loss, (aux, state)

    return OfArrays(with_state, params, args, write)


def record_taps(loss_fn: Callable, params: PyTree, args: tuple) -> dict[str, Tap]:
    """Traces ``loss_fn(params, *args)`` abstractly and returns its tapped calls in order."""
    met: dict[str, Tap] = {}

    def traced(params: PyTree, args: tuple) -> list:
        with _watched(Capture(params, met), params):
            return jax.tree.leaves(loss_fn(params, *args))[:1]  # the loss

    program, paths = jax.make_jaxpr(traced)(params, args), list(flatten(params))
    return located(met, read(program, len(paths)), paths)


def tapped(loss_fn: Callable, taps: dict[str, Tap]) -> Callable:
    """``loss_fn`` with ``slots`` behind its parameters.

    ``(params, slots, *args) → loss_fn(params, *args)`` has as gradient in ``slots`` what
    the taps captured.
    """

    def with_slots(params, slots, *args):
        with _watched(Capture(params, taps, slots), params):
            return loss_fn(params, *args)

    return with_slots


@contextlib.contextmanager
def _watched(capture: Capture, params: PyTree) -> Iterator[None]:
    """Within it, layers and scans on this thread report to this capture."""
    with _patches, capture.active(), contextlib.ExitStack() as stack:
        for adapter in _adapters_in_use():
            stack.enter_context(adapter.watch(capture, params))
        yield


def _adapters_in_use() -> list[Adapter]:
    return [
        importlib.import_module(module).ADAPTER
        for library, module in ADAPTERS.items()
        if library in sys.modules
    ]


class _Patches:
    """Replaces functions of other libraries while any capture runs.

    By ones that look for it (on their thread).
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.count = 0
        self.undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.count == 0:
                # Undoes what is done if an adapter fails halfway.
                with contextlib.ExitStack() as stack:
                    for adapter in _adapters_in_use():
                        for owner, name, make in adapter.replacements():
                            stack.callback(setattr, owner, name, _replace(owner, name, make))
                    self.undo = stack.pop_all()
            self.count += 1

    def __exit__(self, *exc_info: object) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0:
                self.undo.close()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Replaces an attribute and returns the original."""
    if name not in vars(owner):
        raise RuntimeError(
            f"expected {owner.__name__} to define {name!r}, where kfac finds layers; install a "
            "version of this library that kfac is tested with."
        )
    original = vars(owner)[name]
    replacement = make(original)
    setattr(
        owner, name, functools.wraps(original)(replacement) if callable(original) else replacement
    )
    return original


_patches = _Patches()
