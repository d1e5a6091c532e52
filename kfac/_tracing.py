"""Traces of a loss function in which layers report to a capture.

Whichever way the model is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from kfac._capture import Adapter, Capture, Role, Tap
from kfac._provenance import Call, Derived, Origin, Program, Source, read
from kfac._trees import common_parent, flatten

if TYPE_CHECKING:
    from jaxtyping import PyTree

# Library → module with its ADAPTER, which is imported only in programs that use the
# library.
ADAPTERS = {"jax": "kfac._plain", "flax.linen": "kfac._linen", "flax.nnx": "kfac._nnx"}


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
    parts = importlib.import_module("kfac._nnx").split(loss_fn, params, args)
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
    return _located(met, read(program, len(paths)), paths)


def _located(met: dict[str, Tap], program: Program, paths: list[str]) -> dict[str, Tap]:
    """The taps by name, with what the program says of their parameters."""
    taps: dict[str, Tap] = {}
    for key, tap in met.items():
        calls = program.calls.get(key)
        # `nn.scan` traces its body once to find constants, and throws that trace away.
        tap = _locate(tap, calls, key in program.seen, paths) if calls else tap.without_layer()
        base, count = _name(tap), 1
        name = base
        while name in taps:
            count += 1
            name = f"{base}#{count}"
        taps[name] = tap
    return taps


def _locate(tap: Tap, calls: list[Call], seen: bool, paths: list[str]) -> Tap:
    """A tap with its parameters, or with the reason why it is not captured."""
    call = calls[0]
    params: dict[str, Role] = {}
    reasons = [tap.reason]
    for i, (role, origin) in enumerate(zip(tap.shapes, call.origins, strict=True)):
        if isinstance(origin, Derived):
            how = f"computed inside the loss, by {origin.by}"
            reasons.append(
                f"parameter {role!r} is {how if origin.moves else 'under stop_gradient'}"
            )
        elif origin is None:
            reasons.append(f"parameter {role!r} is not an array of the differentiated tree")
        else:
            mapped = [axes[i] for _, axes in reversed(call.vmaps)]
            stacked, stack_axes, rest = _frames(origin, call.scans, mapped)
            params[role] = Role(paths[origin.input], stacked, stack_axes)
            if rest != sorted(rest):
                reasons.append(f"parameter {role!r} is transposed inside the loss")
    if not seen:
        reasons.append("the loss does not depend on its output, or only under stop_gradient")
    if len(calls) > 1:
        reasons.append(
            f"a function that jax.jit or jax.checkpoint keeps calls it once and is used "
            f"{len(calls)} times; give each use a function of its own"
        )
    if call.scans != tap.scans:
        reasons.append(
            "it stands in a loop that kfac does not see, such as jax.lax.map or fori_loop; use "
            "kfac.scan"
        )
    origins = [origin for call in calls for origin in call.origins]
    return dataclasses.replace(
        tap,
        vmaps=tuple(size for size, _ in reversed(call.vmaps)),
        params=params,
        reason=next(filter(None, reasons), None),
        touched=_paths_of(origins, paths),
        moved=_paths_of([o for o in origins if seen and getattr(o, "moves", True)], paths),
    )


def _frames(
    origin: Source, scans: tuple, mapped: list[int | None]
) -> tuple[tuple[bool, ...], tuple[int, ...], list[int]]:
    """Which frames number layers, along which axes of the parameter, and the parameter's others."""
    along = dict(origin.scans)
    frames = [along.get(depth) for depth in range(len(scans))]
    rest = list(origin.axes)
    for axis in mapped:
        frames.append(None if axis is None else rest.pop(axis))
    chosen = tuple(axis for axis in frames if axis is not None)
    return tuple(axis is not None for axis in frames), chosen, rest


def _paths_of(origins: list[Origin], paths: list[str]) -> frozenset[str]:
    """The parameters that arrays of these origins are made of."""
    bits = [
        1 << origin.input if isinstance(origin, Source) else origin.inputs
        for origin in origins
        if origin is not None
    ]
    whole = functools.reduce(operator.or_, bits, 0)
    return frozenset(path for i, path in enumerate(paths) if whole >> i & 1)


def _name(tap: Tap) -> str:
    """Where its parameters stand, if that is known and the call has no name of its own."""
    base = tap.base or "model"
    if tap.params and not tap.named:
        parent = common_parent([role.path for role in tap.params.values()])
        own = parent in (tap.base, f"params/{tap.base}".rstrip("/"))
        base = base if own else parent or "model"
    return base if tap.captured else f"({base})"


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
