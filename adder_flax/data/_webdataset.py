"""Tar files of WebDataset: root/<split>*.tar, in which files of one sample have one name.

A sample is an image and its class, ``x.jpg`` and ``x.cls`` (or ``x.json`` with a ``label``); see
https://github.com/webdataset/webdataset. That library streams samples; here they are read by
number, so that a batch is a function of the step: each file is looked through once at the start,
and an image is then one read at its place.
"""

from __future__ import annotations

import json
import pathlib
import re
import tarfile
from collections.abc import Sequence
from typing import NamedTuple

from adder_flax.data import _images
from adder_flax.data._folder import classes_of, numbered, reference_split, register_collection
from adder_flax.data._source import DataError
from adder_flax.text import printable

# As WebDataset splits them: the first dot after the folders begins the ending.
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")


class _Place(NamedTuple):
    path: pathlib.Path
    name: str
    start: int
    size: int


class TarShards:
    """The tar files of a folder; ``train-07.tar`` and ``train/07.tar`` are of the split train."""

    def __init__(self, root: str | pathlib.Path):
        self._shards: dict[str, list[pathlib.Path]] = {}
        for path in sorted(pathlib.Path(root).rglob("*.tar")):
            folder, *inner = path.relative_to(root).parts
            split = folder if inner else re.split(r"[-_.]", folder)[0]
            self._shards.setdefault(split, []).append(path)
        self.splits = tuple(self._shards)
        if not self.splits:
            raise DataError(
                f"Expected {printable(root)}/<split>-<number>.tar, got no such file. Name the "
                "files of training train-0000.tar and so on."
            )
        self._reference = reference_split(self.splits)
        self._samples: dict[str, list[tuple[_Place, str]]] = {}
        self.label_names = classes_of(label for _, label in self._samples_of(self._reference))

    def records(self, split: str) -> TarRecords:
        """The samples of a split, in their order in the files."""
        samples = self._samples_of(split)
        labels = numbered((label for _, label in samples), self.label_names, split, self._reference)
        return TarRecords([place for place, _ in samples], labels)

    def _samples_of(self, split: str) -> list[tuple[_Place, str]]:
        if split not in self._samples:
            self._samples[split] = [
                sample for path in self._shards[split] for sample in _samples_in(path)
            ]
        return self._samples[split]


class TarRecords:
    """Images in tar files, and their labels."""

    def __init__(self, places: Sequence[_Place], labels: Sequence[int]):
        self._places, self._labels = places, labels

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        place = self._places[index]
        with place.path.open("rb") as file:
            file.seek(place.start)
            return file.read(place.size), self._labels[index]

    def file_names(self) -> list[str]:
        """The images' names in their tar files."""
        return [place.name for place in self._places]

    def describe(self, index: int) -> str:
        """The tar file and the image's name in it."""
        place = self._places[index]
        return printable(f"{place.path}: {place.name}", limit=1000)


def _samples_in(path: pathlib.Path) -> list[tuple[_Place, str]]:
    images: dict[str, _Place] = {}
    labels: dict[str, str] = {}
    suffixes = _images.image_suffixes()
    try:
        with tarfile.open(path, "r:") as file:
            for member in file:
                found = _NAME.fullmatch(member.name)
                if found is None or not member.isfile():
                    continue
                key, ending = found[1], found[2].lower()
                if f".{ending}" in suffixes:
                    place = _Place(path, member.name, member.offset_data, member.size)
                    images.setdefault(key, place)
                elif ending in ("cls", "json"):
                    text = file.extractfile(member).read().decode().strip()  # type: ignore
                    value = text if ending == "cls" else json.loads(text).get("label")
                    if value is not None:
                        labels.setdefault(key, str(value))
    except (tarfile.TarError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        raise DataError(
            f"Expected samples of WebDataset in {printable(path)}, got: {printable(error)}. "
            "Replace the file."
        ) from error
    if lacking := sorted(images.keys() ^ labels.keys()):
        raise DataError(
            f"Expected an image and a class (.cls, or label in .json) of each sample in "
            f"{printable(path)}, got one of both for {lacking[:3]} ({len(lacking)} in all). Add "
            "the other, or remove them."
        )
    return [(place, labels[key]) for key, place in images.items()]


register_collection("webdataset", TarShards, "folder of <split>-<number>.tar")
