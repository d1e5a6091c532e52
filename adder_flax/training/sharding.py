"""Device mesh and where each array of a run lives on it.

The mesh has three axes: ``data`` (batch only), ``fsdp`` (batch and parameters) and ``tensor``
(heads and MLP columns).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from adder_flax.errors import RunError, first_line
from adder_flax.parameters import Facts

_MESH_AXES = ("data", "fsdp", "tensor")
_BATCH_AXES = ("data", "fsdp")

# What belongs to no parameter and has fewer numbers is not split: to gather it would take longer
# than it saves.
_SMALLEST_SPLIT = 2**14

# Axes that a layer names, see adder_flax.parameters.name_axis: columns of query, key, value and fc1
# belong to a head or a hidden unit, rows of out and fc2 consume them.
_OVER_TENSOR = ("heads", "hidden")


def devices_at_hand() -> list[jax.Device]:
    """Returns all devices of the run, of the kind that the environment asks for."""
    try:
        return jax.devices()
    except Exception as error:  # of plugins, too
        got = first_line(error) if str(error) else "none"
        wanted = jax.config.values["jax_platforms"] or ""
        raise RunError(
            f"expected devices of JAX_PLATFORMS={wanted}, got: {got}; "
            "unset JAX_PLATFORMS, set it to cpu, or install JAX for the accelerator"
        ) from error


def make_mesh(axis_sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with axes ``data``, ``fsdp`` and ``tensor``.

    Raises:
      RunError: the sizes do not multiply to the number of devices.

    Example:
      >>> make_mesh({"data": -1, "fsdp": 1, "tensor": 1}).axis_names
      ('data', 'fsdp', 'tensor')
    """
    devices = list(devices if devices is not None else devices_at_hand())
    sizes = [int(axis_sizes[name]) for name in _MESH_AXES]
    given = dict(zip(_MESH_AXES, sizes, strict=True))
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = max(len(devices) // known, 1)
    if math.prod(sizes) != len(devices):
        raise RunError(
            f"expected mesh sizes that multiply to {len(devices)} devices, got {given}; "
            "set one of --config.mesh.{data,fsdp,tensor} to -1 to take what the others leave"
        )
    return jax.make_mesh(sizes, _MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def _parameter_spec(shape: Sequence[int], mesh: Mesh | AbstractMesh, facts: Facts) -> P:
    """How a parameter, or a moment of one, is split over the mesh.

    Axes that its facts name are split over ``tensor``, the longest of the others over ``fsdp``.
    What the mesh does not divide into whole parts stays whole: every shape is valid on every mesh.
    """
    spec: list[str | None] = [None] * len(shape)
    tensor = mesh.shape["tensor"]
    for i, axis in enumerate(facts.axes):
        # JAX refuses kernels on axes that are split unevenly (IndivisibleError).
        if axis and axis.name in _OVER_TENSOR and tensor > 1 and axis.parts % tensor == 0:
            spec[i] = "tensor"
    free = [i for i in range(len(shape)) if spec[i] is None and shape[i] % mesh.shape["fsdp"] == 0]
    if free and mesh.shape["fsdp"] > 1:
        spec[max(free, key=lambda i: shape[i])] = "fsdp"
    return P(*spec)


def _free_spec(shape: Sequence[int], mesh: Mesh | AbstractMesh) -> P:
    """How what is like no parameter is split: factors of curvature lie over all devices."""
    parts = num_batch_shards(mesh)
    divided = [i for i, size in enumerate(shape) if size % parts == 0]
    if parts == 1 or not divided or math.prod(shape) < _SMALLEST_SPLIT:
        return _parameter_spec(shape, mesh, Facts())
    longest = max(divided, key=lambda i: shape[i])
    return P(*(_BATCH_AXES if i == longest else None for i in range(len(shape))))


def tree_path(path: Sequence[Any]) -> str:
    """Returns a key path as ``blocks/0/attention/query/kernel``."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their `tree_path`."""
    return {tree_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def state_sharding(abstract_state: Any, mesh: Mesh | AbstractMesh, facts: Any) -> Any:
    """Returns the ``NamedSharding`` of every leaf of a train state, from shapes.

    Moments follow their parameter, whose facts are a tree like ``abstract_state["params"]``; what
    else the optimizer keeps lies over all devices.
    """
    params = jax.tree.leaves(abstract_state["params"])
    of_params = zip(leaves_by_path(facts).items(), params, strict=True)
    known = {(path, param.shape): fact for (path, fact), param in of_params}

    def place(path: Sequence[Any], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        # A moment stands in the optimizer's state under the path of its parameter, and has its
        # shape.
        parts = tree_path(path).split("/")
        ends = (("/".join(parts[i:]), leaf.shape) for i in range(len(parts)))
        own = next((known[end] for end in ends if end in known), None)
        if own is None:
            return NamedSharding(mesh, _free_spec(leaf.shape, mesh))
        return NamedSharding(mesh, _parameter_spec(leaf.shape, mesh, own))

    return jax.tree_util.tree_map_with_path(place, abstract_state)


def placed_shape(leaf: jax.ShapeDtypeStruct | Array, placed: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape of an array that lies where it is said to."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: its first axis over ``data`` and ``fsdp``."""
    return NamedSharding(mesh, P(_BATCH_AXES))


def num_batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns over how many devices the batch axis is split."""
    return math.prod(mesh.shape[axis] for axis in _BATCH_AXES)


def local_rows(mesh: Mesh, batch_size: int) -> Int[np.ndarray, " rows"]:
    """Returns which rows of a global batch lie on this process's devices, in ascending order.

    Each row is of one process, unless ``tensor`` spans processes.
    """
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[rows] for rows in slices]))


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """Moves this process's rows, those of `local_rows`, to its devices; returns global arrays."""
    return jax.make_array_from_process_local_data(batch_sharding(mesh), batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, P())


def fetch(tree: Any, mesh: Mesh) -> Any:
    """Returns global arrays as NumPy arrays; all processes must call it, as each holds a part."""
    return jax.tree.map(np.asarray, replicate(tree, mesh))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Returns global arrays, or numbers that all processes have alike, whole on every device."""
    return _replicate_on(mesh)(tree)


@functools.lru_cache
def _replicate_on(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))
