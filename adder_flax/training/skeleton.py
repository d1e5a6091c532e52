"""A model taken apart: its structure, its parameters, and what else it carries.

BatchNorm's statistics are no parameters, yet a step changes them and evaluation needs them: they
lie in the train state beside the parameters. Random streams that layers of Flax hold, as
``nnx.Dropout(rngs=rngs)`` does, are nowhere: each step gives them keys that follow from its own.
"""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

Leaves = tuple[tuple[tuple, jax.ShapeDtypeStruct], ...]

_STREAMS = 1 << 21  # dropout layers fold small numbers into the same key


class Skeleton(NamedTuple):
    """A model without its arrays; :func:`take_apart` makes it."""

    graphdef: nnx.GraphDef
    carried: Leaves = ()
    streams: Leaves = ()

    def merge(self, variables: Any, key: Array | None = None) -> nnx.Module:
        """Returns the model with a nested dict of its parameters and of what it carries.

        Where the latter is absent it has its shape there. A ``key`` of its random streams puts it
        into training mode; None is evaluation.
        """
        if self.carried or self.streams:
            flat = dict(self.carried) | self._keys(key) | flatten_dict(variables)
            variables = unflatten_dict(flat)
        model = nnx.merge(self.graphdef, variables)
        model.eval() if key is None else model.train()
        return model

    def carried_by(self, model: nnx.Module) -> dict[str, Any]:
        """What a model carries beside its parameters, as a nested dict."""
        if not self.carried:
            return {}
        # Not all that is there: a call may have added what it recorded.
        found: dict[Any, Any] = flatten_dict(nnx.to_pure_dict(nnx.state(model)))
        return unflatten_dict({path: found[path].astype(s.dtype) for path, s in self.carried})

    def separate(self, variables: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the parameters among variables, and what is carried beside them."""
        if not self.carried:
            return variables, {}
        params, paths = flatten_dict(variables), dict(self.carried)
        carried = {path: params.pop(path) for path in paths}
        return unflatten_dict(params), unflatten_dict(carried)

    def _keys(self, key: Array | None) -> dict[tuple, Array]:
        key = jax.random.fold_in(jax.random.key(0) if key is None else key, _STREAMS)

        def first(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros(leaf.shape, leaf.dtype)  # how often it was asked
            own = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
            return jax.random.split(own, leaf.shape) if leaf.shape else own

        return {path: first(path, leaf) for path, leaf in self.streams}


def take_apart(
    model: nnx.Module | tuple[nnx.GraphDef, nnx.State],
) -> tuple[Skeleton, dict[str, Any]]:
    """Returns a model's structure, and a nested dict of its parameters and of what it carries.

    Args:
      model: a module, or what ``nnx.split`` gives of it: out of ``jax.eval_shape`` the latter alone
        knows arrays that are no variables, as ``nnx.WeightNorm`` has them.

    Example:
      >>> skeleton, variables = take_apart(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
      >>> sorted(variables), [path for path, _ in skeleton.carried]
      (['bias', 'mean', 'scale', 'var'], [('mean',), ('var',)])
    """
    graphdef, state = nnx.split(model) if isinstance(model, nnx.Module) else model
    params, streams, carried = nnx.split_state(state, nnx.Param, nnx.RngState, ...)
    skeleton = Skeleton(graphdef, _leaves(carried), _leaves(streams))
    return skeleton, joined(nnx.to_pure_dict(params), nnx.to_pure_dict(carried))


def joined(params: Any, carried: Any) -> Any:
    """Returns one nested dict of parameters and of what is carried beside them."""
    return unflatten_dict(flatten_dict(params) | flatten_dict(carried)) if carried else params


def _leaves(state: Any) -> Leaves:
    flat: dict[Any, Any] = flatten_dict(nnx.to_pure_dict(state))
    return tuple((path, jax.ShapeDtypeStruct(x.shape, x.dtype)) for path, x in flat.items())
