"""What a finished cell leaves: a record with its settings and every number of the tables."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adder_flax import packed
from adder_flax.compare.plan import Cell, Phase, own_fields
from adder_flax.errors import RunError, writing
from adder_flax.files import write_whole
from adder_flax.training.workdir import HeldError, computing, flatten_config, lock_workdir

CURVE_DIGITS = 6
"""Of a score along training."""

_FORMAT = 1
_POLL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Record:
    """One finished cell.

    Attributes:
      arm: its name.
      levels: by factor.
      phase: ``tuning`` or ``final``.
      seed: of the run.
      values: of what was searched.
      config: the whole configuration, with which ``main.py --config=<record>`` runs it again.
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
      data: what tells the records of each split from those of another set, `Source.marks`.
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
    data: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)


class Records:
    """The records of a comparison: those of one file, and since then small ones of their own.

    Each appears whole or not at all, so several processes may add to them while another packs.

    Args:
      results: folder of ``records.jsonl.xz`` and ``records/``, made when the first is written.
    """

    def __init__(self, results: str | Path):
        self.file = Path(results) / packed.NAME
        self.folder = Path(results) / "records"
        self._read: dict[str, Record] = {}
        self._checked: set[str] = set()
        self._seen: tuple[int, ...] | None = None
        self._packed: tuple[dict[str, Any], dict[str, dict[str, Any]]] = {}, {}

    def address(self, cell: Cell) -> str:
        """Returns the record of a cell, once it is packed, as ``--config`` takes it."""
        return f"{self.file}#{cell.id}"

    def get(self, cell: Cell) -> Record | None:
        """Returns the record of a cell, None where it is not finished.

        Raises:
          RunError: it is damaged, or of other settings.
        """
        record = self._find(cell.id)
        if record is not None and cell.id not in self._checked:
            fields = flatten_config(cell.config)
            # What was renamed since stands there under both names.
            stored = flatten_config(record.config) | own_fields(record.config)
            # A name says nothing of fields at their defaults, which a later version may change.
            known = (computing(fields).keys() & stored.keys()) | own_fields(cell.config).keys()
            if other := sorted(path for path in known if stored.get(path) != fields[path]):
                raise _damaged(cell.id, f"one with another {', '.join(other[:5])}")
            self._checked.add(cell.id)
        return record

    def all(self) -> dict[str, Record]:
        """Returns every record by its name, of this comparison or another."""
        names = {path.stem for path in self.folder.glob("[!.]*.json")} | self._unpack()[1].keys()
        found = {name: self._find(name) for name in sorted(names)}
        return {name: record for name, record in found.items() if record is not None}

    def put(self, cell: Cell, record: Record) -> None:
        """Writes the record of a cell."""
        write_text(self.folder / f"{cell.id}.json", json.dumps(_fields(record), allow_nan=False))
        self._read[cell.id] = record

    def pack(self, comparison: Mapping[str, Any]) -> None:
        """Puts all records into the one file, with the configuration by which it alone goes on.

        The small ones are removed once they are in it.
        """
        if not self.folder.is_dir() and self._unpack()[0] in ({}, comparison):
            return
        while True:
            with contextlib.suppress(HeldError), lock_workdir(self.file.parent, "records.lock"):
                single = list(self.folder.glob("[!.]*.json"))
                records = {name: _fields(record) for name, record in self.all().items()}
                with writing(self.file.name, self.file.parent):
                    packed.write_packed(self.file, comparison, records)
                    for path in single:
                        path.unlink()
                break
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(OSError):  # of others that have come meanwhile, or it is gone
            self.folder.rmdir()

    def _find(self, name: str) -> Record | None:
        if name in self._read:
            return self._read[name]
        path = self.folder / f"{name}.json"
        try:
            try:
                fields = json.loads(path.read_text(encoding="utf-8"))
            except FileNotFoundError:
                # Looked into last: whoever packs removes a small file when it is in the other.
                if (fields := self._unpack()[1].get(name)) is None:
                    return None
            if fields["format"] != _FORMAT:
                raise ValueError("a record of another version of this library")
            known = {key: value for key, value in fields.items() if key != "format"}
            self._read[name] = Record(**known)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _damaged(path, " ".join(str(error).split())[:200]) from error
        return self._read[name]

    def _unpack(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Returns what the one file has, read again where another process has written it."""
        try:
            found = os.stat(self.file)
            seen = found.st_ino, found.st_mtime_ns, found.st_size
            if seen != self._seen:
                self._packed, self._seen = packed.read_packed(self.file), seen
        except FileNotFoundError:
            self._packed, self._seen = ({}, {}), None
        return self._packed


def write_text(path: Path, text: str) -> None:
    """Writes a file that whoever looks sees whole or not at all; a `RunError` says why not."""
    with writing(path.name, path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{text.rstrip()}\n".encode())


def _fields(record: Record) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    if not fields["data"]:  # of a record by an older version, which stays what it was
        del fields["data"]
    return {"format": _FORMAT, **fields}


def _damaged(path: Path | str, reason: str) -> RunError:
    return RunError(
        f"expected the record of a finished cell in {path}, got: {reason}; put it back from a "
        "copy, or move it away: the cell is then run again"
    )
