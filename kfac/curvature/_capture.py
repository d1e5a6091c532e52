"""Capture of what enters each layer and of the cotangent of what leaves it.

It takes one forward and backward pass.

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
from collections.abc import Callable, Iterable, Iterator
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

# Its value is the capture in progress. A user context is part of the key of every tracing
# cache of JAX, so that a function traced without taps is not reused with them, nor one
# capture's slots by the next.
_current = jax.make_user_context(None)


original_scan = jax.lax.scan  # held here, since `jax.lax.scan` is `kfac.scan` while a capture runs


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How the layers of models written with one library are found.

    Attributes:
      replacements: () → what to replace in the library while any capture runs: (owner, name,
        original → replacement).
      watch: (capture, parameters) → context in which the loss is traced, for what goes with this
        one capture.
    """

    replacements: Callable[[], Iterable[tuple[Any, str, Callable[[Any], Any]]]]
    watch: Callable[[Capture, PyTree], contextlib.AbstractContextManager]


class Role(NamedTuple):
    """A parameter of a tapped call.

    Attributes:
      path: where it stands in the parameter tree.
      stacked: for each frame, whether it numbers layers that the parameter is stacked of.
      stack_axes: the parameter's axes for those that do.
    """

    path: str
    stacked: tuple[bool, ...]
    stack_axes: tuple[int, ...]


@dataclasses.dataclass
class Tap:
    """One tapped call of a layer, as recorded while the loss is traced.

    Attributes:
      key: the call's name in every trace of the loss.
      base: what it is called if its parameters are not known.
      layer: how the output depends on the parameters; None where nothing says so.
      shapes: role → shape of the parameter inside the layer.
      x, y: shapes of the input (a tree) and of the output, without the axes of scans and vmaps.
      scan_path: which scans the call is inside of, outermost first, by order of appearance.
      scans: lengths of these scans.
      reason: why there is nothing to capture, if so.
      vmaps: sizes of the vmaps around it, outermost first.
      params: role → which parameter it is.
      touched: paths of the parameters that the call's are made of.
      moved: those of them whose gradient flows through it. If it is not captured, no other use of
        them gives their whole curvature.
      named: whether ``base`` is its name even so.
    """

    key: str
    base: str
    layer: Layer | None
    shapes: dict[str, tuple[int, ...]]
    x: PyTree[jax.ShapeDtypeStruct]
    y: jax.ShapeDtypeStruct
    scan_path: tuple[int, ...]
    scans: tuple[int, ...]
    reason: str | None = None
    vmaps: tuple[int, ...] = ()
    params: dict[str, Role] = dataclasses.field(default_factory=dict)
    touched: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()
    named: bool = False

    @property
    def frames(self) -> tuple[int, ...]:
        """Sizes of the leading axes of what is captured.

        Scans, then vmaps, each outermost first.
        """
        return (*self.scans, *self.vmaps)

    @property
    def captured(self) -> bool:
        """Whether its input and cotangent are."""
        return self.layer is not None and self.reason is None

    def without_layer(self) -> Tap:
        """A call that never happens."""
        return dataclasses.replace(self, layer=None, reason=None)

    def slot(self) -> tuple[PyTree[Array], Array]:
        """Zeros that the pair (x, cotangent of y) of all frames fits in."""

        def zeros(s: jax.ShapeDtypeStruct) -> Array:
            return jnp.zeros((*self.frames, *s.shape), _float_dtype(s.dtype))

        return jax.tree.map(zeros, self.x), zeros(self.y)


