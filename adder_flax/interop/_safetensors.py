"""Where weights lie: a safetensors file, several of them by their index, or a folder of these."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adder_flax.extras import needs
from adder_flax.interop._names import plain_names
from adder_flax.text import printable

with needs("interop"):
    from safetensors import SafetensorError, safe_open

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
# Kinds that are met in place of safetensors, by how they begin.
_OTHERS = {
    b"PK\x03\x04": "a zip archive, such as torch.save and numpy.savez write",
    b"\x80": "a pickle, such as torch.save writes",
    b"version https://git-lfs": "a pointer of git-lfs, which was not replaced by the file",
}


class Weights:
    """Open files of weights.

    Attributes:
      folder: that they lie in.
      shapes: of the arrays, by name, see `plain_names`.
      metadata: texts by name, from the headers.
    """

    def __init__(self, folder: Path, files: Sequence[Any]):
        self.folder = folder
        self.metadata: dict[str, str] = {}
        self._slices: dict[str, tuple[Any, str]] = {}
        for file in files:
            self.metadata |= file.metadata() or {}
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for stored, name in plain_names(places).items():
            if name in self._slices:
                raise ValueError(
                    f"expected each array once, got two of {printable(name, limit=80)}; keep the "
                    "one that counts"
                )
            self._slices[name] = places[stored], stored
        self.shapes = {
            name: tuple(file.get_slice(stored).get_shape())
            for name, (file, stored) in self._slices.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Returns an array of floating-point numbers that are all finite."""
        file, stored = self._slices[name]
        shown = f"'{printable(name, limit=80)}'"
        if (dtype := file.get_slice(stored).get_dtype()) not in _FLOATS:
            raise ValueError(
                f"expected {shown} to hold one of {', '.join(_FLOATS)}, got {printable(dtype)}; "
                "save it as F32"
            )
        array = file.get_tensor(stored)
        finite = np.isfinite(array)
        if not finite.all():
            raise ValueError(
                f"expected finite numbers in {shown}, got "
                f"{finite.size - np.count_nonzero(finite)} of {finite.size} that are NaN or "
                "infinite; take weights of a training that did not diverge"
            )
        return array


@contextlib.contextmanager
def open_weights(path: str | Path) -> Iterator[Weights]:
    """Opens a safetensors file, an index of several, or a folder with one of both."""
    shown = printable(path)
    path, files = Path(path), []
    try:
        if path.is_dir():
            path = path / (_INDEX if (path / _INDEX).exists() else _FILE)
        shards = _shards(path) if path.name.endswith(".index.json") else [path.name]
        with contextlib.ExitStack() as stack:
            for shard in shards:
                file = path.with_name(shard)
                _check_kind(file)
                files.append(stack.enter_context(safe_open(file, "numpy")))
            yield Weights(path.parent, files)
    except SafetensorError as error:
        raise ValueError(
            f"{shown}: expected a safetensors file, got: {printable(error, limit=200)}; get or "
            "save the file again"
        ) from error
    except ValueError as error:
        raise ValueError(f"{shown}: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise type(error)(
            f"expected a safetensors file in {printable(path)}, got: {reason}; correct the path"
        ) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns an object in JSON beside weights, None where there is no file."""
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_bytes())
        if not isinstance(fields, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"expected a configuration in JSON in {printable(path)}, which lies beside the "
            f"weights, got: {printable(error)}; put the one there that belongs to them, or take it "
            "away"
        ) from error
    return fields


def _shards(index: Path) -> list[str]:
    """Returns the names of the files that an index of Hugging Face's names."""
    if (fields := read_json(index)) is None:
        raise FileNotFoundError(2, "No such file or directory")
    places = fields.get("weight_map")
    names = sorted(set(map(str, places.values()))) if isinstance(places, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise ValueError(
            f"expected files of the same folder by array in weight_map, got "
            f"{printable(places, limit=80)}; get the index again"
        )
    return names


def _check_kind(path: Path) -> None:
    """Refuses what is often met in place of a safetensors file, in words of its own."""
    with open(path, "rb") as stream:
        start = stream.read(32)
    for beginning, kind in _OTHERS.items():
        if start.startswith(beginning) and start[8:9] != b"{":
            raise ValueError(
                f"expected a safetensors file, got {kind}; it is not opened, since it may hold "
                "code; load it where you trust it, and save its arrays with safetensors, e.g. "
                "safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
                "'model.safetensors')"
            )
