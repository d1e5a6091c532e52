"""Settings of a comparison: what is compared, what is tuned, on which seeds, against what."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from adder_flax.settings._declare import LONGEST_NAME, fault, section, setting
from adder_flax.settings._optimizer import OptimizerSettings
from adder_flax.settings._run import RunSettings
from adder_flax.settings._use import Options

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


def _by_path(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= (
            _by_path(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return flat


def _range(value: Any) -> Range:
    match value:
        case ("log", float() | int() as low, float() | int() as high) if 0 < low < high < math.inf:
            return LogUniform(float(low), float(high))
        case ("list", *values) if len(values) > 1:
            return OneOf(tuple(values))
    raise ValueError(value)


def _level(fields: Mapping[str, Any]) -> dict[str, Any]:
    """By path, the fields that a level sets, or ranges of those that are tuned in its arms."""
    is_range = lambda x: isinstance(x, tuple | list) and len(x) > 0 and x[0] in ("log", "list")
    return {path: _range(x) if is_range(x) else x for path, x in _by_path(fields).items()}


def _space(fields: Mapping[str, Any]) -> dict[str, Range]:
    return {path: _range(tried) for path, tried in _by_path(fields).items()}


@functools.cache
def _readers() -> dict[str, Callable[[Any], Any]]:
    """What reads a field that holds others by name."""
    from pydantic import AfterValidator, Field, TypeAdapter  # which borrowers of a layer may lack

    pattern = r"^ *[^/\p{C}\p{Z}]([^/\p{C}\p{Z}]| )*$"
    name = Annotated[str, Field(max_length=LONGEST_NAME, pattern=pattern)]
    level = Annotated[dict[name, Any], AfterValidator(_level)]
    levels = Annotated[dict[name, level], Field(min_length=1)]
    kinds = {
        "factors": Annotated[dict[name, levels], Field(min_length=1), AfterValidator(Options)],
        "baseline": Annotated[dict[name, name], AfterValidator(Options)],
        "search": Annotated[dict[name, Any], AfterValidator(_space), AfterValidator(Options)],
    }
    return {field: TypeAdapter(kind).validate_python for field, kind in kinds.items()}


@dataclasses.dataclass(frozen=True)
class CompareSettings:
    """All that a comparison is made from: what ``--mode=compare`` reads."""

    title: str = setting("A comparison", "of the page", expected="a title")
    base: RunSettings = section(RunSettings)
    factors: Mapping[str, Any] = setting(
        {"mechanism": {"dot": {}}},
        "what differs; every combination of levels is an arm",
        parse=lambda value: _readers()["factors"](value),
        expected="by factor and by level, the fields that the level sets: {'mechanism': {'adder': "
        f"{{'model': {{…}}}}, …}}, …}}; or in place of a value its range, {_RANGE}",
    )
    baseline: Mapping[str, str] = setting(
        {},
        "the levels that the others of a factor are compared with",
        parse=lambda value: _readers()["baseline"](value),
        expected="by factor the level that others are compared with: {'mechanism': 'dot'}",
    )
    match: Literal["steps", "nothing"] = setting(
        "steps",
        "what all arms have as much of as the baseline; nothing: each has a schedule of its own",
    )
    search: Mapping[str, Any] = setting(
        {},
        "what is tuned in every arm",
        parse=lambda value: _readers()["search"](value),
        expected=f"fields with {_RANGE}",
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
        if isinstance(old, Mapping) and "max_iterations" in old:
            for levels in fields.get("factors", {}).values():
                for level in levels.values():
                    OptimizerSettings.translated(level.get("optimizer", {}) | {"cg_fac": old})
        return fields
