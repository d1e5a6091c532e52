"""Sources: every one against an independent reading of the same files."""

import functools
import io
import os
import shutil
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from adder_flax.data import (
    SETS,
    ArraySource,
    DataError,
    DataSet,
    UnreadableRecordError,
    channel_statistics,
    load_or_imitate,
    load_source,
    register_source,
)
from adder_flax.data._built_in import FakeSource, stratified_test_mask
from adder_flax.data._folder import classes_of
from adder_flax.data._images import (
    decode_and_center_crop,
    decode_and_random_crop,
    random_crop_box,
)
from adder_flax.settings import ClassificationSettings
from adder_flax.tasks import Classification
from adder_flax.training import other_records
from tests.data.boxes import check_boxes
from tests.data.files import center_crop, encode, smooth_image, write_images
from tests.processes import run_code


@pytest.fixture
def load_folder(image_folder):
    """Loads a split of the image folder."""
    place = dict(data_dir=str(image_folder), image_size=8)
    return lambda split="train", **options: load_source("folder", split, **place | options)


def test_digits_are_those_of_scikit_learn():
    sources = [load_source("digits", split) for split in ("train", "test")]
    assert [len(source) for source in sources] == [1437, 360]
    # Both splits together hold every record once: compare as sorted rows of (pixels, label).
    rows = [np.c_[np.rint(s.images.reshape(-1, 64) / (255 / 16)), s.labels] for s in sources]
    theirs = load_digits()
    expected = np.c_[theirs.data, theirs.target]
    in_order = lambda rows: rows[np.lexsort(rows.T)]
    assert (in_order(np.concatenate(rows)) == in_order(expected)).all()
    assert (np.diff([(s.images.min(), s.images.max()) for s in sources]) == 255).all()


def test_digits_split_is_stratified_and_never_changes():
    """Accuracies are comparable only on one split: of each class, the records of the smallest draws
    of PCG64, which are pinned."""
    target = load_digits().target
    draws = np.random.PCG64(0).random_raw(1797)
    chosen = stratified_test_mask(target, 360 / 1797, seed=0)
    for label, count in enumerate(np.bincount(target)):
        rows = np.flatnonzero(target == label)
        first = rows[np.argsort(draws[rows])][: chosen[rows].sum()]
        assert chosen[first].all()
        assert abs(len(first) - 360 * count / 1797) < 1
    assert draws[:2].tolist() == [11749869230777074271, 4976686463289251617]


def loads_none_of(heavy, *arguments, **options):
    code = "import sys; from adder_flax.data import load_source\n"
    code += f"load_source(*{arguments}, **{options})[0]\n"
    code += f"assert not sys.modules.keys() & {set(heavy)}"
    run_code(code)


def test_digits_do_not_import_scikit_learn():
    """It takes longer than everything else before the first step."""
    heavy = ("sklearn", "tensorflow_datasets", "tensorflow", "pandas")
    loads_none_of(heavy, "digits", "train")


def test_fake_is_a_function_of_split_and_index():
    train, test = (FakeSource(split, (5, 5, 2), 3, 40) for split in ("train", "test"))
    assert (len(train), len(test), train.image_shape) == (40, 10, (5, 5, 2))
    assert load_source("fake", "test", image_size=6).image_shape == (6, 6, 3)
    assert not (train[7]["image"] == train[8]["image"]).all()
    assert not (train[7]["image"] == test[7]["image"]).all()
    images, labels = train.read(np.array([9, 7]))[0].values()
    assert (images[1] == train[7]["image"]).all()
    assert labels.tolist() == [9 % 3, 7 % 3]


def test_folder_reads_classes_by_name(image_folder, load_folder):
    train, val = (load_folder(split, image_size=24) for split in ("train", "eval"))
    assert (train.label_names, train.splits, len(train)) == (("ant", "bird"), ("train", "val"), 8)
    assert (val.split, len(val)) == ("val", 3)
    whole = load_folder(image_size=24, eval_crop_ratio=1.0)
    for index, file in enumerate(sorted(image_folder.glob("train/*/*.*g"))):
        assert train[index]["label"] == ["ant", "bird"].index(file.parent.name)
        for source, ratio in ((train, 0.875), (whole, 1.0)):
            expected = center_crop(Image.open(file).convert("RGB"), 24, ratio)
            assert (source[index]["image"] == expected).all()
    sources = (train, whole, load_source("digits", "train"))
    assert [source.eval_crop_ratio for source in sources] == [0.875, 1, 1]


def test_labels_of_a_split_are_those_of_train(image_folder, load_folder):
    """A split that lacks a class must not shift the numbers of the others."""
    ant = (image_folder / "val" / "ant").rename(image_folder / "ant")
    val = load_folder("val")
    assert [val[index]["label"] for index in range(len(val))] == [1, 1]
    ant.rename(image_folder / "val" / "cat")
    with pytest.raises(DataError, match=r"only labels of the split train in val.*got \['cat'\]"):
        load_folder("val")


