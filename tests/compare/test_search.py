"""Tuning: quasirandom, extended where the best lies at an edge, and known from the scores alone."""

import math

import pytest

from adder_flax.compare import unfold
from adder_flax.settings import LogUniform, OneOf

RATE = {"rate": LogUniform(1e-3, 1e-1)}
OPTIMUM = 0.02


def valley(values):
    """Best at OPTIMUM."""
    return (-abs(math.log(values["rate"] / OPTIMUM)),)


@pytest.mark.parametrize(
    ("space", "grows"),
    [(RATE["rate"], False), (LogUniform(1e-3, 5e-3), True), (LogUniform(0.08, 1.0), True)],
)
def test_a_range_grows_until_it_holds_the_optimum(space, grows):
    tuning = unfold({"rate": space}, 8, 5, valley)
    assert not tuning.edges
    assert 0.5 < tuning.best["rate"] / OPTIMUM < 2
    first = set(unfold({"rate": space}, 8, 0, valley).points)
    assert (tuning.extensions > 0) == (first < set(tuning.points)) == grows
    assert len(first) == 8


def test_a_range_that_may_not_grow_says_that_the_best_is_at_its_edge():
    """The better half of the range is missing, or what lies beyond is not allowed."""
    half = {"rate": LogUniform(1e-3, 1e-2)}
    assert unfold(half, 8, 0, valley).edges == ("rate",)
    tuning = unfold(half, 4, 3, valley, allowed=lambda values: values["rate"] <= 0.01)
    assert tuning.edges == ("rate",)
    assert all(point["rate"] <= 0.01 for point in tuning.points)


def test_nothing_is_best_before_everything_is_known_and_more_trials_keep_the_first():
    known = {}
    tuning = unfold(RATE, 4, 2, known.get)
    assert tuning.best is None
    assert tuning.missing == tuning.points == unfold(RATE, 6, 2, known.get).points[:4]
    known |= {point: valley(point) for point in tuning.points[1:]}
    assert unfold(RATE, 4, 2, known.get).missing == tuning.points[:1]


def test_a_run_that_diverged_is_not_best_and_closes_the_range_on_its_side():
    score = lambda values: (-math.inf, 3) if values["rate"] > 0.03 else (values["rate"], 0.0)
    tuning = unfold(RATE, 8, 3, score)
    assert tuning.best["rate"] <= 0.03
    assert not tuning.edges


def test_two_ranges_grow_on_their_own_sides():
    space = {"rate": LogUniform(1e-3, 1e-1), "decay": LogUniform(1e-3, 1e-1)}
    far = lambda value, best: abs(math.log(value / best))
    score = lambda values: (-0.1 * far(values["rate"], 0.01) - far(values["decay"], 10),)
    tuning = unfold(space, 8, 6, score)
    assert max(point["decay"] for point in tuning.points) > 1
    assert "decay" not in tuning.edges


def test_a_short_list_is_tried_whole_and_its_ends_are_edges_if_they_are_numbers():
    rates = unfold({"rate": OneOf((0.1, 0.2, 0.4))}, 8, 3, lambda values: (values["rate"],))
    assert [point["rate"] for point in rates.points] == [0.1, 0.2, 0.4]
    assert rates.edges == ("rate",)
    sgd = lambda values: (values["name"] == "sgd",)
    names = unfold({"name": OneOf(("adamw", "sgd"))}, 8, 3, sgd)
    assert (names.best["name"], names.edges) == ("sgd", ())


def test_points_of_the_first_range_are_counted_without_those_that_are_not_allowed():
    space, largest = {"rate": LogUniform(1e-3, 1e-2)}, lambda values: (values["rate"],)
    all_of_them = unfold(space, 6, 0, largest).points
    tuning = unfold(space, 6, 1, largest, lambda values: values["rate"] > 2e-3)
    allowed = [values for values in all_of_them if values["rate"] > 2e-3]
    assert len(allowed) < len(all_of_them) < len(tuning.points)
    assert list(tuning.points[: tuning.first]) == allowed


def test_a_trial_whose_score_is_no_number_is_never_the_best():
    points = unfold(RATE, 4, 0, valley).points
    for place, point in enumerate(points):
        scores = {other: (float(i),) for i, other in enumerate(points)} | {point: (math.nan,)}
        assert unfold(RATE, 4, 0, scores.get).best == points[2 if place == 3 else 3]
        tied = {other: (1.0, -float(i)) for i, other in enumerate(points)}
        tied[point] = 1.0, math.nan
        assert unfold(RATE, 4, 0, tied.get).best == points[1 if place == 0 else 0]
