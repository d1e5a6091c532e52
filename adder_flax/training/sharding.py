"""Device mesh and where each array of a run lives on it.

The mesh has three axes: ``data`` (batch only), ``fsdp`` (batch and parameters) and ``tensor``
(heads and MLP columns).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from adder_flax.errors import RunError, first_line
from adder_flax.parameters import Facts

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# What belongs to no parameter and has fewer numbers is not split: to gather it would take
# longer than it saves.
_SMALLEST_SPLIT = 2**14

# Columns of query, key, value and fc1 belong to a head or a hidden unit; rows of out and
# fc2 consume them.
LOGICAL_AXES: Mapping[str, str] = {"heads": "tensor", "hidden": "tensor"}
"""Which axis of the mesh splits an axis that a layer named, see
:func:`adder_flax.parameters.name_axis`."""


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
    sizes = [int(axis_sizes[name]) for name in MESH_AXES]
    given = dict(zip(MESH_AXES, sizes, strict=True))
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = max(len(devices) // known, 1)
    if math.prod(sizes) != len(devices):
        raise RunError(
            f"expected mesh sizes that multiply to {len(devices)} devices, got {given}; "
            "set one of --config.mesh.{data,fsdp,tensor} to -1 to take what the others leave"
        )
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def parameter_spec(shape: Sequence[int], mesh: Mesh | AbstractMesh, facts: Facts) -> P:
    """Returns how a parameter, or a moment of one, is split over the mesh.

    Axes that its facts name are split by :data:`LOGICAL_AXES`, and the longest of the others over
    ``fsdp``. What the mesh does not divide into whole parts stays whole, so every shape is valid on
    every mesh.
    """
    spec: list[str | None] = [None] * len(shape)
    for i, axis in enumerate(facts.axes):
        on_mesh = LOGICAL_AXES.get(axis.name) if axis else None
        # JAX refuses kernels on axes that are split unevenly (IndivisibleError).
        if axis and on_mesh and mesh.shape[on_mesh] > 1 and axis.parts % mesh.shape[on_mesh] == 0:
            spec[i] = on_mesh
    free = [i for i in range(len(shape)) if spec[i] is None and shape[i] % mesh.shape["fsdp"] == 0]
    if free and mesh.shape["fsdp"] > 1:
        spec[max(free, key=lambda i: shape[i])] = "fsdp"
    return P(*spec)


def _free_spec(shape: Sequence[int], mesh: Mesh | AbstractMesh) -> P:
    """How what is like no parameter is split: factors of curvature lie over all devices."""
    parts = num_batch_shards(mesh)
    divided = [i for i, size in enumerate(shape) if size % parts == 0]
    if parts == 1 or not divided or math.prod(shape) < _SMALLEST_SPLIT:
        return parameter_spec(shape, mesh, Facts())
    longest = max(divided, key=lambda i: shape[i])
    return P(*(BATCH_AXES if i == longest else None for i in range(len(shape))))


def tree_path(path: Sequence[Any]) -> str:
    """Returns a key path as ``blocks/0/attention/query/kernel``."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def state_sharding(abstract_state: Any, mesh: Mesh | AbstractMesh, facts: Any) -> Any:
    """Returns the ``NamedSharding`` of every leaf of a train state, from shapes.

    Moments follow their parameter, whose facts are a tree like ``abstract_state["params"]``; what
    else the optimizer keeps lies over all devices.
    """
    by_path = jax.tree_util.tree_leaves_with_path(facts)
    shapes = jax.tree.map(jnp.shape, jax.tree.leaves(abstract_state["params"]))
    known = {
        (tree_path(path), shape): fact for (path, fact), shape in zip(by_path, shapes, strict=True)
    }

    def place(path: Sequence[Any], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        # A moment stands in the optimizer's state under the path of its parameter, and
        # has its shape.
        parts = tree_path(path).split("/")
        ends = (("/".join(parts[i:]), leaf.shape) for i in range(len(parts)))
        own = next((known[end] for end in ends if end in known), None)
        if own is None:
            return NamedSharding(mesh, _free_spec(leaf.shape, mesh))
        return NamedSharding(mesh, parameter_spec(leaf.shape, mesh, own))

    return jax.tree_util.tree_map_with_path(place, abstract_state)


def placed_shape(leaf: jax.ShapeDtypeStruct | Array, placed: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape of an array that lies where it is said to."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: its first axis over ``data`` and ``fsdp``."""
    return NamedSharding(mesh, P(BATCH_AXES))


def num_batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns over how many devices the batch axis is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def local_rows(mesh: Mesh, batch_size: int) -> Int[np.ndarray, " rows"]:
    """Returns which rows of a global batch lie on this process's devices, in ascending order.

    Together the processes hold every row, each row once unless ``tensor`` spans processes, whose
    devices then share it.
    """
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[rows] for rows in slices]))


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """Moves this process's rows, those of `local_rows`, to its devices; returns global arrays."""
    return jax.make_array_from_process_local_data(batch_sharding(mesh), batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, P())
