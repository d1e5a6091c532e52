"""Configurations of earlier versions get the defaults of what they lack, and nothing else."""

import pytest

from adder_flax import settings
from adder_flax.settings import RunSettings, completed, defaults, read


def test_what_is_complete_stays_as_it_is():
    full = defaults(RunSettings)
    full["model"]["width"] = 96
    assert completed(RunSettings, full) == full


@pytest.mark.parametrize(
    "path", ["init", "data.train_split", "model.stem_channels", "optimizer.cg_fac.momentum"]
)
def test_a_field_that_is_lacking_gets_its_default(path):
    full, lacking = defaults(RunSettings), defaults(RunSettings)
    *sections, field = path.split(".")
    inside = lacking
    for section in sections:
        inside = inside[section]
    del inside[field]
    assert completed(RunSettings, lacking) == full


def test_what_is_unknown_is_left_for_the_message():
    with pytest.raises(settings.SettingsError, match="expected no field 'sed'"):
        read(RunSettings, completed(RunSettings, {"sed": 3}))


def test_a_section_is_completed_by_the_class_of_its_name():
    from adder_flax import models

    found = completed(RunSettings, {"model": {"name": "seq2seq"}})
    assert found["model"].keys() == defaults(models.Seq2SeqSettings).keys()
