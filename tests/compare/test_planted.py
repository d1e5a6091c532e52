"""Differences that are planted, and those that are not: what the page says of records whose scores
are made up."""

import dataclasses
import json
import math

import numpy as np
import pytest

from adder_flax.compare import Comparison, Record, write_results
from adder_flax.compare.blocks import as_markdown
from adder_flax.compare.cells import _curve
from adder_flax.compare.figures import forest, profiles
from adder_flax.compare.table import about, cautions, costs, finding, rows_of, runs_csv, scores
from adder_flax.compare.trivial import add_trivial, read_trivial
from adder_flax.data import load_source
from adder_flax.report.contests import read_runs
from tests.compare.tiny import make_config, page_of_records

RATE = "optimizer.learning_rate"
ARMS = {"arm": {"dot": {}, "additive": {"model": {"score": "additive"}}}}


def two_arms(folder, **fields):
    return Comparison(make_config(**{"factors": ARMS, "baseline": {"arm": "dot"}} | fields), folder)


def fill(comparison, score):
    """Finishes every cell unrun: ``score(cell)`` is its accuracy or, if it diverged, NaN."""
    arms = comparison.plan.arms.values()
    while cells := [cell for arm in arms for cell in comparison.open_cells(arm)]:
        for cell in cells:
            comparison.records.put(cell, _record(cell, score(cell)))
    return comparison


def finals(comparison, arm):
    return comparison.final_cells(comparison.plan.arms[arm])


HALF = lambda cell: 0.5
RATES = {"optimizer": {"learning_rate": ("log", 1e-3, 1e-2)}}
FACTS = ["parameters", "multiplications", "additions", "joules", "step_operations", "step_joules"]


def _record(cell, accuracy):
    scores = {} if math.isnan(accuracy) else {"accuracy": accuracy, "loss": 1 - accuracy}
    return Record(
        cell.arm.name,
        dict(cell.arm.levels),
        cell.phase,
        cell.seed,
        dict(cell.values),
        json.loads(cell.config.to_json()),
        steps=8,
        diverged=None if scores else "a loss that is not finite",
        validation=scores,
        test=scores if cell.phase == "final" else {},
        curve={"step": [8], "accuracy": [round(accuracy, 6)]} if scores else {"step": []},
        facts=dict.fromkeys(FACTS, 1.0),
        seconds={"step": 0.1, "run": 1.0},
        machine={"processor": "none", "cores": 1, "device": "1 × none"},
        versions={"python": "3", "jax": "0.10.2"},
        date="2026-01-01",
    )


def valley(optima):
    """Accuracies that are best at a learning rate of each arm."""

    def score(cell):
        distance = abs(math.log10(cell.values[RATE] / optima[cell.arm.name]))
        return 0.9 - 0.1 * distance - 0.001 * (cell.seed % 7)

    return score


@pytest.mark.parametrize("extensions", [0, 3])
def test_an_arm_that_lacks_the_better_half_of_the_grid_is_best_at_the_edge(extensions, tmp_path):
    """With nothing beyond the range; where it may grow, it does until the best lies inside."""
    fields = dict(search=RATES, trials=6, extensions=extensions, seeds=2)
    comparison = two_arms(tmp_path, **fields)
    fill(comparison, valley({"dot": 3e-3, "additive": 3e-2}))
    page = page_of_records(comparison)
    said = f"Best at the edge: {RATE} of additive; what lies beyond was not tried."
    assert (said in page) == (extensions == 0)
    assert page.count("Best at the edge") == page.count(said)
    # The first trials alone: a third of the range in which the best one lies.
    last = page.partition("## What fewer trials would have found")[2].partition("Validation")[0]
    [line] = [line for line in last.splitlines() if line.startswith("| additive")]
    arm = comparison.plan.arms["additive"]
    first = [comparison.tuning_cells(arm, values) for values in comparison.tuning(arm).points[:6]]
    of_first = max(valley({"additive": 3e-2})(cell) for [cell] in first)
    assert line.split(" | ")[-1] == f"{of_first:.4f} |"
    if extensions:
        assert 1.5e-2 < comparison.tuning(arm).best[RATE] < 6e-2


def test_a_trial_of_which_one_seed_diverges_is_behind_those_of_which_none_does(tmp_path):
    fields = dict(search=RATES, trials=4, extensions=0, seeds=1, tuning_seeds=2)
    comparison = two_arms(tmp_path, **fields)
    arm, last = comparison.plan.arms["dot"], max(comparison.plan.tuning_seeds)
    *_, second, largest = sorted(point[RATE] for point in comparison.tuning(arm).points)
    diverges = lambda cell: (cell.values[RATE], cell.seed) == (largest, last)
    fill(comparison, lambda cell: math.nan if diverges(cell) else 100 * cell.values[RATE])
    assert comparison.tuning(arm).best[RATE] == second


