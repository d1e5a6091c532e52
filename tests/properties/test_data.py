"""Damaged images and prepared sets: the true pixels with the true labels, or one message."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adder_flax import data
from adder_flax.data import prepare
from tests.data.files import encode, smooth_image, write_images

CLASSES = ("ant", "bird")


def make_folder(root: Path, train: int = 4, val: int = 2) -> None:
    """Writes root/{train,val}/<class>/<number>.png."""
    for split, count in (("train", train), ("val", val)):
        for label, name in enumerate(CLASSES):
            write_images(root / split / name, count, seed=100 * label)


def read_all(name: str, data_dir: Path, **options) -> tuple[np.ndarray, np.ndarray]:
    """Reads each training image once through its pipeline: images and labels, in order."""
    fixed = {"image_size": 12, "crop_scale": None}
    source = data.load_source(name, "train", data_dir=str(data_dir), **fixed | options)
    batch = (pipeline := data.TrainPipeline(source, len(source)))[0]
    order = np.argsort(pipeline.record_indices(0))
    return batch["image"][order], batch["label"][order]


def message_or(read, right) -> None:
    """Calls; what comes is right, or one message."""
    try:
        found = read()
    except (data.DataError, ValueError) as error:
        message = str(error)
    else:
        right(found)
        return
    assert "expected" in message.lower()
    assert all(c.isprintable() or c == "\n" for c in message)


@given(st.data())
def test_an_image_with_damage_is_read_as_it_was_or_named(draw):
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        true, _ = read_all("folder", Path(folder))
        path = draw.draw(st.sampled_from(sorted(Path(folder).glob("train/*/*.png"))))
        content = bytearray(path.read_bytes())
        bit = draw.draw(st.integers(0, 8 * len(content) - 1))
        cut = draw.draw(st.booleans())
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content[: bit // 8] if cut else content)
        right = lambda found: np.testing.assert_array_equal(found[0], true)
        message_or(lambda: read_all("folder", Path(folder)), right)


_NO_IMAGES = st.binary(max_size=99) | st.sampled_from(
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n/Times-Roman findfont\n",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
        encode(smooth_image(12, 12))[:60],
    ]
)


@given(bad=st.dictionaries(st.integers(0, 7), _NO_IMAGES, min_size=1, max_size=7))
def test_with_skip_what_is_left_keeps_its_pixels_and_labels(bad):
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        true, labels = read_all("folder", Path(folder))
        paths = sorted(Path(folder).glob("train/*/*.png"))
        for index, content in bad.items():
            paths[index].write_bytes(content)
        with pytest.raises((data.DataError, ValueError), match="readable image"):
            read_all("folder", Path(folder))
        found, kept = read_all("folder", Path(folder), on_unreadable="skip")
        left = {image.tobytes(): label for image, label in zip(true, labels, strict=True)}
        for image, label in zip(found, kept, strict=True):
            assert left[image.tobytes()] == label
        good = {true[index].tobytes() for index in range(8) if index not in bad}
        assert {image.tobytes() for image in found} == good


@pytest.mark.parametrize("everything", [False, True])
def test_images_that_vanish_while_they_are_read_are_named_or_skipped(everything, tmp_path):
    make_folder(tmp_path)
    options = {"data_dir": str(tmp_path), "image_size": 8, "on_unreadable": "skip"}
    source = data.load_source("folder", "train", **options)
    batches = data.TrainPipeline(source, 4).iterate()
    next(batches)
    shutil.rmtree(tmp_path if everything else tmp_path / "train" / "ant")

    def read():
        return np.concatenate([next(batches)["label"] for _ in range(20)][-4:])

    message_or(read, lambda labels: np.testing.assert_array_equal(labels, 1))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A small set as TFDS keeps it: where sets are, and its own folder."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    root = tmp_path_factory.mktemp("prepared")
    make_folder(root / "images")
    place = prepare.prepare("folder", str(root / "sets"), str(root / "images"), "property_images")
    return root / "sets", place.relative_to(root / "sets")


def check_set(prepared, harm) -> None:
    sets, inside = prepared
    true, labels = read_all("property_images", sets)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(sets, Path(folder, "sets")))
        harm(copy / inside)

        def right(found):
            np.testing.assert_array_equal(found[0], true)
            np.testing.assert_array_equal(found[1], labels)

        message_or(lambda: read_all("property_images", copy), right)


_FILES = ("dataset_info.json", "features.json", "label.labels.txt", "*-train.array_record*")


@given(
    pattern=st.sampled_from(_FILES),
    how=st.sampled_from(["flip", "cut", "garbage", "gone", "longer", "zeros"]),
    place=st.floats(0, 1, exclude_max=True),
)
def test_a_prepared_set_with_damage_is_read_as_it_was_or_refused(prepared, pattern, how, place):
    def harm(folder):
        path = min(folder.glob(pattern))
        content = path.read_bytes()
        bit = int(place * 8 * len(content.rstrip(b"\0")))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        # A word of a text is another text: of a name, no digest is kept.
        if pattern.startswith("label") and how == "flip":
            return
        new = {
            "flip": bytes(flipped),
            "cut": content[: int(place * len(content))],
            "garbage": np.random.default_rng(bit).bytes(len(content)),
            "longer": content + b"\xff" * 99,
            "zeros": bytes(len(content)),
            "gone": None,
        }[how]
        path.write_bytes(new) if new is not None else path.unlink()

    check_set(prepared, harm)


def _features(content: dict) -> dict:
    return content["featuresDict"]["features"]


_EDITS = {
    "dataset_info.json": (
        lambda c: c.pop("splits"),
        lambda c: c.update(fileFormat="tfrecord"),
        lambda c: c["splits"][0].update(shardLengths=["7"]),
        lambda c: c["splits"][0].update(shardLengths=["-8"]),
        lambda c: c["splits"][0].update(filepathTemplate="../../{SPLIT}"),
    ),
    "features.json": (
        lambda c: _features(c).pop("image"),
        lambda c: _features(c).pop("label"),
        lambda c: _features(c)["image"].update(pythonClassName="antigravity.Nope"),
        lambda c: _features(c)["image"]["image"].update(dtype="uint16"),
        lambda c: _features(c)["label"]["classLabel"].update(numClasses="3"),
        lambda c: _features(c)["label"]["classLabel"].update(numClasses="1"),
    ),
}


@pytest.mark.parametrize("file", _EDITS)
def test_descriptions_that_say_something_else_are_refused(prepared, file):
    for edit in _EDITS[file]:

        def harm(folder, edit=edit):
            content = json.loads((folder / file).read_text())
            edit(content)
            (folder / file).write_text(json.dumps(content))

        check_set(prepared, harm)
