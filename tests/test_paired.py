"""Statistics against enumeration by hand, and how often an interval holds the truth."""

import itertools

import numpy as np
import pytest

from adder_flax.compare import (
    best_of_fewer,
    first_reaching,
    interquartile_mean,
    paired_difference,
    performance_profiles,
)


def test_p_is_that_of_all_sign_flips():
    values, baseline = np.random.default_rng(0).normal(size=(2, 7)) + [[0.7], [0.0]]
    differences = values - baseline
    flips = np.array([differences * signs for signs in itertools.product([1, -1], repeat=7)]).mean(
        1
    )
    expected = np.mean(np.abs(flips) >= abs(differences.mean()) - 1e-12)
    assert paired_difference(values, baseline).p_value == pytest.approx(expected)


@pytest.mark.parametrize(("pairs", "smallest"), [(5, 2 / 32), (6, 2 / 64)])
def test_six_pairs_can_pass_a_test_at_five_percent_and_five_cannot(pairs, smallest):
    values = np.arange(1.0, pairs + 1)
    assert paired_difference(values, np.zeros(pairs)).p_value == pytest.approx(smallest)


def test_one_pair_says_nothing():
    found = paired_difference([0.9], [0.7])
    assert found.mean == pytest.approx(0.2)
    assert (found.low, found.high, found.p_value) == (-np.inf, np.inf, 1)


def test_pairing_removes_what_seeds_have_in_common():
    rng = np.random.default_rng(1)
    seeds = rng.normal(size=6)
    found = paired_difference(seeds + 0.1 + 0.01 * rng.normal(size=6), seeds)
    assert 0.08 < found.low < found.high < 0.12


def test_identical_arms_have_an_interval_that_is_zero():
    values = [0.3, 0.1, 0.2, 0.4, 0.9, 0.6]
    found = paired_difference(values, values)
    assert (found.mean, found.low, found.high, found.p_value) == (0, 0, 0, 1)


def test_arms_that_differ_by_chance_alone_have_intervals_that_hold_zero():
    """As often as docs/compare.md says of six pairs: in 85 of 100 at least."""
    rng = np.random.default_rng(2)
    intervals = [paired_difference(*rng.normal(size=(2, 6))) for _ in range(40)]
    assert np.mean([found.low <= 0 <= found.high for found in intervals]) >= 0.8
    assert np.mean([found.p_value <= 0.05 for found in intervals]) <= 0.15


def test_the_interquartile_mean_leaves_a_quarter_out_at_each_end():
    values = np.random.default_rng(3).normal(size=8)
    assert interquartile_mean(values) == pytest.approx(np.sort(values)[2:6].mean())


def test_first_reaching_follows_the_direction_of_the_score():
    steps, errors = [5, 10, 15], [0.9, 0.4, 0.5]
    assert first_reaching(steps, errors, 0.5, largest=False) == 10
    assert first_reaching(steps, errors, 0.3, largest=False) is None


def test_profiles_count_what_is_solved_within_a_factor():
    costs = {"a": [10.0, 30.0, None], "b": [20.0, 10.0, None], "c": [None, 40.0, None]}
    profiles = performance_profiles(costs, [1, 2, 3, 4])
    expected = {"a": [1, 1, 2, 2], "b": [1, 2, 2, 2], "c": [0, 0, 0, 1]}
    for name, solved in expected.items():
        np.testing.assert_allclose(profiles[name], np.array(solved) / 3)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("trials", [1, 2, 3, 7])
def test_the_best_of_fewer_trials_is_the_median_over_all_choices(trials, largest):
    scores = [*np.random.default_rng(4).normal(size=6), -np.inf if largest else np.inf]
    best = max if largest else min
    of_each = sorted(
        (best(chosen) for chosen in itertools.combinations(scores, trials)), reverse=not largest
    )
    found = best_of_fewer(scores, trials, largest=largest)
    assert found == of_each[(len(of_each) - 1) // 2]
    for count in (0, 8):
        with pytest.raises(ValueError, match="expected 1 to 7 trials"):
            best_of_fewer(scores, count, largest=largest)
