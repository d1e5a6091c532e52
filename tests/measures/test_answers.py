"""A classifier's answers, against loops over them."""

import numpy as np
import pytest

from adder_flax.measures import calibration, confusion_matrix

RNG = np.random.default_rng(0)


def test_confusions_are_counted_one_by_one():
    labels, predicted = RNG.integers(0, 5, (2, 200))
    pairs = np.stack([labels, predicted], -1)
    table = [[(pairs == (true, seen)).all(-1).sum() for seen in range(7)] for true in range(7)]
    np.testing.assert_array_equal(confusion_matrix(labels, predicted, 7), table)
    narrow = confusion_matrix(np.array([1, 99], np.int8), np.array([1, 98], np.int8), 100)
    assert narrow[[1, 99], [1, 98]].tolist() == [1, 1]


@pytest.mark.parametrize(("label", "seen"), [(-1, 4), (0, 3), (3, 0), (2, -1)])
def test_what_is_no_class_is_confused_with_none(label, seen):
    with pytest.raises(ValueError, match="classes from 0 to 2, got some from"):
        confusion_matrix(np.array([0, label]), np.array([1, seen]), 3)


def test_calibration_goes_through_the_answers_bin_by_bin():
    logits, labels = 3 * RNG.standard_normal((500, 4)), RNG.integers(0, 4, 500)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found, error = calibration(probabilities, labels, bins=10), 0.0
    confidence, right = probabilities.max(-1), probabilities.argmax(-1) == labels
    for m in range(10):
        inside = (m / 10 < confidence) & (confidence <= (m + 1) / 10)
        assert found.count[m] == inside.sum()
        if not inside.any():
            assert np.isnan(found.accuracy[m])
            continue
        means = confidence[inside].mean(), right[inside].mean()
        np.testing.assert_allclose([found.confidence[m], found.accuracy[m]], means)
        error += inside.mean() * abs(means[0] - means[1])
    np.testing.assert_allclose(found.error, error)
    # The edges belong to a bin.
    found = calibration(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([0, 0]), bins=2)
    assert found.count.tolist() == [1, 1]
