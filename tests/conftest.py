"""What several test modules share."""

import subprocess
import sys

import pytest

from tests.processes import ROOT, simulated_devices


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
