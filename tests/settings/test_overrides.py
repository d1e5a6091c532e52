"""What a flag cannot set is answered in the words of the field's own declaration."""

import re

import pytest

from adder_flax import models, tasks  # noqa: F401 - they register settings of theirs
from adder_flax.settings import CompareSettings, RunSettings, misfit


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("optimizer", "adamw", "for all of it; set --config.optimizer.name=adamw"),
        ("model", "vit", "set --config.model.name=vit"),
        ("mesh", "8", "it has data, fsdp, tensor"),
        ("optimizer.kfac", "on", "it has learning_rate, step"),
        ("optimizer.clip_norm", "None", "0 is off.*expected 0 or a number in .*, got 'None'; set"),
        ("model.dropout_rate", "None", "config.model.dropout_rate"),
        ("model.score_options.hidden_dim", "wide", "config.model.score_options.hidden_dim"),
        ("task.teacher", "", "expected a run directory"),  # of a task that is not the default
    ],
)
def test_a_misfit_is_told_what_the_field_takes(path, value, words):
    assert re.search(words, misfit(RunSettings, path, value))


def test_fields_of_a_comparison_are_found_and_unknown_ones_are_none():
    assert "config.base.seed" in misfit(CompareSettings, "base.seed", "x")
    assert misfit(RunSettings, "optimizer.no_such_field", "3") is None
    assert misfit(RunSettings, "no.such.field", "3") is None
    assert misfit(RunSettings, "seed.inner", "3") is None
