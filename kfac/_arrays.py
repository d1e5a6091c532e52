"""Trees of arrays: by path, joined, and shared by devices.

Inverses and solutions of layers are the same on all devices of a mesh that splits batches: computed
by all, they would cost each device what they cost one. So lanes are dealt out, and results sent to
all. Under the axes of ``jax.shard_map`` and ``jax.pmap``, where programs are each device's own,
what batches give is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec

Node = TypeVar("Node")

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree

    Flat = dict[str, Array]  # path → array
    AxisName = str | tuple[str, ...] | None


def path_name(path: tuple) -> str:
    """A tree path as text, ``"blocks/0/kernel"``, of a box (a Flax variable) its content's."""
    boxed = len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value")
    return jax.tree_util.keystr(path[:-1] if boxed else path, simple=True, separator="/")


def flatten(tree: PyTree[Array]) -> Flat:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def masked_paths(tree: PyTree[Any]) -> list[str]:
    """Where a tree has a ``optax.MaskedNode`` or None in place of an array or of a branch."""
    is_masked = lambda node: node is None or isinstance(node, optax.MaskedNode)
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_masked)[0]
    return [path_name(path) for path, leaf in leaves if is_masked(leaf)]


def nodes(tree: PyTree[Any], kind: type[Node]) -> list[Node]:
    leaves = jax.tree.leaves(tree, is_leaf=kind.__instancecheck__)
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def all_finite(arrays: Iterable[Array]) -> Bool[Array, ""]:
    """Whether no array has an entry that is infinite or not a number."""
    wrong = jnp.array([~jnp.isfinite(array).all() for array in arrays], jnp.float32).sum()
    # XLA copies a cheap chain, as this sum is, into each of the hundreds of fusions that ask for
    # its end, which is most of what it then compiles; a root counts as dear and is taken once.
    return jnp.sqrt(wrong) == 0


def all_fit(arrays: Iterable[Array]) -> Bool[Array, ""]:
    """Whether what was finite in float32 still is where it was cast to a dtype that holds less."""
    most = jnp.finfo(jnp.float32).maxexp
    return all_finite([array for array in arrays if jnp.finfo(array.dtype).maxexp < most])


def concatenated(trees: Iterable[PyTree[Array]], axis: int = 0) -> PyTree[Array]:
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis), *trees)


def over_devices(
    function: Callable[..., PyTree],
    *lanes: PyTree,
    kept: tuple[PyTree, ...] = (),
    whole: bool = True,
) -> Any:
    """``function(*lanes, *kept)``, some lanes by each device where a mesh is set.

    Arguments and results are trees of arrays with the lanes first. All devices have ``lanes``; of
    ``kept`` they keep a part of each lane where it can be cut, and so of the results unless these
    are to be ``whole``.
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


def one_by_one_on_cpus(
    function: Callable[..., Any], *lanes: Array, elsewhere: Callable[..., Any] | None = None
) -> Any:
    """``function`` of each lane on CPUs, elsewhere of all at once, or what ``elsewhere`` is.

    For factorizations: jaxlib's batched ones wait on CPUs for threads of the pool that they run on,
    two at once for ever where it has two threads.
    """
    return jax.lax.platform_dependent(
        *lanes,
        cpu=lambda *lanes: jax.lax.map(lambda lane: function(*lane), lanes),
        default=elsewhere or function,
    )


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
