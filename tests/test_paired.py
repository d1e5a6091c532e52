"""Statistics against enumeration by hand, and how often an interval holds the truth."""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest

from adder_flax import compare
from adder_flax.compare import best_of_fewer, holm, paired_difference, verdict

INF = math.inf


def exact_p(differences):
    """By all sign flips, in fractions; a sum with more infinities of one sign is beyond others."""

    def size(flipped):
        infinite = sum(math.copysign(1, d) for d in flipped if d in (INF, -INF))
        finite = sum(d for d in flipped if d not in (INF, -INF))
        return abs(infinite), 0 if infinite else abs(finite)

    found = [
        size([d * sign for d, sign in zip(differences, signs, strict=True)])
        for signs in itertools.product([1, -1], repeat=len(differences))
    ]
    return Fraction(sum(one >= size(differences) for one in found), len(found))


@pytest.mark.parametrize("of", [10, 360, 10_000])
def test_p_is_that_of_all_sign_flips_where_many_tie(of):
    """Scores of so many images, which as floats differ by rounding where they are equal."""
    rng = np.random.default_rng(of)
    for pairs in (2, 3, 5, 6, 8):
        counts = rng.integers(of - 9, of + 1, size=(2, pairs))
        expected = exact_p([Fraction(int(a - b), of) for a, b in counts.T])
        assert paired_difference(*(counts / of)).p_value == float(expected)


def test_p_of_differences_that_never_tie():
    values, baseline = np.random.default_rng(0).normal(size=(2, 7)) + [[0.7], [0.0]]
    expected = exact_p([Fraction(a) - Fraction(b) for a, b in zip(values, baseline, strict=True)])
    assert paired_difference(values, baseline).p_value == float(expected)


@pytest.mark.parametrize("huge", [3e9, 1e17])
@pytest.mark.parametrize(
    "others", [(1, 2, 3, 1.5, 1.2), (1, -2, 3, 1, -1), (0, 0, 1, -3e5, 0.5), (2, -1, -1)]
)
def test_a_huge_difference_outweighs_the_others_but_does_not_hide_them(huge, others):
    differences = [huge, *others]
    expected = float(exact_p(list(map(Fraction, differences))))
    assert paired_difference(differences, [0] * len(differences)).p_value == expected


@pytest.mark.parametrize(
    ("of", "counts", "p_value"),
    [
        (360, (-1, 0, 3, -5, 6, -1), 0.9375),  # one of 8 examples, docs/results/curvature_digits
        (10_000, (16, 4, -1, -3, 39, -18), 0.59375),  # 1 of 6 blocks, blocks_fashion_mnist
    ],
)
def test_p_of_two_rows_that_rounding_decided(of, counts, p_value):
    base = np.array([351, 350, 348, 352, 349, 351]) / of
    assert paired_difference(base + np.array(counts) / of, base).p_value == p_value


LEVEL, LEVEL_BASE = (0.21, 0.22, 0.20, 0.23, 0.21), (0.22, 0.21, 0.21, 0.22, 0.20)


@pytest.mark.parametrize(
    ("values", "baseline"),
    [
        ([INF, *LEVEL], [0.20, *LEVEL_BASE]),
        ([INF, *LEVEL], [INF, *LEVEL_BASE]),
        ([INF, INF, *LEVEL[1:]], [0.20, *LEVEL_BASE]),
        ([INF, *LEVEL], [0.20, INF, *LEVEL_BASE[1:]]),
        ([INF, INF, INF, *LEVEL[2:]], [0.20, *LEVEL_BASE[:3], INF, 0.20]),
        ([INF] * 6, [0.20, *LEVEL_BASE]),
        ([INF] * 6, [INF] * 6),
        ([-INF, 1e300, 0.3], [0.1, -1e300, 0.1]),
        ([INF, 0.1], [0.2, 0.1]),
    ],
)
def test_a_run_that_diverged_is_last_and_the_test_exact(values, baseline):
    hundredths = lambda score: score if abs(score) == INF else Fraction(str(score))
    pairs = [(hundredths(a), hundredths(b)) for a, b in zip(values, baseline, strict=True)]
    found = paired_difference(values, baseline)
    assert found.p_value == float(exact_p([0 if a == b else a - b for a, b in pairs]))
    endless = [a > b for a, b in pairs if a != b and INF in (abs(a), abs(b))]
    net = sum(endless) - (len(endless) - sum(endless))
    assert not math.isnan(found.mean)
    assert math.isinf(found.mean) == bool(net)
    assert found.mean * net >= 0
    if endless:
        assert (found.low, found.high) == found.bootstrap == (-INF, INF)


@pytest.mark.parametrize("largest", [True, False])
def test_a_score_that_is_no_number_is_the_worst(largest):
    worst = -INF if largest else INF
    values, baseline = [math.nan, 0.2, 0.3, math.nan], [0.1, math.nan, 0.2, math.nan]
    found = paired_difference(values, baseline, largest=largest)
    assert found == paired_difference([worst, 0.2, 0.3, 0.4], [0.1, worst, 0.2, 0.4])
    one = paired_difference([math.nan, 0.2], [0.1, 0.2], largest=largest)
    assert one.mean == worst


