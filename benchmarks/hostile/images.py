"""Image folders and prepared sets: files of every kind, names of every kind, and files that are
none.

Where an image can be read, its pixels are compared with a conversion in NumPy.
"""

import json
import os
import shutil
import socket
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from adder_flax import data
from benchmarks.hostile._folders import (
    SIDE,
    judge_folder,
    make_folder,
    png,
    quadrants,
    read_all,
    save,
)
from benchmarks.hostile.case import Case, Fault, Group, Observed, judge_process

Rng = np.random.Generator
_NOTHING = "nothing was written"


# --- What an image file means, in NumPy
# ------------------------------------------------------------------------------


def _grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values.reshape(SIDE, SIDE, 1), 3, axis=-1)


def _png_by_hand(pixels: np.ndarray, bits: int, colour_type: int) -> bytes:
    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", SIDE, SIDE, bits, colour_type, 0, 0, 0)
    rows = b"".join(
        b"\0" + row.astype(">u2" if bits == 16 else np.uint8).tobytes() for row in pixels
    )
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _deep_grey(rng: Rng) -> tuple[bytes, np.ndarray]:
    values = quadrants(rng, 2**16, 1)
    image = Image.fromarray(values[..., 0].astype(np.uint16))
    return save(image, ["png", "tiff", "ppm"][rng.integers(3)]), _grey(values / 257)


def _deep_colour(rng: Rng) -> tuple[bytes, np.ndarray]:
    values = quadrants(rng, 2**16, 3)
    return _png_by_hand(values, 16, 2), values / 257


def _deep_alpha(rng: Rng) -> tuple[bytes, np.ndarray]:
    values = quadrants(rng, 2**16, 2)
    return _png_by_hand(values, 16, 4), _grey(values[..., 0] / 257)


def _palette(rng: Rng) -> tuple[bytes, np.ndarray]:
    indices, colours = quadrants(rng, 200, 1)[..., 0], rng.integers(0, 256, (256, 3))
    image = Image.fromarray(indices.astype(np.uint8), "P")
    image.putpalette(colours.astype(np.uint8).tobytes())
    transparency = [None, 7, bytes(rng.integers(0, 256, 256).tolist())][rng.integers(3)]
    return save(image, "png", transparency=transparency), colours[indices]


def _alpha(rng: Rng) -> tuple[bytes, np.ndarray]:
    if rng.integers(2):
        values = quadrants(rng, 256, 4)
        return save(
            Image.fromarray(values.astype(np.uint8), "RGBA"), ["png", "tiff"][rng.integers(2)]
        ), values[..., :3]
    values = quadrants(rng, 256, 2)
    return save(Image.fromarray(values.astype(np.uint8), "LA"), "png"), _grey(values[..., 0])


def _cmyk(rng: Rng) -> tuple[bytes, np.ndarray]:
    values = quadrants(rng, 256, 4)
    ink = values / 255
    return save(Image.fromarray(values.astype(np.uint8), "CMYK"), "tiff"), 255 * (
        1 - ink[..., :3]
    ) * (1 - ink[..., 3:])


def _one_bit(rng: Rng) -> tuple[bytes, np.ndarray]:
    values = quadrants(rng, 2, 1)
    image_format = ["png", "tiff", "bmp", "ppm"][rng.integers(4)]
    return save(Image.fromarray(values[..., 0].astype(bool)), image_format), _grey(255 * values)


def _upright(rng: Rng) -> tuple[bytes, np.ndarray]:
    stored, exif = quadrants(rng), Image.Exif()
    exif[0x0112] = orientation = int(rng.integers(1, 9))
    turned = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: stored[::-1].swapaxes(0, 1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: stored[:, ::-1].swapaxes(0, 1),
    }[orientation]
    image_format = ["png", "tiff", "webp"][rng.integers(3)]
    options = {"lossless": True} if image_format == "webp" else {}
    return save(
        Image.fromarray(stored.astype(np.uint8)), image_format, exif=exif, **options
    ), turned


