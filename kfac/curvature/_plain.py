"""Plain JAX functions.

Layers are marked by hand with ``tap``, and ``jax.lax.scan`` repeats them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from kfac.curvature._capture import Adapter, Capture, current_capture, original_scan
from kfac.curvature._layers import Dense, Generic

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree


def tap(
    layer: Dense | Generic,
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
        path
        if isinstance(path, Mapping)
        else {role: f"{path}/{role}" if path else role for role in params}
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

    None outside of one or for another.

    It is known by its identity: what is computed from it, a cast or a slice, is another array.

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
        return original_scan(f, init, xs, length, *args, **kwargs)
    return capture.scan(f, init, xs, length, args, kwargs)


def _replacements() -> Iterator[tuple[Any, str, Callable[[Callable], Callable]]]:
    yield jax.lax, "scan", lambda original: scan


def _watch(capture: Capture, params: Any) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()  # layers are marked in the loss itself


ADAPTER = Adapter(_replacements, _watch)
