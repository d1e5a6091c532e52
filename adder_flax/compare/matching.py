"""What makes arms equal in something other than steps: parameters, operations or seconds."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from adder_flax import data, training
from adder_flax.compare.cells import facts
from adder_flax.compare.plan import FINAL, Arm, Plan, digest
from adder_flax.compare.records import write_text
from adder_flax.errors import RunError
from adder_flax.extras import needs

with needs("train"):
    from ml_collections import ConfigDict

_TIMED_STEPS = 20
_NAME = "matching.json"


def needs_measuring(plan: Plan) -> bool:
    """Whether it takes more than settings to match the arms of a plan."""
    return plan.settings.match in _MATCHES


def match(plan: Plan, folder: Path, load: Callable[..., data.Source]) -> Plan:
    """Returns the plan with arms that are matched as it says.

    Those matched before are read from ``<folder>/matching.json``.

    Args:
      plan: of the comparison.
      folder: of its records.
      load: as in ``training.build_run``.

    Raises:
      RunError: an arm cannot be matched.
    """
    if not needs_measuring(plan):
        return plan
    known = _read(folder / _NAME)
    fields = {}
    for arm in plan.arms.values():
        baseline = plan.baseline_of(arm)
        if baseline is None:
            continue
        key = "-".join([plan.settings.match, *(digest(_config(plan, a)) for a in (arm, baseline))])
        if key not in known:
            known[key] = _MATCHES[plan.settings.match](
                _config(plan, arm), _config(plan, baseline), arm.name, load
            )
            write_text(folder / _NAME, json.dumps(known, indent=1))
        fields[arm.name] = known[key]
    return plan.matched(fields)


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(
            f"expected what arms are matched by in {path}, got: {error}; move it away"
        ) from error


def _config(plan: Plan, arm: Arm) -> ConfigDict:
    return plan.cell(arm, FINAL, 0, {}).config


def _parameters(
    config: ConfigDict, baseline: ConfigDict, name: str, load: Callable
) -> dict[str, float]:
    """The width of the MLPs, in which the number of parameters is linear."""
    if "mlp_ratio" not in config.model:
        raise RunError(
            f"expected a model with mlp_ratio to match parameters by, got {name!r} without; set "
            "config.match"
        )

    def count(ratio: float | None, config: ConfigDict = config) -> int:
        fields = config.to_dict()
        if ratio is not None:
            fields["model"]["mlp_ratio"] = ratio
        state = training.build_run(ConfigDict(fields), load=load).abstract_state
        return sum(leaf.size for leaf in jax.tree.leaves(state["params"]))

    wanted, width = count(None, baseline), config.model.width
    one, two = count(1.0), count(2.0)
    units = width + round((wanted - one) / (two - one) * width)
    if units < 1:
        raise RunError(
            f"expected to match the {wanted} parameters of the baseline with an MLP of at least 1 "
            f"unit, got {name!r}, which has more without any; make the baseline larger"
        )
    # Half a unit more, as the product is rounded down.
    return {"model.mlp_ratio": (units + 0.5) / width}


def _operations(
    config: ConfigDict, baseline: ConfigDict, name: str, load: Callable
) -> dict[str, float]:
    return _lengths(config, baseline, load, lambda run: facts(run)["step_operations"])


def _seconds(
    config: ConfigDict, baseline: ConfigDict, name: str, load: Callable
) -> dict[str, float]:
    return _lengths(config, baseline, load, _time_step)


def _lengths(
    config: ConfigDict, baseline: ConfigDict, load: Callable, cost: Callable[[training.Run], float]
) -> dict[str, float]:
    """A length with which the steps of a run cost as much as those of the baseline."""
    own, other = (training.build_run(c, load=load) for c in (config, baseline))
    steps = max(1, round(other.num_steps * cost(other) / cost(own)))
    epochs = (steps - 0.5) / own.steps_per_epoch  # half a step less, as the product is rounded up
    warmup = config.optimizer.warmup_epochs * epochs / config.num_epochs
    return {"num_epochs": epochs, "optimizer.warmup_epochs": warmup}


def _time_step(run: training.Run) -> float:
    """Returns the median seconds of a training step."""
    batch = run.batches()[0]
    state, seconds = run.init(), []
    with jax.set_mesh(run.mesh):
        for _ in range(_TIMED_STEPS + 2):
            began = time.perf_counter()
            state, metrics = run.train_step(state, batch, run.hyper)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])  # the first is compiled


_MATCHES: Mapping[str, Callable[..., dict[str, Any]]] = {
    "parameters": _parameters,
    "operations": _operations,
    "seconds": _seconds,
}