def test_the_median_run_of_the_baseline_reaches_its_own_target(tmp_path):
    """Of six runs a mean of the two in the middle would be out of reach for three."""
    accuracies = [0.7, 0.3, 0.6, 0.4, 0.2, 0.5]
    [baseline, _] = rows_of(fill(two_arms(tmp_path, seeds=6), lambda cell: accuracies[cell.seed]))
    assert baseline.target == 0.4
    assert baseline.reached == [8, None, 8, 8, None, 8]
    assert baseline.cost_to_target(lambda record: 1) == 8
    # A curve has six digits of a score, of which a third has more.
    [baseline, _] = rows_of(fill(two_arms(tmp_path / "third", seeds=1), lambda cell: 1 / 3))
    assert baseline.reached == [8]


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"machine": {"processor": "none", "cores": 1, "device": "1 × other"}},
        {"versions": {"python": "3", "jax": "0.11.0"}},
    ],
)
def test_runs_of_another_device_or_version_are_not_compared(elsewhere, tmp_path):
    factors = {"arm": {name: {} for name in ("dot", "here", "there", "mixed")}}
    comparison = two_arms(tmp_path, factors=factors, seeds=3)
    fill(comparison, lambda cell: 0.5 + 0.1 * cell.seed)
    for arm, seeds in (("there", slice(3)), ("mixed", slice(2, 3)), ("dot", slice(1))):
        for cell in finals(comparison, arm)[seeds]:
            record = dataclasses.replace(comparison.records.get(cell), **elsewhere)
            comparison.records.put(cell, record)
    dot, here, mixed, there = sorted(rows_of(comparison), key=lambda row: row.arm.name)
    assert [record.seed for record in dot.records] == [1, 2]
    assert (here.difference.pairs, mixed.difference.pairs, there.difference) == (2, 1, None)
    page = page_of_records(comparison)
    assert page.count("runs are left out") == 3
    # Some of the baseline's, too.
    assert page.count("where most runs of the baseline did not") == 3
    assert "**there: 3 runs are left out. They ran on 1 × " in page
    assert "Not finished" not in page


def test_steps_are_called_the_same_where_they_are(tmp_path):
    """Of two data sets they are not, though each arm takes those of its baseline."""
    comparison = fill(two_arms(tmp_path, seeds=1), HALF)
    assert "All arms take the same steps." in tables_of(comparison)
    [cell] = finals(comparison, "dot")
    record = dataclasses.replace(comparison.records.get(cell), steps=16)
    comparison.records.put(cell, record)
    assert "All arms take the same steps." not in tables_of(comparison)
    # One that diverged is no other schedule.
    comparison.records.put(cell, dataclasses.replace(record, diverged="a loss", test={}))
    assert "All arms take the same steps." in tables_of(comparison)


def test_costs_say_what_of_an_optimizer_is_counted_at_every_step(tmp_path):
    arms = {"arm": {"dot": {}, "kfac": {"optimizer": {"name": "kfac"}}}}
    for factors, said in ((ARMS, False), (arms, True)):
        comparison = fill(two_arms(tmp_path / str(said), factors=factors, seeds=1), HALF)
        assert ("is counted at every step" in tables_of(comparison)) == said


def test_of_a_list_as_many_trials_are_told_as_it_has_values(tmp_path):
    search = {"optimizer": {"learning_rate": ("list", 1e-3, 3e-3, 1e-2)}}
    comparison = two_arms(tmp_path, search=search, trials=8, seeds=1)
    fill(comparison, valley({"dot": 3e-3, "additive": 3e-3}))
    assert "\n\n3 quasirandom trials of each arm with 1 seed each" in page_of_records(comparison)


def test_of_trials_that_are_level_one_without_a_finite_loss_is_not_taken(tmp_path):
    """Where steps that are not finite are left out, an accuracy may have no loss beside it."""
    comparison = two_arms(tmp_path, search=RATES, trials=2, extensions=0, seeds=1)
    arm = comparison.plan.arms["dot"]
    first, second = comparison.tuning(arm).points
    for values, loss in ((first, {"loss": 0.5}), (second, {})):
        [cell] = comparison.tuning_cells(arm, values)
        record = dataclasses.replace(_record(cell, 0.5), validation={"accuracy": 0.5} | loss)
        comparison.records.put(cell, record)
    assert comparison.tuning(arm).best == first


