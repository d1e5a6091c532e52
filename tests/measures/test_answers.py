"""A classifier's answers, against loops over them."""

import numpy as np

from adder_flax.measures import calibration, confusion_matrix

RNG = np.random.default_rng(0)


def test_confusions_are_counted_one_by_one():
    labels, predicted = RNG.integers(0, 5, (2, 200))
    table = np.zeros((7, 7), int)
    for true, seen in zip(labels, predicted, strict=True):
        table[true, seen] += 1
    np.testing.assert_array_equal(confusion_matrix(labels, predicted, 7), table)
    narrow = confusion_matrix(np.array([1, 99], np.int8), np.array([1, 98], np.int8), 100)
    assert narrow[[1, 99], [1, 98]].tolist() == [1, 1]


def test_calibration_goes_through_the_answers_bin_by_bin():
    logits, labels = 3 * RNG.standard_normal((500, 4)), RNG.integers(0, 4, 500)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found, error = calibration(probabilities, labels, bins=10), 0.0
    for m in range(10):
        inside = [
            (max(p), p.argmax() == label)
            for p, label in zip(probabilities, labels, strict=True)
            if m / 10 < max(p) <= (m + 1) / 10
        ]
        assert found.count[m] == len(inside)
        if not inside:
            assert np.isnan(found.accuracy[m])
            continue
        confidence, right = np.mean(inside, axis=0)
        np.testing.assert_allclose([found.confidence[m], found.accuracy[m]], [confidence, right])
        error += len(inside) / 500 * abs(right - confidence)
    np.testing.assert_allclose(found.error, error)


def test_the_edges_belong_to_a_bin():
    found = calibration(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([0, 0]), bins=2)
    assert found.count.tolist() == [1, 1]
