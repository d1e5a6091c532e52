"""A handful of cases of each hostile group: one message or done right, never anything else."""

import importlib

import pytest

from benchmarks.hostile.__main__ import GROUPS

# Those of some groups start processes.
_CASES = {"settings": 60}
_SLOW_CASES = {"moments": 2, "disk": 5, "pairs": 3, "removal": 3}  # whole runs


# Users' calls are not held against annotations either.
@pytest.mark.unchecked
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in _CASES else pytest.mark.slow) for name in GROUPS],
)
def test_hostile_cases_end_in_one_message_or_are_done_right(name):
    group = importlib.import_module(f"benchmarks.hostile.{name}").GROUP
    for case in group.cases(1, (_CASES | _SLOW_CASES).get(name, 20)):
        observed = case.run()
        assert observed.verdict.sound, (
            f"{case.fault.what}: {case.name}: {observed.verdict.value}: {observed.seen}"
        )


@pytest.mark.unchecked
@pytest.mark.parametrize("name", GROUPS)
def test_a_group_makes_as_many_cases_as_it_is_asked_for(name):
    group = importlib.import_module(f"benchmarks.hostile.{name}").GROUP
    made = list(group.cases(0, 40))
    assert len(made) == 40
    assert len({(case.fault, case.name) for case in made}) == 40
