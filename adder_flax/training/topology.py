"""Devices to compile for that need not be there.

TPU slices by libtpu, NVIDIA GPUs, and simulated CPU devices.
"""

import contextlib
import importlib.util
import os

import jax
from jax.experimental import topologies

from adder_flax.errors import RunError, first_line
from adder_flax.training import gpu_topology
from adder_flax.training.sharding import devices_at_hand

GIB = 2**30

TPU_MEMORY_GIB = {"TPU v5 lite": 15.75, "TPU v5": 95.74, "TPU v6 lite": 31.25}
"""What programs can use of the HBM of one device, by its ``device_kind``, as libtpu says where one
does not fit."""


# Without these, libtpu asks a metadata server which chips it runs on, complains that it
# finds none, and lets no second process load it meanwhile, though no chip is touched.
_NO_CHIPS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def topology_devices(name: str) -> list[jax.Device]:
    """Returns the devices of a topology.

    Args:
      name: ``"v5e:4x4"``, ``"v5p:2x2x2"`` or ``"v6e:4x4"`` and the like, a TPU slice; ``"h100:8"``,
        or ``"h100:2x8"`` on two hosts, GPUs (of `gpu_topology.GPUS`); ``"cpu:8"``, so many
        simulated devices; or ``""``, the devices at hand. All but the last must be asked for before
        anything else uses JAX.

    Raises:
      RunError: there is no such topology, or no compiler for it.

    Example:
      >>> topology_devices("v5e")
      Traceback (most recent call last):
      ...
      adder_flax.errors.RunError: expected config.topology as v5e:4x4, h100:8, cpu:8 or empty, got 'v5e'
    """  # noqa: E501 - a message is one line
    if not name:
        return devices_at_hand()
    platform, _, size = name.partition(":")
    if not size:
        raise RunError(f"expected config.topology as v5e:4x4, h100:8, cpu:8 or empty, got {name!r}")
    # Where JAX is in use already, its devices stay what they are.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
    if platform == "cpu":
        return _simulated(size)
    return gpu_topology.gpu_devices(name) if platform in gpu_topology.GPUS else _tpu_slice(name)


def memory_bytes(device: jax.Device) -> int | None:
    """Returns the memory of a device that programs can use, or None where it is not known."""
    if device.device_kind in TPU_MEMORY_GIB:
        return int(TPU_MEMORY_GIB[device.device_kind] * GIB)
    if (usable := gpu_topology.usable_bytes(device)) is not None:
        return usable
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (RuntimeError, NotImplementedError):
        return None


def _simulated(size: str) -> list[jax.Device]:
    count = int(size) if size.isdecimal() else 0
    if count < 1:
        raise RunError(
            f"expected config.topology as cpu:<number of devices>, got 'cpu:{size}'; set "
            "--config.topology"
        )
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
    try:
        devices = jax.devices("cpu")
    except RuntimeError as error:
        raise RunError(
            f"expected {count} simulated devices, got: {first_line(error)}; unset JAX_PLATFORMS"
        ) from error
    if len(devices) < count:
        raise RunError(
            f"expected {count} simulated devices, got the {len(devices)} that JAX was started with"
        )
    return devices[:count]


def _tpu_slice(name: str) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        version = ".".join(jax.__version__.split(".")[:3])
        raise RunError(
            f"expected libtpu, which compiles for {name} without the hardware, got none; "
            f'pip install "jax[tpu]=={version}" (Linux on x86-64), or set --config.topology=cpu:8'
        )
    os.environ.update(_NO_CHIPS | dict(os.environ))
    try:
        devices = list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise RunError(
            f"expected a TPU topology that libtpu knows, as v5e:4x4, got {name!r}: "
            f"{first_line(error)}"
        ) from error
    if devices[0].device_kind not in TPU_MEMORY_GIB:
        raise RunError(
            f"expected a slice of {', '.join(TPU_MEMORY_GIB)}, got {name!r}: "
            f"{devices[0].device_kind}"
        )
    return devices
