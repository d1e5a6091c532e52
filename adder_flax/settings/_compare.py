"""Settings of a comparison: what is compared, what is tuned, on which seeds, against what."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from adder_flax.settings._fields import completed, defaults, section, setting
from adder_flax.settings._keywords import Options
from adder_flax.settings._rules import (
    LONGEST_NAME,
    Choice,
    Flag,
    Integer,
    Number,
    Or,
    Refused,
    Text,
)
from adder_flax.settings._optimizer import translated
from adder_flax.settings._run import RunSettings

_MOST_LEVELS = 100
# Fields that the comparison sets itself.
_OWN = {"seed", "init", "data.train_split", "data.eval_split"}


def _mapping(value: Any) -> dict[str, Any]:
    """Returns what a mapping, which may be a ``ConfigDict``, holds by names."""
    if not hasattr(value, "items"):
        raise Refused
    held = dict(value.items())
    if not all(isinstance(name, str) and name.strip() and name.isprintable() for name in held):
        raise Refused
    if any(len(name) > LONGEST_NAME or "/" in name for name in held):
        raise Refused
    return held


def _by_path(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if hasattr(value, "items"):
            flat |= _by_path(_mapping(value), f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """Numbers between two, their logarithms evenly spread: ``("log", low, high)``."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of some values: ``("list", a, b, c)``."""

    values: tuple[Any, ...]


Range = LogUniform | OneOf


def _is_range(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) > 0 and value[0] in ("log", "list")


def _range(value: Any) -> Range:
    if _is_range(value):
        kind, *rest = value
        if kind == "log" and len(rest) == 2:
            low, high = (Number(0, math.inf, "()").read(end) for end in rest)
            if low < high:
                return LogUniform(low, high)
        if kind == "list" and len(rest) > 1:
            return OneOf(tuple(rest))
    raise Refused


class Levels:
    """By the name of a factor and the name of a level, the fields that the level sets.

    Once read, fields are by their path. Where a level has a range, as ``Space`` has them, the field
    is tuned in the arms of that level.

    >>> Levels().read({"mechanism": {"dot": {}, "adder": {"model": {"score": "adder"}}}})[
    ...     "mechanism"
    ... ]["adder"]
    {'model.score': 'adder'}
    """

    expected = (
        "by factor and by level, the fields that the level sets: {'mechanism': {'adder': {'model': "
        "{…}}, …}, …}; or in place of a value its range, ('log', low, high) with 0 < low < high or "
        "('list', a, b, …)"
    )

    def read(self, value: Any) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        factors = {factor: _mapping(levels) for factor, levels in _mapping(value).items()}
        if not factors or any(not 1 <= len(levels) <= _MOST_LEVELS for levels in factors.values()):
            raise Refused
        return Options(
            {
                factor: {level: self._level(fields) for level, fields in levels.items()}
                for factor, levels in factors.items()
            }
        )

    def _level(self, fields: Any) -> dict[str, Any]:
        return {
            path: _range(value) if _is_range(value) else value
            for path, value in _by_path(_mapping(fields)).items()
        }


class Names:
    """By the name of a factor, the name of one of its levels."""

    expected = "by factor the level that others are compared with: {'mechanism': 'dot'}"

    def read(self, value: Any) -> Mapping[str, str]:
        names = Options(_mapping(value))
        if not all(isinstance(level, str) for level in names.values()):
            raise Refused
        return names


class Space:
    """By field, what is tried: ``("log", low, high)`` or ``("list", a, b, …)``.

    Once read, fields are by their path.

    >>> Space().read({"optimizer": {"learning_rate": ("log", 1e-4, 1e-2)}})[
    ...     "optimizer.learning_rate"
    ... ]
    LogUniform(low=0.0001, high=0.01)
    """

    expected = (
        "fields with ('log', low, high), 0 < low < high, or ('list', a, b, …), several values"
    )

    def read(self, value: Any) -> Mapping[str, Range]:
        return Options({path: _range(values) for path, values in _by_path(_mapping(value)).items()})


