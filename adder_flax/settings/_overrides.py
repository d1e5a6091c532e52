"""What a flag should have been that no field can hold."""

import dataclasses
from collections.abc import Iterable, Iterator

from adder_flax.settings._fields import class_of, defaults, shown


def misfit(settings: type, path: str, value: str) -> str | None:
    """Returns in words what a field takes in place of what a flag gave it, None of no field.

    Args:
      settings: of which it is a field.
      path: of the field: ``optimizer.name``.
      value: as the flag has it.

    >>> from adder_flax.settings import RunSettings
    >>> misfit(RunSettings, "optimizer", "adamw")
    "expected --config.optimizer.<field>, got 'adamw' for all of it; set --config.optimizer.name=adamw"
    >>> misfit(RunSettings, "mesh", "8")
    "expected --config.mesh.<field>, got '8' for all of it; it has data, fsdp, tensor"
    """  # noqa: E501 - a message is one line
    classes, field = [settings], None
    for part in path.split("."):
        field = next((f for f in _fields(classes) if f.name == part), None)
        if field is None:
            return None
        among = field.metadata.get("among")
        nested = class_of(field)
        classes = [nested, *(map(among.get, among) if among else ())] if nested else []
    assert field is not None  # a path has a part
    if not classes:
        declared = field.metadata["declared"]
        return (
            f"config.{path} ({declared.reason}): expected {declared.rule.expected}, got "
            f"{shown(value)}; set --config.{path}"
        )
    known = defaults(classes[0])
    fix = f"set --config.{path}.name={value}" if "name" in known else f"it has {', '.join(known)}"
    return f"expected --config.{path}.<field>, got {shown(value)} for all of it; {fix}"


def _fields(classes: Iterable[type]) -> Iterator[dataclasses.Field]:
    for settings in classes:
        for field in dataclasses.fields(settings):
            yield field
            if field.metadata.get("inline"):
                yield from _fields([class_of(field)])
