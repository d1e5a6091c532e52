"""The records of a comparison in one file: lines of JSON, compressed, its configuration first."""

import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adder_flax.errors import RunError
from adder_flax.files import write_whole

NAME = "records.jsonl.xz"


def read_packed(path: str | Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the configuration of a comparison, and its records by their names.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_packed(f"{folder}/{NAME}", {"seeds": 2}, {"dot-final-0": {"steps": 9}})
      ...     read_packed(f"{folder}/{NAME}")
      ({'seeds': 2}, {'dot-final-0': {'steps': 9}})
    """
    try:
        lines = lzma.decompress(Path(path).read_bytes()).splitlines()
        comparison, *records = map(json.loads, lines)
        return comparison, {record.pop("id"): record for record in records}
    except FileNotFoundError:
        raise
    except (OSError, lzma.LZMAError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(
            f"expected records of a comparison in {path}, got "
            f"{' '.join(str(error).split())[:200] or type(error).__name__}; put the file back from "
            "a copy"
        ) from error


def write_packed(
    path: str | Path, comparison: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]
) -> None:
    """Writes the file whole or not at all; the same records are the same bytes."""
    lines = [comparison, *({"id": name, **records[name]} for name in sorted(records))]
    as_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    text = "".join(as_json(line) + "\n" for line in lines)
    write_whole(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
