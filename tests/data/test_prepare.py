"""The preparation command: small archives in the official formats, read back through TFDS."""

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
    rows = zip(images, labels, strict=True)
    return sorted((image.tobytes(), np.ravel(label).tolist()) for image, label in rows)


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


CIFAR = {
    "cifar10": (
        "cifar-10-binary",
        [f"cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6)],
        "cifar-10-batches-bin/test_batch.bin",
        {"cifar-10-batches-bin/batches.meta.txt": [f"class{label}" for label in range(10)]},
    ),
    "cifar100": (
        "cifar-100-binary",
        ["cifar-100-binary/train.bin"],
        "cifar-100-binary/test.bin",
        {
            "cifar-100-binary/coarse_label_names.txt": [f"coarse{n}" for n in range(20)],
            "cifar-100-binary/fine_label_names.txt": [f"fine{n}" for n in range(100)],
        },
    ),
}


def write_cifar(name, folder, published):
    """An archive of 7 random images in each file; returns the true pixels and labels by split."""
    archive, train_files, test_file, labels_of = CIFAR[name]
    rng, truth = np.random.default_rng(0), {"train": [], "test": []}
    members = {file: "\n".join(names).encode() + b"\n" for file, names in labels_of.items()}
    for file in (*train_files, test_file):
        images = rng.integers(0, 256, (7, 32, 32, 3), np.uint8)
        labels = [rng.integers(0, len(names), 7, np.uint8) for names in labels_of.values()]
        planes = images.transpose(0, 3, 1, 2).reshape(7, -1)
        members[file] = np.concatenate([np.stack(labels, 1), planes], 1).tobytes()
        truth["test" if file == test_file else "train"].append((images, np.stack(labels, 1)))
    folder.mkdir()
    path = folder / f"{archive}.tar.gz"
    write_tar(path, members)
    published({f"https://www.cs.toronto.edu/~kriz/{path.name}": path})
    return {s: [*map(np.concatenate, zip(*files, strict=True))] for s, files in truth.items()}


@pytest.mark.parametrize("name", CIFAR)
def test_cifar_from_binary_files(name, tmp_path, published):
    truth = write_cifar(name, tmp_path / "downloads", published)
    path = prepare(name, str(tmp_path / "sets"), str(tmp_path / "downloads"))
    assert path == tmp_path / "sets" / name / "3.0.2"
    for split, (images, labels) in truth.items():
        records = read_back(name, tmp_path / "sets", split)
        kinds = ("label",) if name == "cifar10" else ("coarse_label", "label")
        found = [[record[kind] for kind in kinds] for record in records]
        assert as_set([r["image"] for r in records], found) == as_set(images, labels)
        count = len(images)
        assert {r["id"] for r in records} == {f"{split}_{n:05d}".encode() for n in range(count)}
    ours = load_source(name, "eval", data_dir=str(tmp_path / "sets"))
    *_, names = CIFAR[name][-1].values()
    assert (ours.split, ours.label_names, ours.image_shape) == ("test", tuple(names), (32, 32, 3))
    images, labels = truth["test"]
    assert as_set(*ours.read(np.arange(7))[0].values()) == as_set(images, labels[:, -1])


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
        records = read_back(name, tmp_path / "sets", split)
        found = [[record[part] for record in records] for part in ("image", "label")]
        assert as_set(*found) == as_set(*truth[file])
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
    # A set that is there is left alone.
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


def test_a_changed_source_file_is_refused(tmp_path, published):
    write_cifar("cifar10", tmp_path / "downloads", published)
    with open(tmp_path / "downloads" / "cifar-10-binary.tar.gz", "ab") as file:
        file.write(b"\0")
    said = r"published source files of cifar10(.|\n)*checksum(.|\n)*SHA-256 c4a38c50a1bc"
    with pytest.raises(DataError, match=said):
        prepare("cifar10", str(tmp_path / "sets"), str(tmp_path / "downloads"))


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
