"""Damaged run directories: the saved state, an older one with a word about it, or one message.

Never other numbers, and nothing that was written gets lost.
"""

import json
import logging
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adder_flax import training
from adder_flax.errors import RunError
from tests.properties import runs
from tests.properties.damages import DAMAGES

CHECKPOINT_FILES = (
    "state/ocdbt.process_0/d/*",
    "state/d/*",
    "state/manifest.ocdbt",
    "state/ocdbt.process_0/manifest.ocdbt",
    "state/_METADATA",
    "_CHECKPOINT_METADATA",
    "state/_sharding",
    "state/array_metadatas/process_0",
    "state/commit_success.txt",
    "commit_success.txt",
)


def first(folder: Path, pattern: str) -> Path:
    return min(path for path in folder.glob(pattern) if path.is_file())


def holds(workdir: Path, how: str, caplog) -> bool | None:
    """Trains on or restores; returns whether the numbers are right, None where it is refused."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        try:
            if how == "train":
                return runs.same_bits(runs.train(workdir), runs.template().states[6])
            state = runs.restore(workdir, int(how) if how.isdecimal() else how)
        except RunError:
            return None
    step, saved = int(state["step"]), runs.template().states
    told = step == 4 or how != "last" or "Checkpoint 4 cannot be read" in caplog.text
    return told and runs.same_bits(state, saved[step])


@pytest.mark.slow
@given(
    file=st.sampled_from(CHECKPOINT_FILES),
    damage=st.sampled_from(sorted(DAMAGES)),
    place=st.floats(0, 1, exclude_max=True),
    how=st.sampled_from(["last", "4", "best", "train"]),
)
def test_a_damaged_checkpoint_gives_what_was_saved_or_is_said(caplog, file, damage, place, how):
    with runs.copy() as workdir:
        DAMAGES[damage](first(workdir / "checkpoints" / "4", file), place)
        before = runs.contents(workdir)
        right = holds(workdir, how, caplog)
        if how in ("last", "train"):  # the checkpoint before it is whole
            assert right
        assert right is not False
        after = runs.contents(workdir)
        assert not before["rows"] - after["rows"]
        if how != "train":
            assert not before["files"] - after["files"]
        elif "set aside" in caplog.text:
            assert list(workdir.glob("checkpoints/4.unreadable"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["last", "4"])
def test_whole_arrays_that_are_not_what_was_saved_are_not_taken(how, caplog):
    with runs.copy() as workdir:
        shutil.rmtree(workdir / "checkpoints" / "4" / "state")
        shutil.copytree(*(workdir / "checkpoints" / step / "state" for step in "24"))
        assert holds(workdir, how, caplog) is (True if how == "last" else None)


@pytest.mark.slow
@given(
    file=st.sampled_from(["config.json", "data.json"]),
    damage=st.sampled_from(sorted(DAMAGES)),
    place=st.floats(0, 1, exclude_max=True),
)
def test_a_damaged_file_of_facts_is_said_or_done_without(caplog, file, damage, place):
    with runs.copy() as workdir:
        DAMAGES[damage](workdir / file, place)
        before = runs.contents(workdir)
        right = holds(workdir, "train", caplog)
        assert right is not False
        if right is None:
            assert before == runs.contents(workdir)
        assert not before["rows"] - runs.contents(workdir)["rows"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_NO_ROWS = (
    _JSON.map(json.dumps).map(str.encode)
    | st.binary(max_size=50).map(lambda text: text.replace(b"\n", b""))
    | st.sampled_from([b"[" * 10**5, b'{"step": 2, "train/lo', b'{"step": ' + b"9" * 5000 + b"}"])
)


@given(lines=st.lists(st.tuples(st.integers(0, 12), _NO_ROWS), min_size=1, max_size=4))
def test_lines_that_are_no_rows_are_set_aside_and_none_is_lost(lines):
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"step": step, "train/loss": 1.0 / step} for step in range(1, 7)]
        known = lambda: [row for row in training.read_metrics(folder) if row in rows]
        texts = [json.dumps(row).encode() for row in rows]
        for place, line in lines:
            texts.insert(place, line)
        (Path(folder) / "metrics.jsonl").write_bytes(b"\n".join(texts))
        before = runs.contents(Path(folder))["rows"]
        assert known() == rows
        with training.metrics.MetricWriter(folder, start_step=4) as writer:
            writer.write(5, {"train/loss": 7.0})
        assert known() == rows[:4]
        assert training.read_metrics(folder)[-1] == {"step": 5, "train/loss": 7.0}
        assert not before - runs.contents(Path(folder))["rows"]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        (None, "seed", 7),
        (None, "batch_size", 16),
        ("model", "width", 32),
        ("optimizer", "learning_rate", 0.5),
        ("data", "name", "mnist"),
    ],
)
def test_the_directory_of_another_run_is_refused_and_stays_as_it_is(caplog, section, name, value):
    with runs.copy() as workdir:
        stored = json.loads((workdir / "config.json").read_text())
        (stored[section] if section else stored)[name] = value
        (workdir / "config.json").write_text(json.dumps(stored))
        before = runs.contents(workdir)
        for how in ("train", "last"):
            assert holds(workdir, how, caplog) is None
        assert runs.contents(workdir) == before


def _of_another_run(checkpoints: Path) -> None:
    """A newer checkpoint of the same shapes, saved by a run with another seed."""
    of = training.fingerprint(runs.template().run.config) | {"seed": 99}
    with tempfile.TemporaryDirectory() as folder:
        with training.Checkpoints(folder, of=of) as saved:
            saved.save(5, runs.template().states[4])
        shutil.copytree(Path(folder, "5"), checkpoints / "5")


_FOREIGN = {
    "an empty newer checkpoint": lambda place: (place / "5").mkdir(),
    "a file called as a checkpoint": lambda place: (place / "5").write_text("x"),
    "a checkpoint 007": lambda place: (place / "007").mkdir(),
    "a checkpoint in Arabic digits": lambda place: (place / "\u0665").mkdir(),
    "half of one": lambda place: (place / "6.orbax-checkpoint-tmp" / "x").mkdir(parents=True),
    "one half deleted": lambda place: (place / "1.deleted" / "x").mkdir(parents=True),
    "one set aside before": lambda place: (place / "4.unreadable").write_text("x"),
    "the newest, copied": lambda place: shutil.copytree(place / "4", place / "40"),
    "one of another run": _of_another_run,
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", _FOREIGN)
def test_what_does_not_belong_among_checkpoints_is_not_taken_for_one(kind, caplog):
    with runs.copy() as workdir:
        _FOREIGN[kind](workdir / "checkpoints")
        before = runs.contents(workdir)
        restored = runs.restore(workdir)
        assert runs.same_bits(restored, runs.template().states[4])
        assert runs.contents(workdir) == before
        assert holds(workdir, "train", caplog) in (True, None)
        assert not before["rows"] - runs.contents(workdir)["rows"]
