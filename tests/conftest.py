"""What several test modules share."""

import os
import subprocess
import sys

import pytest

from tests.processes import QUICK_COMPILATION, ROOT, simulated_devices

# Read when JAX makes its first array, which is after this.
os.environ["XLA_FLAGS"] = f"{QUICK_COMPILATION} {os.environ.get('XLA_FLAGS', '')}"


@pytest.fixture
def run_main():
    """Runs ``main.py`` in a process of its own: ``run_main(*flags, devices=1) → CompletedProcess``."""

    def run(*flags: str, devices: int = 1) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, ROOT / "main.py", *map(str, flags)],
            env=simulated_devices(devices),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
