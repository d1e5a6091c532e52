"""Capture of what enters each layer and of the cotangent of what leaves it, in one pass each way.

A *tap* on a layer's output y is the identity with a backward rule that hands (x, ∂L/∂y) to a
*slot*: an extra argument of zeros, whose "gradient" is the pair. Slots are found inside the
differentiated function through a context that JAX's own caches respect.

- under ``jax.lax.scan`` the slots of the body are scanned over like any other input;
- under ``jax.vmap`` each example writes to its own row, found by a function whose batching rule
  counts rows;
- ``jax.checkpoint``, ``jax.jit`` and ``jax.lax.cond`` need nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend import core
from jax.interpreters import ad, batching

from kfac._arrays import axes_of, flatten, own_along
from kfac.curvature._layers import Dense, Generic

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree

    Layer = Dense | Generic

# The capture in progress. A user context is part of the key of every tracing cache of JAX, so that
# a function traced without taps is not reused with them, nor one capture's slots by the next.
_current = jax.make_user_context(None)

_original_scan = jax.lax.scan  # `jax.lax.scan` is `kfac.scan` while a capture runs


@dataclasses.dataclass(frozen=True)
class Param:
    path: str  # where it stands in the parameter tree
    shape: tuple[int, ...]  # inside the layer
    stack_axes: tuple[int, ...] = ()  # those of the whole that number layers of a scan or vmap

    def to_lanes(self, array: Array) -> Float[Array, "lane ..."]:
        """The whole parameter with its stacked axes as one leading axis."""
        array = jnp.moveaxis(array, self.stack_axes, range(len(self.stack_axes)))
        return array.reshape(-1, *self.shape)

    def from_lanes(self, array: Float[Array, "lane ..."], shape: tuple[int, ...]) -> Array:
        array = array.reshape(*(shape[a] for a in self.stack_axes), *self.shape)
        return jnp.moveaxis(array, range(len(self.stack_axes)), self.stack_axes)


@dataclasses.dataclass
class Tap:
    """One tapped call of a layer, as recorded while the loss is traced."""

    key: str  # the call's name in every trace of the loss
    base: str  # what it is called if its parameters are not known
    layer: Layer | None  # how the output depends on the parameters; None where nothing says so
    shapes: dict[str, tuple[int, ...]]  # role → shape of the parameter inside the layer
    x: PyTree[jax.ShapeDtypeStruct]  # the input, without the axes of scans and vmaps
    y: jax.ShapeDtypeStruct  # the output, likewise
    scan_path: tuple[int, ...]  # scans that it is inside of, by order of appearance
    scans: tuple[int, ...]  # their lengths, outermost first
    reason: str | None = None  # why there is nothing to capture, if so
    vmaps: tuple[int, ...] = ()  # sizes of the vmaps around it, outermost first
    params: dict[str, Param] = dataclasses.field(default_factory=dict)  # by role
    stacked: tuple[bool, ...] = ()  # for each frame, whether it numbers layers that they are of
    touched: frozenset[str] = frozenset()  # paths of the parameters that the call's are made of
    # Those of them whose gradient flows through it: no other use of them gives their whole
    # curvature if it is not captured.
    moved: frozenset[str] = frozenset()
    named: bool = False  # whether ``base`` is its name even so
    examples: int | None = None  # axis of (*vmaps, *y.shape) that numbers them, where it is known

    @property
    def frames(self) -> tuple[int, ...]:
        """Sizes of the leading axes of what is captured: scans, then vmaps, outermost first."""
        return (*self.scans, *self.vmaps)

    @property
    def captured(self) -> bool:
        return self.layer is not None and self.reason is None

    def slot(self) -> tuple[PyTree[Array], Array]:
        """Zeros that the pair (x, cotangent of y) of all frames fits in."""
        zeros = lambda s: jnp.zeros((*self.frames, *s.shape), _float_dtype(s.dtype))
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
            inputs = [a for a in jax.tree.leaves(x) if isinstance(a, jax.Array)] or [jnp.zeros(0)]
            shapes = {role: jnp.shape(p) for role, p in params.items()}
            struct = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
            of_x = jax.tree.map(struct, x) if layer is not None else None
            place = (self.scan_path, self.scans)
            tap = Tap(key, base, layer, shapes, of_x, struct(y), *place, reason, named=named)
            self.taps[key] = tap
            return _mark.bind(y, _nothing_of(inputs), *params.values(), key=key, vmaps=())
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
            # The number of this example. Vmaps around the whole gradient count, too, outermost.
            row = _row_within(_nothing_of([*jax.tree.leaves(x), y])) % count
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


def _tap_backward(x: PyTree[Array], dy: Array) -> tuple:
    return dy, None, (jax.tree.map(lambda a: a.astype(_float_dtype(a.dtype)), x), dy)


_tap.defvjp(lambda y, x, slot: (y, x), _tap_backward)


def _float_dtype(dtype: Any) -> Any:
    # Slots are gradients, so whole numbers (tokens, masks) travel as floats; exact below 2**24.
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32


def _nothing_of(arrays: Iterable[Array]) -> Array:
    """Nothing of each array: batched where any of them is, and no value to differentiate."""
    nothing = [a.reshape(-1)[:0].astype(jnp.float32) for a in arrays]
    return jnp.concatenate([jax.lax.stop_gradient(a) for a in nothing])


@custom_vmap
def _row_within(empty: Array) -> Array:
    return jnp.zeros((), jnp.int32)


@_row_within.def_vmap
def _count_rows(axis_size: int, in_batched: list, empty: Array) -> tuple[Array, bool]:
    # Which the next vmap outside of it meets.
    outer = _row_within(empty[0] if in_batched[0] else empty)
    return outer * axis_size + jnp.arange(axis_size, dtype=jnp.int32), True


# ---- Marks: the identity on the output, with the inputs and the layer's parameters beside it.

_mark = core.Primitive("kfac_mark")
_mark.def_impl(lambda y, *_, **__: y)
_mark.def_abstract_eval(lambda y, *_, **__: y)


def _differentiate(primals: tuple, tangents: tuple, **params: Any) -> tuple:
    capture = current_capture()
    if capture is not None and type(tangents[0]) is not ad.Zero:
        # What it moves there is not what its cotangent says.
        capture.taps[params["key"]].reason = "a derivative of it is taken inside the loss"
    return _mark.bind(*primals, **params), tangents[0]


def _batch(args: tuple, axes: tuple, *, key: str, vmaps: tuple) -> tuple:
    size = next(a.shape[axis] for a, axis in zip(args, axes, strict=True) if axis is not None)
    y = batching.bdim_at_front(args[0], axes[0], size)
    vmaps = (*vmaps, (size, tuple(axes[2:])))
    return _mark.bind(y, *args[1:], key=key, vmaps=vmaps), 0


ad.primitive_jvps[_mark] = _differentiate
batching.primitive_batchers[_mark] = _batch


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
        or the path of each by role; of a parameter stacked for a scan or vmap, the whole stack's.
      y: the layer's output, where it was computed in another way than by ``layer``.

    Raises:
      ValueError: a path that is not in the differentiated tree.

    >>> import jax.numpy as jnp, kfac
    >>> params = {"fc": {"kernel": jnp.ones((3, 2))}}
    >>> tap(kfac.Dense(), params["fc"], jnp.ones((1, 3)), path="fc").tolist()
    [[3.0, 3.0]]
    """
    y = layer(params, x) if y is None else y
    capture = current_capture()
    if capture is None:
        return y
    if isinstance(path, str):
        base = path or "model"
        paths = [f"{path}/{role}" if path else role for role in params]
    else:
        base, *_ = paths = list(path.values())
    for name in paths:
        if name not in capture.shapes:
            raise ValueError(
                "expected kfac.tap's path to name parameters of the differentiated tree, got "
                f"{name!r}; it has {', '.join(sorted(capture.shapes)[:8])}, …"
            )
    return capture.tap(base, layer, x, y, params, named=True)


def path_of(array: Any) -> str | None:
    """Where an array stands in the tree that a capture in progress differentiates.

    None outside of one or for another. It is known by its identity: what is computed from it, a
    cast or a slice, is another array.

    >>> import jax.numpy as jnp, kfac
    >>> def loss_fn(params, x):
    ...     print(path_of(params["fc"]["kernel"]))
    ...     return (x @ params["fc"]["kernel"]).mean()
    >>> layers = kfac.find_layers(loss_fn, {"fc": {"kernel": jnp.ones((3, 2))}}, jnp.ones((4, 3)))
    fc/kernel
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
