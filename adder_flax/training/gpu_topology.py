"""NVIDIA GPUs to compile for that are not there.

XLA and NVIDIA's assembler need a description, and no driver.
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import topologies

from adder_flax.errors import RunError, first_line
from adder_flax.extras import missing, wheel_folders


class Gpu(NamedTuple):
    """What XLA's compiler asks about a GPU, as its maker's driver reports it.

    Attributes:
      device_kind: its full name.
      capability: compute capability, major and minor.
      cores: streaming multiprocessors.
      lanes_per_core: float32 units of one.
      clock_ghz: highest clock of the cores.
      memory_bytes, bandwidth_bytes, l2_bytes: of its memory; the second in a second.
      shared_bytes, shared_bytes_per_block: shared memory of a core, and the most that one block
        gets.
    """

    device_kind: str
    capability: tuple[int, int]
    cores: int
    lanes_per_core: int
    clock_ghz: float
    memory_bytes: int
    bandwidth_bytes: int
    l2_bytes: int
    shared_bytes: int
    shared_bytes_per_block: int

    def architecture(self) -> str:
        """Returns the name under which assemblers know it.

        ``a`` adds what later ones do not have.
        """
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def description(self) -> str:
        """Returns the GpuTargetConfigProto of XLA, in text form."""
        major, minor = self.capability
        features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_bytes}
              shared_memory_per_block_optin: {self.shared_bytes_per_block}
              core_count: {self.cores} fpus_per_core: {self.lanes_per_core} clock_rate_ghz: {self.clock_ghz}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              memory_bandwidth: {self.bandwidth_bytes} l2_cache_size: {self.l2_bytes}
              device_memory_size: {self.memory_bytes}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
              device_vendor: "NVIDIA Corporation" name: "{self.device_kind}"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            runtime_version {{ major: 12 minor: 8 }}
            device_description_str: "{self.device_kind}"
        """  # noqa: E501 - lines of another language


# From the specifications that XLA itself is tested with (openxla/xla,
# xla/backends/gpu/target_config/specs).
GPUS = {
    "a100": Gpu(
        *("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41),
        *(85_100_068_864, 2_039_040_000_000, 41_943_040, 167_936, 166_912),
    ),
    "h100": Gpu(
        *("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98),
        *(84_942_979_072, 3_352_320_000_000, 52_428_800, 233_472, 232_448),
    ),
    "h200": Gpu(
        *("NVIDIA H200 141GB HBM3e", (9, 0), 132, 128, 1.98),
        *(151_397_597_184, 4_800_000_000_000, 52_428_800, 233_472, 232_448),
    ),
    "b200": Gpu(
        *("NVIDIA B200", (10, 0), 148, 128, 1.965),
        *(191_514_411_008, 7_672_320_000_000, 132_644_864, 233_472, 232_448),
    ),
}
"""By the names of ``config.topology``."""

# JAX takes this share of a GPU's memory for programs (XLA_PYTHON_CLIENT_MEM_FRACTION).
_SHARE_OF_PROGRAMS = 0.75


def usable_bytes(device: jax.Device) -> int | None:
    """Returns the memory that programs can use by default of a GPU that is not there.

    None for other devices.
    """
    sizes = {gpu.device_kind: gpu.memory_bytes for gpu in GPUS.values()}
    if device.platform != "gpu" or device.device_kind not in sizes:
        return None
    return int(
        sizes[device.device_kind]
        * float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _SHARE_OF_PROGRAMS))
    )


def compiler_options(device: jax.Device) -> dict[str, str | bool]:
    """Returns what XLA has to be told to compile for a device that is not there.

    For a GPU, that matrix products are the library's. XLA's own have tiles that it finds by trial;
    without a GPU to try them on it takes the first ones, which some shapes do not allow.

    Example:
      >>> compiler_options(jax.devices("cpu")[0])
      {}
    """
    if device.platform != "gpu" or device in jax.devices():
        return {}
    return {"xla_gpu_enable_triton_gemm": False}


def gpu_devices(name: str) -> list[jax.Device]:
    """Returns GPUs to compile for.

    Args:
      name: ``"h100:8"``, or ``"h100:2x8"`` for so many on each of several hosts; see `GPUS`.

    Raises:
      RunError: the size is none, or the compiler for GPUs is not installed.

    Example:
      >>> gpu_devices("h100:many")
      Traceback (most recent call last):
      ...
      adder_flax.errors.RunError: expected config.topology as h100:8 or, on two hosts, h100:2x8, got 'h100:many'
    """  # noqa: E501 - a message is one line
    kind, _, size = name.partition(":")
    counts = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", size)
    if counts is None:
        raise RunError(
            f"expected config.topology as {kind}:8 or, on two hosts, {kind}:2x8, got {name!r}"
        )
    _require_compiler(name)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x{counts[1] or 1}x{counts[2]}",
            target_config=GPUS[kind].description(),
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise RunError(
            f"expected to describe {name} to XLA's compiler, got: {first_line(error)}"
        ) from error
    return list(topology.devices)


def compiler_folder() -> Path | None:
    """Returns the folder of NVIDIA's assembler as Python packages bring it, or None."""
    folders = (folder / "bin" for folder in wheel_folders("nvidia.cuda_nvcc", "nvidia.cu13"))
    return next((folder for folder in folders if (folder / "ptxas").is_file()), None)


def _require_compiler(name: str) -> None:
    folder = compiler_folder()
    plugins = [f"jax_cuda{version}_plugin" for version in (12, 13)]
    nvrtc = [
        library
        for wheel in wheel_folders("nvidia.cuda_nvrtc", "nvidia.cu13")
        for library in wheel.glob("lib/libnvrtc.so.*")
    ]
    if folder is None or not nvrtc or not any(map(importlib.util.find_spec, plugins)):
        version = ".".join(jax.__version__.split(".")[:3])
        compiler = f"the compiler for NVIDIA GPUs, which needs no GPU, to compile for {name}"
        raise RunError(
            f"{missing(compiler, 'gpu-compile')}, or jax-cuda12-plugin=={version} "
            f"jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12 nvidia-cuda-nvrtc-cu12 (Linux), or "
            "set --config.topology=cpu:8"
        )
    # XLA takes the first assembler that it finds; another one may not know what it
    # writes.
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
