"""What makes a run this one: the fields of its configuration that say what is computed, not how."""

import json
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from adder_flax.settings import RunSettings, completed, unread
from adder_flax.text import printable

OPERATIONAL_FIELDS = (
    "mesh",
    "log_every_steps",
    "checkpoint_every_steps",
    "profile_steps",
    "topology",
    "data.data_dir",
)
"""How a run is executed, not what it computes."""

# May change between two starts of one run: what it had computed before it met something broken is
# the same. A record of a comparison is of a whole run, which with another of these ends elsewhere.
_CHANGEABLE_FIELDS = (*OPERATIONAL_FIELDS, "data.on_unreadable", "non_finite")


def flatten_config(config: Any) -> dict[str, Any]:
    """Returns ``{"model.width": 192, …}``, with lists for tuples as JSON has them."""
    flat = flatten_dict(config.to_dict() if hasattr(config, "to_dict") else config, sep=".")
    return {name: list(x) if isinstance(x, tuple) else x for name, x in flat.items()}


def with_defaults(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flattened fields with those that a later version has added, at their defaults."""
    return flatten_config(completed(RunSettings, unflatten_dict(flat, sep=".")))


def fingerprint(config: Any) -> dict[str, Any]:
    """Returns the fields, flattened, that make a run this one: all that no later start may change.

    Example:
      >>> from ml_collections import ConfigDict
      >>> of = fingerprint(ConfigDict({"seed": 3, "mesh": {"data": 8}, "model": {"mean": (0.5,)}}))
      >>> of["model.mean"], of["seed"], of["optimizer.name"], "mesh.data" in of
      ([0.5], 3, 'adamw', False)
    """
    flat = flatten_config(completed(RunSettings, json.loads(config.to_json())))
    return {name: flat[name] for name in sorted(flat) if not name.startswith(_CHANGEABLE_FIELDS)}


def computing(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those flattened fields that say what is computed, and are read by the run at all.

    Example:
      >>> computing({"optimizer.name": "sgd", "optimizer.kfac.damping": 3.0, "mesh.data": 2})
      {'optimizer.name': 'sgd'}
    """
    not_read = (f"{path}." for path in unread(RunSettings, unflatten_dict(flat, sep=".")))
    idle = (*OPERATIONAL_FIELDS, *not_read)
    return {path: value for path, value in flat.items() if not path.startswith(idle)}


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns in words which fields of two runs differ; what neither reads does not count, nor what
    a later start may change.

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
        if there.get(name) != now.get(name) and not name.startswith(_CHANGEABLE_FIELDS)
    ]
