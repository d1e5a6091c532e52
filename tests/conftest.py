"""What several test modules share."""

import os
import subprocess
import sys
import tempfile

import pytest

from tests.processes import ROOT, simulated_devices

# A program that several tests, workers or processes need is compiled once in a run of the tests.
# The controller of pytest-xdist is the first to come here, its workers find the folder in their
# environment.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _COMPILED = tempfile.TemporaryDirectory(prefix="adder_flax_tests_")
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": _COMPILED.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

# JAX reads its environment as it is imported.
from tests import annotations  # noqa: E402

annotations.hold()


@pytest.fixture(autouse=True)
def _calls_that_are_wrong_on_purpose(request):
    """Does not check calls of tests marked ``unchecked``: what they call is to complain itself, or
    asks for more than they need."""
    with annotations.held(request.node.get_closest_marker("unchecked") is None):
        yield


@pytest.fixture
def run_main():
    """Runs ``main.py`` in a process of its own: ``run_main(*flags, devices=1) →
    CompletedProcess``."""

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
