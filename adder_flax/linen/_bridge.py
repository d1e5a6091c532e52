"""NNX modules inside of Linen ones, and the parameter trees of both.

These are the same but for keys of lists, which Linen writes as text.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
from flax.core import Scope

from adder_flax import recorder


def call_nnx(
    module: nn.Module,
    build: Callable[[nnx.Rngs], nnx.Module],
    *inputs: Any,
    deterministic: bool = True,
    **options: Any,
) -> Any:
    """Calls an NNX module whose parameters are those of a Linen module.

    They are drawn by `init` alone. A call looks each up, and what is missing, or of another shape,
    is Linen's error: `flax.nnx.bridge.ToLinen` (Flax 0.12.8) draws all anew in every call, and what
    is missing silently stays random.

    Args:
      module: whose method calls this, a compact one.
      build: makes the NNX module.
      *inputs: of the call.
      deterministic: else there are `rngs` of the `dropout` stream.
      **options: other arguments of the call.
    """
    make = lambda key: nnx.split(build(nnx.Rngs(key)), nnx.Param)
    graphdef, shapes = nnx.eval_shape(lambda: make(jax.random.key(0)))
    values = make(module.make_rng("params"))[1] if module.is_initializing() else shapes
    assert module.scope is not None, "a module that is called is bound"
    params = _declared(module.scope, nnx.to_pure_dict(values))
    if not deterministic:
        dropout = {"dropout": module.make_rng("dropout")} if module.has_rng("dropout") else {}
        options |= dict(deterministic=False, rngs=nnx.Rngs(**dropout))
    nnx.replace_by_pure_dict(shapes, params)
    network = nnx.merge(graphdef, shapes)
    if recorder.told_apart():
        network = recorder.in_scopes(network, module.path)
    return network(*inputs, **options)


def _declared(scope: Scope, values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The parameters of a scope that are named as these, which are its initial ones."""

    def declare(name: Any, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _declared(scope.push(str(name), reuse=True), value)
        initial = lambda _: value if isinstance(value, jax.Array) else jnp.zeros_like(value)
        return scope.param(str(name), initial)

    return {name: declare(name, value) for name, value in values.items()}


def from_nnx(params: Mapping[Any, Any]) -> dict[str, Any]:
    """The Linen form of an NNX parameter tree (`nnx.to_pure_dict(nnx.state(model, nnx.Param))`).

    >>> from_nnx({"blocks": {0: {"kernel": 1.0}}})
    {'blocks': {'0': {'kernel': 1.0}}}
    """
    return {
        str(key): from_nnx(value) if isinstance(value, Mapping) else value
        for key, value in params.items()
    }


def to_nnx(params: Mapping[str, Any]) -> dict[Any, Any]:
    """The NNX form of a Linen parameter tree (`variables["params"]`), for `nnx.update` or
    `nnx.merge`.

    >>> to_nnx({"blocks": {"0": {"kernel": 1.0}}})
    {'blocks': {0: {'kernel': 1.0}}}
    """
    index = lambda key: int(key) if key.isdecimal() else key
    return {
        index(key): to_nnx(value) if isinstance(value, Mapping) else value
        for key, value in params.items()
    }