@dataclasses.dataclass(frozen=True)
class CompareSettings:
    """All that a comparison is made from: what ``--mode=compare`` reads."""

    title: str = setting("A comparison", Text("a title"), "of the page")
    base: RunSettings = section(RunSettings)
    factors: Mapping[str, Any] = setting(
        {"mechanism": {"dot": {}}}, Levels(), "what differs; every combination of levels is an arm"
    )
    baseline: Mapping[str, str] = setting(
        {}, Names(), "the levels that the others of a factor are compared with"
    )
    match: str = setting(
        "steps",
        Choice("steps", "nothing"),
        "what all arms have as much of as the baseline; nothing: each has a schedule of its own",
    )
    search: Mapping[str, Any] = setting({}, Space(), "what is tuned in every arm")
    trials: int = setting(
        8, Integer(1, 4096), "points of the search space that are tried for each arm"
    )
    extensions: int = setting(
        3,
        Integer(0, 16),
        "how often half as many trials are added beyond an edge on which the best one lies",
    )
    tuning_seeds: int = setting(
        1, Integer(1, 1000), "runs of each trial, with seeds that the final runs do not have"
    )
    seeds: int = setting(6, Integer(1, 10_000), "final runs of each arm, with seeds 0, 1, …")
    confirmatory: bool = setting(
        False, Flag(), "whether this is the table that decides, declared before it is run"
    )
    validation_percent: int = setting(
        10,
        Integer(0, 90),
        "of the training split, for tuning and curves; 0 is the set's own split validation",
    )
    target: float | None = setting(
        "baseline",
        Or({"baseline": None}, Number(-1e9, 1e9)),
        "score on the validation split that time-to-target is measured to; baseline: the median of "
        "its final runs",
    )
    results: str = setting(
        "",
        Text("a folder, or nothing", longest=4096, empty=True),
        "where records, tables and figures are kept; empty is <workdir>/results",
    )

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        for factor, level in self.baseline.items():
            if factor not in self.factors:
                yield (
                    f"{where}.baseline: expected factors among {', '.join(self.factors)}, got "
                    f"{factor!r}"
                )
            elif level not in self.factors[factor]:
                yield (
                    f"{where}.baseline.{factor}: expected one of "
                    f"{', '.join(self.factors[factor])}, got {level!r}"
                )
        varied = {
            path
            for levels in self.factors.values()
            for fields in levels.values()
            for path in fields
        }
        for path in sorted(varied & self.search.keys()):
            yield (
                f"{where}.search.{path}: expected a field that no level sets, got one that a "
                "factor varies"
            )
        for path in sorted((varied | self.search.keys()) & _OWN):
            yield (
                f"{where}: expected {path} to be left to the comparison, got it among the factors "
                "or in the search"
            )
        if self.base.data.train_split.endswith("]"):
            yield (
                f"{where}.base.data.train_split: expected a whole split, of which the comparison "
                f"takes a part to tune on, got {self.base.data.train_split!r}"
            )
        if not self.validation_percent and self.base.data.eval_split == "eval":
            yield (
                f"{where}.base.data.eval_split: expected the name of the split to test on where "
                "the set has a split validation of its own, got 'eval', which is that one"
            )


def completed_comparison(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a comparison that an earlier version kept: fields it lacks have their defaults.

    What its base does not read stays, since an arm may.
    """
    own = dict(fields["base"])
    old = own.get("optimizer", {})
    own["optimizer"] = translated(old)
    if own["optimizer"] != old:
        over = {n: value for n, value in old["cg_fac"].items() if n in ("step", "curvature")}
        fields = {**fields, "factors": _translated_levels(fields.get("factors", {}), over)}
    base = _over(completed(RunSettings, own), own)
    return {**defaults(CompareSettings), **fields, "base": base}


def _translated_levels(factors: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns factors whose levels say in words of this version what an optimizer was."""

    def level(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        optimizer = fields.get("optimizer", {})
        if optimizer.get("name") != "cg_fac":
            return fields
        said = {**over, **optimizer.get("cg_fac", {})}
        return {**fields, "optimizer": translated({**optimizer, "cg_fac": said})}

    return {
        factor: {name: level(fields) for name, fields in levels.items()}
        for factor, levels in factors.items()
    }


def _over(fields: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with those of others in their place, section by section."""
    merged = dict(fields)
    for name, value in others.items():
        inside = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(inside, Mapping)
        merged[name] = _over(inside, value) if both else value
    return merged
