"""The tables of the result pages, held to the records that they are made of."""

import json
import re
import statistics

import pytest

from adder_flax import compare, experiment
from adder_flax.compare.blocks import as_markdown
from adder_flax.compare.table import blocks_of, rows_of
from adder_flax.tasks import TASKS
from tests.processes import ROOT

_MADE_BY = {
    "adder_digits": "compare_adder",
    "blocks_fashion_mnist": "compare_blocks:fashion_mnist",
    "cg_fac_autoencoder": "compare_cg_fac:autoencoder",
    "cg_fac_cifar10_adder": "compare_cg_fac:adder,cifar10",
    "cg_fac_digits": "compare_cg_fac",
    "cg_fac_fashion_mnist": "compare_cg_fac:multiplicative,fashion_mnist",
    "cg_fac_g2p": "compare_cg_fac:g2p",
    "curvature_digits": "compare_curvature",
    "default_digits": "compare_default",
    "g2p": "compare_g2p",
    "healing_all_cifar10": "compare_healing:all,cifar10",
    "healing_all_digits": "compare_healing:all",
    "healing_all_fashion_mnist": "compare_healing:all,fashion_mnist",
    "healing_attention_cifar10": "compare_healing:attention,cifar10",
    "healing_attention_digits": "compare_healing:attention",
    "healing_attention_fashion_mnist": "compare_healing:attention,fashion_mnist",
    "mechanisms_cifar10": "compare_mechanisms:cifar10",
    "mechanisms_digits": "compare_mechanisms",
    "mechanisms_fashion_mnist": "compare_mechanisms:fashion_mnist",
    "optimizers_autoencoder": "compare_optimizers:autoencoder",
    "optimizers_cifar10_adder": "compare_optimizers:adder,cifar10",
    "optimizers_digits": "compare_optimizers",
    "optimizers_fashion_mnist_adder": "compare_optimizers:adder,fashion_mnist",
    "optimizers_fashion_mnist_additive": "compare_optimizers:additive,fashion_mnist",
    "optimizers_fashion_mnist_multiplicative": "compare_optimizers:multiplicative,fashion_mnist",
    "optimizers_g2p": "compare_optimizers:g2p",
    "sphere_digits": "compare_sphere",
}
RESULTS = ROOT / "docs" / "results"
NAMES = sorted(path.parent.name for path in RESULTS.glob("*/records"))


def test_there_are_pages():
    assert sorted(_MADE_BY) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_what_its_records_give(name, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    folder = RESULTS.relative_to(ROOT) / name
    config = experiment.load_experiment(_MADE_BY[name])
    config.results = str(folder)
    comparison = compare.Comparison(config, tmp_path)
    made = as_markdown(blocks_of(comparison, rows_of(comparison)))
    assert (folder / "results.md").read_text().startswith(made)


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_a_page_are_those_of_its_final_runs(name):
    """Read and averaged without the code that wrote the page."""
    scores = {}
    for path in (RESULTS / name / "records").glob("*.json"):
        record = json.loads(path.read_text())
        if record["phase"] == "final":
            best = TASKS.get(record["config"]["task"]["name"]).best
            worst = 0.0 if best.largest else float("inf")
            score = worst if record["diverged"] else record["test"][best.name]
            scores.setdefault(tuple(record["levels"].values()), []).append(score)
    rows = _table_of_scores((RESULTS / name / "results.md").read_text())
    assert rows.keys() == scores.keys()
    for arm, row in rows.items():
        found = scores[arm]
        assert row["runs"] == str(len(found)), arm
        assert row["mean"] == f"{statistics.mean(found):.4f}", arm
        assert row["lowest, highest"] == f"{min(found):.4f}, {max(found):.4f}", arm


def _table_of_scores(page):
    """{levels: {column: cell}} of the first table."""
    lines = re.search(r"## Test .*?\n\n(.*?)\n\n", page, re.DOTALL)[1].splitlines()
    head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    factors = head.index("runs")
    return {tuple(row[:factors]): dict(zip(head, row, strict=True)) for row in rows}
