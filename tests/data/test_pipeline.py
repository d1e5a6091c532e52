"""Which records a batch holds, whatever the threads, hosts and restarts; none lost or twice."""

import collections
import itertools
import threading
import time

import numpy as np
import pytest

from adder_flax.data import (
    ArraySource,
    CachedSource,
    DataError,
    EncodedSource,
    EvalPipeline,
    TrainPipeline,
    UnreadableRecordError,
    _pipeline,
)
from tests.data.files import encode, smooth_image


def numbered_source(count):
    """A source whose record i is an image of the two bytes of i, with label i."""
    numbers, names = np.arange(count), list(map(str, range(count)))
    images = np.stack([numbers // 256, numbers % 256], -1).astype(np.uint8)[:, None, None]
    return ArraySource("numbered", "train", ["train"], images, numbers, names)


class PngRecords:
    """Encoded images of varying size; those in `broken` cannot be decoded."""

    def __init__(self, count, broken=(), size=None):
        self.broken = set(broken)
        self.images = [smooth_image(size or 20 + i, size or 30 - i, seed=i) for i in range(count)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return (b"broken" if index in self.broken else encode(self.images[index])), index

    def __getitems__(self, indices):
        return [self[index] for index in indices]

    def describe(self, index):
        return f"file{index}.png"


def encoded_source(count, *, broken=(), size=None, **options):
    what = (PngRecords(count, broken, size), list(map(str, range(count))), (12, 12, 3))
    return EncodedSource("pngs", "train", ["train"], *what, crops_on_host=size is None, **options)


def same(first, second):
    return first.keys() == second.keys() and all((first[key] == second[key]).all() for key in first)


def take(iterator, count):
    batches = list(itertools.islice(iterator, count))
    iterator.close()
    return batches


@pytest.mark.parametrize(("count", "batch_size"), [(10, 3), (7, 7), (1, 1), (300, 50)])
def test_an_epoch_holds_no_record_twice(count, batch_size):
    pipeline = TrainPipeline(numbered_source(count), batch_size)
    assert pipeline.steps_per_epoch == count // batch_size
    left_out = []
    for epoch in range(8):
        steps = range(epoch * pipeline.steps_per_epoch, (epoch + 1) * pipeline.steps_per_epoch)
        labels = np.concatenate([pipeline[step]["label"] for step in steps])
        assert len(set(labels.tolist())) == len(labels) == count // batch_size * batch_size
        left_out.append(frozenset(range(count)) - set(labels.tolist()))
    # What an epoch leaves out changes, so no record is left out for good.
    assert frozenset.intersection(*left_out) == frozenset()
    batch = pipeline[4]
    assert (batch["image"].dtype, batch["label"].dtype) == (np.uint8, np.int32)
    high, low = batch["image"][:, 0, 0].T.astype(int)
    assert (256 * high + low == batch["label"]).all()


@pytest.mark.parametrize(("batch_size", "repeats"), [(12, 3), (10, 3), (9, 2)])
def test_repeated_records_stand_side_by_side(batch_size, repeats):
    """As in DeiT's sampler: the permutation with each record in place so many times, cut into as
    many batches."""
    make = lambda number: TrainPipeline(numbered_source(40), batch_size, seed=2, repeats=number)
    once, repeated = make(1), make(repeats)
    steps = once.steps_per_epoch
    assert repeated.steps_per_epoch == steps == 40 // batch_size
    for epoch in (range(steps), range(steps, 2 * steps)):
        order, rows = (np.concatenate([*map(p.record_indices, epoch)]) for p in (once, repeated))
        assert (rows == np.repeat(order, repeats)[: len(rows)]).all()


def test_permutations_are_uniform_over_seeds_and_epochs():
    """Each of the 24 orders of 4 records comes up equally often, whatever the last epoch had, or
    this epoch or the one before of the last seed."""
    pipelines = [TrainPipeline(numbered_source(4), 4, seed) for seed in range(60)]
    drawn = [[tuple(p[epoch]["label"].tolist()) for epoch in range(41)] for p in pipelines]
    orders = collections.Counter(itertools.chain(*drawn))
    counts = np.array([orders[order] for order in itertools.permutations(range(4))])
    expected = 60 * 41 / 24
    assert ((counts - expected) ** 2 / expected).sum() < 49.7  # 99.9 %, 23 degrees of freedom
    orders = np.array([[hash(order) for order in epochs] for epochs in drawn])
    for again in (
        orders[:, 1:] == orders[:, :-1],
        orders[1:] == orders[:-1],
        orders[1:, :-1] == orders[:-1, 1:],
    ):
        assert 60 < again.sum() < 145  # one in 24: 98 to 101 with a standard deviation of 9.8


def test_large_epochs_are_not_correlated():
    pipeline = TrainPipeline(numbered_source(50_000), 50_000, seed=3)
    for first, second in itertools.pairwise(map(pipeline.record_indices, range(4))):
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(50_000)
        assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 5 / np.sqrt(50_000)


@pytest.mark.parametrize("make_source", [lambda: numbered_source(40), lambda: encoded_source(8)])
@pytest.mark.parametrize(
    "hosts", [[range(4), range(4, 8)], [[0, 1, 6, 7], [2, 3, 4, 5]], [[1], [0, 2, 3, 7]]]
)
def test_hosts_share_the_same_global_batch(make_source, hosts):
    source = make_source()
    whole = TrainPipeline(source, 8, seed=5)
    parts = [TrainPipeline(source, 8, 5, rows=rows) for rows in hosts]
    for step in (0, 1, 7, 23):
        for part, rows in zip(parts, hosts, strict=True):
            assert same(part[step], {key: array[list(rows)] for key, array in whole[step].items()})


@pytest.mark.parametrize("make_source", [lambda: numbered_source(20), lambda: encoded_source(20)])
@pytest.mark.parametrize(("threads", "ahead"), [(1, 1), (2, 3), (8, 2)])
def test_iterating_equals_indexing_whatever_the_threads(make_source, threads, ahead, monkeypatch):
    monkeypatch.setattr(_pipeline, "usable_cores", lambda: threads)
    monkeypatch.setattr(_pipeline, "_AHEAD", ahead)
    pipeline = TrainPipeline(make_source(), 6, seed=1)
    for start in (0, 5):
        batches = take(pipeline.iterate(start), 5)
        assert all(same(batch, pipeline[start + offset]) for offset, batch in enumerate(batches))


def test_random_crops_differ_by_epoch_and_repeat_by_step():
    source = encoded_source(1)
    pipeline = TrainPipeline(source, 1)
    images = [pipeline[step]["image"] for step in range(4)]
    assert same(pipeline[2], TrainPipeline(encoded_source(1), 1)[2])
    assert all((a != b).any() for a, b in itertools.combinations(images, 2))
    centered = TrainPipeline(encoded_source(1, crop_scale=None), 1)
    assert same(centered[0], centered[3])
    repeated = TrainPipeline(encoded_source(6), 6, repeats=3)[0]["image"][:3]
    assert all((a != b).any() for a, b in itertools.combinations(repeated, 2))


def test_cached_source_gives_the_same_batches():
    plain, cached = encoded_source(10, size=12), CachedSource(encoded_source(10, size=12))
    for step in range(6):
        assert same(TrainPipeline(cached, 4)[step], TrainPipeline(plain, 4)[step])
    assert (cached[3]["image"] == plain[3]["image"]).all()
    assert same(EvalPipeline(cached, 4)[2], EvalPipeline(plain, 4)[2])
    # Decoded once.
    cached._source._records.broken.update(range(10))
    assert cached.read(np.arange(10))[0]["label"].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("count", "batch_size", "hosts"), [(10, 4, 1), (10, 4, 2), (3, 8, 4), (8, 4, 2), (1, 1, 1)]
)
def test_evaluation_counts_every_record_once(count, batch_size, hosts):
    size = batch_size // hosts
    rows = [range(host * size, (host + 1) * size) for host in range(hosts)]
    parts = [EvalPipeline(numbered_source(count), batch_size, rows=part) for part in rows]
    assert {len(part) for part in parts} == {-(-count // batch_size)}
    batches = [batch for part in parts for batch in part]
    labels = [batch["label"][batch["mask"]] for batch in batches]
    assert sorted(np.concatenate(labels).tolist()) == list(range(count))
    for batch in batches:
        assert batch["image"].shape == (size, 1, 1, 2)
        assert not batch["image"][~batch["mask"]].any()
        assert not batch["label"][~batch["mask"]].any()
    for part in parts:
        assert all(same(batch, part[step]) for step, batch in enumerate(part))
        with pytest.raises(IndexError, match=rf"\[0, {len(part)}\), got {len(part)}"):
            part[len(part)]


def test_an_error_on_a_thread_names_the_record():
    pipeline = TrainPipeline(encoded_source(6, broken=[4]), 6)
    with pytest.raises(UnreadableRecordError, match=r"record 4 of pngs/train \(file4.png\)"):
        next(pipeline.iterate())


def test_skipped_records_are_replaced_in_training_and_masked_in_evaluation():
    source = encoded_source(6, broken=[2, 3], on_unreadable="skip")
    pipeline = TrainPipeline(source, 6)
    expected = [4 if index in (2, 3) else index for index in pipeline.record_indices(0)]
    assert next(pipeline.iterate())["label"].tolist() == expected
    assert sorted(source.unreadable) == [2, 3]
    labels = [batch["label"][batch["mask"]].tolist() for batch in EvalPipeline(source, 4)]
    assert labels == [[0, 1], [4, 5]]
    none = encoded_source(3, broken=range(3), on_unreadable="skip")
    with pytest.raises(DataError, match="a readable record in pngs/train, got none"):
        TrainPipeline(none, 2)[0]


def test_threads_end_with_the_iterator():
    """Its own threads, by identity: those of earlier tests may end meanwhile."""
    before = set(threading.enumerate())
    iterator = TrainPipeline(encoded_source(6), 2).iterate()
    next(iterator)
    started = set(threading.enumerate()) - before
    assert started
    iterator.close()
    for thread in started:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in started)


def test_reading_ahead_is_bounded():
    """A consumer that stops must not let the pipeline fill the memory."""
    source = numbered_source(100)
    batches, read = [], source.read
    source.read = lambda *arguments: batches.append(1) or read(*arguments)
    iterator = TrainPipeline(source, 10).iterate()
    next(iterator)
    time.sleep(0.3)
    assert len(batches) <= 3
    iterator.close()


@pytest.mark.parametrize("size", [0, 11])
def test_a_batch_that_the_source_does_not_fill_is_refused(size):
    said = rf"1 to 10 records \(all of numbered/train\), got {size}"
    with pytest.raises(DataError, match=said):
        TrainPipeline(numbered_source(10), size)


def test_labels_are_checked():
    source = encoded_source(3, on_unreadable="skip")
    source.label_names = ("only",)
    said = r"label in \[0, 1\) in record 1 .*got 1. Choose a split that has labels"
    with pytest.raises(DataError, match=said):
        source[1]
