"""The directory of a run: its configuration on disk, and the refusal to mix two runs in one place."""

import json
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from adder_flax.errors import RunError

# How a run is executed, not what it computes: these may change between two starts of the same run.
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


def open_workdir(workdir: str | Path, config: ConfigDict) -> Path:
    """Makes the directory of a run, or checks that it belongs to a run of the same configuration.

    Writes ``config.json`` on the first start.

    Raises:
      RunError: the directory holds a run of another configuration; the message lists the differences.
    """
    workdir = Path(workdir).absolute()
    path = workdir / "config.json"
    if path.exists():
        _refuse_another_run(workdir, json.loads(path.read_text()), json.loads(config.to_json()))
    elif jax.process_index() == 0:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            # Other processes, and whoever looks after a crash, see all of it or nothing.
            whole = path.with_suffix(".json.part")
            whole.write_text(json.dumps(json.loads(config.to_json()), indent=2) + "\n")
            whole.replace(path)
        except OSError as error:
            raise RunError(f"expected a directory to write to, got {workdir}: {error}; set --workdir") from error
    return workdir


def read_config(workdir: str | Path) -> ConfigDict:
    """Returns the configuration of the run in a directory.

    Raises:
      RunError: there is no run.
    """
    path = Path(workdir) / "config.json"
    if not path.exists():
        raise RunError(f"expected the directory of a run, with its config.json, got {workdir}; train there first")
    # JSON knows no tuples; a configuration has no lists.
    as_tuple = lambda fields: {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return ConfigDict(json.loads(path.read_text(), object_hook=as_tuple))


def _refuse_another_run(workdir: Path, stored: dict[str, Any], given: dict[str, Any]) -> None:
    stored, given = flatten_config(stored), flatten_config(given)
    differences = [
        f"  {name}: {stored.get(name, 'absent')!r} there, {given.get(name, 'absent')!r} now"
        for name in sorted(stored.keys() | given.keys())
        if stored.get(name) != given.get(name) and not name.startswith(OPERATIONAL_FIELDS)
    ]
    if differences:
        raise RunError(
            f"expected the configuration of the run in {workdir}, got another:\n"
            + "\n".join(differences)
            + "\nchoose another --workdir for a new run, or the same values to go on with that one"
        )
