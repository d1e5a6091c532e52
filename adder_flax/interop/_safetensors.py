"""The safetensors format, read with nothing taken on trust.

All that a file says is checked before its data are read.

A file is the length of its header in 8 bytes, little-endian; the header, a JSON object of names and
their types, shapes and places; and the data, without gaps
(https://github.com/huggingface/safetensors). The package's own reader ends the process at sizes
that do not fit into memory, and does not tell bfloat16 to NumPy.
"""

import collections
import contextlib
import json
import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from adder_flax.text import printable

# The largest networks of timm need a hundredth of it.
_MAX_HEADER_BYTES = 2**24
_MAX_NUMBER, _MAX_AXES = 2**63, 32
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# By how they begin.
_OTHERS = {
    b"PK\x03\x04": "a zip archive, such as torch.save and numpy.savez write",
    b"\x80": "a pickle, such as torch.save writes",
    b"\x93NUMPY": "a NumPy file",
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"version https://git-lfs": "a pointer of git-lfs, which was not replaced by the file",
}
_CONVERT = (
    "load it where you trust it, and save its arrays with safetensors, e.g. "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
)

_AGAIN = "get or save the file again"


class Stored(NamedTuple):
    """What a header says of an array: type, shape, and where its data are.

    The type is called as the format calls it.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class WeightsFile:
    """An open file whose header was read.

    Attributes:
      arrays: what it says of each array, by name.
      metadata: texts by name, which the format leaves to whoever writes it.
    """

    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        size = os.fstat(stream.fileno()).st_size
        self.arrays, self.metadata, self._data_start = _read_header(stream, size)

    def read(self, name: str) -> np.ndarray:
        """Returns an array of floating-point numbers that are all finite.

        Raises:
          ValueError: it is of another kind, or not finite.
        """
        stored = self.arrays[name]
        if stored.dtype not in _DTYPES:
            raise ValueError(
                f"expected {_shown(name)} to hold one of {', '.join(_DTYPES)}, got "
                f"{printable(stored.dtype)}; save it as F32"
            )
        self._stream.seek(self._data_start + stored.start)
        data = self._stream.read(stored.stop - stored.start)
        if len(data) != stored.stop - stored.start:
            raise ValueError(
                f"expected {stored.stop - stored.start} bytes of {_shown(name)}, got {len(data)}"
            )
        array = np.frombuffer(data, np.dtype(_DTYPES[stored.dtype]).newbyteorder("<")).reshape(
            stored.shape
        )
        finite = np.isfinite(array)
        if not finite.all():
            raise ValueError(
                f"expected finite numbers in {_shown(name)}, got "
                f"{finite.size - np.count_nonzero(finite)} of {finite.size} that are NaN or "
                "infinite; take weights of a training that did not diverge"
            )
        return array


@contextlib.contextmanager
def open_weights(path: str | Path) -> Iterator[WeightsFile]:
    """Opens a safetensors file and reads its header.

    Args:
      path: of a regular file, or a link to one.

    Raises:
      ValueError: it is no such file.
      OSError: it cannot be read.
    """
    shown = printable(path)
    if "\0" in str(path):
        raise ValueError(f"expected the path of a safetensors file, got {shown}; correct the path")
    try:
        with open(path, "rb") as stream:
            try:
                yield WeightsFile(stream)
            except ValueError as error:
                raise ValueError(f"{shown}: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise type(error)(
            f"expected a safetensors file in {shown}, got: {reason}; correct the path"
        ) from error


def _read_header(stream: IO[bytes], size: int) -> tuple[dict[str, Stored], dict[str, str], int]:
    """Returns what a file says of its arrays, by name, its metadata, and where the data begin."""
    start = stream.read(32)
    for beginning, kind in _OTHERS.items():
        if start.startswith(beginning) and start[8:9] != b"{":
            raise ValueError(
                f"expected a safetensors file, got {kind}; it is not opened, since it may hold "
                f"code; {_CONVERT}"
            )
    length = int.from_bytes(start[:8], "little")
    if size < 8 or start[8:9] != b"{" or length > size - 8:
        raise ValueError(
            f"expected a safetensors file, got {size} bytes that do not begin like one or end too "
            f"early; {_AGAIN}"
        )
    if length > _MAX_HEADER_BYTES:
        raise ValueError(
            f"expected a header of at most {_MAX_HEADER_BYTES} bytes, got {length}; {_AGAIN}"
        )
    stream.seek(8)
    try:
        header = json.loads(
            stream.read(length).decode(), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"expected a header in JSON, got one that is not: {printable(error)}; {_AGAIN}"
        ) from error
    arrays = {
        name: _stored(name, facts) for name, facts in header.items() if name != "__metadata__"
    }
    metadata = header.get("__metadata__", {})
    _check_metadata(metadata)
    _check_places(arrays, size - 8 - length)
    return arrays, metadata, 8 + length


def _shown(name: str) -> str:
    return f"'{printable(name, limit=80)}'"


def _brief(found: Any) -> str:
    return printable(reprlib.repr(found))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{_shown(twice)} is there twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError(
            f"expected texts by name in __metadata__, got {_brief(metadata)}; {_AGAIN}"
        )


def _stored(name: str, facts: Any) -> Stored:
    """Checks what a header says of an array by itself."""
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"expected dtype, shape and data_offsets of {_shown(name)}, got {_brief(facts)}; "
            f"{_AGAIN}"
        )
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if (
        not isinstance(dtype, str)
        or not _are_sizes(shape)
        or not _are_sizes(offsets)
        or len(offsets) != 2
    ):
        raise ValueError(
            f"expected a type, a shape and two offsets of {_shown(name)}, got {_brief(facts)}; "
            f"{_AGAIN}"
        )
    stored = Stored(dtype, tuple(shape), *offsets)
    needed = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize if dtype in _DTYPES else None
    if stored.stop < stored.start or needed not in (None, stored.stop - stored.start):
        raise ValueError(
            f"expected {needed} bytes for {_shown(name)}, {_shown(dtype)} of shape "
            f"{_brief(stored.shape)}, got {stored.start} to {stored.stop}; {_AGAIN}"
        )
    return stored


def _are_sizes(numbers: Any) -> bool:
    if not isinstance(numbers, list) or len(numbers) > _MAX_AXES:
        return False
    return all(type(number) is int and 0 <= number < _MAX_NUMBER for number in numbers)


def _check_places(arrays: Mapping[str, Stored], size: int) -> None:
    """Checks that the data of all arrays lie one after the other and fill the file."""
    end, last = 0, "the beginning"
    for name, stored in sorted(arrays.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != end:
            raise ValueError(
                f"expected the data of {_shown(name)} to begin at {end}, after {last}, got "
                f"{stored.start}; {_AGAIN}"
            )
        end, last = stored.stop, _shown(name)
    if end != size:
        raise ValueError(f"expected {end} bytes of data, got {size}; {_AGAIN}")
