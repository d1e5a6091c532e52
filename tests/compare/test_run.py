"""Comparisons in whole: what is run, what is not run again, and what the tables say of it."""

import concurrent.futures
import csv
import dataclasses
import itertools
import json
import lzma
import math
import shutil

import jax
import numpy as np
import pytest

from adder_flax import data, packed
from adder_flax.compare import (
    Comparison,
    Records,
    describe,
    mode,
    overview,
    run,
    work,
    write_results,
)
from adder_flax.compare import cells as cells_module
from adder_flax.compare.run import load_once
from adder_flax.compare.table import rows_of
from adder_flax.errors import RunError
from adder_flax.experiment import load_experiment
from adder_flax.training import Evaluator, SavedCheckpoints, build_run, evaluation_params
from adder_flax.training.workdir import lock_workdir
from tests.compare.tiny import make_config, page_of_records

FACTORS = {
    "arm": {
        "dot": {},
        "again": {},
        "additive": {"model": {"score": "additive"}, "optimizer": {"b2": ("list", 0.9, 0.99)}},
        "hot": {"optimizer": {"learning_rate": 1e6}},
    }
}
FIELDS = {
    "factors": FACTORS,
    "baseline": {"arm": "dot"},
    "search": {"optimizer": {"weight_decay": ("log", 1e-3, 1e-1)}},
    "trials": 1,
    "extensions": 0,
    "seeds": 2,
    "title": "Tiny",
    "base": {"ema_decay": 0.5},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison and the records that were made by its first start."""
    comparison = Comparison(make_config(**FIELDS), tmp_path_factory.mktemp("comparison"))
    return comparison, list(work(comparison))


@pytest.fixture
def comparison(finished):
    return finished[0]


@pytest.fixture
def cell(comparison):
    """The first final one of the first arm."""
    return comparison.final_cells(comparison.plan.arms["dot"])[0]


def test_every_cell_runs_once(finished):
    comparison, records = finished
    assert len(records) == len({(r.arm, r.phase, r.seed, json.dumps(r.values)) for r in records})
    for arm in comparison.plan.arms.values():
        assert not comparison.open_cells(arm)
        assert len(comparison.final_cells(arm)) == 2
    assert list(work(comparison)) == []


def test_other_data_are_refused_where_cells_are_finished(comparison, monkeypatch):
    comparison.check()
    load = data.load_source

    def negative(name, split, **options):
        source = load(name, split, **options)
        arrays = source.first(len(source))
        given = 255 - arrays["image"], arrays["label"], source.label_names
        return data.ArraySource(name, split, source.splits, *given)

    monkeypatch.setattr(run, "load_once", negative)
    message = r"that finished cells of '\w+' saw, got train\[.* other records.*set --workdir"
    with pytest.raises(RunError, match=message):
        comparison.check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"factors": {"arm": {"dot": {}, "typo": {"model": {"score": "ader"}}}}},
            "^typo: .*'ader'",
        ),
        ({"search": {"optimizer": {"name": ("list", "adamw", "adamv")}}, "trials": 4}, "'adamv'"),
        ({"base": {"data.eval_split": "train"}}, "got 'train', of which 1293 are trained on"),
        ({"base": {"data.eval_split": "train[90%:]"}}, "of which 144 are tuned on"),
    ],
)
def test_what_would_stop_it_late_or_score_what_was_trained_on_is_refused(fields, message, tmp_path):
    with pytest.raises(RunError, match=message):
        Comparison(make_config(**fields), tmp_path).check()


def test_without_workers_other_settings_leave_the_results_alone(finished, tmp_path, capsys):
    comparison, _ = finished
    write_results(comparison)
    shutil.copytree(comparison.results, tmp_path / "results")
    kept = {path: path.read_bytes() for path in (tmp_path / "results").iterdir() if path.is_file()}
    others = make_config(**FIELDS | {"base": {"batch_size": 32}})
    mode.run(others, tmp_path, workers=0)
    assert "nothing is written" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in kept} == kept
    mode.run(make_config(**FIELDS), tmp_path, workers=0)
    assert "results at" in capsys.readouterr().out


def test_final_runs_alone_are_scored_on_the_test_split(finished, cell):
    comparison, records = finished
    for record in records:
        assert bool(record.test) == (record.phase == "final" and not record.diverged)
    record = comparison.records.get(cell)
    saved = SavedCheckpoints(comparison.workdir / "cells" / cell.id / "checkpoints")
    splits = ("test", 360, record.test), ("train[90%:]", 144, record.validation)
    for split, size, scores in splits:
        run = build_run(cell.config, eval_split=split)
        assert len(run.eval_source) == size
        state = saved.restore(run.abstract_state)
        found = Evaluator(run)(evaluation_params(state))
        assert {name.removeprefix("eval/"): value for name, value in found.items()} == scores
    assert record.test["loss"] != record.validation["loss"]


def test_identical_arms_have_identical_scores_and_one_that_diverges_the_worst(comparison):
    rows = {row.arm.name: row for row in rows_of(comparison)}
    assert rows["again"].scores == rows["dot"].scores
    found = rows["again"].difference
    assert (found.mean, found.low, found.high, found.p_value) == (0, 0, 0, 1)
    assert all(record.diverged for record in rows["hot"].records)
    assert rows["hot"].scores == [0.0, 0.0]


@pytest.mark.slow
def test_a_run_that_ends_without_a_finite_score_has_diverged(cell, tmp_path, monkeypatch):
    tested = lambda evaluator, params: {"eval/loss": math.inf, "eval/accuracy": math.nan}
    monkeypatch.setattr(cells_module.training.Evaluator, "__call__", tested)
    config = cell.config.to_dict() | {"non_finite": "skip"}
    cell = dataclasses.replace(cell, config=type(cell.config)(config))
    record = cells_module.run_cell(cell, tmp_path / "cell", "eval", load_once)
    assert record.diverged == "accuracy nan at its end"
    assert (record.validation, record.test) == ({}, {})
    assert record.curve["step"] == []
    Records(tmp_path).put(cell, record)


@pytest.mark.slow
def test_cells_of_one_seed_are_paired(comparison):
    cells = [comparison.final_cells(comparison.plan.arms[name])[1] for name in ("dot", "additive")]
    assert len({cell.seed for cell in cells}) == 1
    runs = [build_run(cell.config) for cell in cells]
    batch = lambda run: data.TrainPipeline(
        run.train_source, run.config.batch_size, run.config.seed
    )[5]
    batches = [batch(run) for run in runs]
    jax.tree.map(np.testing.assert_array_equal, *batches)
    augmented = [run.task.examples(jax.random.key(0), batches[0])[0] for run in runs]
    np.testing.assert_array_equal(*augmented)
    own, other = (dict(jax.tree.leaves_with_path(run.init()["params"])) for run in runs)
    shared = [path for path in own if path in other and own[path].shape == other[path].shape]
    assert len(shared) == len(own)
    for path in shared:
        np.testing.assert_array_equal(own[path], other[path])


def test_a_start_with_the_records_at_hand_runs_only_what_is_new(comparison, tmp_path):
    comparison.pack()
    shutil.copy(comparison.results / packed.NAME, tmp_path)
    more = {"seeds": 3, "results": str(tmp_path)}
    other = Comparison(make_config(**FIELDS | more), tmp_path / "elsewhere")
    again = list(work(other))
    assert {(record.phase, record.seed) for record in again} == {("final", 2)}
    assert len(again) == 4
    assert len(list((tmp_path / "records").iterdir())) == 4
    other.pack()
    assert not (tmp_path / "records").exists()
    assert list(work(Comparison(make_config(**FIELDS | more), tmp_path / "elsewhere"))) == []


def test_processes_take_different_arms_and_share_what_is_left(comparison, tmp_path, monkeypatch):
    monkeypatch.setattr(cells_module, "run_cell", lambda cell, *_: comparison.records.get(cell))
    other = Comparison(make_config(**FIELDS), tmp_path)
    assert next(work(other)).arm == "dot"
    first, second = other.open_cells(other.plan.arms["dot"])
    with lock_workdir(tmp_path / "cells" / first.id, "claim.lock"):
        ran = list(itertools.islice(work(other), 10))
    # One arm after the other, whose program is compiled; beside another process in the end.
    arms = [arm for arm, _ in itertools.groupby(record.arm for record in ran)]
    assert arms == ["additive", "again", "hot", "dot"]
    assert ran[-1].seed == second.seed
    assert [record.seed for record in work(other)] == [first.seed]


def test_all_that_a_table_needs_is_in_the_records(comparison, tmp_path):
    files = write_results(comparison)
    shutil.copy(comparison.results / packed.NAME, tmp_path)
    # The file says by itself what it is a comparison of.
    config = load_experiment(str(tmp_path / packed.NAME))
    assert config.results == str(tmp_path)
    here = (comparison.results / "results.md").read_text()
    there = page_of_records(Comparison(config, tmp_path / "elsewhere"))
    assert here.replace(str(comparison.results), "") == there.replace(str(tmp_path), "")
    names = {"results.md", "runs.csv", "results.html", "curves.png", "energy.svg"}
    assert {path.name for path in files} >= names
    assert "seconds" not in here.partition("What it costs")[2].partition("Multiplications")[0]
    assert "hot diverged with seed 0, 1" in here
    lines = list(csv.DictReader((comparison.results / "runs.csv").open()))
    assert len(lines) == 8
    assert all("--config.data.eval_split=eval" in line["command"] for line in lines)
    # What an arm does not tune is left empty.
    tuned = {line["arm"] for line in lines if line["optimizer.b2"]}
    assert tuned == {"additive"}
    assert all(line["optimizer.weight_decay"] for line in lines)
    page = (comparison.results / "results.html").read_text()
    assert "data:image/png;base64" in page
    assert 'src="http' not in page


def test_unfinished_arms_are_named(tmp_path):
    other = Comparison(make_config(**FIELDS), tmp_path)
    write_results(other)
    text = (tmp_path / "results" / "results.md").read_text()
    assert "0 of 8 final runs" in text
    said = "final runs that are missing are, by arm, dot 2, additive 2, again 2, hot 2."
    assert f"Not finished: {said}" in text
    assert "0/2" in overview(other)


def test_a_damaged_record_is_one_message(comparison, cell, tmp_path):
    other, record = Records(tmp_path), comparison.records.get(cell)
    other.put(cell, record)
    (other.folder / f"{cell.id}.json").write_text('{"format": 1, "arm"')
    for act in (lambda: Records(tmp_path).get(cell), lambda: Records(tmp_path).pack({})):
        with pytest.raises(RunError, match=r"record of a finished cell in .*dot-final-0"):
            act()
    assert "accuracy" in describe(record, "accuracy")
    values = {"optimizer.learning_rate": 1, "optimizer.kfac.learning_rate": 2, "model.width": 3}
    described = describe(dataclasses.replace(record, values=values), "accuracy")
    assert "  optimizer.learning_rate 1  kfac.learning_rate 2  width 3  " in described


def test_a_record_made_with_another_default_is_not_taken_for_todays(comparison, cell, tmp_path):
    record = comparison.records.get(cell)
    config = json.loads(json.dumps(record.config))
    # What AdamW does not read is nobody's setting.
    config["optimizer"]["kfac"]["damping"] = 3.0
    Records(tmp_path).put(cell, dataclasses.replace(record, config=config))
    assert Records(tmp_path).get(cell) is not None
    config["optimizer"]["b2"] = 0.5
    Records(tmp_path).put(cell, dataclasses.replace(record, config=config))
    with pytest.raises(RunError, match=r"the record .* another optimizer.b2; put it back"):
        Records(tmp_path).get(cell)


def test_packed_records_are_those_that_were_put(comparison, tmp_path):
    """What is packed stays readable by who had looked before, and what comes then is added."""
    cells = [cell for arm in comparison.plan.arms.values() for cell in comparison.final_cells(arm)]
    before = {cell.id: comparison.records.get(cell) for cell in cells}
    first, other = Records(tmp_path), Records(tmp_path)
    for cell in cells[:3]:
        first.put(cell, before[cell.id])
    assert other.get(cells[3]) is None
    other.pack({"seeds": 1})
    assert not first.folder.exists()
    assert [seen.get(cells[4]) for seen in (first, other)] == [None, None]
    first.put(cells[3], before[cells[3].id])
    Records(tmp_path).pack({"seeds": 1})
    packed_four, four = first.file.stat(), {cell.id: before[cell.id] for cell in cells[:4]}
    for seen in (first, other, Records(tmp_path)):
        assert seen.all() == four
    Records(tmp_path).pack({"seeds": 1})
    assert first.file.stat() == packed_four
    Records(tmp_path).pack({"seeds": 2})
    assert packed.read_packed(first.file)[0] == {"seeds": 2}
    assert Records(tmp_path).all() == four


@pytest.mark.slow
def test_processes_that_put_and_pack_at_once_lose_nothing(comparison, cell, tmp_path):
    record = comparison.records.get(cell)

    def add(worker):
        own = Records(tmp_path)
        for number in range(3):
            named = dataclasses.replace(cell, seed=1000 * worker + number)
            own.put(named, record)
            own.pack({})
            assert own.get(named) is not None

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(add, range(3)))
    assert len(Records(tmp_path).all()) == 9


def test_a_row_is_run_by_its_name_in_the_packed_file(comparison, tmp_path):
    comparison.pack()
    cell = comparison.final_cells(comparison.plan.arms["additive"])[0]
    address = comparison.records.address(cell)
    stored = comparison.workdir / "cells" / cell.id / "config.json"
    assert load_experiment(address) == load_experiment(str(stored))
    assert load_experiment(address).model.score == "additive"
    with pytest.raises(RunError, match=rf"expected the name of one of .*; did you mean {cell.id}"):
        load_experiment(address[:-1])
    with pytest.raises(RunError, match="expected an experiment file"):
        load_experiment(str(tmp_path / packed.NAME))
    for content in (b"", b"no", lzma.compress(b"{}\n{}"), lzma.compress(b"")):
        (tmp_path / packed.NAME).write_bytes(content)
        with pytest.raises(RunError, match="expected records of a comparison in .*; put"):
            load_experiment(f"{tmp_path / packed.NAME}#a")


@pytest.mark.slow
def test_cells_of_one_mechanism_share_a_compiled_program(tmp_path):
    search = {"optimizer": {"learning_rate": ("log", 1e-4, 1e-2)}}
    fields = dict(factors={"arm": {"only": {}}}, search=search, trials=18, extensions=0)
    comparison = Comparison(make_config(**fields, base={"num_epochs": 0.05}), tmp_path)
    events = []
    listen = lambda event, duration, **_: events.append(event)
    jax.monitoring.register_event_duration_secs_listener(listen)
    compiled = lambda: sum(event.endswith("backend_compile_duration") for event in events)
    try:
        counts = [compiled() for _ in work(comparison)]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(counts) == 24
    # The first trains, the first final one evaluates on another split.
    assert counts[17] == counts[0]
    assert counts[23] == counts[18]
