"""The house rules that code can check: who imports whom, and what an import costs."""

import ast

import pytest

from tests.processes import ROOT, run_code

# Each imports only from those before it.
ORDER = (
    *("arrays", "text", "errors", "extras", "files", "packed", "experiments", "registry"),
    *("jaxprs", "recorder", "settings", "parameters", "paired", "own_cache", "ops"),
    *("attention", "layers", "models", "quantized", "measures", "counting", "data"),
    *("tasks", "interop", "experiment", "training", "report", "predict", "compare", "linen", "app"),
)


def _modules(package):
    """{dotted name: path} of a package's files, a folder under the name of its ``__init__``."""
    files = (ROOT / package).rglob("*.py")
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in files}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): path for path, p in parts.items()}


def _imports(path):
    """Every module or name that a file imports, wherever in the file, in full."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parent.parts[: 1 - node.level or None]
            base = ".".join([*(package if node.level else ()), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


PLACES = sorted({name.split(".")[1] for name in _modules("adder_flax") if "." in name})


@pytest.mark.parametrize("place", PLACES)
def test_a_place_imports_only_from_those_before_it(place):
    assert place in ORDER, f"expected the place of {place} in ORDER, got {ORDER}; add it"
    allowed = {"adder_flax", *(f"adder_flax.{other}" for other in ORDER[: ORDER.index(place) + 1])}
    for module, path in _modules("adder_flax").items():
        if module.split(".")[1:2] == [place]:
            for name in _imports(path):
                package, *parts = name.split(".")
                within = ".".join([package, *parts[:1]])
                assert package != "adder_flax" or within in allowed, f"{path} imports {name}"


@pytest.mark.parametrize("package", ["adder_flax", "kfac"])
def test_no_file_imports_itself_through_others(package):
    modules = _modules(package)
    taken = {}
    for module, path in modules.items():
        names = [name if name in modules else name.rpartition(".")[0] for name in _imports(path)]
        taken[module] = {name for name in names if name in modules} - {module}
    while free := [module for module, names in taken.items() if not names & taken.keys()]:
        for module in free:
            del taken[module]
    assert not taken, f"these files import each other in a circle, or import one that does: {taken}"


def test_no_figure_uses_the_state_of_pyplot():
    for path in (ROOT / "adder_flax").rglob("*.py"):
        assert not any(name.startswith("matplotlib.pyplot") for name in _imports(path)), path


def test_kfac_stands_alone():
    for path in (ROOT / "kfac").rglob("*.py"):
        for name in _imports(path):
            assert not name.startswith(("adder_flax", "experiments")), f"{path} imports {name}"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "package",
    ["ops", "attention", "layers", "models", "quantized", "measures", "counting", "report"],
)
def test_importing_a_mechanism_loads_no_data_plotting_or_checkpoint_library(package):
    """Nor does a report, before a figure is asked for."""
    heavy = {"matplotlib", "PIL", "scipy", "sklearn", "orbax", "grain", "tensorboardX"}
    heavy |= {"tensorflow", "tensorflow_datasets"}
    code = (
        f"import sys, flax.nnx; old = set(sys.modules); import adder_flax.{package}; "
        "print(*set(sys.modules) - old)"
    )
    assert not heavy & {name.split(".")[0] for name in run_code(code).split()}


def test_settings_are_read_without_jax():
    read = "from adder_flax import settings as s; s.read(s.RunSettings, s.defaults(s.RunSettings))"
    code = f"import sys; {read}; print(*sys.modules)"
    assert not {"jax", "flax", "numpy"} & set(run_code(code).split())


def test_an_experiment_is_read_and_refused_without_jax():
    code = (
        "import sys; from adder_flax import experiment, settings\n"
        "config = experiment.load_experiment('experiments/adder_deit_tiny.py:cifar10'); "
        "config.batch_size = 0\n"
        "try: settings.read(settings.RunSettings, config)\n"
        "except Exception as error: print(error, *sys.modules, sep='\\n')"
    )
    refused, *modules = run_code(code).splitlines()
    assert "batch_size" in refused
    assert not {"jax", "flax", "grain"} & set(modules)