@pytest.mark.slow
def test_a_floor_stands_beside_a_finished_comparison_of_images(tmp_path):
    comparison = fill(two_arms(tmp_path, seeds=2), HALF)
    add_trivial(comparison)
    found = read_trivial(comparison.results)
    source = load_source("digits", "test")
    [cell, _] = finals(comparison, "dot")
    train = load_source("digits", cell.config.data.train_split)
    pixels = lambda s: np.stack([s[i]["image"].ravel() for i in range(len(s))]).astype(float)
    labels = lambda s: np.array([s[i]["label"] for i in range(len(s))])
    near = [np.square(pixels(train) - one).sum(1).argmin() for one in pixels(source)]
    assert found["nearest neighbour"] == (labels(train)[near] == labels(source)).mean()
    assert 0.95 < found["softmax regression"] < 0.98  # 0.97 in the literature
    page = page_of_records(comparison)
    assert f"| nearest neighbour |  | {found['nearest neighbour']:.4f} |" in page


def test_there_is_no_floor_where_arms_see_other_sets_or_more_than_fits(tmp_path, monkeypatch):
    other = {"arm": {"digits": {}, "noise": {"data": {"name": "fake"}}}}
    for number, fields in enumerate(({"factors": other}, {"factors": {"arm": {"dot": {}}}})):
        comparison = two_arms(tmp_path / str(number), **fields, baseline={}, seeds=1)
        fill(comparison, HALF)
        if number:
            monkeypatch.setattr("adder_flax.compare.trivial._MOST_PIXELS", 1000)
        add_trivial(comparison)
        assert read_trivial(comparison.results) == {}


def tables_of(comparison):
    """What a page says without its pictures, which take longer."""
    given = comparison, rows_of(comparison)
    return as_markdown([*about(*given), scores(*given), *cautions(*given), *costs(given[1])])


def test_arms_that_all_diverged_are_named_with_what_they_differ_by(tmp_path):
    """Losses have no worst value, so that every mean is infinite."""
    comparison = two_arms(tmp_path, seeds=2)
    comparison.best = comparison.best._replace(largest=False)
    fill(comparison, lambda cell: math.nan if cell.arm.name == "additive" else 0.5)
    said = "additive is not told from dot in test accuracy by 2 seeds (that takes 10)"
    assert finding(comparison, rows_of(comparison)) == f"{said}: it differs by +inf."


def test_the_smallest_p_is_that_of_the_arm_with_the_most_pairs(tmp_path):
    """Of 7 and 3 pairs, all of one sign, it is 2 · 2 / 2⁷; with ten an arm can be called ahead."""
    factors = {"arm": {"dot": {}, "many": {}, "few": {}}}
    for most, said in ((7, "With 7 pairs of seeds no arm can be called ahead"), (10, None)):
        comparison = two_arms(tmp_path / str(most), factors=factors, seeds=10)
        for arm, seeds in {"dot": 10, "many": most, "few": 3}.items():
            for cell in finals(comparison, arm)[:seeds]:
                comparison.records.put(cell, _record(cell, 0.5 + 0.1 * (arm == "many")))
        page = tables_of(comparison)
        assert ("no arm can be called ahead" in page) == bool(said)
        assert said is None or f"{said}: that takes 10. The smallest p after Holm is 0.0312" in page
        assert f"| many | {most} | 0.6000 |" in page


def test_the_smallest_p_that_is_told_is_in_the_table(tmp_path):
    """Six pairs of which half are better: p is far above the 2 / 2⁶ that six can have."""
    in_turn = lambda cell: 0.5 + 0.1 * (-1) ** cell.seed * (cell.arm.name == "additive")
    comparison = fill(two_arms(tmp_path, seeds=6), in_turn)
    assert "The smallest p after Holm is 1.**" in tables_of(comparison)


def test_of_a_baseline_that_has_not_run_nothing_is_said(tmp_path):
    """Neither that its target is not reached, nor that who waits for it is the baseline."""
    factors = {"arm": {"dot": {}, "adder": {}}, "rate": {"low": {}, "high": {}}}
    comparison = two_arms(tmp_path, factors=factors, seeds=2)
    for name in ("dot, low", "adder, low", "adder, high"):
        for cell in finals(comparison, name):
            comparison.records.put(cell, _record(cell, 0.5))
    page = tables_of(comparison)
    assert "not reached" not in page
    [picture] = forest(comparison, rows_of(comparison))
    assert picture.data["arm"].tolist() == ["dot, low", "adder, low"]


def test_without_a_baseline_no_arm_is_one(tmp_path):
    comparison = fill(two_arms(tmp_path, baseline={}, seeds=2), HALF)
    page = tables_of(comparison)
    assert "baseline" not in page
    assert "not reached" not in page
    assert [row.target for row in rows_of(comparison)] == [None, None]
    assert rows_of(two_arms(tmp_path, baseline={}, seeds=2, target=0.4))[1].reached == [8, 8]


