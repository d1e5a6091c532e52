"""Settings of a comparison: what is compared, what is tuned, on which seeds, against what."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from adder_flax.settings._declare import LONGEST_NAME, fault, is_mapping, section, setting
from adder_flax.settings._optimizer import OptimizerSettings
from adder_flax.settings._run import RunSettings
from adder_flax.settings._use import Options

_MOST_LEVELS = 100
# Fields that the comparison sets itself.
_OWN = {"seed", "init", "data.train_split", "data.eval_split"}


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
_RANGE = "('log', low, high) with 0 < low < high or ('list', a, b, …)"


def _named(value: Any) -> dict[str, Any]:
    held = dict(value.items()) if is_mapping(value) else None
    if held is None or not all(
        isinstance(name, str)
        and name.strip()
        and name.isprintable()
        and len(name) <= LONGEST_NAME
        and "/" not in name
        for name in held
    ):
        raise ValueError(value)
    return held


def _by_path(fields: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in _named(fields).items():
        flat |= _by_path(value, f"{prefix}{name}.") if is_mapping(value) else {prefix + name: value}
    return flat


def _is_range(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) > 0 and value[0] in ("log", "list")


def _range(value: Any) -> Range:
    match value:
        case ("log", float() | int() as low, float() | int() as high) if 0 < low < high < math.inf:
            return LogUniform(float(low), float(high))
        case ("list", *values) if len(values) > 1:
            return OneOf(tuple(values))
    raise ValueError(value)


def read_levels(value: Any) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Returns, by the name of a factor and the name of a level, the fields that the level sets.

    Fields are by their path. Where a level has a range, as a search has them, the field is tuned in
    the arms of that level.

    >>> read_levels({"mechanism": {"dot": {}, "adder": {"model": {"score": "adder"}}}})[
    ...     "mechanism"
    ... ]["adder"]
    {'model.score': 'adder'}
    """
    factors = {factor: _named(levels) for factor, levels in _named(value).items()}
    if not factors or any(not 1 <= len(levels) <= _MOST_LEVELS for levels in factors.values()):
        raise ValueError(value)

    def level(fields: Any) -> dict[str, Any]:
        return {
            path: _range(value) if _is_range(value) else value
            for path, value in _by_path(fields).items()
        }

    return Options(
        {
            factor: {name: level(fields) for name, fields in levels.items()}
            for factor, levels in factors.items()
        }
    )


def read_baseline(value: Any) -> Mapping[str, str]:
    """Returns, by the name of a factor, the name of one of its levels."""
    names = Options(_named(value))
    if not all(isinstance(level, str) for level in names.values()):
        raise ValueError(value)
    return names


def read_space(value: Any) -> Mapping[str, Range]:
    """Returns what is tried by field, which is by its path.

    >>> read_space({"optimizer": {"learning_rate": ("log", 1e-4, 1e-2)}})["optimizer.learning_rate"]
    LogUniform(low=0.0001, high=0.01)
    """
    return Options({path: _range(tried) for path, tried in _by_path(value).items()})


@dataclasses.dataclass(frozen=True)
class CompareSettings:
    """All that a comparison is made from: what ``--mode=compare`` reads."""

    title: str = setting("A comparison", "of the page", expected="a title")
    base: RunSettings = section(RunSettings)
    factors: Mapping[str, Any] = setting(
        {"mechanism": {"dot": {}}},
        "what differs; every combination of levels is an arm",
        parse=read_levels,
        expected="by factor and by level, the fields that the level sets: {'mechanism': {'adder': "
        f"{{'model': {{…}}}}, …}}, …}}; or in place of a value its range, {_RANGE}",
    )
    baseline: Mapping[str, str] = setting(
        {},
        "the levels that the others of a factor are compared with",
        parse=read_baseline,
        expected="by factor the level that others are compared with: {'mechanism': 'dot'}",
    )
    match: Literal["steps", "nothing"] = setting(
        "steps",
        "what all arms have as much of as the baseline; nothing: each has a schedule of its own",
    )
    search: Mapping[str, Any] = setting(
        {}, "what is tuned in every arm", parse=read_space, expected=f"fields with {_RANGE}"
    )
    trials: int = setting(
        8, "points of the search space that are tried for each arm", ge=1, le=4096
    )
    extensions: int = setting(
        3,
        "how often half as many trials are added beyond an edge on which the best one lies",
        ge=0,
        le=16,
    )
    tuning_seeds: int = setting(
        1, "runs of each trial, with seeds that the final runs do not have", ge=1, le=1000
    )
    seeds: int = setting(6, "final runs of each arm, with seeds 0, 1, …", ge=1, le=10_000)
    confirmatory: bool = setting(
        False, "whether this is the table that decides, declared before it is run"
    )
    validation_percent: int = setting(
        10,
        "of the training split, for tuning and curves; 0 is the set's own split validation",
        ge=0,
        le=90,
    )
    target: float | None = setting(
        "baseline",
        "score on the validation split that time-to-target is measured to; baseline: the median of "
        "its final runs",
        words={"baseline": None},
        ge=-1e9,
        le=1e9,
    )
    results: str = setting(
        "",
        "where records, tables and figures are kept; empty is <workdir>/results",
        expected="a folder, or nothing",
        max_length=4096,
    )

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        for factor, level in self.baseline.items():
            if factor not in self.factors:
                expected = f"factors among {', '.join(self.factors)}"
                yield fault(f"{where}.baseline", expected, repr(factor))
            elif level not in self.factors[factor]:
                expected = f"one of {', '.join(self.factors[factor])}"
                yield fault(f"{where}.baseline.{factor}", expected, repr(level))
        levels = (fields for levels in self.factors.values() for fields in levels.values())
        varied = {path for fields in levels for path in fields}
        for path in sorted(varied & self.search.keys()):
            got = "one that a factor varies"
            yield fault(f"{where}.search.{path}", "a field that no level sets", got)
        for path in sorted((varied | self.search.keys()) & _OWN):
            got = "it among the factors or in the search"
            yield fault(where, f"{path} to be left to the comparison", got)
        split = self.base.data.train_split
        if split.endswith("]"):
            expected = "a whole split, of which the comparison takes a part to tune on"
            yield fault(f"{where}.base.data.train_split", expected, repr(split))
        if not self.validation_percent and self.base.data.eval_split == "eval":
            expected = (
                "the name of the split to test on where the set has a split validation of its own"
            )
            got = "'eval', which is that one"
            yield fault(f"{where}.base.data.eval_split", expected, got)

    @staticmethod
    def translated(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a comparison as it is, unless arms of it have the cg_fac of version 0.1.0.

        They name it alone: its section is the base's, which a base without it does not keep.
        """
        old = fields.get("base", {}).get("optimizer", {}).get("cg_fac", {})
        if is_mapping(old) and "max_iterations" in old:
            for levels in fields.get("factors", {}).values():
                for level in levels.values():
                    OptimizerSettings.translated(level.get("optimizer", {}) | {"cg_fac": old})
        return fields
