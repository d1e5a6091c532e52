"""Settings as keywords.

Who calls writes ``score="adder"``, what is called gets its settings whole.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from adder_flax.settings._fields import class_of

Returned = TypeVar("Returned")


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

    Args:
      settings: the class.
      but: fields that are no keywords; nor are those that the function has as arguments of its own.

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
        fields = [
            field for field in _leaves(settings) if field.name not in (*signature.parameters, *but)
        ]
        names = {field.name for field in fields}
        default = signature.parameters["settings"].default

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Returned:
            given = {name: _frozen(keywords.pop(name)) for name in list(keywords) if name in names}
            if given:
                keywords["settings"] = with_fields(keywords.get("settings", default), given)
            return function(*args, **keywords)

        described = signature.replace(parameters=_merged(signature, fields))
        setattr(call, "__signature__", described)  # noqa: B010  functions declare no such attribute
        return call

    return decorate


def with_fields(settings: Any, fields: Mapping[str, Any]) -> Any:
    """Returns settings with some fields changed, those of their inline sections among them.

    >>> from adder_flax.settings import BlockSettings
    >>> with_fields(BlockSettings(), {"score": "adder", "mlp_ratio": 2.0}).attention.score
    'adder'
    """
    changes = {
        name: value
        for name, value in fields.items()
        if name in {f.name for f in dataclasses.fields(settings)}
    }
    for field in _inline(settings):
        own = {leaf.name for leaf in _leaves(class_of(field))}
        if inner := {name: value for name, value in fields.items() if name in own}:
            changes[field.name] = with_fields(getattr(settings, field.name), inner)
    return dataclasses.replace(settings, **changes)


def _inline(settings: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(settings) if field.metadata.get("inline")]


def _leaves(settings: type) -> Iterator[dataclasses.Field]:
    """Yields the fields of a class, those of its inline sections in their place."""
    for field in dataclasses.fields(settings):
        if field.metadata.get("inline"):
            yield from _leaves(class_of(field))
        else:
            yield field


def _merged(
    signature: inspect.Signature, fields: Sequence[dataclasses.Field]
) -> list[inspect.Parameter]:
    """Returns the parameters of a function and, as keywords, the fields."""
    own = list(signature.parameters.values())
    keywords = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=_default(f), annotation=f.type
        )
        for f in fields
    ]
    return sorted([*own, *keywords], key=lambda parameter: parameter.kind)


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Options(value)
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
