"""``python -m adder_flax.data.prepare`` with odd names, folders, source files and disks.

Whatever comes of it, nothing outside ``data_dir`` may change, and what loads afterwards must be
whole.
"""

import contextlib
import gzip
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from absl import logging

from adder_flax import data
from benchmarks.hostile._folders import make_folder, read_all
from benchmarks.hostile.case import ROOT, Case, Fault, Group, Observed, Verdict, judge_call

Rng = np.random.Generator
_PATIENCE = 120  # seconds
_SETS = {
    "mnist": "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}


class _Place:
    """A temporary folder with a bystander that must stay as it is, a place for sets and one for
    source files."""

    def __init__(self, root: Path):
        self.bystander, self.sets, self.source = root / "bystander", root / "sets", root / "source"
        self.bystander.mkdir()
        (self.bystander / "kept.txt").write_text("kept")
        self.source.mkdir()
        self._root, self._before = root, self._state(root)

    def untouched(self) -> bool:
        """Whether nothing but the sets' folder has changed since `remember`."""
        return self._state(self._root) == self._before

    def remember(self) -> None:
        """Takes what is there now as what must stay."""
        self._before = self._state(self._root)

    def _state(self, root: Path) -> dict[str, str]:
        return {
            str(path): _content(path)
            for path in root.rglob("*")
            if self.sets not in (path, *path.parents)
        }


def _content(path: Path) -> str:
    if not path.is_file():
        return "folder or other"
    size = path.stat().st_size
    return hashlib.sha256(path.read_bytes()).hexdigest() if size < 2**24 else f"{size} bytes"


def _command(*arguments: str) -> None:
    """The command in this process, its talk thrown away."""
    from adder_flax.data.prepare import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(arguments)


def _judge(
    rng: Rng,
    spoil: Callable[[_Place, Rng], list[str]],
    is_right: Callable[[_Place], bool] | None = None,
) -> Observed:
    """Lets ``spoil`` make trouble and say the arguments; judges the end of the command and what
    else changed."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    logging.set_verbosity(logging.ERROR)
    root = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        place = _Place(root)
        arguments = spoil(place, rng)
        place.remember()
        seen: list[Observed] = []
        check = None if is_right is None else lambda _: is_right(place)
        run = lambda: seen.append(judge_call(lambda: _command(*arguments), check))
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        if not seen:
            return Observed(Verdict.HANG, f"no end after {_PATIENCE} s")
        return (
            seen[0]
            if place.untouched()
            else Observed(Verdict.LOST, f"changed something outside: {seen[0].seen}")
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


# --- Arguments
# -------------------------------------------------------------------------------------------------


def _odd_name(place: _Place, rng: Rng) -> list[str]:
    names = [
        "../../etc",
        "/etc",
        "",
        " ",
        ".",
        "..",
        "a" * 5000,
        "no_such_set",
        "cifar10/nope",
        "cifar10:99.0.0",
        "cifar10:",
        "cifar10//",
        "a\x1b[31m",
        "caf\udce9",
        "mnist;id",
        "fake",
        "digits",
        "mnist\n",
        "Ω",
        "cifar10/a=b,c=d",
        "http://x/y",
    ]
    return [names[rng.integers(len(names))], f"--data_dir={place.sets}"]


def _odd_set_name(place: _Place, rng: Rng) -> list[str]:
    make_folder(place.source / "images", rng)
    names = [
        "../../etc",
        "/etc/cron.d/x",
        "",
        "mnist",
        "a b",
        "a" * 3000,
        "a/b",
        "a:1.0.0",
        "$(id)",
        "\x07",
    ]
    name = names[rng.integers(len(names))]
    return [
        "folder",
        f"--source={place.source / 'images'}",
        f"--set_name={name}",
        f"--data_dir={place.sets}",
    ]


def _odd_data_dir(place: _Place, rng: Rng) -> list[str]:
    make_folder(place.source / "images", rng)
    file, loop = place.bystander / "kept.txt", place.bystander / "loop"
    loop.symlink_to(loop)
    places = [
        "/etc/passwd",
        file,
        file / "below",
        loop,
        "",
        "/proc/nowhere",
        "/dev/null/x",
        "x" * 5000,
        "~nobody_at_all",
    ]
    chosen = places[rng.integers(len(places))]
    return [
        "folder",
        f"--source={place.source / 'images'}",
        "--set_name=hostile",
        f"--data_dir={chosen}",
    ]


def _odd_source(place: _Place, rng: Rng) -> list[str]:
    file, loop, pipe = place.source / "file", place.source / "loop", place.source / "pipe"
    file.write_text("")
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    places = [file, loop, pipe, place.source / "none", "", place.source, "/dev/null", "x" * 5000]
    name = ["folder", "mnist", "cifar10"][rng.integers(3)]
    chosen = places[rng.integers(len(places))]
    if name != "folder" and chosen in (place.source, ""):
        chosen = loop  # what is missing in a folder is downloaded, which is no fault
    return [name, f"--source={chosen}", f"--data_dir={place.sets}"]


# --- Source files
# -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _published(urls: dict[str, Path]) -> Iterator[None]:
    """Lets these files pass as the published ones, so that what reads them is reached."""
    from tensorflow_datasets.core.download import checksums

    infos = {
        url: checksums.UrlInfo(
            path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest(), path.name
        )
        for url, path in urls.items()
    }
    with mock.patch.object(checksums, "get_all_url_infos", return_value=infos):
        yield


def _idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def _spoilt(content: bytes, rng: Rng) -> bytes:
    """An idx file that is not what it says, or a gzip file that is none."""
    choices = [
        lambda: gzip.compress(content[: int(rng.integers(0, len(content)))]),
        lambda: gzip.compress(content + b"\0"),
        lambda: gzip.compress(b"\0\0\x08\xff" + content[4:]),
        lambda: gzip.compress(b"\0\0\x08\x01\xff\xff\xff\xff" + content),
        lambda: gzip.compress(b"\0\0\x0d" + content[3:]),
        lambda: gzip.compress(rng.bytes(100)),
        lambda: gzip.compress(_idx(np.zeros((3, 5, 5)))),
        lambda: gzip.compress(_idx(np.full(4, 200))),
        lambda: gzip.compress(b""),
        lambda: gzip.compress(content)[:-9],
        lambda: gzip.compress(bytes(2**28 + 9), 1),
        lambda: b"these are words",
        lambda: b"",
        lambda: content,
    ]
    return choices[rng.integers(len(choices))]()


def _idx_files(rng: Rng) -> Observed:
    name = list(_SETS)[rng.integers(2)]

    def spoil(place: _Place, rng: Rng) -> list[str]:
        files = {}
        for split, count in (("train", 6), ("t10k", 4)):
            files[f"{split}-images-idx3-ubyte.gz"] = _idx(rng.integers(0, 256, (count, 28, 28)))
            files[f"{split}-labels-idx1-ubyte.gz"] = _idx(rng.integers(0, 10, count))
        bad = list(files)[rng.integers(4)]
        for file, content in files.items():
            (place.source / file).write_bytes(
                _spoilt(content, rng) if file == bad else gzip.compress(content)
            )
        stack.enter_context(_published({_SETS[name] + file: place.source / file for file in files}))
        return [name, f"--source={place.source}", f"--data_dir={place.sets}"]

    with contextlib.ExitStack() as stack:
        return _judge(rng, spoil)


def _cifar_archive(place: _Place, rng: Rng) -> Path:
    """An archive that is not CIFAR-10's: members missing, short, of other kinds, with paths that
    lead outside."""
    folder = "cifar-10-batches-bin/"
    rows = lambda: np.concatenate([rng.integers(0, 10, (3, 1)), rng.integers(0, 256, (3, 3072))], 1)
    names = [f"{folder}data_batch_{n}.bin" for n in range(1, 6)] + [folder + "test_batch.bin"]
    files = {name: rows().astype(np.uint8).tobytes() for name in names}
    files[folder + "batches.meta.txt"] = "\n".join(f"class{n}" for n in range(10)).encode()
    path, bad, kind = (
        place.source / "cifar-10-binary.tar.gz",
        names[rng.integers(6)],
        rng.integers(9),
    )
    if kind == 0:
        path.write_bytes([b"", b"these are words", rng.bytes(300)][rng.integers(3)])
        return path
    if kind == 1:
        del files[bad]
    elif kind == 2:
        files[bad] = files[bad][: int(rng.integers(0, 3072))]
    elif kind == 3:
        files[bad] = b"\xc8" + files[bad][1:]
    elif kind == 4:
        names_file = folder + "batches.meta.txt"
        files[names_file] = [b"", b"one\ntwo\n", b"\xff\xfe" * 20, b"same\n" * 10][rng.integers(4)]
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if name == bad and kind >= 5:
                info.size, info.type = (
                    0,
                    [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.LNKTYPE][kind - 5],
                )
                info.linkname = "../../../bystander/kept.txt"
            tar.addfile(info, io.BytesIO(content))
        outside = tarfile.TarInfo("../bystander/kept.txt")
        outside.size = 4
        tar.addfile(outside, io.BytesIO(b"lost"))
    if rng.integers(4) == 0:
        path.write_bytes(path.read_bytes()[:-200])
    return path


def _cifar(rng: Rng) -> Observed:
    def spoil(place: _Place, rng: Rng) -> list[str]:
        path = _cifar_archive(place, rng)
        stack.enter_context(_published({f"https://www.cs.toronto.edu/~kriz/{path.name}": path}))
        return ["cifar10", f"--source={place.source}", f"--data_dir={place.sets}"]

    with contextlib.ExitStack() as stack:
        return _judge(rng, spoil)


def _not_published(place: _Place, rng: Rng) -> list[str]:
    """Files under the published names that are not the published ones; some are none at all."""
    name = ["mnist", "fashion_mnist", "cifar10", "cifar100"][rng.integers(4)]
    names = ["cifar-10-binary.tar.gz", "cifar-100-binary.tar.gz"]
    names += [
        f"{split}-{kind}-ubyte.gz"
        for split in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    ]
    for file in names:
        path = place.source / file
        kind = rng.integers(4)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.mkdir()
        else:
            path.write_bytes(
                [b"", b"these are words", gzip.compress(_idx(np.zeros((2, 28, 28))))][
                    rng.integers(3)
                ]
            )
    return [name, f"--source={place.source}", f"--data_dir={place.sets}"]


def _odd_images(place: _Place, rng: Rng) -> list[str]:
    images = place.source / "images"
    make_folder(images, rng)
    kind = rng.integers(5)
    path = images / "train" / "ant" / "0.png"
    if kind == 0:
        path.unlink()
        os.mkfifo(path)
    elif kind == 1:
        path.unlink()
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.unlink()
        path.symlink_to(path)
    elif kind == 3:
        shutil.rmtree(images / "train" / "ant")
        (images / "train" / "ant").mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(2**40)
    return ["folder", f"--source={images}", "--set_name=hostile", f"--data_dir={place.sets}"]


def _odd_classes(rng: Rng) -> Observed:
    """A folder whose classes have odd names becomes a set with as many classes, each with its own
    images."""
    odd = ["$x$", " ", "a ", "line\nend", b"caf\xe9", "猫", "\x1b[31m", "x" * 255, "...", "a\tb"]
    chosen = [odd[i] for i in rng.choice(len(odd), 3, replace=False)]

    def spoil(place: _Place, rng: Rng) -> list[str]:
        make_folder(place.source / "images", rng, chosen)
        return [
            "folder",
            f"--source={place.source / 'images'}",
            "--set_name=hostile",
            f"--data_dir={place.sets}",
        ]

    def is_right(place: _Place) -> bool:
        got, there = read_all("hostile", place.sets), read_all("folder", place.source / "images")
        key = lambda part: sorted(
            (image.tobytes(), int(label)) for image, label in zip(*part, strict=True)
        )
        return all(key(got[split]) == key(there[split]) for split in there)

    return _judge(rng, spoil, is_right)


# --- Disks and moments
# -----------------------------------------------------------------------------------------------


def _full_disk(rng: Rng) -> Observed:
    """A file system with too little room: one message, and no set that loads."""
    root = Path(tempfile.mkdtemp(prefix="hostile-"))
    disk = root / "disk"
    disk.mkdir()
    size = int(rng.integers(20, 260))
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], capture_output=True
    ).returncode:
        shutil.rmtree(root)
        return Observed(Verdict.RIGHT, "not tried: this user may not mount a file system")
    try:
        return _judge(
            rng,
            lambda place, rng: [
                *_folder_arguments(place, rng),
                f"--data_dir={disk}",
            ],
            lambda place: (
                len(data.load_source("hostile", "train", data_dir=str(disk), image_size=8)) == 8
            ),
        )
    finally:
        subprocess.run(["umount", disk], check=True)
        shutil.rmtree(root)


def _folder_arguments(place: _Place, rng: Rng) -> list[str]:
    make_folder(place.source / "images", rng)
    return ["folder", f"--source={place.source / 'images'}", "--set_name=hostile"]


def _killed(rng: Rng) -> Observed:
    """The command ends at a random moment by a signal; the same command afterwards makes the whole
    set."""
    kind = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT][rng.integers(3)]
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        images, sets = Path(folder) / "images", Path(folder) / "sets"
        make_folder(images, rng, train=200, val=100)
        command = [sys.executable, "-m", "adder_flax.data.prepare", "folder", f"--source={images}"]
        command += ["--set_name=hostile", f"--data_dir={sets}"]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        until = time.monotonic() + 100
        while (
            time.monotonic() < until and process.poll() is None and not list(sets.glob("hostile/*"))
        ):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.send_signal(kind)
        said = process.communicate()[1].decode(errors="replace")
        if kind == signal.SIGINT and "Traceback" in said:
            return Observed(Verdict.TRACEBACK, said[-2000:])
        if process.returncode:  # else it was faster
            try:
                found = data.load_source("hostile", "train", data_dir=str(sets), image_size=8)
                if len(found) != 400:
                    return Observed(
                        Verdict.WRONG, f"{len(found)} of 400 images taken for the whole set"
                    )
            except data.DataError:
                pass
        return judge_call(
            lambda: _command(*command[3:]),
            lambda _: (
                len(data.load_source("hostile", "train", data_dir=str(sets), image_size=8)) == 400
            ),
        )


def _by(spoil: Callable[[_Place, Rng], list[str]]) -> Callable[[Rng], Observed]:
    return lambda rng: _judge(rng, spoil)


_KEPT = "everything outside of --data_dir, and every set that was there"
_FAULTS: tuple[tuple[Fault, Callable[[Rng], Observed]], ...] = (
    (Fault("prepare with a path, nothing or garbage for a name", _KEPT), _by(_odd_name)),
    (
        Fault("prepare folder with a path, nothing or garbage for --set_name", _KEPT),
        _by(_odd_set_name),
    ),
    (
        Fault("prepare with a file, a circle of links or no place for --data_dir", _KEPT),
        _by(_odd_data_dir),
    ),
    (
        Fault("prepare with a file, a pipe, a circle of links or nothing for --source", _KEPT),
        _by(_odd_source),
    ),
    (Fault("idx files that are short, long, garbage, bombs or of other sizes", _KEPT), _idx_files),
    (Fault("An archive without the right members, or with links and paths in it", _KEPT), _cifar),
    (
        Fault("Files under the published names that are not the published ones", _KEPT),
        _by(_not_published),
    ),
    (
        Fault("prepare folder with pipes, devices, holes or empty classes in it", _KEPT),
        _by(_odd_images),
    ),
    (Fault("prepare folder with odd class names", "each class and image"), _odd_classes),
    (Fault("prepare on a disk that is full", _KEPT), _full_disk),
    (Fault("prepare is killed", "the same command makes the whole set"), _killed),
)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Cases of all faults in turn."""
    for number in range(count):
        fault, run = _FAULTS[number % len(_FAULTS)]
        yield Case(
            fault,
            f"{seed}/{number}",
            lambda run=run, number=number: run(np.random.default_rng((seed, number))),
        )


GROUP = Group("prepare", 110, cases)
