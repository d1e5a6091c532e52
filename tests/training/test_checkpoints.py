"""What is saved is what is restored, or it is said; who only reads changes nothing."""

import math
import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax.errors import RunError
from adder_flax.training import Checkpoints, SavedCheckpoints


def make_state(value):
    key = jax.random.fold_in(jax.random.key(0), value)
    return {
        "step": jnp.int32(value),
        "params": {"kernel": jax.random.normal(key, (30, 20)), "bias": jnp.ones(4)},
    }


ABSTRACT = jax.eval_shape(lambda: make_state(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(directory) as checkpoints:
        for step, score in ((1, 0.9), (2, 0.5)):
            checkpoints.save(step, make_state(step), score=score)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def snapshot(directory):
    read = lambda path: path.read_bytes() if path.is_file() else None
    paths = [directory, *directory.rglob("*")]
    return {path: (path.stat().st_mtime_ns, read(path)) for path in paths}


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position // 8] ^= 1 << position % 8
    path.write_bytes(content)


def data_of(checkpoint):
    """A file with arrays."""
    return next((checkpoint / "state" / "ocdbt.process_0" / "d").iterdir())


def same(state, step):
    alike = jax.tree.map(np.array_equal, state, make_state(step))
    return all(jax.tree.leaves(alike))


@pytest.mark.parametrize("none", [None, math.nan])
def test_the_best_and_the_last_checkpoint_are_kept(none, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step, score in enumerate([none, 0.9, none, 0.3]):
            checkpoints.save(step, make_state(step), score=score)
            checkpoints.wait()
        assert (checkpoints.steps, checkpoints.best_step) == ([1, 3], 1)
        with pytest.raises(RunError, match=r"one of the steps \[1, 3\].*got 5"):
            checkpoints.restore(ABSTRACT, 5)


def test_reading_writes_nothing_and_needs_no_permission_to(directory):
    (directory / "3.orbax-checkpoint-tmp").mkdir()
    flip(data_of(directory / "2"), 999)
    before = snapshot(directory)
    reader = SavedCheckpoints(directory)
    assert same(reader.restore(ABSTRACT), 1)
    assert same(reader.restore(ABSTRACT, "best"), 1)
    with pytest.raises(RunError, match="step 2"):
        reader.restore(ABSTRACT, 2)
    lacking = {"step": ABSTRACT["step"], "params": {"kernel": ABSTRACT["params"]["kernel"]}}
    said = "another version .*: it has params/bias; it lacks ema; go on with it by that"
    with pytest.raises(RunError, match=said):
        reader.restore(lacking | {"ema": 1}, 1)
    assert snapshot(directory) == before


def test_a_checkpoint_that_the_trainer_deletes_meanwhile_is_not_missed(
    directory, tmp_path, monkeypatch
):
    with Checkpoints(tmp_path / "newer") as checkpoints:
        checkpoints.save(3, make_state(3))
    reader, load = SavedCheckpoints(directory), SavedCheckpoints._record

    def delete_then_load(self, step):
        if step == 2:
            (directory / "2").rename(directory / "2.deleted")
            (tmp_path / "newer" / "3").rename(directory / "3")  # for which it had to go
        return load(self, step)

    monkeypatch.setattr(SavedCheckpoints, "_record", delete_then_load)
    assert same(reader.restore(ABSTRACT), 3)


def test_what_is_set_aside_never_replaces_what_was(directory):
    for attempt in range(3):
        with Checkpoints(directory) as checkpoints:
            flip(data_of(directory / "2"), 900 + attempt)
            assert same(checkpoints.restore(ABSTRACT), 1)
            checkpoints.save(2, make_state(2), score=0.5)
    aside = ["2.unreadable", "2.unreadable.2", "2.unreadable.3"]
    assert sorted(os.listdir(directory)) == ["1", "2", *aside]
    assert len({data_of(directory / name).read_bytes() for name in aside}) > 1


def test_where_no_checkpoint_can_be_read_none_is_moved(directory):
    for path in directory.rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with (
        Checkpoints(directory) as checkpoints,
        pytest.raises(RunError, match="only unreadable ones: {2: .* 1: "),
    ):
        checkpoints.restore(ABSTRACT)
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["1", "2"]


def test_a_full_disk_stops_the_run_and_leaves_the_older_checkpoint(tmp_path):
    # A limit on the size of files makes the kernel refuse to write, as a full disk does.
    incompressible = jax.random.normal(jax.random.key(0), (2**20,))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1))
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))
        try:
            with pytest.raises(RunError, match="what was written before is whole, mend that"):  # noqa: PT012
                checkpoints.save(2, make_state(2) | {"params": {"kernel": incompressible}})
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [1]
        assert same(checkpoints.restore(ABSTRACT), 1)


def test_the_best_is_not_guessed(directory):
    (directory / "1" / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(RunError, match=r"score of every checkpoint.* at step 1"):
        SavedCheckpoints(directory).restore(ABSTRACT, "best")
    with Checkpoints(directory) as checkpoints:
        checkpoints.restore(ABSTRACT)
        checkpoints.save(3, make_state(3), score=0.6)
    assert sorted(os.listdir(directory)) == ["1", "3"]  # 1 may be the best


def test_what_a_killed_run_was_about_to_delete_is_deleted(directory):
    (directory / "1").rename(directory / "1.deleted")
    with Checkpoints(directory):
        pass
    assert os.listdir(directory) == ["2"]


@pytest.mark.parametrize("which", ["last", "best", 7])
def test_no_checkpoint_is_one_message(which, tmp_path):
    with pytest.raises(RunError, match="a readable checkpoint in .* got none; train first"):
        SavedCheckpoints(tmp_path / "nowhere").restore(ABSTRACT, which)


def test_a_checkpoint_saved_before_a_setting_was_added_is_of_the_run_that_has_it_at_its_default(
    tmp_path,
):
    with Checkpoints(tmp_path, of={"seed": 0}) as checkpoints:
        checkpoints.save(1, make_state(1))
    assert same(SavedCheckpoints(tmp_path, of={"seed": 0, "data.repeats": 1}).restore(ABSTRACT), 1)
    with pytest.raises(RunError, match=r"data.repeats: 1 there, 2 now"):
        SavedCheckpoints(tmp_path, of={"seed": 0, "data.repeats": 2}).restore(ABSTRACT)
