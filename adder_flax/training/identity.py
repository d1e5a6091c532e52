"""What makes a run this one: the fields of its configuration that say what is computed, not how."""

import json
from collections.abc import Mapping
from typing import Any

from adder_flax.settings import RunSettings, completed, unread
from adder_flax.text import printable

# How a run is executed, not what it computes: these may change between two starts of the
# same run.
OPERATIONAL_FIELDS = (
    "mesh",
    "log_every_steps",
    "attention_diagnostics",
    "checkpoint_every_steps",
    "profile_steps",
    "topology",
    "data.data_dir",
    "data.num_threads",
)


def flatten_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns ``{"model.width": 192, …}``.

    Example:
      >>> flatten_config({"seed": 0, "model": {"width": 192}})
      {'seed': 0, 'model.width': 192}
    """
    flat = {}
    for name, value in config.items():
        if hasattr(value, "items"):
            flat.update(flatten_config(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat


def with_defaults(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flattened fields, `adder_flax.settings.completed`.

    A later version may have added some.

    Example:
      >>> with_defaults({"seed": 3})["optimizer.name"]
      'adamw'
    """
    return flatten_config(completed(RunSettings, _nested(flat)))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        place = fields
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return fields


def identity(config: Any) -> dict[str, Any]:
    """Returns the fields, flattened, that make a run this one.

    All but those that say how it is executed.

    Example:
      >>> from ml_collections import ConfigDict
      >>> of = identity(ConfigDict({"seed": 3, "mesh": {"data": 8}, "model": {"mean": (0.5,)}}))
      >>> of["model.mean"], of["seed"], of["optimizer.name"], "mesh.data" in of
      ([0.5], 3, 'adamw', False)
    """
    flat = flatten_config(completed(RunSettings, json.loads(config.to_json())))
    return {name: flat[name] for name in sorted(flat) if not name.startswith(OPERATIONAL_FIELDS)}


def computing(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those flattened fields that say what is computed.

    Not how it is, nor what the run's optimizer does not read.

    Example:
      >>> computing({"optimizer.name": "sgd", "optimizer.kfac.damping": 3.0, "mesh.data": 2})
      {'optimizer.name': 'sgd'}
    """
    not_read = (f"{path}." for path in unread(RunSettings, _nested(flat)))
    idle = (*OPERATIONAL_FIELDS, *not_read)
    return {path: value for path, value in flat.items() if not path.startswith(idle)}


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns in words which fields of two runs differ.

    One that is absent is at its declared default; what neither reads does not count.

    Example:
      >>> differences(
      ...     {"seed": 0, "batch_size": 32}, {"seed": 1, "batch_size": 32, "ema_decay": 0.9}
      ... )
      ['ema_decay: 0.0 there, 0.9 now', 'seed: 0 there, 1 now']
    """
    there, now = computing(with_defaults(there)), computing(with_defaults(now))

    def shown(fields: Mapping[str, Any], name: str) -> str:
        return printable(repr(fields[name]), 60) if name in fields else "absent"

    return [
        f"{printable(name, 60)}: {shown(there, name)} there, {shown(now, name)} now"
        for name in sorted(there.keys() | now.keys())
        if there.get(name) != now.get(name)
    ]
