"""What the devices of a mesh share.

Inverses and solutions of layers are the same on all devices of a mesh that splits batches: computed
by all, they would cost each device what they cost one. So lanes are dealt out, and results sent to
all. Under the axes of ``jax.shard_map`` and ``jax.pmap``, where programs are each device's own,
what batches give is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree

    AxisName = str | tuple[str, ...] | None


def over_devices(
    function: Callable[..., PyTree],
    *lanes: PyTree,
    kept: tuple[PyTree, ...] = (),
    whole: bool = True,
) -> Any:
    """``function(*lanes, *kept)``, some lanes by each device where a mesh is set.

    Args:
      function: treats every lane by itself, and gives arrays with the lanes first.
      *lanes: trees of arrays with the lanes first, which all devices have.
      kept: more of them, of which devices keep a part of each lane where it can be cut.
      whole: whether every device gets all results, else they are as ``kept``.
    """
    axes, parts = _automatic_axes()
    if parts == 1:
        return function(*lanes, *kept)
    count = jax.tree.leaves((lanes, kept))[0].shape[0]
    # A single lane is computed by all, since there would be nothing to send but copies of it.
    dealt = count > 1
    missing = -count % parts if dealt else 0

    def padded(a: Array) -> Array:  # with copies, which are as regular as what they copy
        return jnp.concatenate([a, *[a[:1]] * missing])

    def cut(a: Array) -> Array:
        return jax.lax.with_sharding_constraint(a, _within_lanes(a, axes, parts))

    def whole_or_cut(a: Array) -> Array:
        # What devices have parts of is left to XLA: a place for its stack would be one for what it
        # was computed from, too, the activations of the network in the end.
        return a if any(_within_lanes(a, axes, parts)) else _whole(a)

    if missing:
        lanes, kept = jax.tree.map(padded, (lanes, kept))
    spec = PartitionSpec(axes) if dealt else PartitionSpec()
    # Lanes are put together one by one for what follows, and cut out of its results. Without places
    # of their own the whole would count as dealt out on either side, and XLA would send each lane
    # around by itself; so one exchange serves all.
    result = jax.shard_map(
        function, in_specs=spec, out_specs=spec, axis_names=set(axes), check_vma=False
    )(*jax.tree.map(_whole, lanes), *jax.tree.map(whole_or_cut, kept))
    result = jax.tree.map(_whole if whole else cut, result)
    return jax.tree.map(lambda a: a[:count], result)


def divides_lanes() -> bool:
    return _automatic_axes()[1] > 1


def mean_over(axis_name: AxisName, tree: PyTree) -> PyTree:
    """The mean of what the devices along manual axes have; the tree itself without any."""
    return tree if axis_name is None else jax.lax.pmean(tree, axis_name)


def own_along(axes: Collection[str], tree: PyTree) -> PyTree:
    """The arrays as each device's own along manual axes.

    ``jax.shard_map`` keeps account of it, and sums the gradients of what all devices share.
    """
    manual = [name for name in jax.sharding.get_abstract_mesh().manual_axes if name in axes]

    def one(array: Array) -> Array:
        missing = tuple(name for name in manual if name not in axes_of(array))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(one, tree) if manual else tree


def axes_of(array: Array) -> frozenset[str]:
    """The manual axes along which an array differs, none where JAX keeps no account of it."""
    kind = jax.typeof(array)
    # In JAX's name for it until 0.10, and in the present one.
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def names_of(axis_name: AxisName) -> tuple[str, ...]:
    """The axes as a tuple, which may be empty."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())


def _whole(array: Array) -> Array:
    return jax.lax.with_sharding_constraint(array, PartitionSpec())


def _within_lanes(array: Array, axes: tuple[str, ...], parts: int) -> PartitionSpec:
    """The longest axis behind the lanes that the devices divide, or none."""
    divided = [i for i in range(1, array.ndim) if array.shape[i] % parts == 0]
    longest = max(divided, key=lambda i: array.shape[i], default=None)
    return PartitionSpec(*(axes if i == longest else None for i in range(array.ndim)))


def _automatic_axes() -> tuple[tuple[str, ...], int]:
    """Axes of the mesh over which XLA divides work, and the product of their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple([name for name, kind in kinds if kind == AxisType.Auto])
    return axes, math.prod([mesh.shape[name] for name in axes])
