"""Files of weights that nobody vouches for: refused by one message before their data are read, or
read exactly."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from adder_flax import interop
from adder_flax.models import Seq2Seq
from tests.interop.test_weights import load as load_as
from tests.interop.test_weights import make, timm_arrays


def load(tmp_path, **changes):
    arrays = timm_arrays() | changes
    save_file({name: array for name, array in arrays.items() if array is not None}, tmp_path / "w")
    return load_as(make(), tmp_path / "w")


KINDS = [np.ones(16, dtype) for dtype in (bool, np.int8, np.int64, ml_dtypes.float8_e4m3fn)]
WRONG = [np.where(np.arange(16) == 3, x, 0).astype("f") for x in (np.nan, np.inf, -np.inf)]


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        *((each, r"finite numbers in 'norm\.bias', got 1 of 16") for each in WRONG),
        *((each, r"'norm\.bias' to hold one of F64, F32, F16, BF16, got") for each in KINDS),
        (np.full(16, 1e300), r"norm\.bias that float32 holds, got 1e\+300"),
    ],
)
def test_numbers_that_are_none_are_refused_by_name(tmp_path, bias, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, **{"norm.bias": bias})


@pytest.mark.unchecked
def test_a_model_of_sequences_is_refused_by_name(tmp_path):
    sizes = dict(source_symbols=5, target_symbols=7, width=8, embedding_features=4)
    model = Seq2Seq(**sizes, rngs=nnx.Rngs(0))
    interop.save_weights(make(), tmp_path / "w")
    for names in interop.FORMATS:
        with pytest.raises(ValueError, match="expected a vision transformer, .* got a Seq2Seq"):
            interop.save_weights(model, tmp_path / "new", names=names)
    with pytest.raises(ValueError, match="got a Seq2Seq"):
        interop.load_weights(model, tmp_path / "w")
    assert os.listdir(tmp_path) == ["w"]


def test_a_head_is_taken_whole_or_for_other_classes_or_not_there(tmp_path):
    shaped = lambda shape: None if shape is None else np.ones(shape, "f")
    wrong = [((5, 16), None), (None, 5), ((5, 32), 5), ((7, 16), 5), ((7, 32), 7), ((0, 16), 0)]
    for kernel, bias in [(None, None), ((7, 16), 7), *wrong]:
        head = {"head.weight": shaped(kernel), "head.bias": shaped(bias)}
        if (kernel, bias) in wrong:
            with pytest.raises(ValueError, match=r"expected head\."):
                load(tmp_path, **head)
        else:
            assert load(tmp_path, **head) == ("head.bias", "head.kernel")


def test_shapes_are_compared_before_data_are_read(tmp_path):
    """A header of 8 GiB in a sparse file."""
    large = {"dtype": "F32", "shape": [2**31], "data_offsets": [0, 2**33]}
    text = json.dumps({"blocks.0.attn.qkv.weight": large}).encode()
    with open(tmp_path / "w", "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + 2**33)
    with pytest.raises(ValueError, match="expected"):
        interop.load_weights(make(), tmp_path / "w")


def test_names_from_a_file_are_fit_for_a_terminal(tmp_path):
    with pytest.raises(ValueError, match="no place") as caught:
        load(tmp_path, **{"a\x1b[31m" * 10_000: np.ones(1, "f")})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    interop.save_weights(make(seed=1), path)
    before = path.read_bytes()

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="got: No space left on device; what was there is still"):
        interop.save_weights(make(seed=2), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]
    monkeypatch.undo()
    with pytest.raises(OSError, match="got: Is a directory"):
        interop.save_weights(make(), tmp_path)
    interop.save_weights(make(seed=2), path)
    assert load_file(path)
    assert path.read_bytes() != before
