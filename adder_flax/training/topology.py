"""Devices to compile for that need not be there: TPU slices, NVIDIA GPUs, simulated CPU devices."""

import contextlib
import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import topologies

from adder_flax.errors import RunError, first_line
from adder_flax.extras import missing, wheel_folders
from adder_flax.training.sharding import devices_at_hand

GIB = 2**30

TPU_MEMORY_GIB = {"TPU v5 lite": 15.75, "TPU v5": 95.74, "TPU v6 lite": 31.25}
"""What programs can use of the memory of one device, as libtpu says where one does not fit."""

# Without these, libtpu asks a metadata server which chips it runs on, complains that it finds none,
# and lets no second process load it meanwhile, though no chip is touched.
_NO_CHIPS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Gpu(NamedTuple):
    """What XLA's compiler asks about a GPU that is not there; bandwidth is in bytes a second."""

    device_kind: str
    architecture: str
    cores: int
    lanes_per_core: int
    clock_ghz: float
    memory_bytes: int
    bandwidth_bytes: int
    l2_bytes: int
    shared_bytes: int


# From XLA's own specifications (openxla/xla, xla/backends/gpu/target_config/specs).
GPUS = {
    "a100": Gpu(
        *("NVIDIA A100-SXM4-80GB", "sm_80", 108, 64, 1.41),
        *(85_100_068_864, 2_039_040_000_000, 41_943_040, 167_936),
    ),
    "h100": Gpu(
        *("NVIDIA H100 80GB HBM3", "sm_90a", 132, 128, 1.98),
        *(84_942_979_072, 3_352_320_000_000, 52_428_800, 233_472),
    ),
    "h200": Gpu(
        *("NVIDIA H200 141GB HBM3e", "sm_90a", 132, 128, 1.98),
        *(151_397_597_184, 4_800_000_000_000, 52_428_800, 233_472),
    ),
    "b200": Gpu(
        *("NVIDIA B200", "sm_100a", 148, 128, 1.965),
        *(191_514_411_008, 7_672_320_000_000, 132_644_864, 233_472),
    ),
}
"""By the names of ``config.topology``."""

# XLA's GpuTargetConfigProto.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block_optin: {block_bytes}
  core_count: {gpu.cores} fpus_per_core: {gpu.lanes_per_core} clock_rate_ghz: {gpu.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {gpu.bandwidth_bytes} l2_cache_size: {gpu.l2_bytes}
  device_memory_size: {gpu.memory_bytes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: 0 {features} }}
  device_vendor: "NVIDIA Corporation" name: "{gpu.device_kind}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{gpu.device_kind}"
