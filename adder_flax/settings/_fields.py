"""How a setting is declared, once.

Declared are its rule, its default, its reason, and whether it shapes the compiled program.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from adder_flax.errors import RunError
from adder_flax.registry import Registry
from adder_flax.settings._numbers import is_on
from adder_flax.settings._rules import LONGEST_NAME, Integer, Number, Or, Refused, Rule

Settings = TypeVar("Settings")

_MOST_FAULTS = 20
_LONGEST_VALUE = 80


class SettingsError(RunError):
    """A configuration has fields that are not what they should be; one message names them all."""


class Declared(NamedTuple):
    """What is said about a field where it is declared.

    Attributes:
      default: as a configuration writes it; what the settings hold is what its rule makes of that.
      rule: what a value has to be.
      reason: what the field is for, with its unit.
      data: whether the number is data of the compiled step, so that runs that differ in it share
        one program; else it shapes the program or belongs to what is around it. "if on": 0, as None
        always does, leaves its part out.
      only: another field of the class and the values with which this one is read: with others it
        stays at its default, or off.
      follows: another field of the class and, by its values, what the default stands for here.
    """

    default: Any
    rule: Rule
    reason: str
    data: bool | Literal["if on"]
    only: tuple[str, tuple[str, ...]] | None = None
    follows: tuple[str, Mapping[str, Any]] | None = None


def setting(
    default: Any,
    rule: Rule,
    reason: str,
    *,
    data: bool | Literal["if on"] = False,
    only: tuple[str, tuple[str, ...]] | None = None,
) -> Any:
    """Declares a field of a settings class; see `Declared` for the arguments.

    >>> from adder_flax.settings import Integer, read
    >>> @dataclasses.dataclass(frozen=True)
    ... class Size:
    ...     width: int = setting(8, Integer(1, 9), "of the tokens")
    >>> read(Size, {"width": 4})
    Size(width=4)
    >>> read(Size, {"width": 0})
    Traceback (most recent call last):
    ...
    adder_flax.settings._fields.SettingsError: config.width: expected an integer from 1 to 9, got 0; set --config.width
    """  # noqa: E501 - a message is one line
    return dataclasses.field(
        default=rule.read(default),
        metadata={"declared": Declared(default, rule, reason, data, only)},
    )


def following(
    other: str,
    values: Mapping[str, Any],
    rule: Number | Integer,
    reason: str,
    *,
    unset: int = 0,
    data: bool | Literal["if on"] = False,
    only: tuple[str, tuple[str, ...]] | None = None,
) -> Any:
    """Declares a field whose default stands for what another field of its class wants.

    Settings hold what it stands for, if their class calls `settle` once they are made.

    Args:
      other: the other field.
      values: what the default stands for, by the other field's value.
      rule: what any other value has to be; not the default.
      reason: as in `Declared`.
      unset: the default; another number where 0 has a meaning of its own.
      data, only: as in `Declared`.

    >>> from adder_flax.settings import Choice, read
    >>> @dataclasses.dataclass(frozen=True)
    ... class Pool:
    ...     kind: str = setting("max", Choice("max", "mean"), "of the tokens")
    ...     size: int = following("kind", {"max": 2, "mean": 4}, Integer(1, 9), "of a pool")
    ...
    ...     def __post_init__(self):
    ...         settle(self)
    >>> Pool().size, Pool("mean").size, Pool("mean", 3).size
    (2, 4, 3)
    >>> completed(Pool, {"kind": "mean"})
    {'kind': 'mean', 'size': 4}
    """
    names: dict[Any, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    meant = ", ".join(f"{value} with {other} {' or '.join(of)}" for value, of in names.items())
    default = float(unset) if isinstance(rule, Number) else unset
    declared = Declared(
        *(default, Or({unset: None}, rule), f"{reason}; {unset}: {meant}"),
        data=data,
        only=only,
        follows=(other, values),
    )
    return dataclasses.field(default=None, metadata={"declared": declared})


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
    inline: bool = False,
    among: Registry[type] | None = None,
    joined: Registry[type] | None = None,
    read_by: str | None = None,
) -> Any:
    """Declares a field that is itself a settings class.

    Args:
      settings: the class.
      inline: whether its fields stand among those of the class around it in a configuration.
      among: classes by name; the one that the section's field ``name`` stands for reads it.
      joined: in place of one class, a table of them, whose fields the section has all together.
      read_by: which ``name`` beside the section reads it; by default every one does.
    """
    find: Callable[[], Any] = (
        (lambda: settings)
        if joined is None
        else (lambda: join(joined.kind, *map(joined.get, joined)))
    )
    return dataclasses.field(
        default_factory=lambda: find()(),
        metadata={
            "section": find,
            "inline": inline,
            "among": among,
            "joined": joined,
            "read_by": read_by,
        },
    )


def class_of(field: dataclasses.Field) -> Any:
    """Returns the settings class of a field that is a section, else None."""
    return field.metadata["section"]() if "section" in field.metadata else None


def unread(settings: type, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields the sections that nothing reads with the names that a configuration has.

    >>> from adder_flax.settings import RunSettings
    >>> list(unread(RunSettings, {"optimizer": {"name": "adamw"}}))
    ['optimizer.kfac', 'optimizer.cg_fac']
    """
    for field in dataclasses.fields(settings):
        nested = class_of(field)
        if nested is None or field.metadata["inline"]:
            continue
        own = fields.get(field.name, {})
        if _is_unread(field, fields):
            yield field.name
        else:
            yield from (f"{field.name}.{path}" for path in unread(nested, own))


