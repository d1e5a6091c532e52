"""Files of weights with any damage: one message, with the model as it was, or read exactly.

Right is what the own package of the format says: a file that loads must, read by that package, hold
the arrays that the loaded model gives when it is written.
"""

import functools
import json
import pickle
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from adder_flax import interop, models
from adder_flax.errors import RunError, user_errors

pytestmark = pytest.mark.unchecked


@functools.cache
def make(seed: int = 0) -> models.VisionTransformer:
    sizes = {"image_size": 6, "patch_size": 3, "num_classes": 5, "width": 8, "depth": 1}
    return models.VisionTransformer(**sizes, num_heads=2, rngs=nnx.Rngs(seed))


@functools.cache
def valid(names: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        interop.save_weights(make(seed=1), f"{folder}/valid", names=names)
        return Path(folder, "valid").read_bytes()


def split(content: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: str | bytes, data: bytes) -> bytes:
    text = header.encode(errors="surrogatepass") if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + data


def arrays_of(content: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    header, data = split(content)
    header.pop("__metadata__", None)
    return {n: (f["dtype"], f["shape"], data[slice(*f["data_offsets"])]) for n, f in header.items()}


def file_of(arrays: dict[str, tuple[str, list[int], bytes]], names: str) -> bytes:
    """A file of these arrays, with what a valid one says of its network."""
    header, place = {"__metadata__": split(valid(names))[0]["__metadata__"]}, 0
    for name, (dtype, shape, data) in arrays.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + len(data)]}
        place += len(data)
    return join(json.dumps(header), b"".join(data for _, _, data in arrays.values()))


def check(content: bytes, names: str) -> str | None:
    """Loads a file; returns the message where it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder, "model.safetensors"), make()
        path.write_bytes(content)
        before = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        try:
            with user_errors():
                kept = interop.load_weights(model, path)
        except RunError as error:
            after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            jax.tree.map(np.testing.assert_array_equal, after, before)
            message = str(error)
            assert "expected" in message.lower()
            assert message.isprintable()
            assert len(message) < 4000
            return message
        interop.save_weights(model, f"{folder}/back", names=names)
        theirs, ours = read(path), read(Path(folder, "back"))
        heads = ("head.", "classifier.")
        for name in ours:
            if not (kept and name.startswith(heads)):
                np.testing.assert_array_equal(theirs[name], ours[name], err_msg=name)
        return None


def read(path: Path) -> dict[str, np.ndarray]:
    with safetensors.safe_open(path, "flax") as file:
        return {n: np.asarray(file.get_tensor(n)).astype(np.float32) for n in file.keys()}  # noqa: SIM118


FORMATS = st.sampled_from(interop.FORMATS)


@pytest.mark.parametrize("names", interop.FORMATS)
def test_a_whole_file_is_read_exactly(names):
    assert check(valid(names), names) is None


@given(names=FORMATS, data=st.data())
def test_changed_bytes_are_refused_or_read_as_they_are(names, data):
    content = bytearray(valid(names))
    places = st.integers(0, len(content) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=6)):
        content[place] = data.draw(st.integers(0, 255))
    check(bytes(content), names)


@given(names=FORMATS, data=st.data())
def test_a_file_of_another_length_is_refused(names, data):
    content = valid(names)
    start = data.draw(st.integers(0, len(content) - 1))
    cut = data.draw(st.sampled_from(["end", "inside", "beyond"]))
    by = data.draw(st.integers(1, 64))
    changed = {
        "end": content[:start],
        "inside": content[:start] + content[start + by :],
        "beyond": content + b"\1" * by,
    }[cut]
    assert check(changed, names)


_WORDS = (b"F64", b"F16", b"BOOL", b"F8_E4M3", b"null", b"-1", b"1e9", b"[]", b"{}", b"", b"NaN")
_WORDS += (b"18446744073709551616", b'"', b",", b"\0", b"\xff", b"\\u001b[31m", b"true", b'"shape"')


@given(names=FORMATS, data=st.data())
def test_a_changed_word_of_the_header_is_refused_or_changes_nothing(names, data):
    header, rest = split(valid(names))
    text = json.dumps(header).encode()
    words = list(re.finditer(rb'"[^"]*"|\d+|[{}\[\],:]', text))
    word = data.draw(st.sampled_from(words))
    number = st.integers(-5, 2**62).map(lambda n: str(n).encode())
    other = data.draw(st.sampled_from(_WORDS) | number)
    check(join(text[: word.start()] + other + text[word.end() :], rest), names)


_NO_FLOATS = {"BOOL": 1, "I8": 1, "I64": 8, "U16": 2, "F8_E5M2": 1}  # bytes


@given(names=FORMATS, data=st.data())
def test_an_array_that_does_not_fit_is_refused(names, data):
    arrays = arrays_of(valid(names))
    name = data.draw(st.sampled_from(sorted(arrays)))
    dtype, shape, content = arrays[name]
    fault = data.draw(st.sampled_from(["number", "type", "shape", "missing", "renamed"]))
    numbers = np.frombuffer(content, "<f4")
    place = data.draw(st.integers(0, numbers.size - 1))
    if fault == "number":
        wide = numbers.astype("<f8")
        wide[place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e300]))
        arrays[name] = ("F64", shape, wide.tobytes())
    elif fault == "type":
        other = data.draw(st.sampled_from(sorted(_NO_FLOATS)))
        arrays[name] = (other, shape, bytes(numbers.size * _NO_FLOATS[other]))
    elif fault == "shape":
        wrong = [*shape, 2] if data.draw(st.booleans()) else [n + 3 for n in shape]
        arrays[name] = (dtype, wrong, bytes(4 * int(np.prod(wrong))))
    elif fault == "missing":
        del arrays[name]
    else:
        new = data.draw(st.sampled_from(["a" * 10**5, "\x1b[31m", "", "../../x", "\u202egnp"]))
        arrays[new] = arrays.pop(name)
    heads = name.startswith(("head.", "classifier."))
    assert check(file_of(arrays, names), names) or (fault in ("shape", "missing") and heads)


@given(names=FORMATS, data=st.data())
def test_narrower_and_wider_numbers_are_converted_exactly(names, data):
    arrays = arrays_of(valid(names))
    for name, (_, shape, content) in arrays.items():
        numbers = np.frombuffer(content, "<f4")
        dtype = data.draw(st.sampled_from(["F64", "F32", "F16", "BF16"]))
        kept = {
            "F64": numbers.astype("<f8"),
            "F32": numbers,
            "F16": numbers.astype("<f2"),
            "BF16": numbers.view("<u2")[1::2],
        }[dtype]
        arrays[name] = (dtype, shape, kept.tobytes())
    assert check(file_of(arrays, names), names) is None


class _Evil:
    """What leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple:
        return pytest.fail, ("a pickle ran",)


def _headed(length: int) -> bytes:
    """A file whose header is said to be so long."""
    return length.to_bytes(8, "little") + valid("timm")[8:]


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(_Evil()),
        b"PK\3\4" + b"x" * 99,
        b"GGUF" + b"x" * 99,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
        b"",
        b"{}",
        *(2**24 + 1, 2**31, 2**40, 2**63, 2**64 - 1),
    ],
    ids=lambda content: repr(content)[:16],
)
def test_what_is_no_such_file_is_refused_and_no_code_in_it_runs(content):
    assert check(_headed(content) if isinstance(content, int) else content, "timm")
