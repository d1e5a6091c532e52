"""The tables of the result pages, held to the records that they are made of."""

import re

import pytest
from ml_collections import ConfigDict

from adder_flax import compare, packed
from adder_flax.experiment import load_experiment
from adder_flax.settings import CompareSettings, filled
from tests.compare.tiny import page_of_records
from tests.processes import ROOT, run_python

RESULTS = ROOT / "results"
NAMES = sorted(path.parent.name for path in RESULTS.glob(f"*/{packed.NAME}"))


def test_there_are_pages():
    assert len(NAMES) >= 27


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_what_its_records_give(name, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    folder = RESULTS.relative_to(ROOT) / name
    kept = load_experiment(str(folder / packed.NAME)).to_dict()
    comparison = compare.Comparison(ConfigDict(filled(CompareSettings, kept)), tmp_path)
    made = page_of_records(comparison)
    assert (folder / "results.md").read_text() == made
    shown = set(re.findall(r"\(figures/(\w+\.svg)\)", made))
    assert {path.name for path in (folder / "figures").glob("*.svg")} == shown


def test_the_command_reads_a_comparison_of_any_model_from_its_records():
    flags = "--mode=compare", f"--config=results/g2p/{packed.NAME}", "--config.seeds=0"
    done = run_python("main.py", *flags)
    assert done.returncode
    assert "config.seeds: expected" in done.stderr
    assert "config.base" not in done.stderr
