"""The numbers of settings that are data of the compiled step.

They are taken out of the settings, and put back traced.

What is left shapes the program: runs whose settings are equal without their numbers share one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard, TypeVar

Settings = TypeVar("Settings")
Value = TypeVar("Value")


class _Number:
    """Stands where a number was taken out."""

    def __repr__(self) -> str:
        return "<number>"


NUMBER = _Number()


def is_on(value: Value | None) -> TypeGuard[Value]:
    """Whether a rate, strength or bound is in use: not None and not a plain 0.

    A traced number always is.

    >>> is_on(0.0), is_on(None), is_on(0.1)
    (False, False, True)
    """
    return value is not None and not (isinstance(value, int | float) and value == 0)


def take_numbers(settings: Settings) -> tuple[Settings, dict[str, float]]:
    """Returns settings, hashable, with their data taken out, and that data by path.

    A field that is off stays what it is, since that leaves its part out of the program.

    >>> from adder_flax.settings import OptimizerSettings
    >>> shape, numbers = take_numbers(OptimizerSettings(learning_rate=0.1, clip_norm=None))
    >>> shape.learning_rate, shape.clip_norm, numbers["learning_rate"], "clip_norm" in numbers
    (<number>, None, 0.1, False)
    """
    taken: dict[str, float] = {}
    return _take(settings, "", taken), taken


def put_numbers(settings: Settings, numbers: Mapping[str, Any]) -> Settings:
    """Puts numbers, which may be traced, back where `take_numbers` took them out.

    >>> from adder_flax.settings import OptimizerSettings
    >>> put_numbers(*take_numbers(OptimizerSettings(b1=0.5))).b1
    0.5
    """
    return _put(settings, "", numbers)


def _take(settings: Any, prefix: str, taken: dict[str, float]) -> Any:
    changes = {}
    for field in dataclasses.fields(settings):
        value, path = getattr(settings, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            changes[field.name] = _take(value, f"{path}.", taken)
        elif _is_number(value, field.metadata["declared"].data):
            taken[path], changes[field.name] = value, NUMBER
    return dataclasses.replace(settings, **changes)


def _is_number(value: Any, data: bool | Literal["if on"]) -> bool:
    return is_on(value) if data == "if on" else data and value is not None


def _put(settings: Any, prefix: str, numbers: Mapping[str, Any]) -> Any:
    changes = {}
    for field in dataclasses.fields(settings):
        value, path = getattr(settings, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            changes[field.name] = _put(value, f"{path}.", numbers)
        elif value is NUMBER:
            changes[field.name] = numbers[path]
    return dataclasses.replace(settings, **changes)
