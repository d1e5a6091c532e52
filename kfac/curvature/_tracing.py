"""Traces of a loss function in which layers report to a capture, however the model is written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import posixpath
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from kfac._trees import flatten
from kfac.curvature._capture import Capture, Role, Tap, scan
from kfac.curvature._provenance import Call, Derived, Source, paths_of, read

if TYPE_CHECKING:
    from jaxtyping import PyTree


class OfArrays(NamedTuple):
    """A loss function of Flax NNX modules as one of arrays, with its arguments."""

    loss_fn: Callable  # ``(params, *args) → (loss, (aux, state))``
    params: PyTree  # of a module of parameters an ``nnx.State``
    args: tuple
    write: Callable[[Any], None]  # puts the state after the call into the modules


def without_modules(
    loss_fn: Callable, params: PyTree, args: tuple, has_aux: bool = False
) -> OfArrays | None:
    """The loss function without the modules among its arguments; None if there are none."""
    if "flax.nnx" not in sys.modules:
        return None
    return importlib.import_module("kfac.curvature._nnx").split(loss_fn, params, args, has_aux)


def record_taps(loss_fn: Callable, params: PyTree, args: tuple) -> dict[str, Tap]:
    """The tapped calls of ``loss_fn(params, *args)`` by name, in their order; nothing is run."""
    met: dict[str, Tap] = {}
    # What is no array, such as a flag or a function, the loss gets as it is, as under `jax.grad`.
    leaves, structure = jax.tree.flatten(args)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def traced(params: PyTree, arrays: dict[int, Any]) -> list:
        own = structure.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        with _watched(Capture(params, met)):
            return jax.tree.leaves(loss_fn(params, *own))[:1]  # the loss

    program, paths = jax.make_jaxpr(traced)(params, arrays), list(flatten(params))
    calls, seen = read(program, len(paths))
    taps: dict[str, Tap] = {}
    for key, tap in met.items():
        if key in calls:
            tap = _located(tap, calls[key], key in seen, paths)
        else:  # `nn.scan` traces its body once to find constants, and throws that trace away
            tap = dataclasses.replace(tap, layer=None, reason=None)
        name = base = _name(tap)
        count = 1
        while name in taps:
            count += 1
            name = f"{base}#{count}"
        taps[name] = tap
    return taps


def _located(tap: Tap, calls: list[Call], seen: bool, paths: list[str]) -> Tap:
    """A tap with its parameters, or with the reason why it is not captured."""
    call = calls[0]
    params: dict[str, Role] = {}
    reasons = [tap.reason]
    for i, (role, origin) in enumerate(zip(tap.shapes, call.origins, strict=True)):
        if isinstance(origin, Derived):
            how = f"computed inside the loss, by {origin.by}"
            how = how if origin.moves else "under stop_gradient"
            reasons.append(f"parameter {role!r} is {how}")
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
    moving = [origin for origin in origins if seen and getattr(origin, "moves", True)]
    return dataclasses.replace(
        tap,
        vmaps=tuple([size for size, _ in reversed(call.vmaps)]),
        params=params,
        reason=next(filter(None, reasons), None),
        touched=paths_of(origins, paths),
        moved=paths_of(moving, paths),
    )


def _frames(
    origin: Source, scans: tuple, mapped: list[int | None]
) -> tuple[tuple[bool, ...], tuple[int, ...], list[int]]:
    """Which frames number layers, along which axes of the parameter, and the parameter's others."""
    along, rest = dict(origin.scans), list(origin.axes)
    frames = [along.get(depth) for depth in range(len(scans))]
    frames += [None if axis is None else rest.pop(axis) for axis in mapped]
    chosen = tuple([axis for axis in frames if axis is not None])
    return tuple([axis is not None for axis in frames]), chosen, rest


def _name(tap: Tap) -> str:
    """Where its parameters stand, if that is known and the call has no name of its own."""
    base = tap.base or "model"
    if tap.params and not tap.named:
        parents = [posixpath.dirname(role.path) for role in tap.params.values()]
        parent = posixpath.commonpath(parents)
        own = parent in (tap.base, f"params/{tap.base}".rstrip("/"))
        base = base if own else parent or "model"
    return base if tap.captured else f"({base})"


def tapped(loss_fn: Callable, taps: dict[str, Tap]) -> Callable:
    """``(params, slots, *args) → loss_fn(params, *args)``.

    Its gradient in ``slots`` is what the taps captured.
    """

    def with_slots(params, slots, *args):
        with _watched(Capture(params, taps, slots)):
            return loss_fn(params, *args)

    return with_slots


@contextlib.contextmanager
def _watched(capture: Capture) -> Iterator[None]:
    """Within it, layers and scans on this thread report to this capture."""
    with _patches, capture.active(), contextlib.ExitStack() as stack:
        for adapter in _adapters():
            stack.enter_context(adapter.watch())
        yield


def _adapters() -> list[Any]:
    """The modules that find layers of the libraries that this program uses."""
    libraries = {"flax.linen": "kfac.curvature._linen", "flax.nnx": "kfac.curvature._nnx"}
    return [importlib.import_module(a) for name, a in libraries.items() if name in sys.modules]


class _Patches:
    """Replaces functions of other libraries while any capture runs, by ones that look for it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.count = 0
        self.undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.count == 0:
                with contextlib.ExitStack() as stack:  # undoes what is done if one of them fails
                    _replace(stack, jax.lax, "scan", lambda original: scan)
                    for adapter in _adapters():
                        for owner, name, make in adapter.replacements():
                            _replace(stack, owner, name, make)
                    self.undo = stack.pop_all()
            self.count += 1

    def __exit__(self, *exc_info: object) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0:
                self.undo.close()


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, make: Callable) -> None:
    if name not in vars(owner):
        raise RuntimeError(
            f"expected {owner.__name__} to define {name!r}, where kfac finds layers; install a "
            "version of this library that kfac is tested with."
        )
    original = vars(owner)[name]
    setattr(owner, name, functools.wraps(original)(make(original)))
    stack.callback(setattr, owner, name, original)


_patches = _Patches()
