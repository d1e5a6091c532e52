"""The final runs of a comparison, as its ``runs.csv`` has them."""

import csv
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from adder_flax import packed

_TEST = "test_"


class Run(NamedTuple):
    """A final run, and its steps to the validation target; None where it never was there."""

    score: float
    steps: int
    to_target: float | None


@dataclasses.dataclass(frozen=True)
class Runs:
    """Final runs of the arms of a comparison, by seed.

    They are judged by a ``score`` on the test split. The name of an arm is its levels with commas
    between them.
    """

    folder: Path
    score: str
    arms: Mapping[str, Mapping[int, Run]]


def read_runs(folder: str | Path) -> Runs:
    """Reads the final runs of a comparison from the folder of its results."""
    folder = Path(folder)
    path = folder / "runs.csv"
    if not path.exists():
        raise FileNotFoundError(
            f"expected results of a comparison, {path}, found none; write it by --mode=compare "
            f"--config={folder / packed.NAME} --workers=0"
        )
    try:
        with path.open(newline="", encoding="utf-8") as file:
            columns, *rows = filter(None, csv.reader(file))  # without empty lines
        # Before them are factors, which may be called as another column is.
        first = columns.index("seed")
        (test,) = (name for name in columns[first:] if name.startswith(_TEST))
        arms: dict[str, dict[int, Run]] = {}
        for cells in rows:
            row = dict(zip(columns[first:], cells[first:], strict=True))
            reached = float(row["steps_to_target"]) if row["steps_to_target"] else None
            run = Run(float(row[test]), int(row["steps"]), reached)
            arms.setdefault(", ".join(cells[:first]), {})[int(row["seed"])] = run
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"expected numbers in the columns seed, {_TEST}…, steps and steps_to_target of {path}, "
            f"got {type(error).__name__}: {error}; write it anew by --mode=compare --workers=0"
        ) from error
    return Runs(folder, test.removeprefix(_TEST), arms)
