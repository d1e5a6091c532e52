"""The tables of the result pages, held to the records that they are made of: by the code that makes
pages, and their differences, intervals and tests by SciPy and fractions."""

import itertools
import json
import lzma
import math
import re
import statistics
from fractions import Fraction

import numpy as np
import pytest
from ml_collections import ConfigDict
from scipy import stats

from adder_flax import compare, packed
from adder_flax.experiment import load_experiment
from adder_flax.settings import CompareSettings, filled
from tests.compare.tiny import page_of_records
from tests.processes import ROOT, run_python

RESULTS = ROOT / "results"
NAMES = sorted(path.parent.name for path in RESULTS.glob(f"*/{packed.NAME}"))
SMALLER_IS_BETTER = ("loss", "phoneme_error_rate")


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


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_scipy_and_fractions_make_of_its_records(name):
    page = (RESULTS / name / "results.md").read_text()
    score, rows = re.search(r"## Test (\w+)", page)[1], _rows(page)
    baselines = [levels for levels, row in rows.items() if row["difference"] == "baseline"]
    floor = RESULTS / name / "trivial.json"
    for model, accuracy in (json.loads(floor.read_text()) if floor.exists() else {}).items():
        [row] = [rows.pop(levels) for levels in list(rows) if levels[0] == model]
        assert _near(row["mean"], accuracy)
    with lzma.open(RESULTS / name / packed.NAME) as file:
        config, *records = map(json.loads, file)
    _check_budgets(config, records)
    scores = _scores(records, baselines, score)
    if "**Not finished:" in page:  # arms of which there is no record yet
        rows = {of: row for of, row in rows.items() if of in scores or row["runs"] != "0"}
    assert rows.keys() == scores.keys()
    compared = {}
    for levels, row in rows.items():
        ranked = sorted(scores[levels].values())
        quarter = len(ranked) // 4
        assert row["runs"] == str(len(ranked))
        if not ranked:
            continue
        assert row["mean"] == f"{statistics.mean(map(float, ranked)):.4f}"
        assert row["lowest, highest"] == f"{float(ranked[0]):.4f}, {float(ranked[-1]):.4f}"
        assert _near(row["interquartile mean"], np.mean(ranked[quarter : len(ranked) - quarter]))
        if levels not in baselines:
            alike = lambda other, own=levels: sum(a == b for a, b in zip(own, other, strict=True))
            baseline = scores[max(baselines, key=alike)]
            own = scores[levels].items()
            compared[levels] = [x - baseline[seed] for seed, x in own if seed in baseline]
    compared = {levels: differences for levels, differences in compared.items() if differences}
    p_values = {levels: _p(differences) for levels, differences in compared.items()}
    for levels, differences in compared.items():
        row, found = rows[levels], np.array(differences, float)
        assert _near(row["difference"], found.mean())
        interval = (-math.inf, math.inf)
        if len(found) > 1:
            interval = stats.ttest_1samp(found, 0).confidence_interval()
        for end, of_page in zip(interval, row["95 % interval"].split(" to "), strict=True):
            assert _near(of_page, end)
        assert _near(row["p"], p_values[levels])
        # Holm's: the largest of Bonferroni's over the smaller ones, each times those that are left.
        left = lambda p: sum(other >= p for other in p_values.values())
        after = min(1, max(left(p) * p for p in p_values.values() if p <= p_values[levels]))
        assert _near(row["p after Holm"], after)
        told = len(differences) >= 10 and after <= Fraction(1, 20)
        words = "ahead" if (found.mean() > 0) == (score not in SMALLER_IS_BETTER) else "behind"
        many = f"{len(differences)} seed{'s' if len(differences) > 1 else ''}"
        assert row["verdict"] == (words if told else f"no difference that {many} can tell")


def _near(cell, number):
    """Whether a cell is the number with as many digits; halves go either way."""
    unit = 10 ** -len(cell.partition(".")[2])
    return float(cell) == number or abs(float(cell) - number) <= 0.5001 * unit


def _scores(records, baselines, name):
    """{levels: {seed: score}}, exact, of the kind of device and version of most baselines' runs."""
    worst = math.inf if name in SMALLER_IS_BETTER else 0.0
    finals = [(tuple(r["levels"].values()), r) for r in records if r["phase"] == "final"]
    place = lambda record: (record["machine"]["device"], record["versions"]["jax"])
    places = [place(record) for levels, record in finals if levels in baselines]
    home, scores = max(places, key=places.count, default=None), {}
    for levels, record in finals:
        of_arm = scores.setdefault(levels, {})
        if home in (None, place(record)):
            score = worst if record["diverged"] else record["test"][name]
            of_arm[record["seed"]] = Fraction(score).limit_denominator(100_000_000)
    return scores


def _check_budgets(config, records):
    """Every arm that was tuned has the trials of the experiment, and half as many at each edge."""
    tried, ended = {}, {record["arm"] for record in records if record["phase"] == "final"}
    for record in records:
        if record["phase"] == "tuning" and record["arm"] in ended:
            point = json.dumps(record["values"], sort_keys=True)
            tried.setdefault(record["arm"], {}).setdefault(point, []).append(record["seed"])
    extension = math.ceil(config["trials"] / 2)
    for arm, points in tried.items():
        beyond = len(points) - config["trials"]
        assert 0 <= beyond <= config["extensions"] * extension, arm
        assert {len(seeds) for seeds in points.values()} == {config["tuning_seeds"]}, arm


def _p(differences):
    flips = itertools.product([1, -1], repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in flips]
    return Fraction(sum(one >= abs(sum(differences)) for one in sums), len(sums))


def _rows(page):
    """{levels: {column: cell}} of the table of scores."""
    lines = re.search(r"## Test .*?\n\n(.*?)\n\n", page, re.DOTALL)[1].splitlines()
    head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    levels = head.index("runs")
    return {tuple(row[:levels]): dict(zip(head, row, strict=True)) for row in rows}
