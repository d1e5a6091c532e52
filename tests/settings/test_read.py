"""Reading a configuration: what is accepted, in which form, and the one message for what is not."""

import dataclasses
import math
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import pytest
from ml_collections import ConfigDict

from adder_flax import settings
from adder_flax.errors import RunError
from adder_flax.settings import RunSettings, read, setting
from tests.settings.nonsense import tiny

KINDS = {"auto": None, "on": True, "off": False}


@dataclasses.dataclass(frozen=True)
class _Toy:
    rate: float = setting(0.1, "a rate", ge=0, lt=1)
    count: int = setting(3, "a number of things", ge=1, le=8)
    block: int | None = setting("off", "a block", words={"off": None}, ge=1, le=8)
    limit: float | None = setting(0.0, "a limit; 0 is off", words={0: None}, gt=0, le=9)
    span: tuple[float, float] | None = setting((), "() is off", words={(): None}, ge=0, le=1)
    kind: bool | None = setting("auto", "of things", words=KINDS)
    sizes: tuple[int, ...] = setting("", "of stages", commas=int, ge=1, le=9, max_length=2)
    layer: Any = setting("dense", "of blocks", commas=Literal["dense", "adder"], max_length=3)
    most: int | None = setting(None, "if there is one", ge=1)
    turns: tuple[int, ...] = setting((3, 1), "in any order")
    names: Any = setting("a", "of things", commas=str)


GOOD = settings.defaults(_Toy)


def test_defaults_are_what_the_declarations_say_and_their_meanings_are_converted_once():
    numbers = dict(rate=0.1, count=3, limit=0.0, span=(), most=None, turns=(3, 1))
    assert numbers | dict(block="off", kind="auto", sizes="", layer="dense", names="a") == GOOD
    assert read(_Toy, GOOD) == _Toy()
    meanings = dict(block=None, limit=None, span=None, kind=None, sizes=())
    assert vars(_Toy()) == GOOD | meanings


TAKEN = {
    "rate": [(0, 0.0), (np.float32(0.5), 0.5), (math.nextafter(1, 0), math.nextafter(1, 0))],
    "count": [(np.int64(8), 8)],
    "block": [("4", 4), (4, 4)],
    "limit": [(0, None), (9, 9.0)],
    "span": [([0.5, 0.5], (0.5, 0.5))],
    "kind": [("on", True)],
    "sizes": [("3, 4", (3, 4)), ("3", (3,))],
    "layer": [("adder", "adder"), ("adder,dense", ("adder", "dense"))],
    "most": [(10**9, 10**9), (None, None)],
    "turns": [([2, 1, 0], (2, 1, 0))],
    "names": [("a,b", ("a", "b"))],
}


@pytest.mark.parametrize(
    ("name", "value", "meaning"), [(name, *pair) for name in TAKEN for pair in TAKEN[name]]
)
def test_what_is_in_range_is_taken_in_one_form(name, value, meaning):
    taken = getattr(read(_Toy, ConfigDict(GOOD | {name: value})), name)
    assert taken == meaning
    assert type(taken) is type(meaning)


REFUSED = {
    "rate": [True, "0.5", 1, -1e-300, math.nan, np.float64(math.inf), 10**400],
    "count": [2.0, False, 0, 9],
    "block": ["0", "2.5", 0],
    "limit": ["off", -1, False],
    "span": [(1.0, 0.5), (0.5,), {0.1, 0.5}],
    "kind": ["On", True],
    "sizes": ["3,4,5", "0", "a", (3, 4)],
    "layer": ["conv", "adder,", "", ("adder", "dense")],
    "most": [0, "off", 1.0],
    "turns": [(1.5,), 1],
    "names": ["a,"],
}


@pytest.mark.parametrize(("name", "value"), [(name, v) for name in REFUSED for v in REFUSED[name]])
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
    said = "config.kind: expected 'auto', 'on' or 'off', got nothing; the default is 'auto'"
    assert said in message


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
        said = r"config.model.size: expected an integer from 1 to 3, got 4"
        with pytest.raises(RunError, match=said):
            read(RunSettings, tiny() | {"model": {"name": "toy", "size": 4}})


@dataclasses.dataclass(frozen=True)
class _Named:
    name: str = setting("toy", "the model", expected="the name of a model")
    size: int = setting(1, "of the toy", ge=1, le=3)


def test_a_constant_rate_has_no_end_to_be_below():
    config = settings.defaults(RunSettings)
    config["optimizer"] |= {"schedule": "constant", "learning_rate": 1e-6}
    assert read(RunSettings, config).optimizer.learning_rate == 1e-6
    config["optimizer"]["schedule"] = "cosine"
    with pytest.raises(RunError, match="final_learning_rate: expected at most"):
        read(RunSettings, config)


def test_every_field_has_a_reason_and_a_default_that_its_rule_accepts():
    read(RunSettings, settings.defaults(RunSettings))
    for path, declared in settings.declarations(RunSettings):
        assert declared.reason, path
        assert declared.expected, path


def test_what_pydantic_says_of_a_type_is_held_to():
    def check(number):
        if number % 2:
            raise ValueError(number)
        return number

    even = Annotated[int, pydantic.AfterValidator(check)]

    @dataclasses.dataclass(frozen=True)
    class Pair:
        count: even = setting(2, "of things", expected="an even number")

        @property
        def half(self):
            return self.count // 2

    assert read(Pair, {"count": 4}).half == 2
    with pytest.raises(RunError, match="config.count: expected an even number, got 3"):
        read(Pair, {"count": 3})


def test_a_traced_number_takes_the_place_of_one_without_a_check():
    toy = dataclasses.replace(_Toy(), rate=object())
    assert hash(toy) != hash(_Toy())


def test_a_json_schema_accepts_what_is_read_and_no_other():
    schema = settings.json_schema(_Toy)
    assert schema["required"] == list(GOOD)
    assert not schema["additionalProperties"]
    own = schema["properties"]
    assert (own["count"]["minimum"], own["count"]["maximum"]) == (1, 8)
    assert own["rate"]["exclusiveMaximum"] == 1
    assert {"const": "off", "type": "string"} in own["block"]["anyOf"]
    assert own["rate"]["description"] == "a rate"
    whole = settings.json_schema(RunSettings)["properties"]
    assert whole.keys() == settings.defaults(RunSettings).keys()
