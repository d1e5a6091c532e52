"""How a setting is declared, once: its type, range, default and reason, and whether it is data.

A settings class is a frozen dataclass. Pydantic checks what a configuration has for it
(`adder_flax.settings.read`); who makes one in Python, or puts a traced number into it, need not
pass.
"""

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from adder_flax.registry import Registry

LONGEST_NAME = 200
_LONGEST_VALUE = 80


class Declared(NamedTuple):
    """What is said about a field where it is declared; `setting` has the arguments."""

    default: Any
    reason: str
    data: bool | Literal["if on"] = False
    words: Mapping[Any, Any] = {}
    commas: Any = None
    expected: str = ""
    parse: Callable[[Any], Any] | None = None
    only: tuple[str, tuple[str, ...]] | None = None
    follows: tuple[str, Mapping[str, Any]] | None = None
    limits: Mapping[str, Any] = {}
    kind: Any = None

    def is_word(self, value: Any) -> bool:
        """Whether a value of a configuration is one of the words."""
        return any(
            isinstance(value, bool) == isinstance(word, bool) and value == word
            for word in self.words
        )

    def meaning(self, value: Any) -> Any:
        """Returns what the program has for a value of a configuration that is in order.

        Raises:
          ValueError, TypeError: it is not.
        """
        if self.is_word(value):
            return self.words[value]
        if self.parse is not None:
            return self.parse(value)
        if self.commas is None:
            return value
        texts = [text.strip() for text in value.split(",")] if value else []
        if self.commas in (int, float):
            return tuple(map(self.commas, texts))
        return texts[0] if len(texts) == 1 else tuple(texts)


def setting(
    default: Any,
    reason: str,
    *,
    data: bool | Literal["if on"] = False,
    words: Mapping[Any, Any] = {},
    commas: Any = None,
    expected: str = "",
    parse: Callable[[Any], Any] | None = None,
    only: tuple[str, tuple[str, ...]] | None = None,
    **limits: Any,
) -> Any:
    """Declares a field of a settings class.

    Args:
      default: as a configuration writes it.
      reason: what the field is for, with its unit.
      data: whether the number is data of the compiled step, so that runs that differ in it share
        one program; else it shapes the program or belongs to what is around it. "if on": 0, as None
        always does, leaves its part out.
      words: values of a configuration that stand for another one, such as ``{0: None}``.
      commas: type of the values of which a configuration has several, as text with commas between
        them.
      expected: what a value has to be, in the words of a message; by default what type and limits
        say.
      parse: makes what the program has of a value, in place of Pydantic; refuses by a ValueError or
        TypeError.
      only: another field of the class and the values with which this one is read: with others it
        stays at its default, or off.
      **limits: of Pydantic's ``Field``, for the numbers or the text: ge, gt, le, lt, max_length, …

    >>> from adder_flax.settings import read
    >>> @dataclasses.dataclass(frozen=True)
    ... class Size:
    ...     width: int = setting(8, "of the tokens", ge=1, le=9)
    >>> read(Size, {"width": 4})
    Size(width=4)
    >>> read(Size, {"width": 0})
    Traceback (most recent call last):
    ...
    adder_flax.settings._read.SettingsError: config.width: expected an integer from 1 to 9, got 0; set --config.width
    """  # noqa: E501 - a message is one line
    declared = Declared(
        default, reason, data, words, commas, expected, parse, only, None, limits, None
    )
    return dataclasses.field(default=declared.meaning(default), metadata={"declared": declared})


