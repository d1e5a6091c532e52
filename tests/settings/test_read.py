"""Reading a configuration: what is accepted, in which form, and the one message for what is not."""

import dataclasses
import math

import numpy as np
import pytest
from ml_collections import ConfigDict

from adder_flax import settings
from adder_flax.errors import RunError
from adder_flax.settings import Choice, Integer, Number, Or, RunSettings, Span, read
from tests.settings.nonsense import CONTRADICTIONS, NONSENSE, changed, tiny


@dataclasses.dataclass(frozen=True)
class _Toy:
    rate: float = settings.setting(0.1, Number(0, 1, "[)"), "a rate")
    count: int = settings.setting(3, Integer(1, 8), "a number of things")
    block: int | None = settings.setting("off", Or({"off": None}, Integer(1, 8)), "a block")
    limit: float | None = settings.setting(
        0.0, Or({0: None}, Number(0, 9, "(]")), "a limit; 0 is off"
    )
    span: tuple[float, float] | None = settings.setting(
        (), Span(Number(0, 1), optional=True), "a range; () is off"
    )
    kind: bool | None = settings.setting("auto", Choice(auto=None, on=True, off=False), "of things")


GOOD = settings.defaults(_Toy)


def test_defaults_are_what_the_declarations_say_and_their_meanings_are_converted_once():
    assert GOOD == {
        "rate": 0.1,
        "count": 3,
        "block": "off",
        "limit": 0.0,
        "span": (),
        "kind": "auto",
    }
    assert read(_Toy, GOOD) == _Toy(rate=0.1, count=3, block=None, limit=None, span=None, kind=None)


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        ("rate", 0, 0.0),
        ("rate", np.float32(0.5), 0.5),
        ("rate", math.nextafter(1, 0), math.nextafter(1, 0)),
        ("count", np.int64(8), 8),
        ("block", "4", 4),
        ("block", 4, 4),
        ("limit", 0, None),
        ("limit", 9, 9.0),
        ("span", [0.5, 0.5], (0.5, 0.5)),
        ("kind", "on", True),
    ],
)
def test_what_is_in_range_is_taken_in_one_form(name, value, meaning):
    taken = getattr(read(_Toy, ConfigDict(GOOD | {name: value})), name)
    assert taken == meaning
    assert type(taken) is type(meaning)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate", True),
        ("rate", "0.5"),
        ("rate", 1),
        ("rate", -1e-300),
        ("rate", math.nan),
        ("rate", np.float64(math.inf)),
        ("rate", 10**400),
        ("count", 2.0),
        ("count", False),
        ("count", 0),
        ("count", 9),
        ("block", "0"),
        ("block", "2.5"),
        ("block", 0),
        ("limit", "off"),
        ("limit", -1),
        ("limit", False),
        ("span", (1.0, 0.5)),
        ("span", (0.5,)),
        ("span", {0.1, 0.5}),
        ("kind", "On"),
        ("kind", True),
    ],
)
def test_what_is_not_is_named_with_its_value(name, value):
    with pytest.raises(RunError) as error:
        read(_Toy, GOOD | {name: value})
    message = str(error.value)
    assert message.startswith(f"config.{name}: expected ")
    assert f"got {settings.shown(value)}; set --config.{name}" in message


def test_one_message_names_all_that_is_wrong_missing_and_unknown():
    fields = GOOD | {"rate": 2.0, "cuont": 3}
    del fields["kind"]
    with pytest.raises(RunError) as error:
        read(_Toy, fields)
    message = str(error.value)
    assert "got 3;" in message.splitlines()[0]
    assert "config.rate: expected a number in [0, 1), got 2.0" in message
    assert "did you mean 'count'?" in message
    assert (
        "config.kind: expected 'auto', 'on' or 'off', got nothing; the default is 'auto'" in message
    )


def test_a_message_stays_short_whatever_the_value():
    for value in ("x" * 10**6, 10**5000, [[[0] * 1000] * 1000], "\x1b[31m\n"):
        with pytest.raises(RunError) as error:
            read(_Toy, GOOD | {"rate": value})
        assert len(str(error.value)) < 300
        assert "\x1b" not in str(error.value)


def test_a_model_of_another_name_is_read_by_its_own_class():
    with settings.MODEL_SETTINGS.temporary():
        settings.MODEL_SETTINGS.register("toy", _Named)
        fields = tiny() | {"model": {"name": "toy", "size": 2}}
        assert read(RunSettings, fields).model == _Named("toy", 2)
        with pytest.raises(
            RunError, match=r"config.model.size: expected an integer from 1 to 3, got 4"
        ):
            read(RunSettings, tiny() | {"model": {"name": "toy", "size": 4}})


@dataclasses.dataclass(frozen=True)
class _Named:
    name: str = settings.setting("toy", settings.Text("the name of a model"), "the model")
    size: int = settings.setting(1, Integer(1, 3), "of the toy")


@pytest.mark.parametrize("path", NONSENSE)
def test_nonsense_is_refused_by_the_name_of_its_field(path):
    for value in NONSENSE[path]:
        with pytest.raises(RunError, match=f"config.{path}: expected"):
            read(RunSettings, changed(tiny(), {path: value}))


def test_contradictions_of_settings_alone_are_refused():
    by_settings = [c for c in CONTRADICTIONS if "patch_size" not in str(c)][:14]
    for changes in by_settings:
        with pytest.raises(RunError, match="expected"):
            read(RunSettings, changed(tiny(), changes))


def test_every_field_has_a_reason_and_a_default_that_its_rule_accepts():
    for path, declared in settings.declarations(RunSettings):
        assert declared.reason, path
        declared.rule.read(declared.default)
