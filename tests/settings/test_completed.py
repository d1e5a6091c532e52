"""Configurations of earlier versions get the defaults of what they lack, and nothing else."""

import dataclasses
import functools

import pytest

from adder_flax import settings
from adder_flax.errors import RunError
from adder_flax.settings import CompareSettings, RunSettings, completed, defaults, filled, read


def test_what_is_complete_stays_as_it_is():
    full = completed(RunSettings, {"model": {"width": 96}})
    assert full["model"]["width"] == 96
    assert completed(RunSettings, full) == full


@pytest.mark.parametrize(
    "path", ["init", "data.train_split", "model.stem_channels", "optimizer.kfac.damping"]
)
def test_a_field_that_is_lacking_gets_its_default(path):
    full, lacking = completed(RunSettings, {}), defaults(RunSettings)
    *sections, field = path.split(".")
    del functools.reduce(dict.__getitem__, sections, lacking)[field]
    assert completed(RunSettings, lacking) == full


@pytest.mark.parametrize(
    ("step", "expected"),
    [("rms", (0.2, 0.03, 2, 5)), ("share", (0.1, 0.1, 2, 10)), ("clip", (1.0, 10.0, 1, 10))],
)
def test_what_follows_another_field_is_written_down(step, expected):
    config = defaults(RunSettings)
    config["optimizer"]["name"] = "kfac"
    config["optimizer"]["kfac"]["step"] = step
    fields = ("learning_rate", "damping", "iterations", "inverse_interval")
    assert tuple(getattr(read(RunSettings, config).optimizer.kfac, f) for f in fields) == expected
    written = completed(RunSettings, config)["optimizer"]["kfac"]
    assert tuple(written[field] for field in fields) == expected
    config["optimizer"]["kfac"]["damping"] = 3.0
    assert completed(RunSettings, config)["optimizer"]["kfac"]["damping"] == 3.0
    assert read(RunSettings, config).optimizer.kfac.damping == 3.0


def test_the_section_of_version_0_1_0_is_left_out_unless_it_is_read():
    old = {"curvature": "kron", "max_iterations": 0, "momentum": -1.0, "kl_clip": 3e-3}
    written = completed(RunSettings, {"optimizer": {"name": "muon", "cg_fac": old}})
    assert written["optimizer"]["cg_fac"] == defaults(RunSettings)["optimizer"]["cg_fac"]
    with pytest.raises(RunError, match="got cg_fac of version 0.1.0; CHANGELOG"):
        completed(RunSettings, {"optimizer": {"name": "cg_fac", "cg_fac": old}})


def test_a_comparison_with_an_arm_of_version_0_1_0_is_refused():
    """Not read as today's optimizer of that name."""
    old = {"name": "adamw", "cg_fac": {"max_iterations": 0}}
    arms = {"adamw": {}, "second": {"optimizer": {"name": "cg_fac"}}}
    fields = {"base": {"optimizer": old}, "factors": {"optimizer": arms}}
    with pytest.raises(RunError, match="got cg_fac of version 0.1.0; CHANGELOG"):
        filled(CompareSettings, fields)
    del arms["second"]
    assert "max_iterations" not in filled(CompareSettings, fields)["base"]["optimizer"]["cg_fac"]


def test_what_nothing_reads_is_at_its_default():
    config = defaults(RunSettings)
    config["optimizer"]["kfac"] |= {"step": "clip", "damping": 3.0}
    own = defaults(RunSettings)["optimizer"]["kfac"]
    assert completed(RunSettings, config)["optimizer"]["kfac"] == own
    config["optimizer"]["name"] = "kfac"
    config["optimizer"]["kfac"] |= {"step": "share", "kl_clip": 0.5}
    written = completed(RunSettings, config)["optimizer"]["kfac"]
    assert (written["damping"], written["kl_clip"]) == (3.0, own["kl_clip"])


def test_augmentations_of_an_earlier_version():
    jitter = {"brightness": 0.2, "contrast": 0.2, "saturation": 0.2, "hue": 0.0}
    assert read(RunSettings, completed(RunSettings, {"task": jitter})).task.color_jitter == 0.2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sed": 3}, "expected no field 'sed'"),
        # Even where nothing would read it.
        ({"optimizer": {"cg_fac": {"dampng": 3}}}, "cg_fac: expected no field 'dampng'; did you"),
        ({"optimizer": {"cg_fac": 3}}, "cg_fac: expected fields learning_rate.*got 3"),
        ({"task": {"brightness": 0.2, "contrast": 0.1}}, "brightness.*one number for all"),
        ({"task": {"rand_augment_layers": 3}}, "rand_augment_layers: expected 2, what an earlier"),
        ({"optimizer": {"name": "kfac", "kfac": {"step": "fast"}}}, "step: expected .*got 'fast'"),
    ],
)
def test_what_is_wrong_is_left_for_the_message(config, message):
    with pytest.raises(settings.SettingsError, match=message):
        read(RunSettings, completed(RunSettings, config))


def test_a_section_is_completed_by_the_class_of_its_name():
    from adder_flax import models

    found = completed(RunSettings, {"model": {"name": "seq2seq"}})
    assert found["model"].keys() == defaults(models.Seq2SeqSettings).keys()


def test_joined_classes_settle_what_follows():
    @dataclasses.dataclass(frozen=True)
    class Pool:
        kind: str = settings.setting("max", "of the tokens")
        size: int = settings.following("kind", {"max": 2, "mean": 4}, "of a pool", ge=1, le=9)

    joined = settings.join("example", Pool)
    assert (joined().size, joined(kind="mean").size, joined(size=3).size) == (2, 4, 3)