def test_unreadable_image_is_named_or_counted(image_folder, load_folder):
    broken = image_folder / "train" / "bird" / "0.png"
    broken.write_bytes(broken.read_bytes()[:200])
    said = rf"record 3 of folder/train \({broken}\), got OSError.*skip"
    with pytest.raises(UnreadableRecordError, match=said):
        load_folder().read(np.arange(8))
    source = load_folder(on_unreadable="skip")
    images, labels = source.read(np.arange(8))[0].values()
    assert labels.tolist() == [0, 0, 0, -1, 1, 1, 1, 1]
    assert list(source.unreadable) == [3]
    assert not images[3].any()
    assert images[4].any()
    broken.unlink()
    with pytest.raises(UnreadableRecordError, match=r"0\.png.*FileNotFoundError"):
        source[3]


@pytest.mark.parametrize(
    ("width", "height"), [(500, 375), (375, 500), (256, 256), (300, 2000), (65, 17), (1, 1)]
)
@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_center_crop_is_deits(width, height, channels, mode):
    encoded = encode(smooth_image(height, width))
    expected = center_crop(Image.open(io.BytesIO(encoded)).convert(mode), 32, 0.875)
    got = decode_and_center_crop(encoded, 32, channels)
    assert (got == expected.reshape(32, 32, channels)).all()


def test_random_crop_is_a_resized_box():
    image = smooth_image(120, 160)
    for seed in range(5):
        rng = np.random.default_rng((7, seed))
        left, top, width, height = random_crop_box(rng, 160, 120, (0.08, 1.0))
        box = Image.fromarray(image).crop((left, top, left + width, top + height))
        expected = np.asarray(box.resize((20, 20), Image.BICUBIC)).astype(int)
        png, jpeg = (
            decode_and_random_crop(encode(image, kind), 20, 3, (7, seed), (0.08, 1.0)) - expected
            for kind in ("png", "jpeg")
        )
        # Resizing within the image may look one pixel past the box at its edges, where cropping
        # first repeats pixels.
        assert np.abs(png)[1:-1, 1:-1].max() <= 2
        # JPEG decodes such a large image at a fraction of its size.
        assert np.abs(jpeg).mean() < 4


def test_random_crop_up_to_the_edges_of_a_reduced_jpeg():
    """The whole width, at many sizes: rounding must not put the box outside the image decoded at a
    fraction."""
    for width in range(97, 131):
        encoded = encode(smooth_image(3 * width, width), "jpeg")
        assert decode_and_random_crop(encoded, 10, 3, (0,), (1.0, 1.0)).shape == (10, 10, 3)


def test_photographs_are_cropped_with_the_ratio_that_a_run_says(load_folder, image_folder):
    scale, ratio, seed = (0.2, 0.3), (2.0, 2.0), (3, 1)
    settings = ClassificationSettings(resized_crop_scale=scale, resized_crop_ratio=ratio)
    source = load_folder(**Classification.source_options(settings))
    image = Image.open(image_folder / "train" / "ant" / "0.png").convert("RGB")
    rng = np.random.default_rng(seed)
    left, top, width, height = random_crop_box(rng, *image.size, scale, ratio)
    assert abs(width - 2 * height) <= 1
    box = (left, top, left + width, top + height)
    expected = np.asarray(image.resize((8, 8), Image.BICUBIC, box=box))
    assert (source.read(np.array([0]), [seed])[0]["image"][0] == expected).all()


def test_random_crop_boxes_have_the_right_distribution():
    rng = np.random.default_rng(0)
    boxes = [random_crop_box(rng, 400, 300, (0.2, 0.5)) for _ in range(4000)]
    left, top, width, height = np.transpose(boxes)
    check_boxes(top, left, height, width)


def test_tfds_cifar10(cifar10_dir):
    tfds = pytest.importorskip("tensorflow_datasets")
    load = functools.partial(load_source, "cifar10", data_dir=cifar10_dir)
    source = load("test")
    assert (len(source), source.image_shape, source.num_classes) == (10_000, (32, 32, 3), 10)
    assert source.label_names[:3] == ("airplane", "automobile", "bird")
    assert not source.crops_on_host
    records = tfds.builder("cifar10", data_dir=cifar10_dir).as_data_source("test")
    indices = np.array([9999, 0, 17, 17])
    images, labels = source.read(indices)[0].values()
    again, _ = source.read(indices)[0].values()  # from the cache
    assert (images == again).all()
    for row, index in enumerate(indices):
        assert labels[row] == records[int(index)]["label"]
        assert (images[row] == records[int(index)]["image"]).all()
        assert (source[int(index)]["image"] == images[row]).all()
    assert len(load("train[:10%]")) == 5000
    assert load("test", image_size=40)[5]["image"].shape == (40, 40, 3)
    said = r"out of \('train', 'test'\) of cifar10/3.0.2, got 'validation'"
    with pytest.raises(DataError, match=said):
        load("validation")