"""


def topology_devices(name: str) -> list[jax.Device]:
    """Returns the devices of a topology, to be asked for before anything else uses JAX.

    Args:
      name: ``"v5e:4x4"``, ``"v5p:2x2x2"`` or ``"v6e:4x4"`` and the like, a TPU slice; ``"h100:8"``,
        or ``"h100:2x8"`` on two hosts, GPUs of `GPUS`; ``"cpu:8"``, so many simulated devices; or
        ``""``, the devices at hand.

    Example:
      >>> topology_devices("v5e")
      Traceback (most recent call last):
      ...
      adder_flax.errors.RunError: expected config.topology as v5e:4x4, h100:8, cpu:8 or empty, got 'v5e'
    """  # noqa: E501 - a message is one line
    if not name:
        return devices_at_hand()
    platform, _, size = name.partition(":")
    counts = size.split("x")
    most = 1 if platform == "cpu" else 2 if platform in GPUS else 3
    if len(counts) > most or not all(count.isdecimal() and int(count) for count in counts):
        raise RunError(f"expected config.topology as v5e:4x4, h100:8, cpu:8 or empty, got {name!r}")
    # Where JAX is in use already, its devices stay what they are.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        if platform == "cpu":
            jax.config.update("jax_num_cpu_devices", int(size))
    if platform != "cpu":
        return _gpus(name, counts) if platform in GPUS else _tpu_slice(name)
    devices = jax.devices("cpu")
    if len(devices) < int(size):
        raise RunError(
            f"expected {size} simulated devices, got the {len(devices)} that JAX was started with"
        )
    return devices[: int(size)]


def memory_bytes(device: jax.Device) -> int | None:
    """Memory of a device that programs can use, or None where it is not known."""
    if device.device_kind in TPU_MEMORY_GIB:
        return int(TPU_MEMORY_GIB[device.device_kind] * GIB)
    sizes = {gpu.device_kind: gpu.memory_bytes for gpu in GPUS.values()}
    if device.platform == "gpu" and device.device_kind in sizes:
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))  # JAX's default
        return int(sizes[device.device_kind] * share)
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (RuntimeError, NotImplementedError):
        return None


def compiler_options(device: jax.Device) -> dict[str, str | bool]:
    """What XLA has to be told to compile for a device that is not there."""
    # Matrix products on GPUs are the library's: XLA's own have tiles that it finds by trial, and
    # without a GPU to try them on it takes the first ones, which some shapes do not allow.
    if device.platform != "gpu" or device in jax.devices():
        return {}
    return {"xla_gpu_enable_triton_gemm": False}


def compiler_folder() -> Path | None:
    """Returns the folder of NVIDIA's assembler as Python packages bring it, or None."""
    folders = (folder / "bin" for folder in wheel_folders("nvidia.cuda_nvcc", "nvidia.cu13"))
    return next((folder for folder in folders if (folder / "ptxas").is_file()), None)


def _tpu_slice(name: str) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise RunError(
            f"expected libtpu, which compiles for {name} without the hardware, got none; pip "
            f'install "jax[tpu]=={_jax_version()}" (Linux on x86-64), or set '
            "--config.topology=cpu:8"
        )
    os.environ.update(_NO_CHIPS | dict(os.environ))
    try:
        devices = list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise RunError(
            f"expected a TPU topology that libtpu knows, as v5e:4x4, got {name!r}: "
            f"{first_line(error)}"
        ) from error
    if (kind := devices[0].device_kind) not in TPU_MEMORY_GIB:
        raise RunError(f"expected a slice of {', '.join(TPU_MEMORY_GIB)}, got {name!r}: {kind}")
    return devices


def _gpus(name: str, counts: list[str]) -> list[jax.Device]:
    _require_gpu_compiler(name)
    gpu = GPUS[name.partition(":")[0]]
    accelerated = gpu.architecture.endswith("a")
    description = _DESCRIPTION.format(
        gpu=gpu,
        block_bytes=gpu.shared_bytes - 1024,
        major=int(gpu.architecture.strip("sm_a")) // 10,
        features="feature_extension: ACCELERATED_FEATURES" if accelerated else "",
    )
    hosts, on_each = ["1", *counts][-2:]
    described = topologies.get_topology_desc(
        platform="cuda", topology=f"1x{hosts}x{on_each}", target_config=description
    )
    return list(described.devices)


def _require_gpu_compiler(name: str) -> None:
    folder = compiler_folder()
    plugins = [f"jax_cuda{version}_plugin" for version in (12, 13)]
    nvrtc = [
        library
        for wheel in wheel_folders("nvidia.cuda_nvrtc", "nvidia.cu13")
        for library in wheel.glob("lib/libnvrtc.so.*")
    ]
    if folder is None or not nvrtc or not any(map(importlib.util.find_spec, plugins)):
        version = _jax_version()
        compiler = f"the compiler for NVIDIA GPUs, which needs no GPU, to compile for {name}"
        raise RunError(
            f"{missing(compiler, 'gpu-compile')}, or jax-cuda12-plugin=={version} "
            f"jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12 nvidia-cuda-nvrtc-cu12 (Linux), or "
            "set --config.topology=cpu:8"
        )
    # XLA takes the first assembler that it finds; another one may not know what it writes.
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", "")])


def _jax_version() -> str:
    return ".".join(jax.__version__.split(".")[:3])