def test_levels_of_one_name_in_two_factors_stay_apart(tmp_path):
    """Adder or dense, of the scores' layers and of the MLP: instances are those of one MLP."""
    levels = {"adder": {}, "dense": {}}
    factors = {"mlp": levels, "qkv": levels, "steps": {"few": {}, "many": {}}}
    comparison = two_arms(tmp_path, factors=factors, baseline={"qkv": "dense"}, seeds=1)
    rows = rows_of(fill(comparison, HALF))
    steps = {"dense, dense": 4, "dense, adder": 8, "adder, dense": 2}
    reached = lambda row: [steps.get(f"{row.arm.levels['mlp']}, {row.arm.levels['qkv']}")]
    rows = [dataclasses.replace(row, reached=reached(row)) for row in rows]
    [picture] = profiles(comparison, rows)
    # Of four instances dense is first on two, where adder takes twice as long, and adder on two.
    shares = [(picture.data[name][0], picture.data[name][-1]) for name in ("dense", "adder")]
    assert shares == [(1.0, 1.0), (0.0, 0.5)]
    # A factor may be called as a column is.
    (tmp_path / "runs.csv").write_text(runs_csv(comparison, rows))
    found = read_runs(tmp_path).arms
    assert found.keys() == comparison.plan.arms.keys()
    assert {run[0].steps for run in found.values()} == {8}


def test_machines_with_other_versions_are_told_apart(tmp_path):
    comparison = fill(two_arms(tmp_path, seeds=2), HALF)
    [cell, _] = finals(comparison, "dot")
    record = comparison.records.get(cell)
    newer = dataclasses.replace(record, versions=record.versions | {"optax": "9"})
    comparison.records.put(cell, newer)
    page = tables_of(comparison)
    assert "3 runs on none" in page
    one = "1 runs on none, 1 core each (1 × none), 2026-01-01: python 3, jax 0.10.2, optax 9."
    assert one in page


@pytest.mark.parametrize(
    ("confirmatory", "largest", "told"),
    [(False, True, "no difference that"), (True, True, "ahead of"), (True, False, "behind")],
)
def test_six_seeds_put_no_arm_ahead_but_in_a_table_that_was_to_decide(
    confirmatory, largest, told, tmp_path
):
    """Seeds differ by more among themselves than arms."""
    factors = {"arm": {"dot": {}, "additive": {}, "again": {}}}
    comparison = two_arms(tmp_path, factors=factors, seeds=6, confirmatory=confirmatory)
    comparison.best = comparison.best._replace(largest=largest)
    better = lambda cell: 0.1 + 0.01 * cell.seed if cell.arm.name == "additive" else 0
    fill(comparison, lambda cell: 0.4 + 0.2 * (cell.seed % 2) + better(cell))
    page = page_of_records(comparison)
    starts = [f"| {arm} | 6 |" for arm in ("additive", "again")]
    additive, again = (page[page.index(start) :].splitlines()[0].split(" | ") for start in starts)
    assert additive[5:9] == ["+0.1250", "+0.1054 to +0.1446", "+0.1117 to +0.1383", "0.031"]
    # Two differences: the smaller p counts twice.
    assert additive[9] == "0.062"
    assert additive[10].startswith(told.removesuffix(" of"))
    sentence = page.splitlines()[2]
    if confirmatory:
        assert f"additive {told} dot; again not told from it by 6" in sentence
    else:
        assert "None of 2 arms is told from dot in test accuracy by 6 seeds (that" in sentence
        assert "they differ by +0.0000 to +0.1250." in sentence
    assert page.splitlines()[4].startswith("![Differences of 2 arms from dot")
    assert again[8:] == ["1.000", "1.000", "no difference that 6 seeds can tell |"]
    assert ("no arm can be called ahead" in page) == (not confirmatory)


def test_a_score_that_is_not_finite_once_is_no_end_of_a_record(tmp_path):
    """Of a correlation, say, of answers that are all alike before the first step."""
    rows = [
        {"step": 0, "eval/loss": 2.0, "eval/r": math.nan, "eval/never": math.inf},
        {"step": 5, "train/loss": 1.0},
        {"step": 10, "eval/loss": 1.0, "eval/r": 0.5, "eval/never": math.inf},
        {"step": 20, "eval/loss": math.nan, "eval/r": 0.6, "eval/never": math.inf},
    ]
    assert _curve(rows) == {"step": [10], "loss": [1.0], "r": [0.5]}


def test_runs_of_which_none_has_a_curve_have_a_page_without_one(tmp_path):
    """All diverged, or their losses were not finite wherever they were looked at."""
    for number, curve in enumerate(({"step": []}, {"step": [4], "loss": [1.0]})):
        comparison = two_arms(tmp_path / str(number), seeds=1)
        for cell in (*finals(comparison, "dot"), *finals(comparison, "additive")):
            record = _record(cell, 0.5 if number else math.nan)
            comparison.records.put(cell, dataclasses.replace(record, curve=curve))
        [page, *_] = write_results(comparison)
        assert "Along training" not in page.read_text()
