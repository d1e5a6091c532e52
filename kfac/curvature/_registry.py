"""Which methods of which module classes are layers, and of what kind; for Flax NNX and Linen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from kfac.curvature._layers import Dense, Generic, Scale

if TYPE_CHECKING:
    from kfac.curvature._capture import Capture

Describe = Callable[[Any], "Dense | Generic | None"]


class Registration(NamedTuple):
    """A method that is a layer, as ``register_layer`` has it."""

    cls: type
    method: str
    describe: Describe | None
    kind: type[Generic] | type[Scale] = Generic

    def layer(
        self, module: Any, call: Callable, has_state: bool, beside: dict[str, Any]
    ) -> Generic | Dense | str:
        """The layer that ``call`` is, of the parameters and its input, or why none.

        ``beside`` is what else it is called with, by name.
        """
        if self.describe is not None:
            return self.describe(module) or "its kind of call has no curvature here"
        if self.scales_features(module):
            return Scale(fn=_scaled if has_state or beside else call)
        options = tuple(beside.items())
        if not is_hashable(options):
            return f"arrays are among what it is called with beside its input: {', '.join(beside)}"
        return "it holds state" if has_state else Generic(call, options)

    def scales_features(self, module: Any) -> bool:
        """Whether a module's parameters act on each feature of the last axis alone."""
        axes = getattr(module, "feature_axes", getattr(module, "axis", -1))
        return self.kind is Scale and axes in (-1, (-1,))


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


_DENSE_ROLES = {"kernel", "bias", "scale"}
_registrations: dict[tuple[type, str], Registration] = {}


def register_layer(
    cls: type,
    method: str = "__call__",
    describe: Describe | None = None,
    *,
    kind: type[Generic] | type[Scale] = Generic,
) -> None:
    """Makes a method of a Flax module class (NNX or Linen) a layer with curvature of its own.

    Its first argument is the layer's input, with the example axis first and the features last; its
    result is an array. Flax's own dense, convolution, embedding, einsum and normalisation layers
    and ``nnx.LoRA`` are registered already.

    Args:
      cls, method: the class that defines the method, and its name.
      describe: module → ``kfac.Dense()``, ``kfac.L1Dense()``, ``kfac.Generic(fn, …)`` or None (no
        layer), of parameters that the module owns directly, by attribute name. Without it the
        method itself is differentiated, with the modules that are called inside it.
      kind: without ``describe``, ``kfac.Scale`` for a module whose parameters ``scale`` and
        ``bias`` act on each feature of the last axis alone, as those of norms do.

    Raises:
      ValueError: the class is none of Flax's modules, or has no such method.

    >>> from flax import nnx
    >>> class Gain(nnx.Module):
    ...     def __call__(self, x): ...
    >>> register_layer(Gain)
    """
    libraries = [sys.modules[name] for name in ("flax.nnx", "flax.linen") if name in sys.modules]
    modules = tuple([library.Module for library in libraries])
    if not (isinstance(cls, type) and issubclass(cls, modules)):
        raise ValueError(
            f"expected a class of Flax modules (NNX or Linen), got {cls!r}; mark layers of other "
            "code with kfac.tap."
        )
    owner = next((base for base in cls.__mro__ if method in base.__dict__), None)
    if owner is None or owner is object:
        raise ValueError(
            f"expected a method that {cls.__name__} defines, got {method!r}; name the one that is "
            "the layer."
        )
    if describe is None and kind is Generic and (owner, method) in _registrations:
        return  # what is known of it says more
    _registrations[owner, method] = Registration(owner, method, describe, kind)


def register_standard(library: Any, dense: type, general: type) -> None:
    """Registers the layers that both of Flax's libraries have."""
    register_layer(dense, describe=lambda module: Dense())
    register_layer(general, describe=_general_dense)
    for cls in (library.Conv, library.ConvTranspose, library.Embed, library.Einsum):
        register_layer(cls)
    for cls in (library.BatchNorm, library.LayerNorm, library.RMSNorm, library.GroupNorm):
        register_layer(cls, kind=Scale)
    register_layer(library.Embed, "attend")


def registrations(base: type) -> list[Registration]:
    return [r for r in _registrations.values() if issubclass(r.cls, base)]


def tap_registered(
    capture: Capture,
    registration: Registration,
    base: str,
    module: Any,
    params: dict[str, Any],
    call: Callable,
    run: Callable[[], Any],
    rerun: Callable[[dict[str, Any]], Any],
    has_state: bool,
    given: list[tuple[str, Any]],
) -> Any:
    """Runs and taps a call of a Flax layer, or tells why there is none to tap.

    ``call`` is the method as a function of parameters, input and options, ``run`` the call itself,
    ``rerun`` that with other parameters, ``given`` its arguments by name, the input first.
    """
    x: Any = given[0][1] if given else None
    beside = {name: argument for name, argument in given[1:] if argument is not None}
    with capture.mute(registration.describe is None):
        if (has_state or beside) and registration.scales_features(module):
            change_nothing = {"bias": jnp.zeros_like}
            x = rerun({n: change_nothing.get(n, jnp.ones_like)(p) for n, p in params.items()})
        y = run()
    layer = registration.layer(module, call, has_state, beside)
    if not _is_array(x):
        layer = "its input is no array"
    if isinstance(layer, str):
        return capture.tap(base, None, x, y, params, reason=layer) if _is_array(y) else y
    method = registration.method
    if getattr(type(module), method) is not getattr(registration.cls, method):
        params = _parameters_read(layer, params, x, capture)
    if not isinstance(layer, Dense):
        return capture.tap(base, layer, x, y, params)
    # Contracted axes and output axes of general dense layers become one axis each.
    axes = -1 if isinstance(layer, Scale) else getattr(module, "axis", -1)
    # Flax contracts them in their order in x, whatever the order in which they are named.
    axes = sorted([a % x.ndim for a in ((axes,) if isinstance(axes, int) else axes)])
    others = [a for a in range(x.ndim) if a not in axes]
    matrix = jnp.transpose(x, (*others, *axes)).reshape(*[x.shape[a] for a in others], -1)
    flat = y.reshape(*y.shape[: len(others)], -1)
    return capture.tap(base, layer, matrix, flat, params).reshape(y.shape)


def _parameters_read(
    layer: Dense | Generic, params: dict[str, Any], x: Any, capture: Capture
) -> dict[str, Any]:
    """Those of a class that is derived of a registered one, and may have others."""
    if isinstance(layer, Dense):
        return {name: params[name] for name in _DENSE_ROLES & params.keys()}
    with capture.mute():
        jaxpr = jax.make_jaxpr(layer)(params, x).jaxpr
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    names = zip(sorted(params), jaxpr.invars, strict=False)  # the parameters come first
    return {name: params[name] for name, variable in names if id(variable) in read}


def _scaled(params: dict[str, Any], normalized: Any) -> Any:
    """The learned part of a norm that has normalized the input by its state."""
    y = normalized * params["scale"] if "scale" in params else normalized
    return y + params["bias"] if "bias" in params else y


def _general_dense(module: Any) -> Dense | None:
    """The layer of a dense module with several contracted axes; none with a kernel for each row."""
    batch_axes = getattr(module, "batch_axis", None) or getattr(module, "batch_dims", None)
    axes = getattr(module, "axis", -1)
    return None if batch_axes else Dense(num_in_axes=1 if isinstance(axes, int) else len(axes))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.ndim > 0
