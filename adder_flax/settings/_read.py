"""Reading a configuration: Pydantic finds all that is wrong, one message says it."""

import dataclasses
import difflib
import functools
import operator
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from adder_flax.errors import RunError
from adder_flax.settings._declare import (
    LONGEST_NAME,
    Declared,
    alternatives,
    class_of,
    declared_in,
    defaults,
    is_mapping,
    is_span,
    shown,
)
from adder_flax.settings._use import is_on

Settings = TypeVar("Settings")

_MOST_FAULTS = 20
_LONGEST_WORD = 80


class SettingsError(RunError):
    """A configuration has fields that are not what they should be; one message names them all."""


def read(settings: type[Settings], fields: Any, where: str = "config") -> Settings:
    """Returns settings from a configuration, all of whose fields are checked first.

    Raises:
      SettingsError: with one line for each field that is wrong, missing or unknown.
    """
    from pydantic import ValidationError  # not imported with a layer that someone borrows

    try:
        made = _validated(settings, fields)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise SettingsError(
            _message([_in_words(settings, fields, where, each) for each in found])
        ) from None
    if faults := list(_disagreements(made, where)):
        raise SettingsError(_message(faults))
    return made


def json_schema(settings: type) -> dict[str, Any]:
    """The JSON schema of configurations of a class."""
    return _model(settings, described=True).model_json_schema()


def _validated(settings: type[Settings], fields: Any) -> Settings:
    given = dict(fields.items()) if is_mapping(fields) else fields
    return settings(**vars(_model(settings).model_validate(given)))


@functools.cache
def _model(settings: type, described: bool = False) -> Any:
    """Returns Pydantic's model of a class; if it is to be described, with what a schema says.

    It has no defaults: a configuration has all fields.
    """
    import pydantic

    types: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        if (nested := class_of(field)) is not None:
            written = {"json_schema_input_type": _model(nested, True)} if described else {}
            reader = functools.partial(_read_section, field)
            types[field.name] = Annotated[Any, pydantic.PlainValidator(reader, **written)]
            continue
        declared = declared_in(settings)[field.name]
        kind, accepted = _kinds(declared)
        written = {"json_schema_input_type": accepted} if described else {}
        check = pydantic.WrapValidator(functools.partial(_take, declared), **written)
        about = pydantic.Field(description=declared.reason, examples=[declared.default])
        types[field.name] = Annotated[kind, check, about]
    config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return pydantic.create_model(settings.__name__, __config__=config, **types)


def _kinds(declared: Declared) -> tuple[Any, Any]:
    """The type that Pydantic checks a value for, and the one that configurations have."""
    if declared.parse is not None:
        return Any, Any
    if declared.commas is not None:
        limits = {"min_length": 1} if declared.kind is str else {}
        limits |= declared.limits
        most = {"max_length": limits.pop("max_length", LONGEST_NAME)}
        return _limited(tuple[_limited(declared.kind, limits), ...], most), str
    kind = _limited(declared.kind, declared.limits)
    words: Any = tuple(word for word in declared.words if word != ())
    if declared.kind is None:
        return kind, Literal[words]
    return kind, Literal[words] | kind if words else kind


def _limited(kind: Any, limits: Mapping[str, Any]) -> Any:
    import pydantic

    if len(kinds := alternatives(kind)) > 1:
        return functools.reduce(operator.or_, (_limited(each, limits) for each in kinds))
    if is_span(kind):
        return tuple[tuple(_limited(end, limits) for end in typing.get_args(kind))]
    if kind is str:
        limits = {"max_length": LONGEST_NAME, **limits}
    return Annotated[kind, pydantic.Field(**limits)] if limits and kind is not type(None) else kind


def _take(declared: Declared, value: Any, check: Callable[[Any], Any]) -> Any:
    from pydantic_core import PydanticCustomError

    try:
        return _taken(declared, _plain(value), check)
    except (ValueError, TypeError, OverflowError):
        words = {"expected": declared.expected}
        raise PydanticCustomError("setting", "{expected}", words) from None


def _taken(declared: Declared, value: Any, check: Callable[[Any], Any]) -> Any:
    if declared.parse is not None or declared.is_word(value):
        return declared.meaning(value)
    if declared.kind is None:
        raise ValueError(value)  # words are all
    if declared.commas is not None:
        several = declared.meaning(_text(value, empty=declared.commas in (int, float)))
        taken = check(several if isinstance(several, tuple) else (several,))
        return taken if isinstance(several, tuple) else taken[0]
    if isinstance(value, str) and declared.kind in (int, float):
        if not any(isinstance(word, str) for word in declared.words):
            raise ValueError(value)
        value = declared.kind(value)  # as a command line gives it where words are allowed
    taken = check(value)
    if isinstance(taken, str):
        return _text(taken, empty=declared.default == "")
    if is_span(declared.kind) and taken[0] > taken[1]:
        raise ValueError(taken)
    return taken


