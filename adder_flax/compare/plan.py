"""What a comparison consists of: arms, and cells, each an ordinary run.

Arms are combinations of levels.
"""

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from adder_flax import settings
from adder_flax.compare.search import value_at
from adder_flax.errors import RunError
from adder_flax.extras import needs
from adder_flax.settings import CompareSettings, Options, Range, RunSettings
from adder_flax.training.workdir import OPERATIONAL_FIELDS, flatten_config, with_defaults

with needs("train"):
    from ml_collections import ConfigDict

TUNING = "tuning"
FINAL = "final"
Phase = Literal["tuning", "final"]

_NAMES = ("model.name", "task.name", "optimizer.name")
_FIRST_TUNING_SEED = 1_000_000
_MOST_ARMS = 1000


@dataclasses.dataclass(frozen=True)
class Arm:
    """One combination of levels.

    Attributes:
      name: the levels with commas between them.
      levels: of each factor.
      fields: what they set, by path.
      space: what is tuned, by path: in every arm, or in those of its levels.
    """

    name: str
    levels: Mapping[str, str]
    fields: Mapping[str, Any]
    space: Mapping[str, Range]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
      arm: whose it is.
      phase: ``tuning`` or ``final``; the test split is read after the final ones alone.
      seed: of the run.
      values: of the fields that are searched.
      config: its whole configuration.
    """

    arm: Arm
    phase: Phase
    seed: int
    values: Mapping[str, Any]
    config: ConfigDict = dataclasses.field(compare=False)

    @functools.cached_property
    def id(self) -> str:
        """Its name, of its directory and of its record; other settings have another one."""
        return f"{_slug(self.arm.name)}-{self.phase}-{self.seed}-{digest(self.config)}"


class Plan:
    """The arms and cells of a comparison.

    Args:
      config: as an experiment file makes it, see ``CompareSettings``.

    Attributes:
      settings: what it says.
      arms: by name; a configuration keeps names sorted, but baselines come first.

    Raises:
      SettingsError: fields that are wrong, those of every arm included.

    Example:
      >>> from adder_flax.settings import defaults
      >>> scores = {"dot": {}, "adder": {"model": {"score": "adder"}}}
      >>> sizes = {"96": {"model": {"width": 96}}}
      >>> fields = {"factors": {"score": scores, "width": sizes}, "baseline": {"score": "dot"}}
      >>> plan = Plan(ConfigDict(defaults(CompareSettings) | fields))
      >>> list(plan.arms), plan.baseline_of(plan.arms["adder, 96"]).name
      (['dot, 96', 'adder, 96'], 'dot, 96')
      >>> plan.cell(
      ...     plan.arms["adder, 96"], "final", 3, {"optimizer.learning_rate": 0.01}
      ... ).config.model.score
      'adder'
    """

    def __init__(self, config: ConfigDict):
        self.settings = settings.read(CompareSettings, config)
        self._base = config.base.to_dict()
        self._cells: dict[tuple[Any, ...], Cell] = {}
        self.arms = self._make_arms()
        for arm in self.arms.values():
            settings.read(RunSettings, self._config(arm, {}), where=f"config of {arm.name}")
        if self.settings.match == "steps":
            self._check_steps()

    def baseline_of(self, arm: Arm) -> Arm | None:
        """Returns the arm that one is compared with; a baseline has none."""
        name = ", ".join({**arm.levels, **self.settings.baseline}.values())
        return None if name == arm.name or not self.settings.baseline else self.arms[name]

    @property
    def searched(self) -> tuple[str, ...]:
        """Fields that are tuned in some arm."""
        return tuple(dict.fromkeys(path for arm in self.arms.values() for path in arm.space))

    @property
    def tuning_seeds(self) -> range:
        """Seeds of the runs that tune."""
        return range(_FIRST_TUNING_SEED, _FIRST_TUNING_SEED + self.settings.tuning_seeds)

    def cell(self, arm: Arm, phase: Phase, seed: int, values: Mapping[str, Any]) -> Cell:
        """Returns the run of an arm, with values of what is searched or those in the middle."""
        key = arm.name, phase, seed, Options(values)
        if key not in self._cells:
            fields = settings.completed(RunSettings, self._config(arm, values) | {"seed": seed})
            self._cells[key] = Cell(arm, phase, seed, Options(values), ConfigDict(fields))
        return self._cells[key]

    def allows(self, arm: Arm, values: Mapping[str, Any]) -> bool:
        """Whether the settings of a run take these values of what is searched."""
        try:
            settings.read(RunSettings, self._config(arm, values))
        except settings.SettingsError:
            return False
        return True

    def _make_arms(self) -> dict[str, Arm]:
        baseline, factors = self.settings.baseline, {}
        for factor, levels in self.settings.factors.items():
            factors[factor] = dict(
                sorted(levels.items(), key=lambda level: level[0] != baseline.get(factor))
            )
        arms = {}
        for levels in itertools.islice(itertools.product(*factors.values()), _MOST_ARMS + 1):
            fields: dict[str, Any] = {}
            for factor, level in zip(factors, levels, strict=True):
                fields |= factors[factor][level]
            tuned = {path: value for path, value in fields.items() if isinstance(value, Range)}
            arm = Arm(
                ", ".join(levels),
                dict(zip(factors, levels, strict=True)),
                Options({path: value for path, value in fields.items() if path not in tuned}),
                Options({**self.settings.search, **tuned}),
            )
            arms[arm.name] = arm
        if len(arms) > _MOST_ARMS:
            raise RunError(
                f"expected at most {_MOST_ARMS} combinations of levels, got more; take fewer levels"
            )
        if len({_slug(name) for name in arms}) < len(arms):
            raise RunError(
                "expected names of levels that differ in letters and digits, got "
                f"{', '.join(arms)}; rename them"
            )
        made: dict[Any, Arm] = {}
        for arm in arms.values():
            other = made.setdefault((arm.fields, arm.space), arm)
            if any(factors[f][arm.levels[f]] != factors[f][other.levels[f]] for f in factors):
                raise RunError(
                    f"expected arms that differ, got {other.name!r} and {arm.name!r}, in which the "
                    "levels of one factor set the fields of another; set each in one factor"
                )
        return arms

    def _config(self, arm: Arm, values: Mapping[str, Any]) -> dict[str, Any]:
        # A field that is searched has the middle of its range until it has a value: its default
        # need not suit what the arm sets beside it.
        middles = {path: value_at(tried, 0.5) for path, tried in arm.space.items()}
        percent, whole = self.settings.validation_percent, self.settings.base.data.train_split
        splits = {
            "data.train_split": f"{whole}[:{100 - percent}%]" if percent else whole,
            "data.eval_split": f"{whole}[{100 - percent}%:]" if percent else "validation",
        }
        config = copy.deepcopy(self._base)
        for path, value in {**arm.fields, **middles, **values, **splits, "init": "path"}.items():
            *sections, field = path.split(".")
            inside = config
            for section in sections:
                inside = inside.setdefault(section, {})
            inside[field] = value
        return settings.filled(RunSettings, config)

    def _check_steps(self) -> None:
        if tuned := sorted({"num_epochs", "batch_size"} & set(self.searched)):
            raise RunError(
                f"expected arms of as many steps, as config.match is 'steps', got {tuned[0]} among "
                "what is tuned; set config.match to 'nothing', or leave it out of the search"
            )
        for arm in self.arms.values():
            other = self.baseline_of(arm)
            if other is None:
                continue
            own, its = (flatten_config(self._config(a, {})) for a in (arm, other))
            for field in ("num_epochs", "batch_size"):
                if own[field] != its[field]:
                    raise RunError(
                        f"expected {field} of {arm.name!r} to be {its[field]}, that of "
                        f"{other.name!r}, as config.match is 'steps', got {own[field]}; set "
                        f"config.match to 'nothing', or {field} alike"
                    )


def digest(config: Mapping[str, Any] | ConfigDict) -> str:
    """Returns what tells settings apart: `own_fields`, in twelve characters."""
    return hashlib.sha256(json.dumps(own_fields(config), sort_keys=True).encode()).hexdigest()[:12]


def own_fields(config: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """Returns the fields, by path, in which what a configuration computes is not the default.

    A field that a later version adds, at its default, changes nothing here.

    Example:
      >>> from adder_flax.settings import RunSettings, defaults
      >>> own_fields(defaults(RunSettings) | {"seed": 3, "log_every_steps": 1})
      {'seed': 3}
    """
    fields = with_defaults(flatten_config(config))
    # What is usual depends on who reads it.
    usual = with_defaults({path: fields[path] for path in _NAMES if path in fields})
    usual["optimizer.name"] = settings.OptimizerSettings().name
    return {
        path: value
        for path, value in fields.items()
        if not path.startswith(OPERATIONAL_FIELDS) and (path not in usual or usual[path] != value)
    }


def _slug(name: str) -> str:
    return re.sub(r"[^\w=.+]+", "_", name).strip("_")
