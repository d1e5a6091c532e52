"""The house rules that code can check: who imports whom, and what an import costs."""

import ast
import subprocess
import sys

import pytest

from tests.processes import ROOT

ORDER = ("ops", "attention", "layers", "models", "data", "training", "analysis", "interop")


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_imports_only_from_those_before_it(folder):
    later = ORDER[ORDER.index(folder) + 1 :]
    for path in (ROOT / "adder_flax" / folder).rglob("*.py"):
        for name in _imports(path):
            assert not name.startswith(tuple(f"adder_flax.{other}" for other in later)), f"{path} imports {name}"


def test_kfac_stands_alone():
    for path in (ROOT / "kfac").rglob("*.py"):
        for name in _imports(path):
            assert not name.startswith(("adder_flax", "experiments")), f"{path} imports {name}"


@pytest.mark.parametrize("package", ["ops", "attention", "layers", "models"])
def test_importing_a_mechanism_loads_no_data_plotting_or_checkpoint_library(package):
    heavy = {"matplotlib", "tensorflow", "tensorflow_datasets", "orbax", "grain", "sklearn", "PIL", "tensorboardX"}
    code = f"import sys, flax.nnx; old = set(sys.modules); import adder_flax.{package}; print(*set(sys.modules) - old)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not heavy & {name.split(".")[0] for name in done.stdout.split()}
