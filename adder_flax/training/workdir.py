"""The directory of a run.

Its configuration on disk, and the refusal to mix two runs in one place.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import logging

from adder_flax.errors import RunError, writing
from adder_flax.experiment import as_config
from adder_flax.extras import needs
from adder_flax.files import write_whole
from adder_flax.settings import RunSettings, completed
from adder_flax.text import printable
from adder_flax.training.checkpoints import SavedCheckpoints
from adder_flax.training.identity import differences, identity

with needs("train"):
    from ml_collections import ConfigDict

_SHOWN_DIFFERENCES = 20


def open_workdir(workdir: str | Path, config: ConfigDict) -> Path:
    """Returns the directory of a run as an absolute path.

    It is checked not to hold another one; writes nothing.

    A run that has not saved a checkpoint does not bind the next one: a mistake can be mended in the
    same directory.

    Raises:
      RunError: the directory holds checkpoints of another configuration; the message lists the
        differences.
    """
    workdir = Path(workdir).absolute()
    stored = _read_config(workdir)
    if stored is not None and SavedCheckpoints(workdir / "checkpoints").steps:
        _refuse_another_run(workdir, stored, config)
    return workdir


def write_config(workdir: str | Path, config: ConfigDict) -> None:
    """Writes ``config.json``, once the run is known to be good, unless it is there.

    Raises:
      RunError: the directory holds checkpoints of another configuration, or cannot be written to.
    """
    workdir = open_workdir(workdir, config)
    given = completed(RunSettings, json.loads(config.to_json()))
    path = workdir / "config.json"
    if jax.process_index() or _read_config(workdir) == given:
        return
    if SavedCheckpoints(workdir / "checkpoints").steps:
        if path.exists():
            return  # it differs in how the run is executed; the first start stays on record
        logging.warning(
            "No config.json beside the checkpoints in %s: taking them to be of this run", workdir
        )
    with writing("config.json", workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(given, indent=2) + "\n").encode())


def write_data(workdir: str | Path, records: Mapping[str, int]) -> None:
    """Writes ``data.json``: how many records each split has, for a later start to compare with.

    Raises:
      RunError: the directory cannot be written to.
    """
    if jax.process_index() == 0:
        with writing("data.json", workdir):
            write_whole(Path(workdir) / "data.json", (json.dumps(records) + "\n").encode())


def write_jax_settings(workdir: str | Path) -> None:
    """Writes ``jax.json``: what of JAX decides a run's random numbers and its precision.

    Raises:
      RunError: the directory cannot be written to.
    """
    if jax.process_index() == 0:
        with writing("jax.json", workdir):
            text = json.dumps(_jax_settings(), indent=2) + "\n"
            write_whole(Path(workdir) / "jax.json", text.encode())


def check_jax_settings(workdir: str | Path) -> None:
    """Refuses to go on with a run under which JAX would draw or round otherwise.

    A run begun before they were kept has none to compare with.

    Raises:
      RunError: the settings of this process are others than those of :func:`write_jax_settings`.
    """
    try:
        before = dict(json.loads((Path(workdir) / "jax.json").read_text()))
    except (FileNotFoundError, ValueError):
        return  # a run of before, or damaged: nothing to compare with
    now = _jax_settings()
    if others := [name for name in now if before.get(name, now[name]) != now[name]]:
        lines = [f"  {name}: {before[name]} there, {now[name]} now" for name in others]
        variables = " ".join(f"{name.upper()}={before[name]}" for name in others if before[name])
        raise RunError(
            f"expected the settings of JAX that the run in {workdir} began with, got others, by "
            "which it would end elsewhere:\n"
            + "\n".join(lines)
            + f"\nset them as they were{f' ({variables})' * bool(variables)}, or choose another "
            "--workdir for a new run"
        )


# By version of JAX and by environment these differ, and with them the numbers of a run.
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)


def _jax_settings() -> dict[str, Any]:
    return {name: jax.config.values[name] for name in _JAX_SETTINGS}


def changed_data(workdir: str | Path, records: Mapping[str, int]) -> str | None:
    """Returns in words what became of the data set since :func:`write_data`.

    None where it is as it was.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as workdir:
      ...     write_data(workdir, {"train": 60, "val": 20})
      ...     changed_data(workdir, {"train": 50, "val": 20})
      'the data set has changed since this run was last started: train 60 records then, 50 now'
    """
    try:
        before = json.loads(read_file(Path(workdir) / "data.json") or "null")
        changes = [
            f"{split} {before[split]} records then, {n} now"
            for split, n in records.items()
            if before[split] != n
        ]
    except (RunError, ValueError, TypeError, KeyError, RecursionError):
        return None  # not there, or damaged: nothing to compare with
    return (
        f"the data set has changed since this run was last started: {', '.join(changes)}"
        if changes
        else None
    )


def read_config(workdir: str | Path) -> ConfigDict:
    """Returns the configuration of the run in a directory.

    A setting that was added since is at its default.

    Raises:
      RunError: there is no run, or its config.json cannot be understood.
    """
    stored = _read_config(Path(workdir))
    if stored is None:
        raise RunError(
            f"expected the directory of a run, with its config.json, got {workdir}; train there "
            "first"
        )
    return as_config(completed(RunSettings, stored))


def read_file(path: Path) -> bytes | None:
    """Returns what a file holds, or None where there is none.

    Raises:
      RunError: it cannot be read, or is no file.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(
            f"expected to read {path}, got: {error.strerror}; make it readable, or move it away"
        ) from error


def _read_config(workdir: Path) -> dict[str, Any] | None:
    path = workdir / "config.json"
    text = read_file(path)
    if text is None:
        return None
    try:
        stored = json.loads(text)
        if not isinstance(stored, dict):
            raise ValueError(f"a JSON {type(stored).__name__}")
        as_config(stored)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else printable(error)
        reason = f"no JSON ({reason})" if isinstance(error, json.JSONDecodeError) else reason
        raise RunError(
            f"expected the configuration of a run in {path}, got: {reason}; put it back from a "
            "copy, or move it away: the run is then taken to be of the configuration it is started "
            "with"
        ) from error
    return stored


def _refuse_another_run(workdir: Path, stored: dict[str, Any], config: ConfigDict) -> None:
    if found := differences(identity(ConfigDict(stored)), identity(config)):
        more = len(found) - _SHOWN_DIFFERENCES
        raise RunError(
            f"expected the configuration of the run in {workdir}, got another:\n"
            + "\n".join(
                f"  {line}"
                for line in found[:_SHOWN_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])
            )
            + "\nchoose another --workdir for a new run, or the same values to go on with that one"
        )
