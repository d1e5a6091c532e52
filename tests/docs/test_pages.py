"""The code on the pages for borrowers runs, page by page, top to bottom."""

import contextlib
import re
from types import ModuleType

import pytest

import kfac
from adder_flax.attention import SCORES
from adder_flax.compare import Plan
from adder_flax.counting._walk import KERNELS
from adder_flax.data import SETS
from adder_flax.models import MODELS
from adder_flax.ops import _backend
from adder_flax.report import CLAIMS
from adder_flax.settings import (
    MODEL_SETTINGS,
    SCORE_OPTIONS,
    TASK_SETTINGS,
    CompareSettings,
    declarations,
    shown,
)
from adder_flax.tasks import TASKS
from adder_flax.training import OPTIMIZERS
from kfac.curvature import _linen, _nnx, _registry  # noqa: F401  both have registered their layers
from tests.processes import ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("index", "layers", "cg_fac", "eight_bits")),
    *(
        page
        for of in ("borrow", "attention", "extend")
        for page in sorted((DOCS / of).glob("*.md"))
    ),
]
REGISTRIES = [SCORES, SCORE_OPTIONS, SETS, CLAIMS, KERNELS, MODELS, TASKS, OPTIMIZERS]
REGISTRIES += [_backend._BACKENDS, MODEL_SETTINGS, TASK_SETTINGS]


def code_blocks(page):
    """The page's Python, but for included files, written ```{.python}, which
    examples/run_installed.sh runs."""
    return BLOCK.findall(page.read_text())


@pytest.fixture
def own_names():
    """What a page registers is forgotten afterwards."""
    with contextlib.ExitStack() as stack:
        for registry in REGISTRIES:
            stack.enter_context(registry.temporary())
        layers = dict(_registry._registrations)
        stack.callback(_registry._registrations.update, layers)
        stack.callback(_registry._registrations.clear)  # before
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if code_blocks(page)],
)
def test_code_on_a_page_runs(page, own_names):
    namespace = {"__name__": "page"}
    for block in code_blocks(page):
        exec(compile(block, page, "exec"), namespace)


def test_a_sixth_mechanism_takes_fewer_than_25_lines():
    worked = code_blocks(DOCS / "extend" / "score.md")[0]
    assert "register_score" in worked
    assert len(worked.splitlines()) < 25


def test_comparisons_on_their_page_are_plans():
    spaces = [{}, {}]
    for code, space in zip(code_blocks(DOCS / "compare.md"), spaces, strict=True):
        exec(code, space)
    own, fewer = (Plan(space["get_config"]()) for space in spaces)
    assert list(own.arms) == ["dot", "adder"]
    assert set(fewer.arms) == {"dot", "additive", "adder", "adder without identity"}


def test_the_fields_of_a_comparison_have_the_defaults_that_its_page_says():
    page = (DOCS / "compare.md").read_text()
    said = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE))
    assert {"seeds", "trials", "match", "confirmatory"} <= said.keys()
    known = {path: shown(declared.default) for path, declared in declarations(CompareSettings)}
    assert said == {path: known[path].strip("'") for path in said}


def test_the_reference_of_kfac_names_everything_public():
    """The other packages have `__all__`, from which their pages follow."""
    page = (DOCS / "api" / "kfac.md").read_text()
    public = {name: value for name, value in vars(kfac).items() if not name.startswith("_")}
    named = set(re.findall(r"^::: kfac\.(\w+)$", page, re.MULTILINE))
    assert named == {n for n, value in public.items() if not isinstance(value, ModuleType)}
