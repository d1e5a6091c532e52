"""Prepares a data set as ArrayRecord, which training reads without TensorFlow.

    python -m adder_flax.data.prepare cifar10  # also cifar100, mnist, fashion_mnist
    python -m adder_flax.data.prepare cifar10 --source=DOWNLOADS  # from files already there
    python -m adder_flax.data.prepare folder --source=IMAGENET --set_name=my_imagenet
    python -m adder_flax.data.prepare imagenette  # any other set: TFDS's own preparation

TFDS itself needs TensorFlow to prepare sets whose source files hold bare pixels. For the four named
above the files are read here instead: the binary and idx editions, no pickles. Everything else is
TFDS's: the builders' names, versions and features, the download, the published SHA-256 of every
file, and the layout on disk, so any TFDS reader opens the result.
"""

# What a class of TFDS takes when it is derived from is nowhere declared.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

import argparse
import gzip
import hashlib
import io
import pathlib
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from adder_flax.data._folder import Collection, image_folder
from adder_flax.data._registry import SETS
from adder_flax.data._source import DataError
from adder_flax.data._tfds import NAME, base_name, reason, sets_folder
from adder_flax.extras import needs
from adder_flax.text import printable

with needs("data"):
    import requests
    import tensorflow_datasets as tfds
    from PIL import Image
    from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

_NOT_DOWNLOADED = (requests.RequestException, tfds.download.DownloadError, NonMatchingChecksumError)


def prepare(
    name: str, data_dir: str | None = None, source: str | None = None, set_name: str | None = None
) -> pathlib.Path:
    """Downloads and prepares a set unless it is already there; returns its folder.

    Arguments are those of the command. Of source files, under their published names, what is
    missing in the folder ``source`` is downloaded.
    """
    if source is not None and not pathlib.Path(source).is_dir():
        raise DataError(f"Expected --source as a folder, got '{printable(source)}', which is none.")
    folder = None if source is None else pathlib.Path(source)
    builder: Any = None
    try:
        if name == "folder":
            builder, folder = _folder_builder(folder, set_name, data_dir), None
        elif name in _BUILDERS:
            builder = _BUILDERS[name](data_dir=data_dir, file_format="array_record")
            builder.source = folder
        else:
            builder = _tfds_builder(name, data_dir)
        config = tfds.download.DownloadConfig(manual_dir=folder)
        builder.download_and_prepare(download_config=config, file_format="array_record")
    except DataError:
        raise
    except _NOT_DOWNLOADED as error:
        raise DataError(
            f"Expected the published source files of {name}, got {type(error).__name__}: {error}\n"
            f"Download them yourself and pass --source=<their folder>:\n{_source_files(builder)}"
        ) from error
    except Exception as error:  # of TFDS and its many libraries
        # TFDS wraps the failed import in errors of its own, such as that of extracting an archive.
        if any(getattr(e, "name", None) == "tensorflow" for e in _chain(error)):
            raise DataError(
                f"Expected TensorFlow, which TFDS needs to prepare {name}, got none. Install it "
                "for this command alone (pip install tensorflow-cpu, best in another "
                "environment); training does not need it."
            ) from error
        raise DataError(
            f"Expected to prepare '{printable(name)}' in {printable(sets_folder(data_dir))}, got "
            f"{reason(error)}. Nothing half is taken for a set; mend this and run the command "
            "again."
        ) from error
    return pathlib.Path(builder.data_dir)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _source_files(builder: tfds.core.DatasetBuilder) -> str:
    # TFDS knows its checksums by the module of its own builder.
    published = (getattr(kind, "url_infos", None) for kind in type(builder).mro())
    infos: Mapping[str, Any] = next(filter(None, published), {})
    return "\n".join(
        f"  {url}\n    as {info.filename}, SHA-256 {info.checksum}" for url, info in infos.items()
    )


class Cifar10(tfds.image_classification.Cifar10, skip_registration=True):
    """TFDS's CIFAR-10, its binary edition read with NumPy.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html.
    """

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        published = self._cifar_info
        archive = dl_manager.download(published.url)
        read = lambda files: _read_archive(archive, [published.prefix + file for file in files])
        texts = read(published.label_files)
        for key, names in zip(published.label_keys, texts, strict=True):
            self.info.features[key].names = names.decode().split()
        files = {"train": published.train_files, "test": published.test_files}
        return {split: self._generate_examples(split, read(files[split])) for split in files}

    def _generate_examples(self, split: str, contents: Iterator[bytes]) -> Iterator:
        keys = self._cifar_info.label_keys
        parsed = (read_cifar(content, len(keys)) for content in contents)
        rows = (row for labels, images in parsed for row in zip(labels, images, strict=True))
        # TFDS orders a split by the hash of the key: the same keys give its order.
        for index, (labels, image) in enumerate(rows):
            own = {"id": f"{split}_{index:05d}", "image": encode_png(image)}
            yield index, own | dict(zip(keys, labels, strict=True))


class Cifar100(Cifar10, tfds.image_classification.Cifar100, skip_registration=True):
    """TFDS's CIFAR-100, its binary edition read with NumPy."""


