"""All right labels of an image, from a file in the order of the images' names."""

import json

import numpy as np
import pytest

from adder_flax.data import DataError, EvalPipeline, load_source, with_label_sets
from tests.data.files import encode, smooth_image

# As ImageNet's are: numbered across the classes, so that order of names and order of paths differ.
CLASSES = {"ant": ["v3.png", "v5.png"], "bee": ["v1.png", "v4.png"], "cat": ["v2.png"]}
SETS = [[1, 2], [], [0], [0, 1, 2], [2]]
OF_NAME = dict(zip(["v1.png", "v2.png", "v3.png", "v4.png", "v5.png"], SETS, strict=True))


def pixels(name):
    """An image that no other name has."""
    return smooth_image(8, 8, seed=int(name[1]))


def write_folder(root):
    for split in ("train", "val"):
        for label, names in CLASSES.items():
            (root / split / label).mkdir(parents=True)
            for name in names:
                (root / split / label / name).write_bytes(encode(pixels(name)))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Where the images lie as a folder and as a set of TFDS, which has them in another order."""
    prepare = pytest.importorskip("adder_flax.data.prepare").prepare
    root, sets = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("sets")
    write_folder(root)
    prepare("folder", str(sets), str(root), "insects")
    return {"folder": str(root), "insects": str(sets)}


@pytest.fixture(params=["folder", "insects"])
def load(request, places):
    return lambda split="val": load_source(
        request.param, split, data_dir=places[request.param], image_size=8, eval_crop_ratio=1.0
    )


@pytest.fixture
def labels_file(tmp_path):
    path = tmp_path / "real.json"
    path.write_text(json.dumps(SETS))
    return path


def names_of(images):
    """The names, found by the pixels."""
    return [next(n for n in OF_NAME if np.array_equal(pixels(n), image)) for image in images]


def numbers(labels):
    return [np.flatnonzero(row).tolist() for row in labels]


def test_each_image_gets_the_labels_of_its_name(load, labels_file):
    arrays, readable = with_label_sets(load(), labels_file).read(np.arange(5))
    names = names_of(arrays["image"])
    assert readable.all()
    assert sorted(names) == sorted(OF_NAME)
    assert numbers(arrays["labels"]) == [OF_NAME[name] for name in names]
    for name, label in zip(names, arrays["label"], strict=True):
        assert name in list(CLASSES.values())[label]


def test_a_part_is_told_by_its_own_images(load, tmp_path):
    part = load("val[:60%]")
    arrays, _ = part.read(np.arange(3))
    assert part.file_names() == (names := names_of(arrays["image"]))
    (tmp_path / "part.json").write_text(json.dumps([OF_NAME[name] for name in sorted(names)]))
    arrays, _ = with_label_sets(part, tmp_path / "part.json").read(np.arange(3))
    assert numbers(arrays["labels"]) == [OF_NAME[name] for name in names]


def test_batches_are_filled_up_without_labels(load, labels_file):
    *_, last = EvalPipeline(with_label_sets(load(), labels_file), 3)
    assert last["mask"].tolist() == [True, True, False]
    assert (last["labels"].shape, last["labels"].dtype) == ((3, 3), bool)
    assert not last["labels"][2].any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"lists of labels in JSON in .*, got: No such file"),
        ("[[1], [", "lists of labels in JSON in .*, got: Expecting value"),
        (json.dumps(SETS[:4]), "each of the 5 images of folder/val in .*, got 4"),
        (json.dumps(OF_NAME), "each of the 5 images of folder/val in .*, got no list"),
        (json.dumps([*SETS[:4], [3]]), r"labels in \[0, 3\) for image 4 in .*, got \[3\]"),
        (json.dumps([*SETS[:4], [-1]]), r"labels in \[0, 3\) for image 4 in .*, got \[-1\]"),
        (json.dumps([*SETS[:4], 2]), r"labels in \[0, 3\) for image 4 in .*, got 2"),
    ],
)
def test_a_file_that_does_not_belong_to_the_split_is_one_message(text, message, places, tmp_path):
    source = load_source("folder", "val", data_dir=places["folder"], image_size=8)
    if text is not None:
        (tmp_path / "labels.json").write_text(text)
    with pytest.raises(DataError, match=message):
        with_label_sets(source, tmp_path / "labels.json")


def test_images_that_names_do_not_tell_apart_are_refused(tmp_path):
    write_folder(tmp_path / "twice")
    folder = tmp_path / "twice" / "val" / "ant"
    (folder / "v3.png").rename(folder / "v1.png")
    twice = load_source("folder", "val", data_dir=str(tmp_path / "twice"), image_size=8)
    for source, message in (
        (twice, "different names in folder/val, .*got v1.png twice"),
        (load_source("digits", "test"), "keeps the names of its images' files, got digits"),
    ):
        (tmp_path / "sets.json").write_text(json.dumps([[0]] * len(source)))
        with pytest.raises(DataError, match=message):
            with_label_sets(source, tmp_path / "sets.json")