def following(
    other: str, values: Mapping[str, Any], reason: str, *, unset: Any = 0, **declared: Any
) -> Any:
    """Declares a field whose default stands for what another field of its class wants.

    Settings hold what it stands for, if their class calls `settle` once they are made.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Pool:
    ...     kind: str = setting("max", "of the tokens")
    ...     size: int = following("kind", {"max": 2, "mean": 4}, "of a pool", ge=1)
    ...
    ...     def __post_init__(self):
    ...         settle(self)
    >>> Pool().size, Pool("mean").size, Pool("mean", 3).size
    (2, 4, 3)
    """
    names: dict[Any, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    meant = ", ".join(f"{value} ({', '.join(of)})" for value, of in names.items())
    reason = f"{reason}; {unset}: {meant}"
    default = type(next(iter(values.values())))(unset)  # a flag takes what its default is
    field = setting(default, reason, words={unset: None}, **declared)
    own = field.metadata["declared"]._replace(follows=(other, values))
    return dataclasses.field(default=None, metadata={"declared": own})


def settle(made: Any) -> None:
    """Puts what defaults stand for into new settings: see `following`."""
    for field in dataclasses.fields(made):
        declared = field.metadata.get("declared")
        if declared and declared.follows and getattr(made, field.name) is None:
            other, values = declared.follows
            object.__setattr__(made, field.name, values[getattr(made, other)])


def section(
    settings: type | None = None,
    *,
    among: Registry[type] | None = None,
    joined: Registry[type] | None = None,
    read_by: str | None = None,
) -> Any:
    """Declares a field that is itself a settings class."""
    find: Callable[[], Any] = lambda: (
        settings if joined is None else join(joined.kind, *map(joined.get, joined))
    )
    return dataclasses.field(
        default_factory=lambda: find()(),
        metadata={"section": find, "among": among, "joined": joined, "read_by": read_by},
    )


def class_of(field: dataclasses.Field, own: Any = None) -> Any:
    """Returns the settings class of a field that is a section, else None."""
    if "section" not in field.metadata:
        return None
    among: Any = field.metadata["among"]
    name = own.get("name") if among and is_mapping(own) else None
    if among and isinstance(name, str) and name in among:
        return among.get(name)
    return field.metadata["section"]()


def is_mapping(fields: Any) -> bool:
    """Whether this has fields by name, as a ``ConfigDict`` has, which is no ``Mapping``."""
    return isinstance(fields, Mapping) or all(
        hasattr(type(fields), name) for name in ("keys", "items", "__getitem__")
    )


@functools.cache
def join(kind: str, *classes: type) -> type:
    """Returns a settings class that has the fields of some others.

    >>> from adder_flax.settings import DataSettings, MeshSettings
    >>> join("example", DataSettings, MeshSettings)().image_size
    224

    Raises:
      ValueError: two of them declare one field in two ways.
    """
    ways: dict[str, str] = {}
    for settings in classes:
        for name, declared in declared_in(settings).items():
            way = f"{declared.expected} by default {shown(declared.default)}"
            if ways.setdefault(name, way) != way:
                raise ValueError(
                    f"expected options of one name to be declared alike for every {kind}, got "
                    f"{name!r} as {ways[name]} and as {way}; choose another name"
                )

    def faults(made: Any, where: str) -> Iterator[str]:
        for settings in classes:
            if hasattr(settings, "faults"):
                yield from settings.faults(made, where)

    return dataclasses.make_dataclass(
        f"{kind.title()}Options",
        [],
        bases=classes[::-1],  # of which the last one's fields come first
        namespace={"faults": faults, "__post_init__": settle},
        frozen=True,
    )


@functools.cache
def declared_in(settings: type) -> dict[str, Declared]:
    """What is declared about the fields of a class that are no sections, by their names."""
    hints = typing.get_type_hints(settings, include_extras=True)
    found = {}
    for field in dataclasses.fields(settings):
        if (declared := field.metadata.get("declared")) is not None:
            declared = declared._replace(kind=_kind(hints[field.name], declared))
            found[field.name] = declared._replace(expected=declared.expected or _expected(declared))
    return found


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the one type that is none."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if union else (hint,)


def is_span(kind: Any) -> bool:
    """Whether values are (low, high)."""
    return kind in (tuple[int, int], tuple[float, float])


def _kind(hint: Any, declared: Declared) -> Any:
    if declared.commas is not None:
        return declared.commas
    kinds = alternatives(hint)
    if declared.words:
        named = lambda k: typing.get_origin(k) in (tuple, Literal)
        return next((k for k in kinds if k in (int, float) or named(k)), None)
    if {int, float} & {*kinds}:  # text beside a number is a module's own
        kinds = [kind for kind in kinds if kind is not str]
    return functools.reduce(operator.or_, kinds)


def _expected(declared: Declared) -> str:
    kind, words = declared.kind, [shown(word) for word in declared.words if word != ()]
    if typing.get_origin(kind) is Literal:
        words += map(repr, typing.get_args(kind))
    elif kind is not None:
        words.append(_expected_kind(kind, declared.limits))
    if declared.commas in (int, float):
        example = '"32,64"' if declared.commas is int else '"0.5,0.5"'
        most = declared.limits.get("max_length", LONGEST_NAME)
        return f"up to {most} with commas between them ({example}), each {words[-1]}"
    *rest, last = words
    text = f"{', '.join(rest)} or {last}" if rest else last
    each = ", or one for each block with commas between them" if declared.commas else ""
    return text + each + ", or ()" * (() in declared.words)


def _expected_kind(kind: Any, limits: Mapping[str, Any]) -> str:
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if len(kinds := alternatives(kind)) > 1:
        return " or ".join(_expected_kind(each, limits) for each in kinds)
    if is_span(kind):
        ends = _expected_kind(typing.get_args(kind)[0], limits)
        return f"(low, high), low ≤ high, each {ends}"
    low, high = (limits.get(a, limits.get(b)) for a, b in (("ge", "gt"), ("le", "lt")))
    if kind is int:
        return (
            "an integer" + f" from {low}" * (low is not None) + f" to {high}" * (high is not None)
        )
    if kind is float:
        ends = (
            "(" if "gt" in limits or low is None else "[",
            ")" if "lt" in limits or high is None else "]",
        )
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        return f"a number in {ends[0]}{low:g}, {high:g}{ends[1]}"
    names = {bool: "True or False", type(None): "None", str: "text"}
    return names.get(kind, shown(kind))


def defaults(settings: type) -> dict[str, Any]:
    """Returns the declared defaults as a configuration writes them, sections as dictionaries.

    >>> from adder_flax.settings import MeshSettings
    >>> defaults(MeshSettings)
    {'data': -1, 'fsdp': 1, 'tensor': 1}
    """
    return {
        field.name: field.metadata["declared"].default if nested is None else defaults(nested)
        for field in dataclasses.fields(settings)
        for nested in [class_of(field)]
    }


def declarations(settings: type, prefix: str = "") -> Iterator[tuple[str, Declared]]:
    """Yields every field with its path in a configuration: ``("optimizer.b1", Declared(…))``."""
    for field in dataclasses.fields(settings):
        if (nested := class_of(field)) is None:
            yield prefix + field.name, declared_in(settings)[field.name]
        else:
            yield from declarations(nested, f"{prefix}{field.name}.")


def fault(path: str, expected: str, got: Any) -> str:
    """Returns what a settings class says of fields that do not go together.

    >>> fault("config.num_heads", "a number that divides config.width = 8", 3)
    'config.num_heads: expected a number that divides config.width = 8, got 3'
    """
    return f"{path}: expected {expected}, got {got}"


def shown(value: Any) -> str:
    """Returns a value as a message shows it: of one short line, without control characters.

    >>> shown("x" * 100_000)[-5:]
    'xxxx…'
    """
    try:
        text = repr(value)
    # An integer of more than 4,300 digits, lists in lists in lists.
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} too large to show"
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
