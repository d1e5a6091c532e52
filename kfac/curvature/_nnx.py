"""Flax NNX: finds layers while the loss is traced, without touching the model.

NNX has no interceptors: methods that are layers are replaced on their classes while a capture runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from kfac.curvature import _registry as registry
from kfac.curvature._capture import current_capture
from kfac.curvature._layers import Generic
from kfac.curvature._tracing import OfArrays

if TYPE_CHECKING:
    from jaxtyping import Array

registry.register_standard(nnx, nnx.Linear, nnx.LinearGeneral)


def _low_rank(params: dict[str, Array], x: Array) -> Array:
    return x @ params["lora_a"] @ params["lora_b"]


# What it adds to its base module, which is a layer of its own.
registry.register_layer(nnx.LoRA, describe=lambda module: Generic(_low_rank))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A method of a module as a function of its parameters (by path), its input and options."""

    graphdef: nnx.GraphDef
    method: Callable[..., Array]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # also of parameters that are not read
    __name__: str

    def __call__(self, params: dict[str, Array], x: Array, **options: Any) -> Array:
        whole = {path: jnp.zeros(shape) for path, shape in self.shapes} | params
        nested = traverse_util.unflatten_dict(whole, sep="/")
        return self.method(nnx.merge(self.graphdef, nested), x, **options)


watch = contextlib.nullcontext  # what is replaced finds the capture by itself


def replacements() -> Iterator[tuple[Any, str, Callable[[Callable], Callable]]]:
    """(Owner, name, original → replacement) of every method that is a layer."""
    for registration in registry.registrations(nnx.Module):
        tapped = functools.partial(_tapped_method, registration=registration)
        yield registration.cls, registration.method, tapped


def _tapped_method(original: Callable, registration: registry.Registration) -> Callable:
    signature = inspect.signature(original)

    def method(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        run = lambda: original(module, *args, **kwargs)
        capture = current_capture()
        if capture is None:
            return run()
        params, has_state = _variables(module, deep=registration.describe is None)
        if not params:
            return run()
        base = registration.cls.__name__
        shapes = tuple([(path, p.shape) for path, p in params.items()])
        call = _Call(nnx.graphdef(module), original, shapes, base)

        def rerun(params: dict[str, Array]) -> Any:
            twin = nnx.clone(module)
            for role, value in params.items():
                getattr(twin, role)[...] = value
            return original(twin, *args, **kwargs)

        given = list(signature.bind(module, *args, **kwargs).arguments.items())[1:]
        return registry.tap_registered(
            capture, registration, base, module, params, call, run, rerun, has_state, given
        )

    return method


def _variables(module: nnx.Module, deep: bool) -> tuple[dict[str, Array], bool]:
    """The parameters of a module, with its submodules' if deep; whether it holds other arrays."""
    graph = vars(module)
    if deep:
        graph = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(module)}
    params = {name: node for name, node in graph.items() if isinstance(node, nnx.Param)}
    arrays = (nnx.Variable, jax.Array, np.ndarray)  # such as statistics, or a convolution's mask
    others = any([isinstance(graph[name], arrays) for name in graph.keys() - params])
    own = {name: node.get_raw_value() for name, node in params.items()}
    return {name: array for name, array in own.items() if array is not None}, others


def split(loss_fn: Callable, params: Any, args: tuple, has_aux: bool) -> OfArrays | None:
    """The loss function of arrays, as ``nnx.value_and_grad`` sees modules; None without any."""
    places = [isinstance(node, nnx.Pytree) for node in (params, *args)]
    if not any(places):
        return None
    of_params = places[0]
    nodes = [node for node in (params, *args) if isinstance(node, nnx.Pytree)]

    def is_own(path: tuple, value: Any) -> bool:
        return of_params and path[0] == 0 and isinstance(value, nnx.Param)

    graphdef, own, rest = nnx.split(nodes, is_own, ...)
    rest = nnx.as_pure(rest)

    def of_arrays(params: Any, *args: Any) -> tuple[Any, Any]:
        own = nnx.State({0: params}) if of_params else nnx.State({})
        nodes = nnx.merge(graphdef, own, rest)
        left, given = iter(nodes), zip(places, (params, *args), strict=True)
        result = loss_fn(*[next(left) if is_node else a for is_node, a in given])
        loss, aux = result if has_aux else (result, None)
        return loss, (aux, nnx.as_pure(nnx.split(nodes, is_own, ...)[2]))

    arrays = tuple([None if isinstance(arg, nnx.Pytree) else arg for arg in args])
    params = own[0] if of_params else params
    return OfArrays(of_arrays, params, arrays, functools.partial(nnx.update, nodes))
