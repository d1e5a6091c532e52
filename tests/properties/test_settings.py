"""Configurations that no run should start from, each refused by the name of its field before
compute; and odd ones that every run should."""

import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from adder_flax import settings, training
from adder_flax.app import modes
from adder_flax.errors import RunError
from adder_flax.settings import RunSettings
from tests.settings.nonsense import CONTRADICTIONS, NONSENSE, changed, tiny

pytestmark = pytest.mark.unchecked

FIELDS = sorted(path for path, _ in settings.declarations(RunSettings))
SECTIONS = sorted({path.rpartition(".")[0] for path in FIELDS} - {""})
_OPTIONS = "model.score_options"  # of scores that may be registered later: completed


def refused(fields: object, named: str) -> str:
    with pytest.raises(RunError) as error:
        settings.read(RunSettings, fields)
    message = str(error.value)
    assert "expected" in message
    assert named in message
    assert len(message) < 4000
    assert all(c.isprintable() or c == "\n" for c in message)
    return message


# No setting means any of these.
_NEVER = [{"a": 1}, 1j, b"1", object(), ["a", "b"], [[[]]], {1}, np.zeros(2), dict, len, "\x1b[31m"]


@pytest.mark.parametrize(
    "cases",
    [
        list(itertools.product(FIELDS, _NEVER)),
        [(path, value) for path in sorted(NONSENSE) for value in NONSENSE[path]],
    ],
    ids=["no type of a setting", "nonsense"],
)
@given(data=st.data())
def test_a_wrong_value_is_refused_by_name(cases, data):
    path, value = data.draw(st.sampled_from(cases))
    refused(changed(tiny(), {path: value}), f"config.{path}")


@given(path=st.sampled_from(FIELDS), data=st.data())
def test_a_field_that_does_not_exist_is_refused_with_the_nearest(path, data):
    section, _, name = path.rpartition(".")
    place = data.draw(st.integers(0, len(name) - 1))
    typo = name[:place] + data.draw(st.sampled_from("qxz")) + name[place:]
    message = refused(with_field(section, typo), typo)
    assert len(name) < 5 or f"'{name}'" in message


@given(
    section=st.sampled_from(["", *SECTIONS]),
    name=st.text(min_size=1, max_size=30) | st.sampled_from(["x" * 10**5, "__class__", 3, None]),
)
def test_a_field_of_any_name_is_refused_or_there(section, name):
    if f"{section}.{name}".lstrip(".") not in [*FIELDS, *SECTIONS]:
        refused(with_field(section, name), section)


def section_of(fields: dict, path: str) -> dict:
    return functools.reduce(dict.__getitem__, filter(None, path.split(".")), fields)


def with_field(section: str, name: object) -> dict:
    fields = tiny()
    section_of(fields, section)[name] = 1
    return fields


@given(path=st.sampled_from([p for p in [*FIELDS, *SECTIONS] if not p.startswith(_OPTIONS)]))
def test_a_field_or_section_that_is_missing_is_refused_by_name(path):
    section, _, name = path.rpartition(".")
    fields = tiny()
    del section_of(fields, section)[name]
    refused(fields, f"config.{path}")


@pytest.mark.parametrize("whole", [{}, None, [], "config", 3, dict])
def test_what_is_no_configuration_is_refused(whole):
    refused(whole, "config")


@pytest.mark.parametrize("changes", CONTRADICTIONS, ids=str)
def test_settings_that_contradict_each_other_are_refused_and_nothing_is_written(changes, tmp_path):
    with pytest.raises(RunError, match="(?i)expected"):
        modes.train(ConfigDict(changed(tiny(), changes)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["", " ", "ADDER", "x" * 150, "../../etc", "None", "ünïcode"])
@pytest.mark.parametrize("path", ["model.score", "optimizer.name", "model.name", "data.name"])
def test_a_name_that_nobody_registered_is_refused(path, name):
    with pytest.raises(RunError, match="(?i)expected"):
        training.build_run(ConfigDict(changed(tiny(), {path: name})))


# Odd, and allowed: each takes a step. Sizes are small, so that it compiles in seconds.
_ODD = {
    "model.width": (4, 12),
    "model.num_heads": (1, 2),
    "model.mlp_ratio": (0.25, 1.7),
    "model.patch_size": (2, 8),
    "model.score": ("dot", "bilinear", "additive", "adder", "gaussian"),
    "model.mlp_linear": ("dense", "adder"),
    "model.temperature": (1e-3, 1e3),
    "model.drop_path_rate": (0.0, 0.99),
    "model.remat": (True, False),
    "batch_size": (8, 32),
    "accumulation_steps": (1, 2),
    "optimizer.name": ("adamw", "sgd", "kfac"),
    "optimizer.learning_rate": (1e-12, 10.0),
    "optimizer.clip_norm": (0.0, 1e-6),
    "task.label_smoothing": (0.0, 0.99),
    "task.mixup_alpha": (0.0, 1e3),
    "task.crop_padding": (0, 8),
    "task.flip_probability": (0.0, 1.0),
}


@pytest.mark.slow
@given(changes=st.fixed_dictionaries({path: st.sampled_from(v) for path, v in _ODD.items()}))
def test_an_odd_configuration_takes_a_step(changes):
    fields = changed(tiny(), changes | {"optimizer.final_learning_rate": 0.0})
    run = training.build_run(ConfigDict(fields))
    batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), training.abstract_batch(run))
    _, metrics = run.train_step(run.init(), batch, run.hyper)
    assert np.isfinite(metrics["loss"])


def test_the_list_of_nonsense_is_about_settings_that_there_are():
    known = {*FIELDS, *SECTIONS}
    assert not {*NONSENSE} - known
    assert not {*itertools.chain.from_iterable(CONTRADICTIONS)} - known