def test_tfds_does_not_import_tensorflow(cifar10_dir):
    loads_none_of(["tensorflow"], "cifar10", "test", data_dir=cifar10_dir)


# A folder in which no set of TFDS is prepared, whatever there is at home.
NO_SETS = {"data_dir": str(Path(__file__).parent)}
PREPARE = f"python -m adder_flax.data.prepare cifar100 --data_dir={NO_SETS['data_dir']}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digits", "val"), r"split out of \('train', 'test'\) of digits, got 'val'"),
        (("fake", "val"), "of fake, got 'val'"),
        (("digits", "train", {"image_size": 9}), "image_size 8 for digits, got 9"),
        (("folder", "train"), "data_dir=<root of the image folder>"),
        (("folder", "train", {"data_dir": "/nowhere/at/all"}), "image_size for data set 'folder'"),
        (("folder", "train", {"data_dir": "/none", "image_size": 8}), "got '/none', which is no"),
        (("cifar1", "train"), "got 'cifar1'. Did you mean cifar10"),
        (("cifar100", "train", NO_SETS), PREPARE),
        (("cifar10:9.9.9", "train", NO_SETS), "version that TFDS has, got 'cifar10:9.9.9'"),
        (("imagenette/nope", "train", NO_SETS), "version that TFDS has, got 'imagenette/nope'"),
    ],
)
def test_errors_say_what_to_do(arguments, message):
    name, split, *options = arguments
    with pytest.raises(DataError, match=message):
        load_source(name, split, **(options[0] if options else {}))


def test_errors_of_a_folder(image_folder, load_folder):
    with pytest.raises(DataError, match=r"out of \('train', 'val'\).*got 'test'"):
        load_folder("test")
    with pytest.raises(IndexError, match=r"record of folder/train in \[0, 8\), got 8"):
        load_folder()[8]
    (image_folder / "empty").mkdir()
    with pytest.raises(DataError, match="one sub-folder per class"):
        load_folder("empty")
    # The folder of a split in place of the one above it.
    with pytest.raises(DataError, match=r"<split>/<class>/<image>, got 3 images in .*/ant, which"):
        load_folder(data_dir=str(image_folder / "train"))
    (loose := image_folder / "train" / "loose.png").write_bytes(b"")
    with pytest.raises(DataError, match="got the file 'loose.png' beside the classes' folders"):
        load_folder()
    loose.unlink()
    (image_folder / "train" / "cat").mkdir()
    with pytest.raises(DataError, match=r"images of each class in .*, got none of \['cat'\]"):
        load_folder()
    write_images(image_folder / "train" / "cat" / "deep" / "deeper", 1)
    assert load_folder().read(np.arange(9))[0]["label"].tolist() == [0] * 3 + [1] * 5 + [2]


def test_other_records_have_other_marks(image_folder, load_folder):
    numbers = lambda x: {"train": [3, x, float("nan")]}
    assert other_records(numbers(0.25), numbers(0.25)) == []
    assert other_records(numbers(0.25), numbers(0.26)) == ["train other records"]
    marks = load_folder().marks()
    assert marks[0] == 8
    now = lambda: other_records({"train": marks}, {"train": load_folder().marks()})
    assert now() == []
    picture = next((image_folder / "train").glob("*/*"))
    Image.new("RGB", (8, 8), (250, 10, 90)).save(picture)
    assert now() == ["train other records"]
    picture.unlink()
    assert now() == ["train 8 records then, 7 now"]


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("dtype", "first", "message"),
    [
        ("float32", 0, r"images of own/train in uint8, 0 to 255, got float32\. Scale them"),
        ("uint8", 1, r"labels of own/train in \[0, 3\), got 3\. Count classes from 0"),
        ("uint8", -1, r"labels of own/train in \[0, 3\), got -1\. Count classes from 0"),
    ],
)
def test_arrays_that_are_no_images_with_classes_are_refused(dtype, first, message):
    images, labels = np.ones((3, 2, 2, 1), dtype), np.arange(first, first + 3)
    with pytest.raises(DataError, match=message):
        ArraySource("own", "train", ["train"], images, labels, ["x", "y", "z"])


