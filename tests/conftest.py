"""What several test modules share."""

import collections
import functools
import gc
import os
import tempfile

import jaxlib
import pytest
from jaxlib import xla_client

from tests.processes import run_python

# A program that several tests, workers or processes need is compiled once in a run of the tests.
# The controller of pytest-xdist is the first to come here, its workers find the folder in their
# environment.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _COMPILED = tempfile.TemporaryDirectory(prefix="adder_flax_tests_")
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": _COMPILED.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

# Most of a run of the tests is compilation, of thousands of small programs that run once. XLA's
# older emitters take half the time for those, and LLVM less for what it is told to optimise less.
# XLA reads its flags once: other processes that tests start, such as main.py, have the defaults.
# So has a run whose own XLA_FLAGS are set, be it to nothing.
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    if jaxlib.__version__.startswith("0.10."):  # XLA ends the process at a flag that it has no more
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    xla_client.CompileOptions()
    del os.environ["XLA_FLAGS"]

# JAX reads its environment as it is imported.
import jax  # noqa: E402

from tests import annotations  # noqa: E402

# Checks take a seventh of a run.
if os.environ.get("HOLD_ANNOTATIONS"):
    annotations.hold()

# Else one twentieth of a run goes into looking through what libraries and caches hold.
gc.freeze()
gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)  # before slow ones are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow all but n cases, from all over them, of tests that are marked ``cases(n)``."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("cases") and not item.get_closest_marker("slow"):
            cases[item.nodeid.split("[")[0]].append(item)
    for some in cases.values():
        count = some[0].get_closest_marker("cases").args[0]
        kept = {round(i * (len(some) - 1) / max(count - 1, 1)) for i in range(count)}
        for i, item in enumerate(some):
            if i not in kept:
                item.add_marker("slow")


@pytest.fixture(autouse=True)
def _calls_that_are_wrong_on_purpose(request):
    """Does not check calls of tests marked ``unchecked``: what they call complains itself."""
    with annotations.held(request.node.get_closest_marker("unchecked") is None):
        yield


@pytest.fixture
def x64():
    """Float64 while the test runs."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def run_main():
    """Runs ``main.py`` in a process of its own: ``run_main(*flags, devices=1)``."""
    return functools.partial(run_python, "main.py")
