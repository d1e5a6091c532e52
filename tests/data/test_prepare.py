"""The preparation command: small archives in the official formats, read back through TFDS."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util

import numpy as np
import pytest
import tensorflow_datasets as tfds

from adder_flax.data import DataError, load_source
from adder_flax.data.prepare import FashionMNIST, main, prepare
from tests.data.files import write_idx, write_tar


def read_back(name, data_dir, split):
    """All records, through TFDS's own reader and decoder."""
    return tfds.builder(name, data_dir=str(data_dir)).as_data_source(split)


def as_set(images, labels):
    return sorted(
        (image.tobytes(), tuple(np.atleast_1d(label).tolist()))
        for image, label in zip(images, labels, strict=True)
    )


@pytest.fixture
def cifar_files(tmp_path, published):
    """Builds a CIFAR archive with `per_file` random images in each file; returns the true pixels
    and labels."""

    def build(name, files, label_files, label_bounds, per_file=7):
        rng = np.random.default_rng(0)
        members = {f: "\n".join(names).encode() + b"\n" for f, names in label_files.items()}
        truth = {}
        for file in files:
            images = rng.integers(0, 256, (per_file, 32, 32, 3), np.uint8)
            labels = np.stack(
                [rng.integers(0, bound, per_file, np.uint8) for bound in label_bounds], 1
            )
            planes = images.transpose(0, 3, 1, 2).reshape(per_file, -1)
            members[file] = np.concatenate([labels, planes], 1).tobytes()
            truth[file.split("/")[-1]] = images, labels
        source = tmp_path / "downloads"
        source.mkdir()
        write_tar(source / f"{name}.tar.gz", members)
        published({f"https://www.cs.toronto.edu/~kriz/{name}.tar.gz": source / f"{name}.tar.gz"})
        return source, truth

    return build


def test_cifar10_from_binary_files(cifar_files, tmp_path):
    prefix = "cifar-10-batches-bin/"
    names = [f"class{label}" for label in range(10)]
    train_files = [f"{prefix}data_batch_{n}.bin" for n in range(1, 6)]
    source, truth = cifar_files(
        "cifar-10-binary",
        [*train_files, prefix + "test_batch.bin"],
        {prefix + "batches.meta.txt": names},
        [10],
    )
    path = prepare("cifar10", str(tmp_path / "sets"), str(source))
    assert path == tmp_path / "sets" / "cifar10" / "3.0.2"
    train = read_back("cifar10", tmp_path / "sets", "train")
    images = np.concatenate([truth[f"data_batch_{n}.bin"][0] for n in range(1, 6)])
    labels = np.concatenate([truth[f"data_batch_{n}.bin"][1] for n in range(1, 6)])
    assert as_set([r["image"] for r in train], [r["label"] for r in train]) == as_set(
        images, labels
    )
    assert {r["id"] for r in train} == {f"train_{n:05d}".encode() for n in range(35)}
    assert len(read_back("cifar10", tmp_path / "sets", "test")) == 7
    ours = load_source("cifar10", "eval", data_dir=str(tmp_path / "sets"))
    assert (ours.split, ours.label_names, ours.image_shape) == ("test", tuple(names), (32, 32, 3))
    got = [ours[i] for i in range(len(ours))]
    assert as_set([r["image"] for r in got], [r["label"] for r in got]) == as_set(
        *truth["test_batch.bin"]
    )


def test_cifar100_keeps_both_labels(cifar_files, tmp_path):
    prefix = "cifar-100-binary/"
    coarse, fine = [f"coarse{n}" for n in range(20)], [f"fine{n}" for n in range(100)]
    source, truth = cifar_files(
        "cifar-100-binary",
        [prefix + "train.bin", prefix + "test.bin"],
        {prefix + "coarse_label_names.txt": coarse, prefix + "fine_label_names.txt": fine},
        [20, 100],
    )
    prepare("cifar100", str(tmp_path / "sets"), str(source))
    train = read_back("cifar100", tmp_path / "sets", "train")
    labels = [(r["coarse_label"], r["label"]) for r in train]
    assert as_set([r["image"] for r in train], labels) == as_set(*truth["train.bin"])
    assert load_source("cifar100", "train", data_dir=str(tmp_path / "sets")).label_names == tuple(
        fine
    )


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("mnist", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        ("fashion_mnist", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
    ],
)
def test_mnist_from_idx_files(name, url, tmp_path, published):
    rng = np.random.default_rng(1)
    source, urls, truth = tmp_path / "downloads", {}, {}
    source.mkdir()
    for split, count in {"train": 6, "t10k": 3}.items():
        images, labels = (
            rng.integers(0, 256, (count, 28, 28), np.uint8),
            rng.integers(0, 10, count, np.uint8),
        )
        truth[split] = images, labels
        for array, kind in ((images, "images-idx3"), (labels, "labels-idx1")):
            file = source / f"{split}-{kind}-ubyte.gz"
            write_idx(file, array)
            urls[url + file.name] = file
    published(urls)
    prepare(name, str(tmp_path / "sets"), str(source))
    for split, published_split in {"train": "train", "test": "t10k"}.items():
        records = read_back(name, tmp_path / "sets", split)
        assert as_set([r["image"] for r in records], [r["label"] for r in records]) == as_set(
            *truth[published_split]
        )
    ours = load_source(name, "train", data_dir=str(tmp_path / "sets"))
    assert ours.image_shape == (28, 28, 1)
    assert as_set(*ours.read(np.arange(6))[0].values()) == as_set(*truth["train"])


