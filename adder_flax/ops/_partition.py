"""Splits a backend's function over devices as its operands come.

XLA splits over devices what it can look into. A kernel is a closed box: left alone, every device
would gather all of its operands and compute all of its results. So each function states its axes,
once, and from them follows how it can be split, in one of two ways:

- by a *rule* for the compiler (`custom_partitioning`): operands stay split as they come. An axis of
  every result costs nothing, the axis that is summed over costs one sum over devices at the end,
  and the others are gathered, as is an axis with a capital letter, which is needed whole.
- over the *mesh* of `jax.set_mesh` (`jax.shard_map`): the batch, or else the rows, over all of its
  automatic axes. TPUs need this one: their compiler does not call back into Python for rules when
  it compiles ahead of time.

Inside the user's own `jax.shard_map` there is nothing left to split. On meshes with explicit axes,
whose types say how arrays are split, the result is split as the operands are and the functions run
on automatic axes.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from adder_flax.arrays import AnyArray

Axes = Sequence[Sequence[str]]


def split_by_rule(function: Callable, operand_axes: Axes, result_axes: Axes) -> Callable:
    """Returns `function`, which makes parts of parts, with a rule that tells the compiler which
    parts of the operands give which parts of the results.
    """
    names = list(dict.fromkeys(name for axes in [*operand_axes, *result_axes] for name in axes))
    kept = [n for n in names if all(n in axes for axes in result_axes) and not n.isupper()]
    summed = [name for name in names if not any(name in axes for axes in result_axes)]

    def partition(mesh, operands, results):
        arrays = [
            *zip(jax.tree.leaves(results), result_axes, strict=True),
            *zip(operands, operand_axes, strict=True),
        ]
        # Of two arrays that want one mesh axis for different axes of theirs, the smaller is moved.
        arrays.sort(key=lambda array_and_axes: -math.prod(array_and_axes[0].shape))
        split = _assign_mesh_axes(mesh, arrays, kept + summed)
        partial_over = tuple(axis for name in summed for axis in split.get(name, ()))

        def place(axes):
            return NamedSharding(mesh, P(*[split.get(name) for name in axes]))

        def on_each_device(*parts):
            # Parts live on one device: the user's mesh, at hand here, says nothing about them.
            device = mesh.abstract_mesh.abstract_device
            with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
                partial = function(*parts)
                return jax.lax.psum(partial, partial_over) if partial_over else partial

        result_places = jax.tree.unflatten(jax.tree.structure(results), map(place, result_axes))
        return mesh, on_each_device, result_places, tuple(map(place, operand_axes))

    split = custom_partitioning(function)
    join = lambda side: ", ".join(" ".join(axes) for axes in side)
    split.def_partition(
        partition,
        sharding_rule=f"{join(operand_axes)} -> {join(result_axes)}",
        reduction_factors=tuple(summed),
        need_replication_factors=tuple(name for name in names if name not in kept + summed),
    )
    return split


def _assign_mesh_axes(
    mesh: Mesh | AbstractMesh, arrays, names: Sequence[str]
) -> Mapping[str, tuple[str, ...]]:
    """Returns over which mesh axes to split each of the named axes: those of the first array that
    splits it evenly, of pairs of an array type with a sharding and the names of its axes.
    """
    split = {}
    for array, axes in arrays:
        spec = (*array.sharding.spec, *[None] * len(axes))
        for name, length, entry in zip(axes, array.shape, spec, strict=False):
            wanted = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            taken = [axis for used in split.values() for axis in used]
            fits = (
                not set(wanted) & set(taken)
                and length % math.prod(mesh.shape[axis] for axis in wanted) == 0
            )
            if wanted and fits and name in names and name not in split:
                split[name] = wanted
    return split


def split_over_mesh(function: Callable, operand_axes: Axes, result_axes: Axes) -> Callable:
    """Returns `function` split over the automatic axes of the mesh at hand."""
    names = dict.fromkeys(name for axes in operand_axes for name in axes)
    candidates = [name for name in names if name not in "nk" and not name.isupper()]

    def on_mesh(*operands):
        mesh = jax.sharding.get_abstract_mesh()
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        # Those of one device too: Mosaic refuses a kernel where any axis is left to the compiler.
        automatic = [axis for axis, kind in kinds if kind == AxisType.Auto]
        if math.prod(mesh.shape[axis] for axis in automatic) == 1:
            return function(*operands)
        pairs = zip(operand_axes, operands, strict=True)
        lengths = {name: n for axes, a in pairs for name, n in zip(axes, a.shape, strict=True)}
        split: dict[str, tuple[Any, ...]] = {name: () for name in candidates}
        for axis in automatic:
            for name in candidates:
                wanted = (*split[name], axis)
                if lengths[name] % math.prod(mesh.shape[other] for other in wanted) == 0:
                    split[name] = wanted
                    break

        def on_each_device(*parts):
            results, structure = jax.tree.flatten(function(*parts))
            missing = [
                tuple(a for name in candidates if name not in axes for a in split[name])
                for axes in result_axes
            ]
            summed = zip(results, missing, strict=True)
            results = [jax.lax.psum(r, axes) if axes else r for r, axes in summed]
            return jax.tree.unflatten(structure, results)

        def places(all_axes):
            return tuple(P(*[split.get(name) or None for name in axes]) for axes in all_axes)

        out = places(result_axes)
        return jax.shard_map(
            on_each_device,
            in_specs=places(operand_axes),
            out_specs=out[0] if len(out) == 1 else out,
            axis_names=set(automatic),
            check_vma=False,
        )(*operands)

    return on_mesh


def keep_explicit_axes(
    function: Callable[..., jax.Array], formula: str, *operands: jax.Array
) -> jax.Array:
    """Calls a function of arrays, which may be split over explicit axes of a mesh, as if these were
    automatic; the result is split along its axes as the first operand is that has them.

    The formula names all axes as `jnp.einsum` does: `"...mk,kn->...mn"`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return function(*operands)
    *inputs, result = [axes.removeprefix("...") for axes in re.split(",|->", formula)]
    leading = [a.ndim - len(own) for a, own in zip(operands, inputs, strict=True)]
    # From the end: leading axes broadcast.
    names = [[f"b{n}" for n in range(count, 0, -1)] for count in (*leading, max(leading))]
    *operand_axes, result_axes = [[*a, *b] for a, b in zip(names, (*inputs, result), strict=True)]
    types = zip(map(jax.typeof, operands), operand_axes, strict=True)
    split = _assign_mesh_axes(mesh, types, result_axes)
    place = P(*[split.get(name) for name in result_axes])
    # Given a function, auto_axes returns one; its type is also that of what it returns without.
    return jax.sharding.auto_axes(function, out_sharding=place)(*operands)  # pyright: ignore[reportReturnType]


def vary_alike(*operands: AnyArray) -> list[AnyArray]:
    """Returns the operands as varying over all manual axes of the mesh over which any of them does,
    as types under `jax.shard_map` ask for. Transposed, it sums the gradient of an operand that all
    devices share.
    """
    varying = [jax.typeof(a).manual_axis_type.varying for a in operands]
    missing = [tuple(frozenset().union(*varying) - own) for own in varying]
    cast = zip(operands, missing, strict=True)
    return [jax.lax.pcast(a, axes, to="varying") if axes else a for a, axes in cast]


def result_type(
    shape: Sequence[int], dtype: jax.typing.DTypeLike, *operands: jax.Array
) -> jax.ShapeDtypeStruct:
    """Returns the type of what a kernel computes from operands that vary alike."""
    scalar = jax.eval_shape(lambda a: a.sum(), operands[0])
    return scalar.update(shape=tuple(shape), dtype=dtype)
