"""Test processes: where the project is, how many devices JAX shows, how it compiles."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Most of the time of the tests is compilation, half of that LLVM's optimisation of programs that run once.
QUICK_COMPILATION = "--xla_backend_optimization_level=0"


def simulated_devices(count: int) -> dict[str, str]:
    """Returns an environment in which JAX sees ``count`` CPU devices."""
    flags = f"{QUICK_COMPILATION} --xla_force_host_platform_device_count={count}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
