"""Test processes: where the project is, and how many devices JAX shows."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def simulated_devices(count: int) -> dict[str, str]:
    """Returns an environment in which JAX sees ``count`` CPU devices."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
    }
