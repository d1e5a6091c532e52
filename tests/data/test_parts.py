"""Parts of a split: together they are the whole, none holds a record of another."""

import numpy as np
import pytest

from adder_flax.data import DataError, EvalPipeline, SequenceSource, TrainPipeline, load_source
from adder_flax.data._load import part_of, shared_records


def _images(source):
    return source.read(np.arange(len(source)))[0]["image"].reshape(len(source), -1)


def test_parts_share_no_record_and_leave_none_out():
    whole = load_source("digits", "train")
    parts = [load_source("digits", f"train[{part}]") for part in (":70%", "70%:85%", "85%:")]
    assert [len(part) for part in parts] == [1006, 215, 216]
    together = np.concatenate([_images(part) for part in parts])
    order = lambda rows: rows[np.lexsort(rows.T)]
    np.testing.assert_array_equal(order(together), order(_images(whole)))


def test_a_part_of_records_sorted_by_class_has_all_classes():
    arrays = {"source": np.repeat(np.arange(10), 50)[:, None], "target": np.zeros((500, 1))}
    source = SequenceSource("sorted", "train", ["train"], arrays, {}, longest=1)
    part = part_of(source, (90, 100))
    assert len(np.unique(part.read(np.arange(len(part)))[0]["source"])) > 7
    assert part[3]["source"] == part.read(np.array([3]))[0]["source"][0]


def test_pipelines_read_a_part():
    part = load_source("digits", "train[90%:]")
    seen = np.concatenate([batch["label"][batch["mask"]] for batch in EvalPipeline(part, 64)])
    batches = TrainPipeline(part, 36)
    assert batches.steps_per_epoch == 4
    trained = np.concatenate([batches[step]["label"] for step in range(4)])
    assert sorted(trained) == sorted(seen)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("train[90%:80%]", "rising from 0 to 100"),
        ("train[:101%]", "rising from 0 to 100"),
        ("train[50%:50%]", "rising from 0 to 100"),
        ("train[10:20]", r"out of \('train', 'test'\)"),  # left to the set
    ],
)
def test_what_is_no_part_is_refused(split, message):
    with pytest.raises(DataError, match=message):
        load_source("digits", split)


PARTS = ["", "[:50%]", "[40%:]", "[50%:]", "[33%:34%]", "[7%:93%]"]


@pytest.mark.cases(12)
@pytest.mark.parametrize("one", PARTS)
@pytest.mark.parametrize("other", PARTS)
def test_shared_records_are_those_that_both_have(one, other):
    """marin-community/marin#2700: records that are trained on among those that scores are of."""
    sources = [load_source("digits", f"train{part}") for part in (one, other)]
    # No image of the whole is in it twice.
    images = [{image.tobytes() for image in _images(source)} for source in sources]
    assert [len(each) for each in images] == [len(source) for source in sources]
    assert shared_records(*sources) == len(set.intersection(*images))
    test = load_source("digits", "test")
    assert shared_records(sources[0], test) == shared_records(test, sources[0]) == 0