class Capture:
    """State of one trace of the loss: without slots it records taps, with slots it feeds them."""

    def __init__(
        self,
        params: PyTree,
        taps: dict[str, Tap] | None = None,
        slots: dict[str, Any] | None = None,
    ):
        leaves = flatten(params)
        self.shapes = {path: jnp.shape(leaf) for path, leaf in leaves.items()}
        self.paths = {id(leaf): path for path, leaf in leaves.items()}
        self.alive = [params]  # an id stays unique only as long as its object lives
        self.taps = {} if taps is None else taps
        self.names = {tap.key: name for name, tap in self.taps.items()}
        self.slots = slots
        self.calls: dict[str, int] = {}
        self.scan_path: tuple[int, ...] = ()
        self.scans: tuple[int, ...] = ()
        self.num_scans = 0
        self.muted = False

    @contextlib.contextmanager
    def mute(self) -> Iterator[None]:
        """Lets layers within it not report.

        What is called belongs to another layer, or never happens.
        """
        before, self.muted = self.muted, True
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

    def name(self, base: str) -> str:
        """``base``, or ``base#2`` and so on for further calls of the same layer."""
        count = self.calls[base] = self.calls.get(base, 0) + 1
        return base if count == 1 else f"{base}#{count}"

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
        """Taps a call: returns y."""
        key = self.name(base)
        if self.slots is None:
            inputs = [a for a in jax.tree.leaves(x) if isinstance(a, jax.Array)]
            shapes = {role: jnp.shape(p) for role, p in params.items()}
            self.taps[key] = Tap(
                key,
                base,
                layer,
                shapes,
                jax.tree.map(_shape, x) if layer is not None else None,
                _shape(y),
                self.scan_path,
                self.scans,
                reason,
                named=named,
            )
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
            row, count = _row(x, y), math.prod(tap.vmaps)
            num_axes = len(tap.vmaps)
            slot = jax.tree.map(lambda s: s.reshape(count, *s.shape[num_axes:])[row], slot)
        y, x = own_along(axes_of(slot[1]), (y, x))
        return _tap(y, x, slot)

    def scan(
        self, f: Callable, init: Any, xs: Any, length: int | None, args: tuple, kwargs: dict
    ) -> Any:
        """``jax.lax.scan`` with the slots of the taps in its body as further inputs."""
        path = (*self.scan_path, self.num_scans)
        self.num_scans += 1
        length = length if length is not None else len(jax.tree.leaves(xs)[0])
        inner = {n: t for n, t in self.taps.items() if t.scan_path[: len(path)] == path}
        slots = None if self.slots is None else {n: self.slots[n] for n in inner if n in self.slots}
        state = (self.scan_path, self.scans, self.slots)
        calls, num_scans = dict(self.calls), self.num_scans

        def body(carry, xs_and_slots):
            x, slots = xs_and_slots
            # JAX may trace a body more than once: every time it starts from the same
            # state.
            self.scan_path, self.scans, self.slots = path, (*state[1], length), slots
            self.calls, self.num_scans = dict(calls), num_scans
            self._inherit_paths(xs, x)
            try:
                return f(carry, x)
            finally:
                self.scan_path, self.scans, self.slots = state

        return original_scan(body, init, (xs, slots), length, *args, **kwargs)

    def _inherit_paths(self, outer: PyTree, inner: PyTree) -> None:
        for o, i in zip(jax.tree.leaves(outer), jax.tree.leaves(inner), strict=True):
            if id(o) in self.paths:
                self.paths[id(i)] = self.paths[id(o)]
                self.alive.append(i)


def current_capture() -> Capture | None:
    """The capture in progress on this thread, if layers are to report to it."""
    capture = _current.value
    return None if capture is None or capture.muted else capture


@jax.custom_vjp
def _tap(y: Array, x: PyTree[Array], slot: tuple[PyTree[Array], Array]) -> Array:
    return y


def _tap_backward(x: PyTree[Array], dy: Array) -> tuple:
    return dy, None, (jax.tree.map(_as_float, x), dy)


def _tap_forward(
    y: Array, x: PyTree[Array], slot: tuple[PyTree[Array], Array]
) -> tuple[Array, PyTree[Array]]:
    return y, x


_tap.defvjp(_tap_forward, _tap_backward)


def _shape(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _as_float(array: Array) -> Array:
    return array.astype(_float_dtype(array.dtype))


def _float_dtype(dtype: Any) -> Any:
    # Slots are gradients, so whole numbers (tokens, masks) travel as floats; exact below
    # 2**24.
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32


def _row(x: PyTree[Array], y: Array) -> Array:
    """The number of this example among those of all vmaps around it."""
    # Nothing of each array: enough to be batched where any of them is, and no value that
    # a gradient could flow to.
    batched = [
        jax.lax.stop_gradient(a.reshape(-1)[:0].astype(jnp.float32))
        for a in (*jax.tree.leaves(x), y)
    ]
    return _row_within(jnp.concatenate(batched))


@custom_vmap
def _row_within(empty: Array) -> Array:
    return jnp.zeros((), jnp.int32)


@_row_within.def_vmap
def _count_rows(axis_size: int, in_batched: list, empty: Array) -> tuple[Array, bool]:
    # Which the next vmap outside of it meets.
    outer = _row_within(empty[0] if in_batched[0] else empty)
    return outer * axis_size + jnp.arange(axis_size, dtype=jnp.int32), True
