"""Seconds of a step of each arm of a comparison, as ``python -m benchmarks.compare seconds``
leaves them.
"""

import csv
from pathlib import Path

TIMING = "timing.csv"
"""Seconds of a step of each arm, timed in turn, on one machine or several: columns ``arm``,
``step_seconds``, ``machine`` (processor and cores) and ``timed`` (with what and when)."""


def read_timing(path: Path) -> dict[str, list[dict[str, str]]]:
    """Reads the rows of a ``timing.csv`` by their machine, none where there is no such file."""
    if not path.exists():
        return {}
    rows: dict[str, list[dict[str, str]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found = {name: row[name] for name in ("arm", "step_seconds", "machine", "timed")}
                float(found["step_seconds"])
                rows.setdefault(found["machine"], []).append(found)
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"expected the columns arm, step_seconds, machine and timed in {path}, got {error}; "
            "remove it, and write it anew by python -m benchmarks.compare seconds"
        ) from error
    return rows
