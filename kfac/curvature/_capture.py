"""Capture of what enters each layer and of the cotangent of what leaves it, in one pass each way.

A *tap* on a layer's output y is the identity with a backward rule that hands (x, ∂L/∂y) to a
*slot*: an extra argument of zeros, whose "gradient" is the pair. Slots are created outside the
differentiated function and found inside it through a context that JAX's own caches respect, so
layers keep their signatures. The rule changes no gradient.

- under ``jax.lax.scan`` the slots of the body are scanned over like any other input
  (``Capture.scan``);
- under ``jax.vmap`` each example writes to its own row, found by a function whose batching rule
  counts rows;
- ``jax.checkpoint``, ``jax.jit`` and ``jax.lax.cond`` need nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from kfac._sharing import axes_of, own_along
from kfac._trees import flatten
from kfac.curvature._layers import Dense, Generic
from kfac.curvature._provenance import mark

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree

    Layer = Dense | Generic

# Its value is the capture in progress. A user context is part of the key of every tracing cache of
# JAX, so that a function traced without taps is not reused with them, nor one capture's slots by
# the next.
_current = jax.make_user_context(None)

_original_scan = jax.lax.scan  # `jax.lax.scan` is `kfac.scan` while a capture runs


class Role(NamedTuple):
    """A parameter of a tapped call."""

    path: str  # where it stands in the parameter tree
    # for each frame, whether it numbers layers that the parameter is stacked of
    stacked: tuple[bool, ...]
    stack_axes: tuple[int, ...]  # the parameter's axes for those that do


@dataclasses.dataclass
class Tap:
    """One tapped call of a layer, as recorded while the loss is traced."""

    key: str  # the call's name in every trace of the loss
    base: str  # what it is called if its parameters are not known
    layer: Layer | None  # how the output depends on the parameters; None where nothing says so
    shapes: dict[str, tuple[int, ...]]  # role → shape of the parameter inside the layer
    # of the input (a tree) and of the output, without the axes of scans and vmaps
    x: PyTree[jax.ShapeDtypeStruct]
    y: jax.ShapeDtypeStruct
    # which scans the call is inside of, outermost first, by order of appearance
    scan_path: tuple[int, ...]
    scans: tuple[int, ...]  # lengths of these scans
    reason: str | None = None  # why there is nothing to capture, if so
    vmaps: tuple[int, ...] = ()  # sizes of the vmaps around it, outermost first
    # role → which parameter it is
    params: dict[str, Role] = dataclasses.field(default_factory=dict)
    touched: frozenset[str] = frozenset()  # paths of the parameters that the call's are made of
    # those of them whose gradient flows through it. If it is not captured, no other use of them
    # gives their whole curvature.
    moved: frozenset[str] = frozenset()
    named: bool = False  # whether ``base`` is its name even so

    @property
    def frames(self) -> tuple[int, ...]:
        """Sizes of the leading axes of what is captured: scans, then vmaps, outermost first."""
        return (*self.scans, *self.vmaps)

    @property
    def captured(self) -> bool:
        return self.layer is not None and self.reason is None

    def slot(self) -> tuple[PyTree[Array], Array]:
        """Zeros that the pair (x, cotangent of y) of all frames fits in."""
        frames = self.frames

        def zeros(s: jax.ShapeDtypeStruct) -> Array:
            return jnp.zeros((*frames, *s.shape), _float_dtype(s.dtype))

        return jax.tree.map(zeros, self.x), zeros(self.y)


class Capture:
    """State of one trace of the loss: without slots it records taps, with slots it feeds them."""

    def __init__(self, params: PyTree, taps: dict[str, Tap], slots: dict[str, Any] | None = None):
        leaves = flatten(params)
        self.shapes = {path: jnp.shape(leaf) for path, leaf in leaves.items()}
        self.paths = {id(leaf): path for path, leaf in leaves.items()}
        self.alive = [params]  # an id stays unique only as long as its object lives
        self.taps = taps
        self.names = {tap.key: name for name, tap in taps.items()}
        self.slots = slots
        self.calls: dict[str, int] = {}
        self.scan_path: tuple[int, ...] = ()
        self.scans: tuple[int, ...] = ()
        self.num_scans = 0
        self.muted = False

    @contextlib.contextmanager
    def mute(self, muted: bool = True) -> Iterator[None]:
        """Within it layers do not report: they belong to another layer, or never happen."""
        before, self.muted = self.muted, self.muted or muted
        try:
            yield
        finally:
            self.muted = before

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it, taps and scans on this thread belong to this capture."""
        with _current(self):
            try:
                yield
            finally:
                # JAX's caches keep the context's value: let go of the tracers.
                self.paths, self.alive, self.slots = {}, [], None

    def tap(
        self,
        base: str,
        layer: Layer | None,
        x: PyTree[Array],
        y: Array,
        params: dict[str, Array],
        *,
        reason: str | None = None,
        named: bool = False,
    ) -> Array:
        count = self.calls[base] = self.calls.get(base, 0) + 1
        key = base if count == 1 else f"{base}#{count}"
        if self.slots is None:
            inputs = [a for a in jax.tree.leaves(x) if isinstance(a, jax.Array)]
            shapes = {role: jnp.shape(p) for role, p in params.items()}
            of_x = jax.tree.map(_shape, x) if layer is not None else None
            place = (self.scan_path, self.scans)
            tap = Tap(key, base, layer, shapes, of_x, _shape(y), *place, reason, named=named)
            self.taps[key] = tap
            return mark(key, y, inputs, list(params.values()))
        if key not in self.names:
            raise RuntimeError(
                f"expected the same layers in every trace of the loss, got {key!r}, which was not "
                "met in the first; make the loss function deterministic in what it calls."
            )
        tap, slot = self.taps[self.names[key]], self.slots.get(self.names[key])
        if slot is None:
            return y
        if tap.vmaps:  # a slot holds the rows of all examples; each writes to its own alone
            count, num_axes = math.prod(tap.vmaps), len(tap.vmaps)
            row = _row(x, y) % count  # vmaps around the whole gradient count, too, outermost
            slot = jax.tree.map(lambda s: s.reshape(count, *s.shape[num_axes:])[row], slot)
        y, x = own_along(axes_of(slot[1]), (y, x))
        return _tap(y, x, slot)

    def scan(self, f: Callable, init: Any, xs: Any, length: Any, args: tuple, kwargs: dict) -> Any:
        """``jax.lax.scan`` with the slots of the taps in its body as further inputs."""
        path = (*self.scan_path, self.num_scans)
        self.num_scans += 1
        length = length if length is not None else len(jax.tree.leaves(xs)[0])
        inner = [n for n, t in self.taps.items() if t.scan_path[: len(path)] == path]
        slots = None if self.slots is None else {n: self.slots[n] for n in inner if n in self.slots}
        state = (self.scan_path, self.scans, self.slots)
        calls, num_scans = dict(self.calls), self.num_scans

        def body(carry, xs_and_slots):
            x, slots = xs_and_slots
            # JAX may trace a body more than once: every time it starts from the same state.
            self.scan_path, self.scans, self.slots = path, (*state[1], length), slots
            self.calls, self.num_scans = dict(calls), num_scans
            for outer, own in zip(jax.tree.leaves(xs), jax.tree.leaves(x), strict=True):
                if id(outer) in self.paths:
                    self.paths[id(own)] = self.paths[id(outer)]
                    self.alive.append(own)
            try:
                return f(carry, x)
            finally:
                self.scan_path, self.scans, self.slots = state

        return _original_scan(body, init, (xs, slots), length, *args, **kwargs)


