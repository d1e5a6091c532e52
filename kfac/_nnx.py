"""Flax NNX: finds the layers of a model and their parameters.

While the loss is traced, without touching the model.

NNX has no interceptors, so the methods that are layers are replaced on their classes while a
capture runs. A parameter is known by the identity of its array where ``nnx.merge`` makes a module
of the differentiated parameters; its path then travels as metadata of the variable, through
``nnx.scan``, ``nnx.vmap``, ``nnx.remat`` and ``nnx.jit``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from kfac._capture import Adapter, Capture, current_capture
from kfac._layers import Dense, Generic, Scale
from kfac._registry import (
    Registration,
    general_dense,
    is_array,
    plain_dense,
    register_layer,
    registrations,
    tap_registered,
)

if TYPE_CHECKING:
    from jaxtyping import Array

_PATH = "kfac_path"

register_layer(nnx.Linear, describe=plain_dense)
register_layer(nnx.LinearGeneral, describe=general_dense)
for _cls in (nnx.Conv, nnx.ConvTranspose, nnx.Embed, nnx.Einsum):
    register_layer(_cls)
for _cls in (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm):
    register_layer(_cls, kind=Scale)
register_layer(nnx.Embed, "attend")


@dataclasses.dataclass(frozen=True)
class _Call:
    """A method of a module as a function of its parameters (by path) and its input."""

    graphdef: nnx.GraphDef
    method: str
    __name__: str

    def __call__(self, params: dict[str, Array], x: Array) -> Array:
        nested: dict = {}
        for path, value in params.items():
            *parents, last = path.split("/")
            node = nested
            for key in parents:
                node = node.setdefault(key, {})
            node[last] = value
        return getattr(nnx.merge(self.graphdef, nested), self.method)(x)


def _replacements() -> Iterator[tuple[Any, str, Callable[[Callable], Callable]]]:
    for registration in registrations(nnx.Module):
        tapped = functools.partial(_tapped_method, registration=registration)
        yield registration.cls, registration.method, tapped
    yield nnx, "merge", _naming_merge


def _name_variables(capture: Capture, tree: Any) -> None:
    """Writes to each variable in ``tree`` the path of its array among the parameters.

    That is, the differentiated ones, if it is one.
    """
    for variable in filter(_is_variable, jax.tree.leaves(tree, is_leaf=_is_variable)):
        path = capture.paths.get(id(variable.get_raw_value()))
        if path is not None:
            variable.set_metadata(_PATH, path)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _naming_merge(merge: Callable) -> Callable:
    def merge_and_name(*args: Any, **kwargs: Any) -> Any:
        node = merge(*args, **kwargs)
        capture = current_capture()
        if capture is not None:
            _name_variables(capture, node)
        return node

    return merge_and_name


def _tapped_method(original: Callable, registration: Registration) -> Callable:
    def method(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        capture = current_capture()
        if capture is None:
            return original(module, *args, **kwargs)
        with capture.mute():  # what is called inside belongs to this layer
            y = original(module, *args, **kwargs)
            layer, variables = _describe(module, registration)
        x = args[0] if args else next(iter(kwargs.values()), None)
        if layer is None or not variables or not is_array(x):
            return y
        params = {role: _parameter(capture, variable) for role, variable in variables.items()}
        paths = [path for path, _, _ in params.values() if path is not None]
        name = _common_parent(paths) if paths else f"({registration.cls.__name__})"
        return tap_registered(capture, name, layer, module, x, y, params)

    return method


def _describe(
    module: nnx.Module, registration: Registration
) -> tuple[Dense | Generic | None, Mapping[str, nnx.Variable]]:
    if registration.describe is not None:
        own = {
            n: v
            for n, v in vars(module).items()
            if isinstance(v, nnx.Param) and v.get_raw_value() is not None
        }
        return registration.describe(module), own
    variables = {}
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            if not isinstance(node, nnx.Param):
                return None, {}  # state besides parameters: not a function of them and the input
            variables["/".join(map(str, path))] = node
    # Paths are metadata; without them, layers that differ in nothing else compare equal
    # and are solved together.
    paths = {role: v.get_metadata(_PATH, None) for role, v in variables.items()}
    for role, variable in variables.items():
        if paths[role] is not None:
            variable.del_metadata(_PATH)
    graphdef = nnx.graphdef(module)
    for role, variable in variables.items():
        if paths[role] is not None:
            variable.set_metadata(_PATH, paths[role])
    return registration.layer(
        module, _Call(graphdef, registration.method, registration.cls.__name__)
    ), variables


def _parameter(
    capture: Capture, variable: nnx.Variable
) -> tuple[str | None, tuple[int, ...], bool]:
    value = variable.get_raw_value()
    path = capture.paths.get(id(value))
    if path is not None:
        return path, value.shape, True
    # Inside a scan or vmap of NNX the array is another one, a slice perhaps: the path is
    # known, the identity is not.
    return variable.get_metadata(_PATH, None), value.shape, False


def _common_parent(paths: list[str]) -> str:
    split = [path.split("/") for path in paths]
    parents = []
    for keys in zip(*(p[:-1] for p in split), strict=False):
        if len(set(keys)) > 1:
            break
        parents.append(keys[0])
    return "/".join(parents) or "model"


@contextlib.contextmanager
def _watch(capture: Capture, params: Any) -> Iterator[None]:
    _name_variables(capture, params)  # of losses that are differentiated in a state or a module
    yield


ADAPTER = Adapter(_replacements, _watch)
