"""The tables of the result pages, held to the records that they are made of."""

import json
import lzma
import re
import statistics
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from adder_flax import compare, packed
from adder_flax.compare.blocks import as_markdown
from adder_flax.compare.table import blocks_of, rows_of
from adder_flax.experiment import load_experiment
from adder_flax.settings import CompareSettings, filled
from adder_flax.tasks import TASKS
from tests.processes import ROOT

RESULTS = ROOT / "results"
NAMES = sorted(path.parent.name for path in RESULTS.glob(f"*/{packed.NAME}"))


def test_there_are_pages():
    assert len(NAMES) >= 27


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_what_its_records_give(name, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    folder = RESULTS.relative_to(ROOT) / name
    kept = load_experiment(str(folder / packed.NAME)).to_dict()
    comparison = compare.Comparison(ConfigDict(filled(CompareSettings, kept)), tmp_path)
    made = as_markdown(blocks_of(comparison, rows_of(comparison)))
    assert (folder / "results.md").read_text().startswith(made)


def test_the_command_reads_a_comparison_of_any_model_from_its_records():
    command = [sys.executable, "main.py", "--mode=compare", f"--config=results/g2p/{packed.NAME}"]
    done = subprocess.run([*command, "--config.seeds=0"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode
    assert "config.seeds: expected" in done.stderr
    assert "config.base" not in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_a_page_are_those_of_its_final_runs(name):
    """Read and averaged without the code that wrote the page."""
    scores = {}
    with lzma.open(RESULTS / name / packed.NAME) as file:
        _, *lines = file
    for line in lines:
        record = json.loads(line)
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
