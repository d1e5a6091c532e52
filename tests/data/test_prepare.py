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


def idx_files(source, sizes, url=""):
    """Writes MNIST's files of random images; returns them by address, and what is in them."""
    rng, urls, truth = np.random.default_rng(1), {}, {}
    source.mkdir()
    for split, count in sizes.items():
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        truth[split] = images, rng.integers(0, 10, count, np.uint8)
        for array, kind in zip(truth[split], ("images-idx3", "labels-idx1"), strict=True):
            file = source / f"{split}-{kind}-ubyte.gz"
            write_idx(file, array)
            urls[url + file.name] = file
    return urls, truth


def same_records(records, truth):
    return as_set([r["image"] for r in records], [r["label"] for r in records]) == as_set(*truth)


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
            draw = lambda bound: rng.integers(0, bound, per_file, np.uint8)
            labels = np.stack([draw(bound) for bound in label_bounds], 1)
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
    files = [truth[f"data_batch_{n}.bin"] for n in range(1, 6)]
    assert same_records(train, map(np.concatenate, zip(*files, strict=True)))
    assert {r["id"] for r in train} == {f"train_{n:05d}".encode() for n in range(35)}
    assert len(read_back("cifar10", tmp_path / "sets", "test")) == 7
    ours = load_source("cifar10", "eval", data_dir=str(tmp_path / "sets"))
    assert (ours.split, ours.label_names, ours.image_shape) == ("test", tuple(names), (32, 32, 3))
    assert same_records([ours[i] for i in range(len(ours))], truth["test_batch.bin"])


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
    ours = load_source("cifar100", "train", data_dir=str(tmp_path / "sets"))
    assert ours.label_names == tuple(fine)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("mnist", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        ("fashion_mnist", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
    ],
)
def test_mnist_from_idx_files(name, url, tmp_path, published):
    source = tmp_path / "downloads"
    urls, truth = idx_files(source, {"train": 6, "t10k": 3}, url)
    published(urls)
    prepare(name, str(tmp_path / "sets"), str(source))
    for split, file in {"train": "train", "test": "t10k"}.items():
        assert same_records(read_back(name, tmp_path / "sets", split), truth[file])
    ours = load_source(name, "train", data_dir=str(tmp_path / "sets"))
    assert ours.image_shape == (28, 28, 1)
    assert as_set(*ours.read(np.arange(6))[0].values()) == as_set(*truth["train"])


def test_fashion_mnist_that_was_compressed_again_is_taken_by_its_content(tmp_path, monkeypatch):
    """As in Debian's package; one pixel that differs is refused."""
    source = tmp_path / "downloads"
    urls, _ = idx_files(source, {"train": 6, "t10k": 3})
    content = {name: gzip.decompress(file.read_bytes()) for name, file in urls.items()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
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
    own = dict(data_dir=str(tmp_path / "sets"))
    fast = load_source("my_images", "train", image_size=16, **own)
    assert (fast.label_names, fast.splits) == (("ant", "bird"), ("train", "val"))
    assert fast.crops_on_host
    content = [as_set(*s.read(np.arange(8))[0].values()) for s in (fast, direct)]
    assert content[0] == content[1]
    assert load_source("my_images", "eval", image_size=16, **own).split == "val"
    said = "for my_images, whose images are not all square and of one"
    with pytest.raises(DataError, match=said):
        load_source("my_images", "train", **own)


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
    with pytest.raises(DataError, match="as array_record .*got tfrecord, which has no random acc"):
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
    with pytest.raises(DataError, match="grey or RGB, and one class label each, got numbers with"):
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
    said = r"published source files of cifar10(.|\n)*checksum(.|\n)*SHA-256 c4a38c50a1bc"
    with pytest.raises(DataError, match=said):
        prepare("cifar10", str(tmp_path / "sets"), str(source))


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed"
)
def test_a_set_that_needs_tensorflow_says_so(tmp_path, published, monkeypatch):
    """Preparing KMNIST is left to TFDS, which reads its files through TensorFlow."""
    monkeypatch.setattr(tfds.image_classification.KMNIST, "url_infos", None)
    source, place = tmp_path / "downloads", "http://codh.rois.ac.jp/kmnist/dataset/kmnist/"
    published(idx_files(source, {"train": 1, "t10k": 1}, place)[0])
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
