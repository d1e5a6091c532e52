"""Files of weights that are wrong in one known way: their arrays, their headers, or what stands in
their place."""

import functools
import json
import os
import pickle
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from adder_flax import interop
from benchmarks.hostile._weights import KEPT, judge_file, spread, valid
from benchmarks.hostile.case import Case, Fault, Group, Observed

_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "BOOL": 1,
    "I8": 1,
    "U8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
}
_ITEM_BYTES |= {"U16": 2, "U32": 4, "U64": 8, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_NAMES = (
    "a" * 100_000,
    "\x1b[2J\x1b[31mred",
    "x\r\nerror: all is well",
    "",
    "\u202egnp",
    "../../etc/passwd",
    "ключ",
)


def _parse(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _arrays(content: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    header, data = _parse(content)
    header.pop("__metadata__", None)
    return {n: (f["dtype"], f["shape"], data[slice(*f["data_offsets"])]) for n, f in header.items()}


def _join(header: dict[str, Any] | str, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode(
        errors="surrogatepass"
    )
    return len(text).to_bytes(8, "little") + text + data


def _file(arrays: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    header, place = {}, 0
    for name, (dtype, shape, data) in arrays.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + len(data)]}
        place += len(data)
    return _join(header, b"".join(data for _, _, data in arrays.values()))


def _pick(rng: np.random.Generator, arrays: dict) -> str:
    return str(rng.choice(sorted(arrays)))


def _not_finite(rng: np.random.Generator, content: bytes) -> bytes:
    arrays = _arrays(content)
    name = _pick(rng, arrays)
    dtype, shape, data = arrays[name]
    numbers = np.frombuffer(data, "<f4").copy()
    numbers[rng.integers(numbers.size) if rng.random() < 0.5 else slice(None)] = rng.choice(
        [np.nan, np.inf, -np.inf]
    )
    return _file(arrays | {name: (dtype, shape, numbers.tobytes())})


def _other_type(rng: np.random.Generator, content: bytes) -> bytes:
    arrays = _arrays(content)
    name, other = _pick(rng, arrays), _pick(rng, _ITEM_BYTES)
    _, shape, data = arrays[name]
    return _file(arrays | {name: (other, shape, bytes(len(data) // 4 * _ITEM_BYTES[other]))})


def _packed_type(rng: np.random.Generator, content: bytes) -> bytes:
    arrays = _arrays(content)
    name = _pick(rng, arrays)
    _, shape, data = arrays[name]
    dtype, share = [
        ("F4", 8),
        ("F6_E2M3", 16 / 3),
        ("F6_E3M2", 16 / 3),
        ("float32", 1),
        ("f32", 1),
    ][rng.integers(5)]
    return _file(arrays | {name: (dtype, shape, data[: int(len(data) / share)])})


def _too_large(rng: np.random.Generator, content: bytes) -> bytes:
    arrays = _arrays(content)
    name = _pick(rng, arrays)
    _, shape, data = arrays[name]
    numbers = np.frombuffer(data, "<f4").astype("<f8")
    numbers[rng.integers(numbers.size)] = rng.choice([1e300, -3.5e38, 1e39])
    return _file(arrays | {name: ("F64", shape, numbers.tobytes())})


def _narrower(rng: np.random.Generator, content: bytes) -> bytes:
    """Gives what must load: each array in a type of its own."""
    arrays = _arrays(content)
    for name, (_, shape, data) in arrays.items():
        dtype = ("F64", "F32", "F16", "BF16")[rng.integers(4)]
        numbers = np.frombuffer(data, "<f4")
        bits = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
        kept = (
            numbers.astype(bits[dtype]).tobytes()
            if dtype in bits
            else numbers.view("<u2")[1::2].tobytes()
        )
        arrays[name] = (dtype, shape, kept)
    return _file(arrays)


def _other_shape(rng: np.random.Generator, content: bytes) -> bytes:
    arrays = _arrays(content)
    name = _pick(rng, arrays)
    dtype, shape, _ = arrays[name]
    shape = list(shape)
    change = rng.integers(5)
    if change == 0:
        shape = shape[::-1] + [1]
    elif change == 1:
        shape = shape[1:]
    elif change == 2:
        shape[rng.integers(len(shape))] += int(rng.integers(1, 5))
    elif change == 3:
        shape[rng.integers(len(shape))] = 0
    else:
        shape = [int(np.prod(shape)), 1]
    return _file(arrays | {name: (dtype, shape, bytes(4 * int(np.prod(shape))))})


def _head(rng: np.random.Generator, content: bytes) -> bytes:
    arrays = _arrays(content)
    weight, bias = sorted(
        (n for n in arrays if n.startswith(("head.", "classifier."))), key=lambda n: "bias" in n
    )
    classes, width = int(rng.integers(0, 9)), int(rng.choice([4, 8, 16]))
    shapes = {
        weight: [classes, width] if rng.random() < 0.5 else [width, classes],
        bias: [int(rng.integers(0, 9))],
    }
    for name, shape in shapes.items():
        if rng.random() < 0.3:
            del arrays[name]
        elif rng.random() < 0.7:
            arrays[name] = ("F32", shape, bytes(4 * int(np.prod(shape))))
    return _file(arrays)


def _missing(rng: np.random.Generator, content: bytes) -> bytes:
    arrays = _arrays(content)
    for _ in range(rng.integers(1, 4)):
        del arrays[_pick(rng, arrays)]
    return _file(arrays)


def _beside(rng: np.random.Generator, content: bytes) -> bytes:
    return _file(_arrays(content) | {_NAMES[rng.integers(len(_NAMES))]: ("F32", [1], bytes(4))})


def _renamed(rng: np.random.Generator, content: bytes) -> bytes:
    arrays = _arrays(content)
    stored = arrays.pop(_pick(rng, arrays))
    return _file(arrays | {_NAMES[rng.integers(len(_NAMES))]: stored})


def _declared(rng: np.random.Generator, content: bytes) -> bytes:
    """An array that is said to be as large as a disk, or beyond what numbers of 64 bits count."""
    header, data = _parse(content)
    name = _pick(rng, header.keys() - {"__metadata__"})
    shape = [
        [2**31, 2**20],
        [2**33],
        [2**62, 8],
        [2**64],
        [10**30],
        [-1, 8],
        [1.5],
        [True],
        ["8"],
        None,
        [2] * 5000,
    ]
    header[name]["shape"] = shape[rng.integers(len(shape))]
    if rng.random() < 0.5 and isinstance(header[name]["shape"], list) and rng.random() < 0.5:
        header[name]["data_offsets"] = [0, 2**33]
    return _join(header, data)


def _places(rng: np.random.Generator, content: bytes) -> bytes:
    header, data = _parse(content)
    name = _pick(rng, header.keys() - {"__metadata__"})
    start, stop = header[name]["data_offsets"]
    by = (-4, 4, 8, 10**6, 2**63, -(2**40))[rng.integers(6)]
    places = [
        [start + by, stop + by],
        [stop, start],
        [0, stop - start],
        [start, stop, stop],
        [start],
        "all",
        [start, None],
    ]
    header[name]["data_offsets"] = places[rng.integers(len(places))]
    return _join(header, data)


def _no_header(rng: np.random.Generator, content: bytes) -> bytes:
    header, data = _parse(content)
    text = json.dumps(header)
    first = next(iter(header.keys() - {"__metadata__"}))
    wrong = [
        text[:-1],
        text.replace("{", "[", 1),
        "{" * 100_000,
        '{"a":' * 20_000,
        "{"
        + ", ".join([f'"{first}": {json.dumps(header[first])}'] * 2)
        + text[1:].join([", ", ""]),
        text.replace('"dtype"', '"type"', 1),
        text.replace("]", ", NaN]", 1),
        text.replace('"shape": [', '"shape": [' + "9" * 5000, 1),
        '{"__metadata__": {"format": 3}}',
        '{"__metadata__": []}',
        "{}",
        text + "x",
        '{"\ud800": 1}',
        '{"a": {"dtype": "F32", "shape": [' + "[" * 500 + "]" * 500 + '], "data_offsets": [0, 4]}}',
        "null",
        " " * (2**24 + 5),
    ]
    return _join(wrong[rng.integers(len(wrong))], data)


def _big_header(rng: np.random.Generator, content: bytes) -> bytes:
    return (2**24 + 1, 2**31, 2**40, 2**63, 2**64 - 1)[rng.integers(5)].to_bytes(
        8, "little"
    ) + content[8:]


class _Evil:
    """What leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("unpickled",)


def _another_format(rng: np.random.Generator, path: Path) -> None:
    kind = rng.integers(7)
    if kind == 0:
        path.write_bytes(pickle.dumps(_Evil(), protocol=int(rng.integers(0, 6))))
    elif kind == 1:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(_Evil()))
    elif kind == 2:
        np.savez(path.with_suffix(".npz"), a=np.array([_Evil()], dtype=object))
        path.with_suffix(".npz").rename(path)
    elif kind == 3:
        path.write_bytes(b"\x89HDF\r\n\x1a\n" + rng.bytes(500))
    elif kind == 4:
        path.write_bytes(b"GGUF" + rng.bytes(500))
    elif kind == 5:
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    else:
        path.write_bytes(rng.bytes(int(rng.integers(0, 40))))


def _no_file(rng: np.random.Generator, path: Path) -> None:
    kind = rng.integers(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == 3:
        path.symlink_to(
            rng.choice(
                ["/dev/zero", "/dev/null", "/dev/full", "/dev/tty", "/proc/kmsg", "/proc/self/mem"]
            )
        )
    elif kind == 4:
        path.symlink_to(path)
    elif kind == 5:
        path.symlink_to("/nowhere/\x1b[31m")
    else:
        os.mkfifo(path.with_name("fifo"))
        path.symlink_to("fifo")


_CONTENTS = {
    "NaN or infinity in weights": _not_finite,
    "weights of another type of number": _other_type,
    "weights in fewer than 8 bits, or of a type with an unknown name": _packed_type,
    "weights in float64 beyond float32": _too_large,
    "weights in float64, float16 and bfloat16": _narrower,
    "an array of weights of another shape": _other_shape,
    "a head of another width or number of classes, or half of one": _head,
    "weights with arrays missing": _missing,
    "weights with an array of a strange name beside them": _beside,
    "an array of weights with a strange name": _renamed,
    "a shape that the file cannot hold": _declared,
    "places of arrays that overlap, leave gaps or lie outside of the file": _places,
    "a header that is none": _no_header,
    "a header said to be as large as a disk": _big_header,
}
_PLACES = {
    "a file of another format, with code in it or not, in place of weights": _another_format,
    "a FIFO, folder, socket, device or link to nothing in place of weights": _no_file,
}


def _run(make: Callable, is_content: bool, seed: int, place: int, index: int) -> Observed:
    rng = np.random.default_rng((seed, place, index))
    names = interop.FORMATS[index % len(interop.FORMATS)]
    if is_content:
        return judge_file(make(rng, valid(names)), names)
    return judge_file(None, names, functools.partial(make, rng))


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields files with one fault each, in the three formats in turn."""
    kinds = [
        (Fault(what, KEPT), functools.partial(_run, make, what in _CONTENTS, seed, place))
        for place, (what, make) in enumerate((_CONTENTS | _PLACES).items())
    ]
    return spread(kinds, count)


GROUP = Group("weights", 480, cases)
