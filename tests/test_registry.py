"""The registry: names, the nearest name, the same definition again, another under a taken name."""

import pytest

from adder_flax.registry import Registry


@pytest.fixture
def scores():
    registry = Registry("score", "register_score")
    registry.register("dot", len)
    registry.register("adder", abs)
    return registry


def test_entries_are_listed_in_the_order_of_registration(scores):
    assert list(scores) == ["dot", "adder"]
    assert len(scores) == 2


def test_an_unknown_name_is_answered_with_the_nearest_if_one_is_near_and_how_to_add(scores):
    said = r"expected a score among dot, adder, got 'ader'; did you mean 'adder'\?.*reg"
    with pytest.raises(ValueError, match=said):
        scores.get("ader")
    with pytest.raises(ValueError) as error:
        scores.get("zzzz")
    assert "did you mean" not in str(error.value)


def test_the_same_definition_replaces_itself(scores):
    define = lambda value: lambda: value
    scores.register("mine", define(1))
    scores.register("mine", define(2))
    assert scores.get("mine")() == 2


def test_another_definition_under_a_taken_name_is_refused(scores):
    with pytest.raises(ValueError, match="registered already"):
        scores.register("dot", abs)


def test_lazy_entries_are_imported_once_and_only_when_asked_for(scores):
    scores.register_lazily("broken", "no_such_module:thing")
    assert "broken" in scores
    with pytest.raises(ModuleNotFoundError):
        scores.get("broken")


def test_a_temporary_scope_forgets_even_after_an_error(scores):
    with pytest.raises(KeyError), scores.temporary():  # noqa: PT012
        scores.register("mine", pow)
        raise KeyError
    assert list(scores) == ["dot", "adder"]