def _plain(value: Any) -> Any:
    if type(value).__module__ == "numpy" and not getattr(value, "shape", ()):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, list) else value


def _text(value: Any, empty: bool) -> str:
    if not isinstance(value, str) or not value.isprintable() or not (empty or value.strip()):
        raise ValueError(value)
    return str(value)


def _read_section(field: dataclasses.Field, own: Any) -> Any:
    from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

    among: Any = field.metadata["among"]
    name = own.get("name") if among and is_mapping(own) else None
    # What could be no name at all is left to the field's own declaration.
    if among and isinstance(name, str) and name.isprintable() and len(name) <= LONGEST_NAME:
        try:
            among.get(name)
        except ValueError as error:
            words = PydanticCustomError("name", "{words}", {"words": str(error)})
            details = InitErrorDetails(type=words, loc=("name",), input=name)
            raise ValidationError.from_exception_data(name, [details]) from None
    settings = class_of(field, own)
    if field.metadata["joined"] is not None and is_mapping(own):
        # Some were declared after the configuration was made.
        own = defaults(settings) | dict(own.items())
    return _validated(settings, own)


def _in_words(settings: Any, fields: Any, where: str, error: Mapping[str, Any]) -> str:
    *sections, name = error["loc"] or ("",)
    for part in sections:
        field = next(f for f in dataclasses.fields(settings) if f.name == part)
        where, fields = f"{where}.{part}", fields[part]
        settings = class_of(field, fields)
    path, got = f"{where}.{name}" if error["loc"] else where, shown(error["input"])
    match error["type"]:
        case "setting":
            return f"{path}: expected {error['ctx']['expected']}, got {got}"
        case "name":
            return f"{path}: {error['ctx']['words']}"
        case "missing":
            default = defaults(settings)[name]
            declared = declared_in(settings).get(name)
            expected = declared.expected if declared else "its fields"
            return f"{path}: expected {expected}, got nothing; the default is {shown(default)}"
        case "extra_forbidden" | "invalid_key":
            return _unknown(settings, where, name, fields)
        case "model_type":
            field = next((f for f in dataclasses.fields(settings) if f.name == name), None)
            known = defaults(class_of(field) if field else settings)
            return f"{path}: expected fields {', '.join(known)}, got {got}"
    return f"{path}: {error['msg'].removeprefix('Value error, ')}"


