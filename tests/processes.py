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


def run_python(
    *arguments: str | Path, devices: int = 1, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own until it ends, well or not."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=simulated_devices(devices) | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def run_code(code: str, *arguments: str | Path, devices: int = 1, **environment: str) -> str:
    """Returns what a program prints that has to end well."""
    done = run_python("-c", code, *arguments, devices=devices, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
