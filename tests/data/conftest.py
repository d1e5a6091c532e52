"""Small data sets in the official formats, made by the tests."""

from __future__ import annotations

import hashlib
import os
import pathlib

import pytest

from tests.data.files import encode, smooth_image


@pytest.fixture(scope="session")
def cifar10_dir() -> str:
    """The data_dir of a prepared CIFAR-10, with which a few more tests run."""
    ours = pathlib.Path(__file__).parents[3] / "shared" / "data" / "tfds"
    place = pathlib.Path(os.environ.get("ADDER_FLAX_TEST_TFDS", ours))
    if not (place / "cifar10").is_dir():
        pytest.skip("no prepared CIFAR-10: ADDER_FLAX_TEST_TFDS names a TFDS data_dir with one")
    return str(place)


@pytest.fixture
def published(monkeypatch):
    """Lets files made by a test pass as the published ones: f({url: path})."""
    checksums = pytest.importorskip("tensorflow_datasets.core.download.checksums")

    def publish(files: dict[str, pathlib.Path]) -> None:
        infos = {
            url: checksums.UrlInfo(
                size=path.stat().st_size,
                checksum=hashlib.sha256(path.read_bytes()).hexdigest(),
                filename=path.name,
            )
            for url, path in files.items()
        }
        monkeypatch.setattr(checksums, "get_all_url_infos", lambda: dict(infos))

    return publish


@pytest.fixture
def image_folder(tmp_path) -> pathlib.Path:
    """train/ with 5 + 3 images of classes "bird" and "ant", val/ with 2 + 1, of several sizes and
    formats."""
    for split, counts in {"train": {"bird": 5, "ant": 3}, "val": {"bird": 2, "ant": 1}}.items():
        for name, count in counts.items():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = smooth_image(30 + 7 * number, 50 - 4 * number, seed=number)
                suffix = ("png", "jpeg")[number % 2]
                (folder / f"{number}.{suffix}").write_bytes(encode(image, suffix))
    (tmp_path / "train" / "bird" / "notes.txt").write_text("not an image")
    return tmp_path