def test_fashion_mnist_that_was_compressed_again_is_taken_by_its_content(tmp_path, monkeypatch):
    """As in Debian's package; one pixel that differs is refused."""
    rng = np.random.default_rng(1)
    source, digests = tmp_path / "downloads", {}
    source.mkdir()
    for split, count in {"train": 6, "t10k": 3}.items():
        images, labels = (
            rng.integers(0, 256, (count, 28, 28), np.uint8),
            rng.integers(0, 10, count, np.uint8),
        )
        for array, kind in ((images, "images-idx3"), (labels, "labels-idx1")):
            file = source / f"{split}-{kind}-ubyte.gz"
            write_idx(file, array)
            digests[file.name] = hashlib.sha256(gzip.decompress(file.read_bytes())).hexdigest()
    monkeypatch.setattr(FashionMNIST, "CONTENT_SHA256", digests)
    prepare("fashion_mnist", str(tmp_path / "sets"), str(source))
    assert len(read_back("fashion_mnist", tmp_path / "sets", "train")) == 6
    file = source / "t10k-images-idx3-ubyte.gz"
    write_idx(file, np.zeros((3, 28, 28), np.uint8))
    with pytest.raises(DataError, match="published source files of fashion_mnist"):
        prepare("fashion_mnist", str(tmp_path / "others"), str(source))


def test_folder_is_copied_without_encoding_again(image_folder, tmp_path):
    path = prepare("folder", str(tmp_path / "sets"), str(image_folder), "my_images")
    assert path.parent.name == "my_images"
    direct = load_source("folder", "train", data_dir=str(image_folder), image_size=16)
    fast = load_source("my_images", "train", data_dir=str(tmp_path / "sets"), image_size=16)
    assert (fast.label_names, fast.splits) == (("ant", "bird"), ("train", "val"))
    assert fast.crops_on_host
    assert as_set(*fast.read(np.arange(8))[0].values()) == as_set(
        *direct.read(np.arange(8))[0].values()
    )
    assert (
        load_source("my_images", "eval", data_dir=str(tmp_path / "sets"), image_size=16).split
        == "val"
    )
    with pytest.raises(
        DataError, match="image_size for my_images, whose images are not all square and of one size"
    ):
        load_source("my_images", "train", data_dir=str(tmp_path / "sets"))


def test_a_set_that_is_there_is_left_alone(image_folder, tmp_path):
    path = prepare("folder", str(tmp_path / "sets"), str(image_folder), "my_images")
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert prepare("folder", str(tmp_path / "sets"), str(image_folder), "my_images") == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before


def test_another_format_has_no_random_access(image_folder, tmp_path):
    path = prepare("folder", str(tmp_path / "sets"), str(image_folder), "my_images")
    info = path / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    for file in path.glob("*array_record*"):
        file.rename(file.with_name(file.name.replace("array_record", "tfrecord")))
    with pytest.raises(
        DataError, match="my_images as array_record .*got tfrecord, which has no random access"
    ):
        load_source("my_images", "train", data_dir=str(tmp_path / "sets"), image_size=16)


class Numbers(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A set without images."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"value": tfds.features.Scalar(np.int64)})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"value": 1}


def test_a_set_without_images_is_refused(tmp_path):
    Numbers(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    with pytest.raises(
        DataError, match="one uint8 image, grey or RGB, and one class label each, got numbers with"
    ):
        load_source("numbers", "train", data_dir=str(tmp_path))


def test_a_changed_source_file_is_refused(cifar_files, tmp_path):
    prefix = "cifar-10-batches-bin/"
    source, _ = cifar_files(
        "cifar-10-binary",
        [prefix + "test_batch.bin"],
        {prefix + "batches.meta.txt": list("0123456789")},
        [10],
    )
    with open(source / "cifar-10-binary.tar.gz", "ab") as file:
        file.write(b"\0")
    with pytest.raises(
        DataError,
        match=r"published source files of cifar10(.|\n)*checksum(.|\n)*SHA-256 c4a38c50a1bc",
    ):
        prepare("cifar10", str(tmp_path / "sets"), str(source))


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed"
)
def test_a_set_that_needs_tensorflow_says_so(tmp_path, published, monkeypatch):
    """Preparing KMNIST is left to TFDS, which reads its files through TensorFlow."""
    monkeypatch.setattr(tfds.image_classification.KMNIST, "url_infos", None)
    source = tmp_path / "downloads"
    source.mkdir()
    urls = {}
    for split in ("train", "t10k"):
        for kind, array in (
            ("images-idx3", np.zeros((1, 28, 28), np.uint8)),
            ("labels-idx1", np.zeros(1, np.uint8)),
        ):
            file = source / f"{split}-{kind}-ubyte.gz"
            write_idx(file, array)
            urls["http://codh.rois.ac.jp/kmnist/dataset/kmnist/" + file.name] = file
    published(urls)
    with pytest.raises(DataError, match="needs to prepare kmnist.*pip install tensorflow-cpu"):
        prepare("kmnist", str(tmp_path / "sets"), str(source))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_set"], "name of a TFDS set"),
        (["folder"], "--source=<image folder>"),
        (["cifar10", "--source=/no/such/folder"], "which is none"),
        (["folder", "--source=.", "--set_name=cifar10"], "that no other set has"),
    ],
)
def test_errors_of_the_command(arguments, message, image_folder, monkeypatch):
    monkeypatch.chdir(image_folder)
    with pytest.raises(SystemExit, match=message):
        main(arguments)
