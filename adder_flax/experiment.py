"""Reads an experiment: a Python file, the ``config.json`` of a run, or a comparison's records."""

import difflib
import json
import os
import re
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from adder_flax import experiments, packed, settings
from adder_flax.errors import RunError, first_line
from adder_flax.extras import needs

with needs("train"):
    from ml_collections import ConfigDict

_FIX = "see the files in experiments/ for what one looks like"


def load_experiment(path: str) -> ConfigDict:
    """Returns what the ``get_config`` of an experiment file makes, or what a JSON file holds.

    Args:
      path: of the file, or the bare name of one that comes with the package; what follows a colon
        is the argument of ``get_config``. A ``.json`` file holds a configuration, as the
        ``config.json`` of a run does, or one under the name ``config``. ``records.jsonl.xz`` is the
        comparison that it is of, ``records.jsonl.xz#<name>`` one of its runs; fields that a version
        has added or given up since are put right. A file may import from those beside it.

    Raises:
      RunError: whatever is wrong with it, with the line.

    Example:
      >>> load_experiment("deit_small:cifar10").model.width
      384
    """
    if packed.NAME in path:
        return _from_packed(*path.partition("#")[::2])
    path, colon, argument = path.partition(":")
    path = _file_of(path)
    source = _read(path)
    if path.endswith(".json"):
        return _from_json(source, path)
    module = types.ModuleType("config_config")
    module.__file__ = path
    if (folder := os.path.dirname(os.path.abspath(path))) not in sys.path:
        sys.path.append(folder)  # at the end, where it hides nothing
    try:
        exec(compile(source, path, "exec"), module.__dict__)
        make = getattr(module, "get_config", None)
        if not callable(make):
            raise RunError(f"expected a function get_config in {path}, got {make!r}; {_FIX}")
        config = make(argument) if colon else make()
    except (RunError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: a file that leaves says nothing otherwise
        raise RunError(
            "expected an experiment file that makes a configuration, got "
            f"{_describe(error, path)}; mend it, or set --config to another"
        ) from error
    if not isinstance(config, ConfigDict):
        raise RunError(
            f"expected get_config of {path} to return an ml_collections.ConfigDict, got "
            f"{type(config).__name__}; {_FIX}"
        )
    return config


def experiment_names() -> list[str]:
    """Returns the names of the experiments that come with the package.

    >>> "adder_deit_tiny" in experiment_names()
    True
    """
    makes = re.compile(r"^(def get_config\(|get_config = |from .* import get_config)", re.MULTILINE)
    files = experiments.FOLDER.glob("*.py")
    return sorted(file.stem for file in files if makes.search(file.read_text(encoding="utf-8")))


def _file_of(path: str) -> str:
    """Returns the path of a shipped experiment for its name, and other paths as they are."""
    if not path.isidentifier() or os.path.isfile(path):
        return path
    names = experiment_names()
    if path not in names:
        near = difflib.get_close_matches(path, names, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RunError(
            f"expected an experiment that comes with the package, got {path!r}; {hint}--help lists "
            "all, a file of your own ends in .py"
        )
    return str(experiments.FOLDER / f"{path}.py")


def as_config(fields: dict[str, Any]) -> ConfigDict:
    """Returns what was read from JSON as a configuration, which has tuples in place of lists.

    Example:
      >>> as_config({"profile_steps": [3, 5]}).profile_steps
      (3, 5)
    """

    def with_tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: with_tuples(field) for name, field in value.items()}
        return tuple(map(with_tuples, value)) if isinstance(value, list) else value

    return ConfigDict(with_tuples(fields))


def _from_json(text: bytes, path: str) -> ConfigDict:
    try:
        stored = json.loads(text)
        fields = stored.get("config", stored)
        if not isinstance(fields, dict):
            raise ValueError(f"a JSON {type(fields).__name__} as its configuration")
        return as_config(_of_this_version(fields))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(
            f"expected the configuration of a run in {path}, got {first_line(error)[:500]}; set "
            "--config"
        ) from error


def _from_packed(path: str, name: str) -> ConfigDict:
    """Returns a run of a comparison, or without a name the comparison itself."""
    try:
        comparison, records = packed.read_packed(path)
    except FileNotFoundError as error:
        raise RunError(f"expected an experiment file, got {path}: none; set --config") from error
    if not name:
        return as_config(_of_this_version(comparison | {"results": os.path.dirname(path)}))
    if name not in records:
        near = difflib.get_close_matches(name, records, n=1) or list(records)[:1]
        raise RunError(
            f"expected the name of one of {len(records)} records after {path}#, got {name!r}; "
            f"did you mean {', '.join(near)}?"
        )
    return as_config(_of_this_version(records[name]["config"]))


def _of_this_version(fields: dict[str, Any]) -> dict[str, Any]:
    from adder_flax import models, tasks  # noqa: F401 - they register the settings of theirs

    if "base" in fields:  # what it does not read, an arm may
        return settings.filled(settings.CompareSettings, fields)
    return settings.completed(settings.RunSettings, fields)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(f"expected an experiment file, got {path}: {why}; set --config") from error


def _describe(error: BaseException, path: str) -> str:
    """Returns what went wrong and on which line of the file."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"a syntax error in line {error.lineno} of {path}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = f"line {lines[-1]} of {path}" if lines else path
    words = " ".join(str(error).split())
    return f"{type(error).__name__} from {where}" + (f": {words[:500]}" if words else "")
