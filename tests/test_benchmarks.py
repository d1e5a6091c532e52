"""Every benchmark can be started: what it imports is where it says."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    "module",
    sorted(
        ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
        for path in FOLDER.rglob("*.py")
    ),
)
def test_a_benchmark_can_be_imported(module):
    importlib.import_module(module)