class MNIST(tfds.image_classification.MNIST, skip_registration=True):
    """TFDS's MNIST, its idx files read with NumPy. Format: http://yann.lecun.com/exdb/mnist."""

    CONTENT_SHA256: Mapping[str, str] = {}
    """Of the source files' content, by the names of the files: one that was compressed again is the
    same file."""

    source: pathlib.Path | None = None
    """Where source files may lie that need no download."""

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        ends = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
        files = lambda front: [self._file(dl_manager, f"{front}-{end}") for end in ends]
        fronts = {"train": "train", "test": "t10k"}
        return {split: self._generate_examples(*files(front)) for split, front in fronts.items()}

    def _file(self, dl_manager: Any, name: str) -> pathlib.Path:
        path, content = self.source and self.source / name, self.CONTENT_SHA256.get(name)
        if path and content and path.is_file():
            with gzip.open(path) as file:
                if hashlib.sha256(file.read()).hexdigest() == content:
                    return path
        return pathlib.Path(dl_manager.download(self.URL + name))

    def _generate_examples(self, images_path: pathlib.Path, labels_path: pathlib.Path) -> Iterator:
        images, labels = read_idx(images_path), read_idx(labels_path)
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield index, {"image": encode_png(image[..., None]), "label": label}


class FashionMNIST(MNIST, tfds.image_classification.FashionMNIST, skip_registration=True):
    """TFDS's Fashion-MNIST, its idx files read with NumPy."""

    # Of Debian's package dataset-fashion-mnist 0.0~git20200523.55506a9-1, whose files are those of
    # github.com/zalandoresearch/fashion-mnist, compressed again: all 70,000 images and labels were
    # compared with those of the set that TFDS prepares.
    CONTENT_SHA256: Mapping[str, str] = {
        "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",  # noqa: E501
        "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",  # noqa: E501
        "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",  # noqa: E501
        "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",  # noqa: E501
    }


_BUILDERS = {builder.name: builder for builder in (Cifar10, Cifar100, MNIST, FashionMNIST)}


def read_cifar(
    data: bytes, num_labels: int
) -> tuple[UInt8[np.ndarray, "n labels"], UInt8[np.ndarray, "n 32 32 3"]]:
    """Reads CIFAR's binary edition: an image's labels, then 1,024 red, green and blue bytes each.

    >>> labels, images = read_cifar(bytes([7]) + bytes(3072), num_labels=1)
    >>> labels.tolist(), images.shape
    ([[7]], (1, 32, 32, 3))
    """
    table = np.frombuffer(data, np.uint8).reshape(-1, num_labels + 3 * 32 * 32)
    return table[:, :num_labels], table[:, num_labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def read_idx(path: pathlib.Path) -> UInt8[np.ndarray, "..."]:
    """Reads a gzipped idx file: two zeros, type 8, number of axes, big-endian sizes, bytes."""
    with gzip.open(path) as file:
        data = file.read()
    shape = np.frombuffer(data, ">u4", count=data[3], offset=4).astype(int)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def _read_archive(archive: Any, members: Sequence[str]) -> Iterator[bytes]:
    """Yields the content of files in a tar archive, which is never unpacked to the disk."""
    with tarfile.open(archive) as tar:
        for member in members:
            yield tar.extractfile(member).read()  # type: ignore


def encode_png(image: UInt8[np.ndarray, "height width channel"]) -> bytes:
    """Lossless; one channel is grey, three are RGB."""
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, "png")
    return buffer.getvalue()


class FolderBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """An image folder as a TFDS set; image files are copied as they are, not encoded again."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, folder: Collection, set_name: str, **options: Any):
        self._folder = folder
        self.name = set_name
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=self._folder.label_names),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"Images of the folder {self._folder.root.name}.",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        records = self._folder.records
        return {split: self._generate_examples(records(split)) for split in self._folder.splits}

    def _generate_examples(self, records: Any) -> Iterator:
        for index, path in enumerate(records.file_names()):
            encoded, label = records[index]
            file = printable(pathlib.Path(path).relative_to(self._folder.root), limit=4096)
            yield index, {"image": encoded, "label": label, "file_name": file}


def _folder_builder(source: pathlib.Path | None, set_name: str | None, data_dir: str | None):
    if source is None:
        raise DataError("Expected --source=<image folder> with 'folder', got none.")
    folder = image_folder(source)
    name = folder.root.resolve().name if set_name is None else set_name
    taken = {*SETS, *tfds.list_builders(with_community_datasets=False)}
    if not NAME.fullmatch(name) or name in taken:
        raise DataError(
            "Expected a set name of letters, digits and _ that no other set has, got "
            f"'{printable(name)}'. Choose one: --set_name=…"
        )
    return FolderBuilder(folder, name, data_dir=data_dir, file_format="array_record")


def _tfds_builder(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder:
    base_name(name)
    try:
        return tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except tfds.core.DatasetNotFoundError as error:
        raise DataError(f"Expected the name of a TFDS set or 'folder', got {name!r}.") from error


def main(arguments: Sequence[str]) -> None:
    """The command line; see the module's docstring."""
    layout = argparse.RawDescriptionHelpFormatter
    prog = "python -m adder_flax.data.prepare"
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=layout)
    parser.add_argument("name", help="TFDS name, or folder")
    for name, words in (
        ("data_dir", "where to put the set (default: TFDS_DATA_DIR, or ~/tensorflow_datasets)"),
        ("source", "folder of downloaded source files; with 'folder': the image folder"),
        ("set_name", "with 'folder': name of the set (default: the folder's name)"),
    ):
        parser.add_argument(f"--{name}", help=words)
    options = vars(parser.parse_args(arguments))
    try:
        path = prepare(**options)
    except DataError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted. Nothing half is taken for a set; run the command again.")
    print(f"Prepared {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
