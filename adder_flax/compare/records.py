"""What a finished cell leaves: a small file with its settings and every number of the tables."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adder_flax.compare.plan import Cell, Phase, own_fields
from adder_flax.errors import RunError, writing
from adder_flax.files import write_whole
from adder_flax.training.identity import computing, flatten_config

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Record:
    """One finished cell.

    Attributes:
      arm: its name.
      levels: by factor.
      phase: ``tuning`` or ``final``.
      seed: of the run.
      values: of what was searched.
      config: the whole configuration, with which ``main.py --config=<record>.json`` runs it again.
      steps: done.
      diverged: how the run stopped being finite, else None.
      validation: scores on the validation split at the end.
      test: scores on the test split, of final runs.
      curve: scores on the validation split along training, and the steps after which they were
        taken.
      facts: of the model: ``parameters``; ``multiplications``, ``additions`` and ``joules`` (a
        model of the arithmetic alone) of one example forward; ``step_operations`` (multiplications
        and additions) and ``step_joules`` of a training step.
      seconds: ``step``, the median of a training step, and ``run``, all of it since it was last
        started.
      machine: ``processor``, ``cores`` and ``device``.
      versions: of the libraries.
      date: on which it was finished.
    """

    arm: str
    levels: Mapping[str, str]
    phase: Phase
    seed: int
    values: Mapping[str, Any]
    config: Mapping[str, Any]
    steps: int
    diverged: str | None
    validation: Mapping[str, float]
    test: Mapping[str, float]
    curve: Mapping[str, Sequence[float]]
    facts: Mapping[str, float]
    seconds: Mapping[str, float]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str


class Records:
    """The records in a folder.

    Each appears whole or not at all, so several processes may add to it.

    Args:
      folder: made when the first is written.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._read: dict[str, Record] = {}
        self._checked: set[str] = set()

    def path(self, cell: Cell) -> Path:
        """Returns where the record of a cell is or will be."""
        return self.folder / f"{cell.id}.json"

    def get(self, cell: Cell) -> Record | None:
        """Returns the record of a cell, None where it is not finished.

        Raises:
          RunError: it is damaged, or of other settings.
        """
        record = self._read_file(self.path(cell))
        if record is not None and cell.id not in self._checked:
            stored, fields = flatten_config(record.config), flatten_config(cell.config)
            # A name says nothing of fields at their defaults, which a later version may change.
            known = computing(fields).keys() & stored.keys()
            if other := [
                path
                for path in {*known, *own_fields(cell.config)}
                if stored.get(path) != fields[path]
            ]:
                raise _damaged(self.path(cell), f"one with another {', '.join(sorted(other)[:5])}")
            self._checked.add(cell.id)
        return record

    def all(self) -> dict[str, Record]:
        """Returns every record in the folder by its file's name, of this comparison or another."""
        found = {
            path.stem: self._read_file(path) for path in sorted(self.folder.glob("[!.]*.json"))
        }
        return {name: record for name, record in found.items() if record is not None}

    def put(self, cell: Cell, record: Record) -> None:
        """Writes the record of a cell."""
        write_text(
            self.path(cell),
            json.dumps(
                {"format": _FORMAT, **dataclasses.asdict(record)}, indent=1, allow_nan=False
            ),
        )
        self._read[cell.id] = record

    def _read_file(self, path: Path) -> Record | None:
        if path.stem not in self._read:
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                return None
            except (OSError, ValueError) as error:
                raise _damaged(path, str(error)) from error
            self._read[path.stem] = _parse(text, path)
        return self._read[path.stem]


def write_text(path: Path, text: str) -> None:
    """Writes a file that whoever looks sees whole or not at all.

    Raises:
      RunError: it cannot be written.
    """
    with writing(path.name, path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{text}\n".encode())


def _parse(text: str, path: Path) -> Record:
    try:
        fields = json.loads(text)
        if fields.pop("format") != _FORMAT:
            raise ValueError("a record of another version of this library")
        return Record(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, " ".join(str(error).split())[:200] or type(error).__name__) from error


def _damaged(path: Path, reason: str) -> RunError:
    return RunError(
        f"expected the record of a finished cell in {path}, got: {reason}; put it back from a "
        "copy, or move it away: the cell is then run again"
    )