def _is_unread(field: dataclasses.Field, fields: Mapping[str, Any]) -> bool:
    reader = field.metadata["read_by"]
    return reader is not None and fields.get("name", reader) != reader


@functools.cache
def join(kind: str, *classes: type) -> type:
    """Returns a settings class that has the fields of some others.

    Args:
      kind: what the classes belong to, in the words of a message.
      *classes: settings; a field that several have must be declared alike.

    >>> from adder_flax.settings import DataSettings, MeshSettings
    >>> (
    ...     join("example", DataSettings, MeshSettings)().image_size,
    ...     defaults(join("example", MeshSettings))["fsdp"],
    ... )
    (224, 1)

    Raises:
      ValueError: two of them declare one field in two ways.
    """
    fields: dict[str, dataclasses.Field] = {}
    for field in (field for settings in classes for field in dataclasses.fields(settings)):
        other = fields.setdefault(field.name, field)
        if _ways(other) != _ways(field):
            raise ValueError(
                f"expected options of one name to be declared alike for every {kind}, got "
                f"{field.name!r} as "
                f"{' and as '.join(map(' by default '.join, (_ways(other), _ways(field))))}; "
                "choose another name"
            )

    def faults(made: Any, where: str) -> Iterator[str]:
        for settings in classes:
            if hasattr(settings, "faults"):
                yield from settings.faults(made, where)

    declared = [
        (f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata))
        for f in fields.values()
    ]
    return dataclasses.make_dataclass(
        f"{kind.title()}Options",
        declared,
        namespace={"faults": faults, "__post_init__": settle},
        frozen=True,
    )


def read(settings: type[Settings], fields: Any, where: str = "config") -> Settings:
    """Returns settings from a configuration, all of whose fields are checked first.

    Args:
      settings: the class: a frozen dataclass whose fields are declared by `setting` and `section`.
        Its method ``faults(where)``, if it has one, yields a message for each pair of fields that
        do not go together.
      fields: a mapping, such as a ``ConfigDict`` or what was read from JSON.
      where: what a message calls it.

    Raises:
      SettingsError: with one line for each field that is wrong, missing or unknown.
    """
    faults: list[str] = []
    made = _read(settings, fields, where, faults)
    if made is not None:
        faults += _disagreements(made, where)
    if made is None or faults:
        raise SettingsError(_message(faults))
    return made


def defaults(settings: type) -> dict[str, Any]:
    """Returns the declared defaults as a configuration writes them, sections as dictionaries.

    >>> from adder_flax.settings import MeshSettings
    >>> defaults(MeshSettings)
    {'data': -1, 'fsdp': 1, 'tensor': 1}
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        if (nested := class_of(field)) is None:
            fields[field.name] = field.metadata["declared"].default
        elif field.metadata["inline"]:
            fields |= defaults(nested)
        else:
            fields[field.name] = defaults(nested)
    return fields


def completed(settings: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration that leaves nothing to be told by a version of this library.

    What it lacks, as one of an earlier version does, has its declared default, as has what nothing
    reads, and what stands for the wish of another field gives way to that. What an earlier version
    had and this one does without (``retired`` of the class) is left out; what it had in another way
    the class's ``translated`` tells.

    >>> from adder_flax.settings import RunSettings
    >>> full = completed(RunSettings, {"mesh": {"fsdp": 2}, "optimizer": {"name": "kfac"}})
    >>> full["mesh"], full["optimizer"]["kfac"]["iterations"]
    ({'data': -1, 'fsdp': 2, 'tensor': 1}, 2)
    """
    fields = getattr(settings, "translated", dict)(fields)
    full: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        nested, own = class_of(field), fields.get(field.name, {})
        if nested is None:
            full[field.name] = fields.get(field.name, field.metadata["declared"].default)
        elif field.metadata["inline"]:
            full |= completed(nested, fields)
        elif not _is_mapping(own):
            continue  # it stays as it is, for the message, as fields do that are not known
        elif _is_unread(field, full):
            full[field.name] = dict(own.items()) | defaults(nested)
        else:
            among = field.metadata["among"]
            if among is not None and own.get("name") in among:
                nested = among.get(own["name"])
            full[field.name] = completed(nested, own)
    for field in dataclasses.fields(settings):
        declared = field.metadata.get("declared")
        if declared and declared.only and full[declared.only[0]] not in declared.only[1]:
            full[field.name] = declared.default
        if declared and declared.follows and _stands_for_another(declared, full[field.name]):
            other, values = declared.follows
            # Where the other one is wrong, a message is to name that.
            full[field.name] = values.get(full[other], declared.default)
    known = {*full, *getattr(settings, "retired", ())}
    return full | {name: value for name, value in fields.items() if name not in known}


