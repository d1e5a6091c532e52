"""What uses settings: modules whose keywords they are, and the compiled step whose data they hold.

A module's user writes ``score="adder"``, the module gets its settings whole. The numbers that are
data of the compiled step are taken out of the settings and put back traced: what is left shapes the
program, and runs whose settings are equal without their numbers share one.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

Returned = TypeVar("Returned")
Settings = TypeVar("Settings")
Value = TypeVar("Value")


class Options(Mapping):
    """A mapping that cannot be changed, so it can be part of what identifies a compiled program.

    >>> Options({"gradient": "full"})["gradient"], hash(Options(a=1)) == hash(Options(a=1))
    ('full', True)
    """

    def __init__(self, *fields: Mapping[str, Any] | Iterable[tuple[str, Any]], **more: Any):
        self._fields = dict(*fields, **more)

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __hash__(self) -> int:
        return hash(frozenset(self._fields.items()))

    def __repr__(self) -> str:
        return f"Options({self._fields})"


def keywords_of(
    settings: type, *, but: Sequence[str] = ()
) -> Callable[[Callable[..., Returned]], Callable[..., Returned]]:
    """Lets a function take the fields of the class of its argument ``settings`` as keywords too.

    They are written into its signature. Lists and mappings among the values are frozen.

    >>> from adder_flax.settings import AttentionSettings
    >>> @keywords_of(AttentionSettings)
    ... def describe(width, *, settings=AttentionSettings()):
    ...     return width, settings.score, settings.temperature
    >>> (
    ...     describe(8, score="adder"),
    ...     describe(8, settings=AttentionSettings(score="dot"), temperature=2.0),
    ... )
    ((8, 'adder', 1.0), (8, 'dot', 2.0))
    """

    def decorate(function: Callable[..., Returned]) -> Callable[..., Returned]:
        signature = inspect.signature(function)
        names = {field.name for field in dataclasses.fields(settings)}
        names -= {*signature.parameters, *but}
        default = signature.parameters["settings"].default

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Returned:
            given = {name: _frozen(keywords.pop(name)) for name in list(keywords) if name in names}
            if given:
                whole = keywords.get("settings", default)
                keywords["settings"] = dataclasses.replace(whole, **given)
            return function(*args, **keywords)

        own = inspect.signature(settings).parameters.values()
        fields = [f.replace(kind=f.KEYWORD_ONLY) for f in own if f.name in names]
        merged = sorted([*signature.parameters.values(), *fields], key=lambda p: p.kind)
        # Functions declare no such attribute.
        setattr(call, "__signature__", signature.replace(parameters=merged))  # noqa: B010
        return call

    return decorate


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Options(value)
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class _Number:
    """Stands where a number was taken out."""

    def __repr__(self) -> str:
        return "<number>"


NUMBER = _Number()


def is_on(value: Value | None) -> TypeGuard[Value]:
    """Whether a rate, strength or bound is in use: traced, or neither None nor 0.

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
    changed: dict[str, Any] = {}
    taken: dict[str, float] = {}
    for field in dataclasses.fields(settings):  # pyright: ignore[reportArgumentType]
        name, value = field.name, getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            changed[name], inner = take_numbers(value)
            taken |= {f"{name}.{path}": number for path, number in inner.items()}
            continue
        data = field.metadata["declared"].data
        if data and value is not None and (data != "if on" or is_on(value)):
            changed[name], taken[name] = NUMBER, value
    return dataclasses.replace(settings, **changed), taken  # pyright: ignore[reportArgumentType]


def put_numbers(settings: Settings, numbers: Mapping[str, Any], at: str = "") -> Settings:
    """Puts numbers, which may be traced, back where `take_numbers` took them out.

    >>> from adder_flax.settings import OptimizerSettings
    >>> put_numbers(*take_numbers(OptimizerSettings(b1=0.5))).b1
    0.5
    """
    made = copy.copy(settings)  # without a check: what is settled stays so
    for name, value in vars(settings).items():
        if value is NUMBER:
            vars(made)[name] = numbers[at + name]
        elif dataclasses.is_dataclass(value):
            vars(made)[name] = put_numbers(value, numbers, f"{at}{name}.")
    return made
