"""The distribution: what each extra brings, what is said where one is missing or stands beside."""

import ast
import functools
import importlib.metadata
import re
import shutil
import sys
import tomllib

import pytest

from tests.processes import ROOT, run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What the core's own requirements always bring.
OF_THE_CORE = {"jaxlib": "jax", "ml_dtypes": "jax", "pydantic_core": "pydantic"}
# Cannot be resolved beside an extra, and says so where it is imported: see pyproject.toml.
BY_ITSELF = {"jax2onnx"}


def _names(requirements):
    names = (re.match(r"[\w.-]+", requirement)[0] for requirement in requirements)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def _brought_by(extra):
    others = [entry[11:-1].split(",") for entry in EXTRAS[extra] if entry.startswith("adder-flax[")]
    return _names(EXTRAS[extra]).union(*(_brought_by(name) for names in others for name in names))


def _imports(tree, extra=None):
    """(module, extra of the `with needs(...)` around it, line) of every import but those for type
    checkers."""
    for node in ast.iter_child_nodes(tree):
        inside = extra
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.With) and isinstance(call := node.items[0].context_expr, ast.Call):
            inside = call.args[0].value if ast.unparse(call.func) == "needs" else extra
        if isinstance(node, ast.Import):
            yield from ((alias.name, extra, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, extra, node.lineno
        yield from _imports(node, inside)


@pytest.mark.parametrize("package", ["adder_flax", "kfac"])
def test_an_import_beyond_the_core_names_an_extra_that_brings_it(package):
    core = _names(PROJECT["dependencies"])
    distributions = importlib.metadata.packages_distributions()
    known = sys.stdlib_module_names | {"adder_flax", "kfac", *OF_THE_CORE, *BY_ITSELF}
    for path in (ROOT / package).rglob("*.py"):
        for module, extra, line in _imports(ast.parse(path.read_text())):
            name = module.partition(".")[0]
            if name in known:
                continue
            allowed = core | (_brought_by(extra) if extra else set())
            found = _names(distributions.get(name, [name])) & allowed
            assert found, f"{path}:{line}: {module}, extra {extra}"


def test_the_requirements_of_main_are_the_core_and_four_extras():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = {line.partition("#")[0].strip() for line in lines} - {""}
    extras = [EXTRAS[name] for name in ("train", "data", "report", "interop")]
    needed = {*PROJECT["dependencies"]}.union(*extras)
    assert listed == {name for name in needed if not name.startswith("adder-flax[")}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("library", "code", "extra"),
    [
        ("grain", "import adder_flax.data as data; data.TrainPipeline", "data"),
        ("safetensors", "import adder_flax.interop", "interop"),
        ("matplotlib", "from adder_flax import report; report.new_figure(1, 1)", "report"),
        ("jinja2", "from adder_flax.report import document; document.html_page('', '')", "report"),
        ("orbax", "import adder_flax.training", "train"),
        ("sklearn", "from adder_flax import data; data.load_source('digits', 'test')", "data"),
    ],
)
def test_what_is_missing_is_one_message_that_names_the_extra(library, code, extra):
    hidden = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {library!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""
    if library == "sklearn":  # looked for, not imported
        hidden = "import importlib.util; importlib.util.find_spec = lambda name: None"
    done = run_python("-c", f"{hidden}\n{code}")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("adder_flax.extras.MissingExtraError: expected ")
    assert last.endswith(f'pip install ".[{extra}]"')


@pytest.mark.parametrize("package", ["adder_flax", "kfac"])
def test_it_is_not_imported_beside_the_other_kfac(package, tmp_path):
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / package, tmp_path / package, ignore=left_out)
    run = functools.partial(run_python, "-c", f"import {package}", cwd=tmp_path)
    done = run()
    assert done.returncode == 0, done.stderr
    (tmp_path / "kfac-0.2.4.dist-info").mkdir()
    done = run()
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: expected adder-flax alone to bring")
