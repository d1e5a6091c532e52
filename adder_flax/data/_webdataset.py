"""Tar files of WebDataset: root/<split>-<number>.tar, in which files of one sample have one name.

A sample is an image and its class, ``x.jpg`` and ``x.cls`` (or ``x.json`` with a ``label``); see
https://github.com/webdataset/webdataset. That library streams samples; here they are read by
number, so that a batch is a function of the step: each file is looked through once at the start,
and an image is then one read at its place.
"""

import functools
import json
import pathlib
import re
import tarfile

from adder_flax.data import _images
from adder_flax.data._folder import Collection, FileRecords, Place, register_collection
from adder_flax.data._registry import EVAL_SPLITS
from adder_flax.data._source import DataError
from adder_flax.text import printable

# As WebDataset splits them: the first dot after the folders begins the ending.
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")


def tar_shards(root: pathlib.Path) -> Collection:
    """Opens the tar files of a folder.

    ``train-07.tar``, ``imagenet1k-train-07.tar`` and ``train/07.tar`` are of ``train``.
    """
    shards: dict[str, list[pathlib.Path]] = {}
    for path in sorted(root.rglob("*.tar")):
        folder, *inner = path.relative_to(root).parts
        shards.setdefault(folder if inner else _split_of(folder), []).append(path)
    if not shards:
        raise DataError(
            f"Expected {printable(root)}/<split>-<number>.tar, got no such file. Name the "
            "files of training train-0000.tar and so on."
        )

    @functools.cache
    def read(split: str) -> tuple[functools.partial[FileRecords], list[str]]:
        samples = [sample for path in shards[split] for sample in _samples_in(path)]
        places = [place for place, _ in samples]
        return functools.partial(FileRecords, places), [label for _, label in samples]

    return Collection(root, shards, read)


def _split_of(name: str) -> str:
    parts = re.split(r"[-_.]", name)
    return next((part for part in parts if part in ("train", *EVAL_SPLITS)), parts[0])


def _samples_in(path: pathlib.Path) -> list[tuple[Place, str]]:
    images: dict[str, Place] = {}
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
                    place = Place(str(path), member.offset_data, member.size, member.name)
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


register_collection("webdataset", tar_shards, "folder of <split>-<number>.tar")
