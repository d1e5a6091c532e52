"""Which methods of which module classes are layers, and of what kind.

Shared by the NNX and the Linen adapter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kfac.curvature._layers import Dense, Generic, Scale

Describe = Callable[[Any], "Dense | Generic | None"]


@dataclasses.dataclass(frozen=True)
class Registration:
    """A method that is a layer.

    Attributes:
      cls: the module class that defines the method.
      method: its name.
      describe: module → layer kind; None as result leaves the module alone. None instead of a
        function: the module itself, as a function of its parameters and input, is the layer.
      kind: of which kind, ``Generic`` or ``Scale``.
    """

    cls: type
    method: str
    describe: Describe | None
    kind: type[Generic] | type[Scale] = Generic

    def layer(self, module: Any, call: Callable, has_state: bool) -> Generic | Scale | Dense | str:
        """The layer that this call of a module is, or why it is none.

        Args:
          module: whose method is called.
          call: the method, as a function of the module's parameters and its input.
          has_state: whether the module holds more than parameters.
        """
        if self.describe is not None:
            return self.describe(module) or "its kind of call has no curvature here"
        if has_state:
            return Scale(fn=_scaled) if self.scales_features(module) else "it holds state"
        return Scale(fn=call) if self.scales_features(module) else Generic(call)

    def scales_features(self, module: Any) -> bool:
        """Whether a module's parameters act on each feature of the last axis alone."""
        # A norm along other axes has scales that do not belong to features of the last
        # one.
        axes = getattr(module, "feature_axes", getattr(module, "axis", -1))
        return self.kind is Scale and axes in (-1, (-1,))


_registrations: dict[tuple[type, str], Registration] = {}


def register_layer(
    cls: type,
    method: str = "__call__",
    describe: Describe | None = None,
    *,
    kind: type[Generic] | type[Scale] = Generic,
) -> None:
    """Makes a method of a Flax module class (NNX or Linen) a layer with curvature of its own.

    The method's first argument is the layer's input, with the example axis first and the features
    last; its result is an array. Modules called inside it are part of it, unless ``describe`` says
    what it is without them. Flax's own dense, convolution, embedding, einsum and normalisation
    layers and ``nnx.LoRA`` are registered already.

    Args:
      cls: the class that defines the method.
      method: ``"__call__"``, or a method that is called on it.
      describe: module → ``kfac.Dense()``, ``kfac.L1Dense()``, ``kfac.Generic(fn, …)`` or None (no
        layer). The layer's parameters are those that the module owns directly, by attribute name.
        Without ``describe`` the method itself is differentiated, and the parameters of submodules
        belong to the layer too.
      kind: without ``describe``, ``kfac.Scale`` for a module whose parameters ``scale`` and
        ``bias`` act on each feature of the last axis alone, as those of norms do; it then has
        Kronecker factors.

    Raises:
      ValueError: the class is none of Flax's modules, or has no such method.

    >>> from flax import nnx
    >>> class Gain(nnx.Module):
    ...     def __call__(self, x): ...
    >>> register_layer(Gain)
    """
    libraries = [sys.modules[name] for name in ("flax.nnx", "flax.linen") if name in sys.modules]
    if not (
        isinstance(cls, type) and issubclass(cls, tuple(library.Module for library in libraries))
    ):
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


@contextlib.contextmanager
def temporary() -> Iterator[None]:
    """Forgets, at its end, what was registered inside.

    >>> from flax import nnx
    >>> class Gain(nnx.Module):
    ...     def __call__(self, x): ...
    >>> with temporary():
    ...     register_layer(Gain)
    >>> [(cls, "__call__") in _registrations for cls in (Gain, nnx.Linear)]
    [False, True]
    """
    # They register Flax's own layers, once in a process, when they load.
    for adapter in ("kfac.curvature._nnx", "kfac.curvature._linen"):
        importlib.import_module(adapter)
    kept = dict(_registrations)
    try:
        yield
    finally:
        _registrations.clear()
        _registrations.update(kept)


def registrations(base: type) -> list[Registration]:
    """All registrations of subclasses of ``base``."""
    return [r for r in _registrations.values() if issubclass(r.cls, base)]


def tap_registered(
    capture: Any, base: str, layer: Dense | Generic | str, module: Any, x: Any, y: Any, params: Any
) -> Any:
    """Taps a call of a Flax layer, or tells why there is none.

    Contracted axes and output axes of general dense layers become one axis each.
    """
    if not is_array(x):
        layer = "its input is no array"
    if isinstance(layer, str):
        return capture.tap(base, None, x, y, params, reason=layer) if is_array(y) else y
    if not isinstance(layer, Dense):
        return capture.tap(base, layer, x, y, params)
    axes = getattr(module, "axis", -1) if not layer.elementwise else -1
    axes = [a % x.ndim for a in ((axes,) if isinstance(axes, int) else axes)]
    others = [a for a in range(x.ndim) if a not in axes]
    matrix = jnp.transpose(x, (*others, *axes)).reshape(*(x.shape[a] for a in others), -1)
    flat = y.reshape(*y.shape[: len(others)], -1)
    return capture.tap(base, layer, matrix, flat, params).reshape(y.shape)


def neutral(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a norm that change nothing."""
    return {n: (jnp.zeros_like if n == "bias" else jnp.ones_like)(p) for n, p in params.items()}


def _scaled(params: dict[str, Any], normalized: Any) -> Any:
    """The learned part of a norm that holds state, which has normalized the input."""
    y = normalized * params["scale"] if "scale" in params else normalized
    return y + params["bias"] if "bias" in params else y


def plain_dense(module: Any) -> Dense:
    """The layer of a dense module that contracts the last axis."""
    return Dense()


def general_dense(module: Any) -> Dense | None:
    """The layer of a dense module with several contracted axes.

    None if it has one kernel per batch row.
    """
    batch_axes = getattr(module, "batch_axis", None) or getattr(module, "batch_dims", None)
    axes = getattr(module, "axis", -1)
    return None if batch_axes else Dense(num_in_axes=1 if isinstance(axes, int) else len(axes))


def is_array(x: Any) -> bool:
    """Whether x is a JAX array with at least one axis, traced or not."""
    return isinstance(x, jax.Array) and x.ndim > 0
