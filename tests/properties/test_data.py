"""Damaged images and prepared sets: the true pixels with the true labels, or one message."""

import json
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adder_flax import data
from adder_flax.data import prepare
from tests.data.files import encode, smooth_image, write_images
from tests.properties.damages import DAMAGES


def make_folder(root: Path) -> None:
    """Writes root/{train,val}/<class>/<number>.png."""
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("ant", "bird")):
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


_NO_IMAGES = st.binary(max_size=99) | st.sampled_from(
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n/Times-Roman findfont\n",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
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

    read = lambda: np.concatenate([next(batches)["label"] for _ in range(20)][-4:])
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

        right = lambda found: jax.tree.map(np.testing.assert_array_equal, found, (true, labels))
        message_or(lambda: read_all("property_images", copy), right)


@given(
    pattern=st.sampled_from(
        ["dataset_info.json", "features.json", "label.labels.txt", "*-train.array_record*"]
    ),
    damage=st.sampled_from(sorted(DAMAGES.keys() - {"a folder"})),
    place=st.floats(0, 1, exclude_max=True),
)
def test_a_prepared_set_with_damage_is_read_as_it_was_or_refused(prepared, pattern, damage, place):
    # A word of a text is another text: of a name, no digest is kept.
    if pattern.startswith("label") and damage in ("one bit flipped", "overwritten from there on"):
        return
    check_set(prepared, lambda folder: DAMAGES[damage](min(folder.glob(pattern)), place))


_features = lambda content: content["featuresDict"]["features"]


@pytest.mark.parametrize(
    ("file", "edit"),
    [
        ("dataset_info", lambda c: c.pop("splits")),
        ("dataset_info", lambda c: c.update(fileFormat="tfrecord")),
        ("dataset_info", lambda c: c["splits"][0].update(shardLengths=["7"])),
        ("dataset_info", lambda c: c["splits"][0].update(shardLengths=["-8"])),
        ("dataset_info", lambda c: c["splits"][0].update(filepathTemplate="../../{SPLIT}")),
        ("features", lambda c: _features(c).pop("image")),
        ("features", lambda c: _features(c).pop("label")),
        ("features", lambda c: _features(c)["image"].update(pythonClassName="antigravity.Nope")),
        ("features", lambda c: _features(c)["image"]["image"].update(dtype="uint16")),
        ("features", lambda c: _features(c)["label"]["classLabel"].update(numClasses="3")),
        ("features", lambda c: _features(c)["label"]["classLabel"].update(numClasses="1")),
    ],
)
def test_descriptions_that_say_something_else_are_refused(prepared, file, edit):
    def harm(folder):
        path = folder / f"{file}.json"
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))

    check_set(prepared, harm)