def _stands_for_another(declared: Declared, value: Any) -> bool:
    try:
        return declared.rule.read(value) is None
    except Refused:
        return False


def declarations(settings: type, prefix: str = "") -> Iterator[tuple[str, Declared]]:
    """Yields every field with its path in a configuration: ``("optimizer.b1", Declared(…))``."""
    for field in dataclasses.fields(settings):
        if (nested := class_of(field)) is None:
            yield prefix + field.name, field.metadata["declared"]
        else:
            yield from declarations(
                nested, prefix if field.metadata["inline"] else f"{prefix}{field.name}."
            )


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


def _read(settings: type[Settings], fields: Any, where: str, faults: list[str]) -> Settings | None:
    """Returns settings, or None where a field is wrong: then messages were added to ``faults``."""
    if not _is_mapping(fields):
        faults.append(
            f"{where}: expected fields {', '.join(defaults(settings))}, got {shown(fields)}"
        )
        return None
    before = len(faults)
    given = dict(fields.items())
    known = defaults(settings)
    faults += [_unknown(where, name, known) for name in given if name not in known]
    made = _take(settings, given, where, faults)
    return made if len(faults) == before else None


def _take(settings: Any, given: Mapping[str, Any], where: str, faults: list[str]) -> Any:
    """`_read` without a look at fields that are not known."""
    before, values = len(faults), {}
    for field in dataclasses.fields(settings):
        path, nested = f"{where}.{field.name}", class_of(field)
        if nested is not None and field.metadata["inline"]:
            values[field.name] = _take(nested, given, where, faults)
        elif field.name not in given:
            expected = "its fields" if nested else field.metadata["declared"].rule.expected
            faults.append(
                f"{path}: expected {expected}, got nothing; the default is {shown(_default(field))}"
            )
        elif nested is not None:
            values[field.name] = _read_section(field, given[field.name], path, faults)
        else:
            rule = field.metadata["declared"].rule
            try:
                values[field.name] = rule.read(given[field.name])
            except Refused:
                faults.append(f"{path}: expected {rule.expected}, got {shown(given[field.name])}")
    return settings(**values) if len(faults) == before else None


def _is_mapping(fields: Any) -> bool:
    # A ConfigDict is no Mapping by its class; whoever borrows a layer need not have it installed.
    return isinstance(fields, Mapping) or all(
        hasattr(type(fields), name) for name in ("keys", "items", "__getitem__")
    )


def _read_section(field: dataclasses.Field, fields: Any, where: str, faults: list[str]) -> Any:
    settings, among = class_of(field), field.metadata["among"]
    name = fields.get("name") if _is_mapping(fields) else None
    # What could be no name at all is left to the rule of the field.
    if (
        among is not None
        and isinstance(name, str)
        and name.isprintable()
        and len(name) <= LONGEST_NAME
    ):
        try:
            settings = among.get(name)
        except ValueError as error:
            faults.append(f"{where}.name: {error}")
            return None
    if field.metadata["joined"] is not None and _is_mapping(fields):
        # Some were declared after the configuration was made.
        fields = defaults(settings) | dict(fields.items())
    return _read(settings, fields, where, faults)


def _ways(field: dataclasses.Field) -> tuple[str, str]:
    """Returns what a field is declared to be, in words."""
    declared = field.metadata["declared"]
    return declared.rule.expected, shown(declared.default)


def _default(field: dataclasses.Field) -> Any:
    nested = class_of(field)
    return field.metadata["declared"].default if nested is None else defaults(nested)


def _unknown(where: str, name: Any, known: Mapping[str, Any]) -> str:
    near = (
        difflib.get_close_matches(name[:_LONGEST_VALUE], known, n=1)
        if isinstance(name, str)
        else []
    )
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"{where}: expected no field {shown(name)}; {hint}"


def _disagreements(made: Any, where: str) -> Iterator[str]:
    """Yields what the settings and their sections say about fields that do not go together."""
    for field in dataclasses.fields(made):
        if "section" in field.metadata:
            inner = where if field.metadata["inline"] else f"{where}.{field.name}"
            yield from _disagreements(getattr(made, field.name), inner)
        else:
            yield from _not_read(made, field, where)
    if hasattr(made, "faults"):
        yield from made.faults(where)


def _not_read(made: Any, field: dataclasses.Field, where: str) -> Iterator[str]:
    """Yields a message where a value was chosen that nothing reads."""
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
