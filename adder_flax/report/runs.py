"""The final runs of a comparison, as its ``runs.csv`` has them."""

import csv
import dataclasses
from collections.abc import Mapping
from pathlib import Path

_TEST = "test_"


@dataclasses.dataclass(frozen=True)
class Runs:
    """Final runs of the arms of a comparison.

    Attributes:
      folder: its results.
      score: what runs are judged by on the test split, such as ``accuracy``.
      arms: the row of each seed of each arm, whose name is its levels with commas between them.
    """

    folder: Path
    score: str
    arms: Mapping[str, Mapping[int, Mapping[str, str]]]

    def scores(self, arm: str) -> dict[int, float]:
        """Returns what each seed of an arm scored on the test split."""
        return {seed: float(row[_TEST + self.score]) for seed, row in self.arms[arm].items()}

    def steps_to_target(self, arm: str) -> dict[int, float | None]:
        """Returns after how many steps each seed was at the validation target; None: never."""
        return {
            seed: float(row["steps_to_target"]) if row["steps_to_target"] else None
            for seed, row in self.arms[arm].items()
        }


def read_runs(folder: str | Path) -> Runs:
    """Reads the final runs of a comparison.

    Args:
      folder: its results.

    Raises:
      FileNotFoundError: there are no results.
      ValueError: the file is not one that ``--mode=compare`` writes.
    """
    folder = Path(folder)
    path = folder / "runs.csv"
    if not path.exists():
        raise FileNotFoundError(f"expected results of a comparison, {path}, found none")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows, columns = list(reader), list(reader.fieldnames or [])
    test = [name for name in columns if name.startswith(_TEST)]
    if len(test) != 1 or not {"seed", "steps", "steps_to_target"} <= {*columns}:
        raise ValueError(
            f"expected the columns seed, {_TEST}…, steps and steps_to_target in {path}, got "
            f"{', '.join(columns) or 'none'}; write it anew by --mode=compare --workers=0"
        )
    factors = columns[: columns.index("seed")]
    arms: dict[str, dict[int, Mapping[str, str]]] = {}
    for row in rows:
        name = ", ".join(row[factor] for factor in factors)
        arms.setdefault(name, {})[int(row["seed"])] = row
    return Runs(folder, test[0].removeprefix(_TEST), arms)