def test_a_set_of_ones_own_is_found_by_name():
    def load(split, **_):
        images = np.zeros((2, 6, 6, 3), np.uint8)
        return ArraySource("own", split, ["a", "test"], images, [0, 1], ["x", "y"])

    statistics = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    with SETS.temporary():
        register_source(DataSet("own", load, ("a", "test"), (6, 6, 3), 2, statistics))
        assert load_source("own", "eval", image_size=6).split == "test"
        assert channel_statistics(load_source("own", "a")) == statistics
        with pytest.raises(DataError, match="image_size 6 for own, got 7"):
            load_source("own", "a", image_size=7)
        with pytest.raises(DataError, match="of a TFDS set, got 'owm'. Did you mean own"):
            load_source("owm", "a")
        with pytest.raises(ValueError, match="registered already"):
            register_source(DataSet("own", load_source))
    assert "own" not in SETS


def test_a_set_that_is_not_here_is_imitated_with_its_own_statistics():
    options = dict(data_dir="/nowhere", eval_crop_ratio=0.9)
    for name, size, expected in (
        ("fashion_mnist", None, ((28, 28, 1), 10, False, 1.0)),
        ("imagenet2012", 32, ((32, 32, 3), 1000, True, 0.9)),
        ("cifar10", None, ((32, 32, 3), 10, False, 1.0)),
    ):
        source = load_or_imitate(name, "train", image_size=size, **options)
        facts = (source.image_shape, source.num_classes)
        assert (*facts, source.crops_on_host, source.eval_crop_ratio) == expected
        if name == "fashion_mnist":
            assert channel_statistics(source) == ((0.2860,), (0.3530,))
    with pytest.raises(DataError, match="which is no folder"):
        load_or_imitate("folder", "train", image_size=8, **options)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A small prepared set: its folder."""
    prepare = pytest.importorskip("adder_flax.data.prepare").prepare
    root = tmp_path_factory.mktemp("images")
    for name in ("ant", "bird"):
        write_images(root / "train" / name, 3)
    return prepare("folder", str(tmp_path_factory.mktemp("sets")), str(root), "insects")


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


INFO, FEATURES, LABELS = "dataset_info.json", "features.json", "label.labels.txt"
RECORDS = "insects-train.array_record-00000-of-00001"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (INFO, lambda f: f.write_text('{"name": "ins'), "as it was prepared in .*ParseError"),
        (FEATURES, lambda f: f.unlink(), "no prepared version there"),
        (INFO, lambda f: edit(f, '"6"', '"5"'), "6 records in .* where dataset_info.json says 5"),
        (LABELS, lambda f: f.write_text("ant\nant\n"), "1 names .* declares 2"),
        (RECORDS, lambda f: f.write_bytes(f.read_bytes()[:-100]), "whole, as it was prepared"),
    ],
)
def test_damage_of_a_prepared_set_is_one_message(prepared, tmp_path, file, damage, message):
    folder = tmp_path / "insects" / "1.0.0"
    shutil.copytree(prepared, folder)
    assert len(load_source("insects", "train", data_dir=str(tmp_path), image_size=8)) == 6
    damage(folder / file)
    with pytest.raises(DataError, match=message):
        load_source("insects", "train", data_dir=str(tmp_path), image_size=8)


def test_names_of_classes_are_fit_to_show(tmp_path):
    for name in (b"caf\xe9", b"a\nb", b"$x$", b" "):
        write_images(tmp_path / "train" / os.fsdecode(name), 1)
    source = load_source("folder", "train", data_dir=str(tmp_path), image_size=8)
    assert source.label_names == (r"\x20", "$x$", r"a\nb", r"caf\udce9")
    assert source.read(np.arange(4))[0]["label"].tolist() == [0, 1, 2, 3]


def test_the_first_readable_records(image_folder, load_folder):
    digits = load_source("digits", "train")
    assert (digits.first(5)["image"] == digits.images[:5]).all()
    whole = load_folder().read(np.arange(8))[0]["image"]
    for name in ("0.png", "1.jpeg"):
        (image_folder / "train" / "bird" / name).write_bytes(b"no image")
    source = load_folder(on_unreadable="skip")
    images, labels = source.first(5).values()
    readable = whole[[0, 1, 2, 5, 6, 7]]  # ants come first
    assert all(any((image == other).all() for other in readable) for image in images)
    assert {0, 1} == set(labels.tolist())
    assert source.first(8)["label"].tolist() == [0, 0, 0, 1, 1, 1]
    for path in image_folder.glob("train/*/*.*g"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="a readable record in folder/train, got none"):
        load_folder(on_unreadable="skip").first(4)


def test_the_order_of_classes_is_that_of_their_labels_alone():
    """Two may be one number; the order of a set of strings differs from process to process."""
    for labels in permutations(["1", "01", "2", "001"]):
        assert classes_of(labels) == ["001", "01", "1", "2"]