def _animated(rng: Rng) -> tuple[bytes, np.ndarray]:
    first, second = (Image.fromarray(quadrants(rng).astype(np.uint8)) for _ in range(2))
    kind = ["png", "webp", "tiff"][rng.integers(3)]
    options = {"lossless": True} if kind == "webp" else {}
    return save(first, kind, save_all=True, append_images=[second], **options), np.asarray(first)


def _other_name(rng: Rng) -> tuple[bytes, np.ndarray]:
    values = quadrants(rng, 256, 1)
    return save(
        Image.fromarray(values[..., 0].astype(np.uint8)), ["gif", "bmp", "ppm"][rng.integers(3)]
    ), _grey(values)


def _kinds(make: Callable[[Rng], tuple[bytes, np.ndarray]]) -> Callable[[Rng], Observed]:
    """A case: files of one kind in every place, whose pixels must be those of the formula, up to
    rounding."""

    def run(rng: Rng) -> Observed:
        expected = {"train": [], "eval": []}

        def spoil(root: Path):
            make_folder(root, rng)
            for split, folder in (("train", "train"), ("eval", "val")):
                for path in sorted(root.glob(f"{folder}/*/*.png")):
                    content, meaning = make(rng)
                    path.write_bytes(content)
                    expected[split].append(meaning)
            return is_right

        def is_right(got) -> bool:
            # The middle of each quadrant: SIDE pixels become 32, of which the central 28 are kept.
            at, where = (
                np.ix_([7, 20], [7, 20]),
                np.ix_([SIDE // 4, 3 * SIDE // 4], [SIDE // 4, 3 * SIDE // 4]),
            )
            return all(
                len(got[split][0]) == len(meanings)
                and all(
                    np.abs(image[at] - m[where]).max() <= 1
                    for image, m in zip(got[split][0], meanings, strict=True)
                )
                for split, meanings in expected.items()
            )

        return judge_folder(spoil, lambda root: read_all("folder", root))

    return run


# --- Files that are no image, and images that cannot be taken
# -------------------------------------------------------


def _special(path: Path, rng: Rng) -> None:
    path.unlink()
    kind = rng.integers(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        with socket.socket(socket.AF_UNIX) as server:
            place = Path.cwd()
            os.chdir(path.parent)  # the names of sockets are short
            server.bind(path.name)
            os.chdir(place)
    elif kind == 2:
        path.symlink_to(["/dev/zero", "/dev/tty", "/dev/random"][rng.integers(3)])
    elif kind == 3:
        path.symlink_to(path)
    elif kind == 4:
        path.symlink_to(path.with_name("gone.png"))
    else:
        other = path.with_name("other.png")
        path.symlink_to(other)
        other.symlink_to(path)


def _too_large(path: Path, rng: Rng) -> None:
    kind = rng.integers(3)
    if kind == 0:
        path.write_bytes(save(Image.new("1", (2**13 + int(rng.integers(1, 2000)), 2**13)), "png"))
    elif kind == 1:  # a header that claims much
        header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
        content = b"IHDR" + header
        path.write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + struct.pack(">I", 13)
            + content
            + struct.pack(">I", zlib.crc32(content))
        )
    else:  # a file of holes
        with path.open("wb") as file:
            file.truncate(2**40)


def _no_image(path: Path, rng: Rng) -> None:
    whole = path.read_bytes()
    jpeg = save(Image.fromarray(quadrants(rng).astype(np.uint8)), "jpeg")
    contents = [
        b"",
        b"these are words\n",
        whole[: int(rng.integers(1, len(whole) - 1))],
        jpeg[: int(rng.integers(2, len(jpeg) // 2))],
        rng.bytes(500),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n/Times-Roman findfont\n",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    ]
    path.write_bytes(contents[rng.integers(len(contents))])


def _unknown_range(path: Path, rng: Rng) -> None:
    kind = rng.integers(3)
    values = quadrants(rng, 70_000, 1)[..., 0]
    image = [
        values.astype(np.int32),
        rng.random((SIDE, SIDE), np.float32),
        (values - 40_000).astype(np.int32),
    ][kind]
    path.write_bytes(save(Image.fromarray(image), "tiff"))


def _flipped_png(rng: Rng) -> Observed:
    """One wrong bit in a PNG: the true pixels, or a message."""

    def spoil(root: Path):
        make_folder(root, rng)
        path = sorted(root.glob("train/*/*.png"))[rng.integers(8)]
        # Of smooth images Pillow alone decodes one damaged file in fifteen to other pixels.
        path.write_bytes(png(np.linspace(0, 255, SIDE * SIDE * 3).reshape(SIDE, SIDE, 3)))
        true = read_all("folder", root)["train"][0]
        content = bytearray(path.read_bytes())
        bit = int(rng.integers(8 * len(content)))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(content))
        return lambda got: (got["train"][0] == true).all()

    return judge_folder(spoil, lambda root: read_all("folder", root))


def _refused(spoil_file: Callable[[Path, Rng], None]) -> Callable[[Rng], Observed]:
    """A case: one such file in either split, and every image of one split in a third of the cases,
    under skip."""

    def run(rng: Rng) -> Observed:
        everywhere = rng.integers(3) == 0

        def spoil(root: Path):
            make_folder(root, rng)
            paths = sorted(root.glob("train/*/*.png"))
            for path in paths if everywhere else [paths[rng.integers(len(paths))]]:
                spoil_file(path, rng)

        options = {"on_unreadable": "skip"} if everywhere else {}
        return judge_folder(spoil, lambda root: read_all("folder", root, **options))

    return run


def _skipped(rng: Rng) -> Observed:
    """Some files that are none, under skip: what is left has its own pixels and labels, and no
    other is counted."""
    bad = sorted({int(rng.integers(8)), int(rng.integers(8))})

    def spoil(root: Path):
        make_folder(root, rng)
        whole = read_all("folder", root)["eval"]
        paths = sorted(root.glob("val/*/*.png"))
        gone = sorted({int(rng.integers(4)), int(rng.integers(4))})
        for index in gone:
            [_special, _no_image, _unknown_range][rng.integers(3)](paths[index], rng)
        for index in bad:
            _no_image(sorted(root.glob("train/*/*.png"))[index], rng)
        kept = [index for index in range(4) if index not in gone]
        return lambda got: (
            (got["eval"][0] == whole[0][kept]).all() and (got["eval"][1] == whole[1][kept]).all()
        )

    return judge_folder(spoil, lambda root: read_all("folder", root, on_unreadable="skip"))


# --- Names and layouts
# ----------------------------------------------------------------------------------------------

_ODD_NAMES = (
    "$x^2$",
    "$",
    r"\frac{1}{0}$",
    "%s{0}",
    "a b",
    " ",
    "  ",
    "...",
    "x" * 255,
    "tab\there",
    "line\nend",
    "bell\x07\x1b[31m",
    b"caf\xe9",
    b"\xff\xfe",
    "猫",
    "a\u202eb",
    "e\u0301",
    "\u00e9",
    "Cat",
    "cat",
    "-rf",
    "nul",
    "0",
    "é" * 120,
)


def _names(rng: Rng) -> Observed:
    """Classes of odd names: each has a label of its own, and a name that any output takes."""
    chosen = [_ODD_NAMES[i] for i in rng.choice(len(_ODD_NAMES), 3, replace=False)]

    def spoil(root: Path):
        make_folder(root, rng, chosen)
        return is_right

    def read(root: Path):
        source = data.load_source("folder", "train", data_dir=str(root), image_size=8)
        _, labels = source.gather(np.arange(len(source)))
        return source.label_names, labels

    def is_right(got) -> bool:
        names, labels = got
        shown = all(name.isprintable() and name.strip() and name.encode() for name in names)
        return shown and len(names) == 3 and np.bincount(labels).tolist() == [4, 4, 4]

    return judge_folder(spoil, read)


def _layout(rng: Rng) -> Observed:
    """Folders that are not <split>/<class>/<image>, each of which must be told."""
    kind = int(rng.integers(12))

    def spoil(root: Path):
        if kind == 0:
            return
        make_folder(root, rng)
        ant = root / "train" / "ant"
        if kind == 1:
            shutil.rmtree(root / "train" / "bird")
            shutil.rmtree(root / "val" / "bird")
        elif kind == 2:
            for path in ant.iterdir():
                path.unlink()
        elif kind == 3:
            (root / "val" / "ant").rename(root / "val" / "Ant")
        elif kind == 4:
            shutil.rmtree(root / "val" / "ant")
            (root / "val" / "ant").write_text("in place of a class")
        elif kind == 5:
            shutil.copy(ant / "0.png", root / "train" / "loose.png")
        elif kind == 6:
            shutil.rmtree(root / "val")
        elif kind == 7:
            shutil.rmtree(root / "train")
            (root / "train").write_text("")
        elif kind == 8:
            for path in root.glob("*/*/*"):
                path.unlink()
        elif kind == 9:
            shutil.rmtree(root / "train")
            (root / "train").symlink_to(root / "train")
        elif kind == 10:
            shutil.rmtree(root)
            root.write_text("a file")
        else:
            for path in root.glob("*/*/*.png"):
                path.rename(path.with_suffix(".xcf"))

    return judge_folder(spoil, lambda root: read_all("folder", root))


def _nested(rng: Rng) -> Observed:
    """Folders in a class's folder belong to it, and links that lead round in a circle end."""

    def spoil(root: Path):
        make_folder(root, rng)
        inner = root / "train" / "ant" / "a" / "b"
        inner.mkdir(parents=True)
        shutil.copy(root / "train" / "bird" / "0.png", inner / "9.png")
        (inner / "up").symlink_to(root / "train" / "ant")
        (root / "train" / ".hidden").mkdir()
        return lambda got: np.bincount(got["train"][1]).tolist() == [5, 4]

    return judge_folder(spoil, lambda root: read_all("folder", root))


def _thousands(rng: Rng) -> Observed:
    count = int(rng.integers(1000, 3000))
    one = png(quadrants(rng))

    def spoil(root: Path):
        for split in ("train", "val"):
            for number in range(count):
                folder = root / split / f"c{number:05d}"
                folder.mkdir(parents=True)
                (folder / "0.png").write_bytes(one)
        return lambda got: (got["train"][1] == np.arange(count)).all()

    return judge_folder(spoil, lambda root: read_all("folder", root))


def _vanishing(rng: Rng) -> Observed:
    """The folder, or images of it, go while batches are read."""
    everything, skip = bool(rng.integers(2)), bool(rng.integers(2))

    def read(root: Path):
        options = {"on_unreadable": "skip"} if skip else {}
        source = data.load_source("folder", "train", data_dir=str(root), image_size=8, **options)
        batches = data.TrainPipeline(source, 4, num_threads=2).iterate()
        next(batches)
        if everything:
            shutil.rmtree(root)
        else:
            shutil.rmtree(root / "train" / "ant")
        for _ in range(20):
            labels = next(batches)["label"]
        return labels

    def spoil(root: Path):
        make_folder(root, rng)
        return (lambda labels: (labels == 1).all()) if skip and not everything else None

    return judge_folder(spoil, read)


# --- Prepared sets
# -------------------------------------------------------------------------------------------------


def _prepared(root: Path, rng: Rng) -> Path:
    """A small set as TFDS keeps it, and its folder."""
    import tensorflow_datasets as tfds

    from adder_flax.data.prepare import prepare

    tfds.disable_progress_bar()
    with tempfile.TemporaryDirectory() as images:
        make_folder(Path(images), rng)
        return prepare("folder", str(root), images, "hostile_images")


def _edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _features(content: dict) -> dict:
    return content["featuresDict"]["features"]


_TEXT = {"text": {}, "pythonClassName": "tensorflow_datasets.core.features.text_feature.Text"}

_INDEX_EDITS: tuple[Callable[[dict], object], ...] = (
    lambda c: c.pop("splits"),
    lambda c: c.update(name="another"),
    lambda c: c.update(fileFormat="tfrecord"),
    lambda c: c["splits"][0].update(shardLengths=["7"]),
    lambda c: c["splits"][0].update(shardLengths=["9"]),
    lambda c: c["splits"][0].update(shardLengths=["4", "4"]),
    lambda c: c["splits"][0].update(shardLengths=["-8"]),
    lambda c: c["splits"][0].pop("shardLengths"),
    lambda c: c["splits"][0].update(filepathTemplate="../../{SPLIT}"),
    lambda c: c["supervisedKeys"]["tuple"]["items"].reverse(),
)
_FEATURE_EDITS: tuple[Callable[[dict], object], ...] = (
    lambda c: _features(c).pop("image"),
    lambda c: _features(c).pop("label"),
    lambda c: _features(c).update(image=_TEXT),
    lambda c: _features(c)["image"].update(pythonClassName="antigravity.Nope"),
    lambda c: _features(c)["image"]["image"].update(dtype="uint16"),
    lambda c: _features(c)["image"]["image"]["shape"].update(dimensions=["-1", "-1", "4"]),
    lambda c: _features(c)["image"]["image"]["shape"].update(dimensions=["28", "28", "3"]),
    lambda c: _features(c)["image"]["image"]["shape"].update(
        dimensions=["1000000", "1000000", "3"]
    ),
    lambda c: _features(c)["label"]["classLabel"].update(numClasses="3"),
    lambda c: _features(c)["label"]["classLabel"].update(numClasses="1"),
)
_LABELS = (b"", b"ant\n", b"ant\nbird\ncat\n", b"ant\nant\n", b"ant\n\xff\xfe\n", None)


def _damaged_set(damage: Callable[[Path, Rng], None]) -> Callable[[Rng], Observed]:
    def run(rng: Rng) -> Observed:
        def spoil(root: Path):
            damage(_prepared(root, rng), rng)

        return judge_folder(spoil, lambda root: read_all("hostile_images", root))

    return run


def _damage_text(folder: Path, rng: Rng) -> None:
    path = folder / ["dataset_info.json", "features.json"][rng.integers(2)]
    whole = path.read_bytes()
    kind = rng.integers(6)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.unlink()
        os.mkfifo(path)
    else:
        contents = [
            b"",
            whole[: int(rng.integers(2, len(whole) - 2))],
            rng.bytes(200),
            b"[1]",
            b"{}",
        ]
        path.write_bytes(contents[rng.integers(len(contents))])


def _damage_meaning(folder: Path, rng: Rng) -> None:
    if rng.integers(2):
        _edit(folder / "dataset_info.json", _INDEX_EDITS[rng.integers(len(_INDEX_EDITS))])
    else:
        _edit(folder / "features.json", _FEATURE_EDITS[rng.integers(len(_FEATURE_EDITS))])


def _damage_labels(folder: Path, rng: Rng) -> None:
    content, path = _LABELS[rng.integers(len(_LABELS))], folder / "label.labels.txt"
    path.unlink()
    if content is not None:
        path.write_bytes(content)


def _damage_records(folder: Path, rng: Rng) -> None:
    path = next(iter(folder.glob("*-train.array_record*")))
    whole = path.read_bytes()
    kind = rng.integers(8)
    if kind < 2:
        path.unlink()
    if kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.write_bytes(b"")
    elif kind == 3:
        path.write_bytes(whole[: int(rng.integers(1, len(whole)))])
    elif kind == 4:
        path.write_bytes(rng.bytes(len(whole)))
    elif kind == 5:
        path.write_bytes(whole + rng.bytes(100))
    elif kind == 6:
        path.write_bytes(bytes(len(whole)))
    elif kind == 7:
        shutil.copy(next(iter(folder.glob("*-val.array_record*"))), path)


def _flipped_records(rng: Rng) -> Observed:
    """One wrong bit in a file of records: the true records, or a message."""

    def spoil(root: Path):
        folder = _prepared(root, rng)
        true = read_all("hostile_images", root)["train"]
        path = next(iter(folder.glob("*-train.array_record*")))
        content = bytearray(path.read_bytes())
        bit = int(rng.integers(8 * len(content.rstrip(b"\0"))))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(content))
        return lambda got: all((a == b).all() for a, b in zip(got["train"], true, strict=True))

    return judge_folder(spoil, lambda root: read_all("hostile_images", root))


def _damage_version(folder: Path, rng: Rng) -> None:
    kind = rng.integers(4)
    if kind == 0:
        folder.rename(folder.with_name("1.x"))
    elif kind == 1:
        folder.with_name("7.0.0").mkdir()
    elif kind == 2:
        shutil.rmtree(folder)
        folder.write_text("a file")
    else:
        shutil.rmtree(folder.parent)
        folder.parent.write_text("a file")


# --- Whole runs
# -------------------------------------------------------------------------------------------------

_SMALL = {
    "model.width": 16,
    "model.depth": 1,
    "model.num_heads": 2,
    "model.patch_size": 8,
    "data.image_size": 16,
    "batch_size": 4,
    "eval_batch_size": 4,
    "num_epochs": 2.0,
    "optimizer.warmup_epochs": 0.0,
}


def _main(root: Path, **overrides) -> list[str]:
    settings = {**_SMALL, "data.data_dir": root / "images", **overrides}
    return [
        "main.py",
        "--config=experiments/additive_deit_tiny.py:folder",
        f"--workdir={root / 'run'}",
        *(f"--config.{name}={value}" for name, value in settings.items()),
    ]


def _whole_run(rng: Rng) -> Observed:
    """A run to its end, pictures included, on classes of odd names or with nothing to evaluate
    on."""
    kind = int(rng.integers(3))
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        root = Path(folder)
        classes = [("$x^2$", "$"), (b"caf\xe9", "line\n\x1b[31m"), ("ant", "bird")][kind]
        make_folder(root / "images", rng, classes)
        if kind == 2:
            for path in root.glob("images/val/*/*.png"):
                path.write_bytes(b"no image")
            return judge_process(_main(root, **{"data.on_unreadable": "skip"}), timeout=600)
        pictures = lambda _: (
            (root / "run" / "attention.png").is_file() and (root / "run" / "curves.png").is_file()
        )
        return judge_process(_main(root), timeout=600, is_right=pictures)


def _vanishing_run(rng: Rng) -> Observed:
    """The folder is removed while a run trains."""
    import threading

    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        root = Path(folder)
        make_folder(root / "images", rng)

        def remove() -> None:
            metrics = root / "run" / "metrics.jsonl"
            until = time.monotonic() + 500
            while time.monotonic() < until and not (metrics.exists() and metrics.stat().st_size):
                time.sleep(0.1)
            shutil.rmtree(root / "images")

        remover = threading.Thread(target=remove, daemon=True)
        remover.start()
        # More epochs than fit into the time: it can only end by the folder's removal.
        return judge_process(
            _main(root, num_epochs=1e6, log_every_steps=1, checkpoint_every_steps=10**6),
            timeout=600,
        )


_IN_PROCESS: tuple[tuple[Fault, Callable[[Rng], Observed]], ...] = (
    (Fault("A grey image of 16 bits", "its values, scaled to 8 bits"), _kinds(_deep_grey)),
    (Fault("A colour image of 16 bits", "its values, scaled to 8 bits"), _kinds(_deep_colour)),
    (
        Fault("A grey image of 16 bits with transparency", "its values, scaled to 8 bits"),
        _kinds(_deep_alpha),
    ),
    (
        Fault("An image with a palette, and transparent colours in it", "its colours"),
        _kinds(_palette),
    ),
    (Fault("An image with transparency", "its colours"), _kinds(_alpha)),
    (Fault("An image in CMYK", "its colours, converted"), _kinds(_cmyk)),
    (Fault("An image of 1 bit", "black is 0 and white 255"), _kinds(_one_bit)),
    (
        Fault("A photograph that lies on its side, by EXIF", "it is turned upright"),
        _kinds(_upright),
    ),
    (Fault("An animation or several pages", "the first image"), _kinds(_animated)),
    (Fault("A GIF, BMP or PPM named .png", "it is read as what it is"), _kinds(_other_name)),
    (Fault("A pipe, socket, device or circle of links named .png", _NOTHING), _refused(_special)),
    (
        Fault("An image or file larger than the limit, or that claims to be", _NOTHING),
        _refused(_too_large),
    ),
    (Fault("A file named .png that is no image, or half of one", _NOTHING), _refused(_no_image)),
    (Fault("An image of floating-point or 32-bit values", _NOTHING), _refused(_unknown_range)),
    (Fault("One wrong bit in a PNG", "the true pixels, or nothing"), _flipped_png),
    (
        Fault("Unreadable images, with on_unreadable=skip", "all others, each with its own label"),
        _skipped,
    ),
    (
        Fault(
            "Classes named $, \\n, \\x1b, bytes that are not UTF-8, spaces, dots, 255 letters",
            "each class",
        ),
        _names,
    ),
    (Fault("A folder of another layout", _NOTHING), _layout),
    (Fault("Folders in folders, and links that lead round in a circle", "every image"), _nested),
    (Fault("Thousands of classes", "each class"), _thousands),
    (
        Fault("Images that vanish while they are read", "under skip, what is left is trained on"),
        _vanishing,
    ),
    (
        Fault("Descriptions of a prepared set missing, cut short or garbage", _NOTHING),
        _damaged_set(_damage_text),
    ),
    (
        Fault("Descriptions of a prepared set that say something else", _NOTHING),
        _damaged_set(_damage_meaning),
    ),
    (
        Fault("Names of labels missing, too few, too many, doubled or garbage", _NOTHING),
        _damaged_set(_damage_labels),
    ),
    (
        Fault("Records missing, empty, cut short, garbage or of another split", _NOTHING),
        _damaged_set(_damage_records),
    ),
    (Fault("One wrong bit in a file of records", "the true records, or nothing"), _flipped_records),
    (Fault("Versions of a prepared set that are none", _NOTHING), _damaged_set(_damage_version)),
)
_WHOLE: tuple[tuple[Fault, Callable[[Rng], Observed]], ...] = (
    (
        Fault(
            "Odd class names, or nothing to evaluate on, in a whole run",
            "pictures and all; or checkpoints",
        ),
        _whole_run,
    ),
    (
        Fault("The image folder is removed during a run", "the run, up to its last checkpoint"),
        _vanishing_run,
    ),
)
_EVERY = 20  # cases in the process for each case that is a whole run


def cases(seed: int, count: int) -> Iterator[Case]:
    """Cases of all faults in turn; a whole run, which takes long, once in a while."""
    for number in range(count):
        part, place = divmod(number, _EVERY + 1)
        whole = place == _EVERY
        kinds, index = (_WHOLE, part) if whole else (_IN_PROCESS, part * _EVERY + place)
        fault, run = kinds[index % len(kinds)]
        yield Case(
            fault,
            f"{seed}/{number}",
            lambda run=run, number=number: run(np.random.default_rng((seed, number))),
        )


GROUP = Group("images", 168, cases)
