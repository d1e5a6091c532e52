"""Test processes: where the project is, how many devices JAX shows, and code in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def simulated_devices(count: int) -> dict[str, str]:
    """Returns an environment in which JAX sees ``count`` CPU devices."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
    }


def run_code(code: str, *arguments: str | Path, devices: int = 1, **environment: str) -> str:
    """Runs Python in a process of its own and returns what it prints; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=simulated_devices(devices) | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