def _unknown(settings: type, where: str, name: Any, fields: Any) -> str:
    retired = getattr(settings, "retired", {})
    if name in retired and isinstance(retired[name], str):
        return f"{where}.{name}: expected no such field: {retired[name]}; leave it out"
    if name in retired:
        return (
            f"{where}.{name}: expected {' or '.join(map(shown, retired[name]))}, what an earlier "
            f"version had this field for is always so now, got {shown(fields[name])}; leave it out"
        )
    known = [field.name for field in dataclasses.fields(settings)]
    near = difflib.get_close_matches(str(name)[:_LONGEST_WORD], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"{where}: expected no field {shown(name)}; {hint}"


def _disagreements(made: Any, where: str) -> Iterator[str]:
    for field in dataclasses.fields(made):
        if "section" in field.metadata:
            yield from _disagreements(getattr(made, field.name), f"{where}.{field.name}")
        else:
            yield from _not_read(made, field, where)
    if hasattr(made, "faults"):
        yield from made.faults(where)


def _not_read(made: Any, field: dataclasses.Field, where: str) -> Iterator[str]:
    """A message where a value was chosen that nothing reads."""
    declared, value = field.metadata["declared"], getattr(made, field.name)
    if declared.only is None or not is_on(value):
        return
    other, readers = declared.only
    chosen = getattr(made, other)
    usual = declared.follows[1][chosen] if declared.follows else field.default
    if chosen not in readers and value != usual:
        yield (
            f"{where}.{field.name}: expected {shown(declared.default)} with {other}={chosen!r}, "
            f"which does not read it, got {shown(value)}; leave it, or set --{where}.{other} to "
            f"{' or '.join(map(repr, readers))}"
        )


def _message(faults: list[str]) -> str:
    if len(faults) == 1:
        path = faults[0].partition(":")[0]
        return faults[0] if "; " in faults[0] else f"{faults[0]}; set --{path}"
    more = [f"and {len(faults) - _MOST_FAULTS} more"] * (len(faults) > _MOST_FAULTS)
    lines = "\n  ".join([*faults[:_MOST_FAULTS], *more])
    return (
        f"expected a configuration without mistakes, got {len(faults)}; set --config.<field> of "
        f"each:\n  {lines}"
    )


def unread(settings: type, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields the sections that nothing reads with the names that a configuration has.

    >>> from adder_flax.settings import RunSettings
    >>> list(unread(RunSettings, {"optimizer": {"name": "adamw"}}))
    ['optimizer.kfac', 'optimizer.cg_fac']
    """
    for field in dataclasses.fields(settings):
        if (nested := class_of(field)) is not None:
            if _is_unread(field, fields):
                yield field.name
            else:
                own = fields.get(field.name, {})
                yield from (f"{field.name}.{path}" for path in unread(nested, own))


def _is_unread(field: dataclasses.Field, fields: Mapping[str, Any]) -> bool:
    reader = field.metadata["read_by"]
    return reader is not None and fields.get("name", reader) != reader


def filled(settings: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration of an earlier version as one of this version.

    What it lacks has its declared default. What this version does without (``retired`` of the
    class) is left out at the values at which it changes nothing; what it has in another way the
    class's ``translated`` tells.

    >>> from adder_flax.settings import RunSettings
    >>> filled(RunSettings, {"mesh": {"fsdp": 2}})["mesh"]
    {'data': -1, 'fsdp': 2, 'tensor': 1}
    """
    fields = getattr(settings, "translated", dict)(fields)
    full: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        own = fields.get(field.name, {})
        nested = class_of(field, own)
        if nested is None:
            full[field.name] = fields.get(field.name, field.metadata["declared"].default)
        elif is_mapping(own):
            full[field.name] = filled(nested, own)
    # What is unknown, or no section, stays as it is, for the message.
    retired = getattr(settings, "retired", {})
    return full | {
        name: value
        for name, value in fields.items()
        if name not in full
        and (isinstance(retired.get(name, ()), str) or _plain(value) not in retired.get(name, ()))
    }


def completed(settings: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration that leaves nothing to be told by a version of this library.

    It is `filled`; what nothing reads is at its default, and what stands for the wish of another
    field gives way to that.

    >>> from adder_flax.settings import RunSettings
    >>> full = completed(RunSettings, {"optimizer": {"name": "kfac"}})
    >>> full["optimizer"]["kfac"]["iterations"]
    2
    """
    return _settled(settings, filled(settings, fields))


def _settled(settings: type, full: dict[str, Any]) -> dict[str, Any]:
    for field in dataclasses.fields(settings):
        own, declared = full[field.name], field.metadata.get("declared")
        if declared is None and is_mapping(own):
            nested = class_of(field, own)
            full[field.name] = (
                own | defaults(nested) if _is_unread(field, full) else _settled(nested, own)
            )
    for name, declared in declared_in(settings).items():
        if declared.only and full[declared.only[0]] not in declared.only[1]:
            full[name] = declared.default
        if declared.follows and declared.is_word(full[name]):
            other, values = declared.follows
            # Where the other one is wrong, a message is to name that.
            full[name] = values.get(full[other], declared.default)
    return full


def misfit(settings: type, path: str, value: str) -> str | None:
    """Returns in words what a field takes in place of what a flag gave it, None of no field.

    >>> from adder_flax.settings import RunSettings
    >>> misfit(RunSettings, "mesh", "8")
    "expected --config.mesh.<field>, got '8' for all of it; it has data, fsdp, tensor"
    """
    *sections, name = path.split(".")
    classes = [settings]
    for part in sections:
        fields = [f for c in classes for f in dataclasses.fields(c) if f.name == part]
        classes = [
            nested
            for field in fields
            if class_of(field)
            for among in [field.metadata["among"]]
            for nested in [class_of(field), *(map(among.get, among) if among else ())]
        ]
    declared = next((declared_in(c)[name] for c in classes if name in declared_in(c)), None)
    if declared is not None:
        return (
            f"config.{path} ({declared.reason}): expected {declared.expected}, got "
            f"{shown(value)}; set --config.{path}"
        )
    known = next((defaults(c)[name] for c in classes if name in defaults(c)), None)
    if known is None:
        return None
    fix = f"set --config.{path}.name={value}" if "name" in known else f"it has {', '.join(known)}"
    return f"expected --config.{path}.<field>, got {shown(value)} for all of it; {fix}"