def current_capture() -> Capture | None:
    """The capture in progress on this thread, if layers are to report to it."""
    capture = _current.value
    return None if capture is None or capture.muted else capture


@jax.custom_vjp
def _tap(y: Array, x: PyTree[Array], slot: tuple[PyTree[Array], Array]) -> Array:
    return y


def _tap_forward(y: Array, x: PyTree[Array], slot: tuple) -> tuple[Array, PyTree[Array]]:
    return y, x


def _tap_backward(x: PyTree[Array], dy: Array) -> tuple:
    return dy, None, (jax.tree.map(lambda a: a.astype(_float_dtype(a.dtype)), x), dy)


_tap.defvjp(_tap_forward, _tap_backward)


def _shape(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _float_dtype(dtype: Any) -> Any:
    # Slots are gradients, so whole numbers (tokens, masks) travel as floats; exact below 2**24.
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32


def _row(x: PyTree[Array], y: Array) -> Array:
    """The number of this example among those of all vmaps around it."""
    # Nothing of each array: enough to be batched where any of them is, and no value that a gradient
    # could flow to.
    nothing = [a.reshape(-1)[:0].astype(jnp.float32) for a in (*jax.tree.leaves(x), y)]
    return _row_within(jnp.concatenate([jax.lax.stop_gradient(a) for a in nothing]))


@custom_vmap
def _row_within(empty: Array) -> Array:
    return jnp.zeros((), jnp.int32)


@_row_within.def_vmap
def _count_rows(axis_size: int, in_batched: list, empty: Array) -> tuple[Array, bool]:
    # Which the next vmap outside of it meets.
    outer = _row_within(empty[0] if in_batched[0] else empty)
    return outer * axis_size + jnp.arange(axis_size, dtype=jnp.int32), True


# ---- Plain functions: layers are marked by hand, and `jax.lax.scan` repeats them.


def tap(
    layer: Layer,
    params: dict[str, Any],
    x: PyTree[Array],
    *,
    path: str | Mapping[str, str],
    y: Array | None = None,
) -> Array:
    """Applies a layer of a plain function so that its curvature is captured.

    Outside of a capture it is ``layer(params, x)``.

    Args:
      layer: ``kfac.Dense()``, ``kfac.L1Dense()``, ``kfac.Scale(fn=…)``, ``kfac.Readout(fn=…)`` or
        ``kfac.Generic(fn)``.
      params: the layer's own parameters by role; for ``Dense`` these are ``kernel`` and optionally
        ``bias``.
      x: its input.
      path: where ``params`` stands in the parameter tree that is differentiated, ``"encoder/fc1"``,
        or the path of each by role; a parameter stacked for ``jax.lax.scan`` or ``jax.vmap`` has
        the same path as the whole stack.
      y: the layer's output, where it was computed in another way than by ``layer``.

    Returns:
      The layer's output.

    Raises:
      ValueError: a path that is not in the differentiated tree.

    >>> import jax.numpy as jnp
    >>> params = {"fc": {"kernel": jnp.ones((3, 2))}}
    >>> tap(Dense(), params["fc"], jnp.ones((1, 3)), path="fc").tolist()
    [[3.0, 3.0]]
    """
    y = layer(params, x) if y is None else y
    capture = current_capture()
    if capture is None:
        return y
    paths = (
        {role: f"{path}/{role}" if path else role for role in params}
        if isinstance(path, str)
        else path
    )
    for name in paths.values():
        if name not in capture.shapes:
            raise ValueError(
                "expected kfac.tap's path to name parameters of the differentiated tree, got "
                f"{name!r}; it has {', '.join(sorted(capture.shapes)[:8])}, …"
            )
    base = path or "model" if isinstance(path, str) else next(iter(paths.values()))
    return capture.tap(base, layer, x, y, params, named=True)


def path_of(array: Any) -> str | None:
    """Where an array stands in the tree that a capture in progress differentiates.

    None outside of one or for another. It is known by its identity: what is computed from it, a
    cast or a slice, is another array.

    >>> import jax.numpy as jnp, kfac
    >>> params, found = {"fc": {"kernel": jnp.ones((3, 2))}}, []
    >>> def loss_fn(params, x):
    ...     found.append(path_of(params["fc"]["kernel"]))
    ...     return (x @ params["fc"]["kernel"]).mean()
    >>> layers = kfac.find_layers(loss_fn, params, jnp.ones((4, 3)))
    >>> found, path_of(params["fc"]["kernel"])
    (['fc/kernel'], None)
    """
    capture = current_capture()
    return None if capture is None else capture.paths.get(id(array))


def scan(
    f: Callable, init: Any, xs: Any = None, length: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """``jax.lax.scan``; tapped layers inside are captured once per iteration.

    While a capture runs, ``jax.lax.scan`` itself is this function; call it by this name where code
    holds on to the original (``from jax.lax import scan``).
    """
    capture = current_capture()
    if capture is None:
        return _original_scan(f, init, xs, length, *args, **kwargs)
    return capture.scan(f, init, xs, length, args, kwargs)