def test_the_interval_is_students():
    """By the textbook's formula, with the quantile of five degrees from a printed table."""
    values, baseline = [0.84, 0.91, 0.88, 0.79, 0.90, 0.86], [0.80, 0.85, 0.87, 0.80, 0.83, 0.82]
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    half = 2.5706 * statistics.stdev(differences) / math.sqrt(6)
    found, mean = paired_difference(values, baseline), statistics.mean(differences)
    ends = pytest.approx([mean, mean - half, mean + half], abs=1e-6)
    assert [found.mean, found.low, found.high] == ends
    low, high = found.bootstrap
    assert found.low < low < found.mean < high < found.high


def test_holm_is_the_closure_of_bonferroni():
    """A p is the largest over all groups of tests that hold it, each by Bonferroni's."""
    rng = np.random.default_rng(5)
    for count in range(6):
        p_values = (rng.uniform(size=count) ** 3).round(2).tolist()
        sizes = range(1, count + 1)
        groups = [g for size in sizes for g in itertools.combinations(range(count), size)]
        of_group = lambda group: min(1.0, len(group) * min(p_values[i] for i in group))  # noqa: B023
        expected = [max(of_group(g) for g in groups if i in g) for i in range(count)]
        assert holm(p_values) == pytest.approx(expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("largest", [True, False])
def test_ahead_takes_ten_seeds_after_holm_or_a_table_that_was_to_decide(largest, sign):
    told = "ahead" if (sign > 0) == largest else "behind"
    gains = sign * np.array([0.10, 0.11, 0.12, 0.10, 0.13, 0.09, 0.10, 0.11, 0.12, 0.10])
    of = lambda pairs, gains=gains: paired_difference(gains[:pairs], [0.0] * pairs)
    say = lambda found, p, **options: verdict(found, p, largest=largest, **options)
    assert say(of(10), 0.05) == told
    assert say(of(10), 0.051) == "no difference that 10 seeds can tell"
    assert say(of(9), 2 / 2**9) == "no difference that 9 seeds can tell"
    assert say(of(6), 1.0, confirmatory=True) == told
    level = of(6, gains * np.tile([1, -1], 5))
    assert say(level, 0.0, confirmatory=True) == "no difference that 6 seeds can tell"
    assert say(of(1), 1.0, confirmatory=True) == "no difference that 1 seed can tell"


def test_one_pair_says_nothing():
    found = paired_difference([0.9], [0.7])
    assert found.mean == pytest.approx(0.2)
    assert (found.low, found.high, found.p_value) == (-np.inf, np.inf, 1)


def test_arms_that_differ_by_chance_alone_have_intervals_that_hold_zero():
    """As often as docs/compare.md says of six pairs: in 95 of 100, the bootstrap's in 86."""
    rng = np.random.default_rng(2)
    intervals = [paired_difference(*rng.normal(size=(2, 6))) for _ in range(60)]
    assert np.mean([found.low <= 0 <= found.high for found in intervals]) >= 0.9
    assert np.mean([found.bootstrap[0] <= 0 <= found.bootstrap[1] for found in intervals]) >= 0.75
    assert np.mean([found.p_value <= 0.05 for found in intervals]) <= 0.1


def test_the_interquartile_mean_leaves_a_quarter_out_at_each_end():
    values = np.random.default_rng(3).normal(size=8)
    assert compare.interquartile_mean(values) == pytest.approx(np.sort(values)[2:6].mean())


def test_first_reaching_follows_the_direction_of_the_score():
    steps, errors = [5, 10, 15], [0.9, 0.4, 0.5]
    assert compare.first_reaching(steps, errors, 0.5, largest=False) == 10
    assert compare.first_reaching(steps, errors, 0.3, largest=False) is None


def test_profiles_count_what_is_solved_within_a_factor():
    costs = {"a": [10.0, 30.0, None], "b": [20.0, 10.0, None], "c": [None, 40.0, None]}
    profiles = compare.performance_profiles(costs, [1, 2, 3, 4])
    expected = {"a": [1, 1, 2, 2], "b": [1, 2, 2, 2], "c": [0, 0, 0, 1]}
    for name, solved in expected.items():
        np.testing.assert_allclose(profiles[name], np.array(solved) / 3)


def test_nothing_is_as_cheap_as_nothing():
    costs = {"a": [0.0, 4.0, 0.0], "b": [0.0, 2.0, 1.0], "c": [None, 2.0, None]}
    ratios = {name: row.tolist() for name, row in compare.cost_ratios(costs).items()}
    assert ratios == {"a": [1, 2, 1], "b": [1, 1, INF], "c": [INF, 1, INF]}
    scores = {"a": (1 + 2 / 3 + 1) / 3, "b": 2 / 3, "c": 1 / 3}
    assert compare.profile_scores(costs) == pytest.approx(scores)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("trials", [1, 2, 3, 7])
def test_the_best_of_fewer_trials_is_the_median_over_all_choices(trials, largest):
    scores = [*np.random.default_rng(4).normal(size=6), -np.inf if largest else np.inf]
    best = max if largest else min
    of_each = sorted(map(best, itertools.combinations(scores, trials)), reverse=not largest)
    found = best_of_fewer(scores, trials, largest=largest)
    assert found == of_each[(len(of_each) - 1) // 2]
    for count in (0, 8):
        with pytest.raises(ValueError, match="expected 1 to 7 trials"):
            best_of_fewer(scores, count, largest=largest)
