"""Damaged run directories: every file and folder of a run, its configuration, its metrics, its
checkpoints."""

import functools
import itertools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adder_flax import training
from benchmarks.hostile import _runs
from benchmarks.hostile.case import Case, Fault, Group, Observed, Verdict, judge_call

_UNPRIVILEGED = 65534  # nobody
_RUN_FILES = ("config.json", "data.json", "metrics.jsonl", "tensorboard/events*") + tuple(
    f"checkpoints/{step}/{name}" for step in (4, 2) for name in _runs.CHECKPOINT_FILES
)
_RUN_FOLDERS = ("tensorboard", "checkpoints") + tuple(
    f"checkpoints/{step}{name}"
    for step in (4, 2)
    for name in (
        "",
        "/state",
        "/state/d",
        "/state/ocdbt.process_0",
        "/state/ocdbt.process_0/d",
        "/state/array_metadatas",
    )
)
Harm = Callable[[Path, random.Random], None]

_FILE = Fault(
    "a file of a run that is cut, emptied, overwritten or gone",
    "the checkpoint before, all rows of metrics",
)
_PLACE = Fault(
    "a folder, link or pipe where a file of a run was", "the checkpoint before, all rows of metrics"
)
_FOLDER = Fault(
    "a folder of a run that is gone or is something else", "everything outside of that folder"
)
_PERMISSION = Fault("a run that may not be read or written", "everything")
_CONFIG = Fault("a config.json that is none, or of another run", "everything")
_ROWS = Fault("lines in metrics.jsonl that are no rows", "every line, in metrics.jsonl.aside")
_FOREIGN = Fault("things in a run's directory that do not belong there", "everything")


def _emptied(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def _cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(max(1, path.stat().st_size)))


def _overwritten(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(path.stat().st_size or 1))


def _zeroed(path: Path, draw: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _lengthened(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 99)))


def _gone(path: Path, draw: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _replaced(make: Callable[[Path], Any]) -> Harm:
    def replace(path: Path, draw: random.Random) -> None:
        _gone(path, draw)
        make(path)

    return replace


def _permission(mode: int) -> Harm:
    return lambda path, draw: path.chmod(mode)


_FILES: dict[str, Harm] = {
    "emptied": _emptied,
    "cut": _cut,
    "overwritten": _overwritten,
    "zeroed": _zeroed,
    "lengthened": _lengthened,
    "gone": _gone,
}
_PLACES: dict[str, Harm] = {
    "a folder": _replaced(Path.mkdir),
    "a full folder": _replaced(lambda path: (path / "x" / "y").mkdir(parents=True)),
    "a dangling link": _replaced(lambda path: path.symlink_to("nowhere")),
    "a link to itself": _replaced(lambda path: path.symlink_to(path)),
    "a pipe": _replaced(os.mkfifo),
    "a device": _replaced(lambda path: path.symlink_to("/dev/zero")),
}
_FOLDERS: dict[str, Harm] = {
    "gone": _gone,
    "a file": _replaced(Path.touch),
    "empty": _replaced(Path.mkdir),
    "a dangling link": _replaced(lambda path: path.symlink_to("nowhere")),
    "a link to itself": _replaced(lambda path: path.symlink_to(path)),
    "a pipe": _replaced(os.mkfifo),
}
_MODES: dict[str, Harm] = {
    f"mode {mode:o}": _permission(mode) for mode in (0o000, 0o444, 0o555, 0o111, 0o222)
}

_TEXTS = [
    b"{",
    b"[]",
    b"null",
    b"1e999",
    b"NaN",
    b'"x"',
    b"{}",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"[" * 10**5,
    b"\0" * 64,
]
_TEXTS += [
    b'{"a":' * 10**5,
    b"{'seed': 0}",
    b'{"seed": 0}{"seed": 1}',
    b'{"model": null}',
    b"<html>",
    b"9" * 5000,
]


def _config_text(text: bytes) -> Harm:
    return lambda workdir, draw: (workdir / "config.json").write_bytes(text) and None


def _config_fields(change: Callable[[dict[str, Any], random.Random], Any]) -> Harm:
    def harm(workdir: Path, draw: random.Random) -> None:
        path = workdir / "config.json"
        fields = json.loads(path.read_text())
        change(fields, draw)
        path.write_text(json.dumps(fields))

    return harm


_FIELDS: dict[str, Callable[[dict[str, Any], random.Random], Any]] = {
    "lacks a field": lambda fields, draw: fields.pop(
        draw.choice(["seed", "model", "batch_size", "optimizer"])
    ),
    "lacks all of the model": lambda fields, draw: fields["model"].clear(),
    "has one more": lambda fields, draw: fields.update(
        {f"\x1b[31m{draw.random()}": "\x1b[0m" * 99}
    ),
    "has thousands more": lambda fields, draw: fields.update({f"f{n}": n for n in range(5000)}),
    "another type": lambda fields, draw: fields.update(
        {draw.choice(["seed", "model", "batch_size"]): ["\u2028"]}
    ),
    "another value": lambda fields, draw: fields.update(seed=draw.randrange(1, 99)),
    "not a number": lambda fields, draw: fields["optimizer"].update(learning_rate=float("nan")),
}

_LINES = [
    b"",
    b" ",
    b"garbage",
    b"[1, 2]",
    b"3",
    b"null",
    b'"x"',
    b"{}",
    b'{"step": null}',
    b'{"step": "4"}',
]
_LINES += [
    b'{"step": 3, "train/loss": "\xe2\x80\xa8"}',
    b'{"step": 2.5}',
    b'{"train/loss": 1.0}',
    b"\xff\xfe\0",
    b"{" * 10**5,
]
_LINES += [
    b'{"step": 1, "a": {"b": 2}}',
    b'{"step": true}',
    b'{"step": 2, "train/lo',
    b"\r",
    b'{"step": ' + b"9" * 5000 + b"}",
]


def _line(text: bytes) -> Harm:
    def harm(workdir: Path, draw: random.Random) -> None:
        path = workdir / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")
        lines.insert(draw.randrange(len(lines)), text)
        path.write_bytes(b"\n".join(lines))

    return harm


def _unended(workdir: Path, draw: random.Random) -> None:
    path = workdir / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))


def _save_as_another(directory: Path) -> None:
    """Adds a newer checkpoint of the same shapes, saved by a run with another seed."""
    with tempfile.TemporaryDirectory() as folder:
        of = training.identity(_runs.template().run.config) | {"seed": 99}
        with _runs.quietly(), training.Checkpoints(folder, of=of) as checkpoints:
            checkpoints.save(5, _runs.template().saved[4])
        shutil.copytree(Path(folder, "5"), directory / "5")


_FOREIGNERS: dict[str, Callable[[Path], Any]] = {
    "an empty newer checkpoint": lambda workdir: (workdir / "checkpoints" / "5").mkdir(),
    "a file called as a checkpoint": lambda workdir: (workdir / "checkpoints" / "5").write_text(
        "x"
    ),
    "a link called as a checkpoint": lambda workdir: (workdir / "checkpoints" / "5").symlink_to(
        "5"
    ),
    "a checkpoint 007": lambda workdir: (workdir / "checkpoints" / "007").mkdir(),
    "a checkpoint of 30 digits": lambda workdir: (workdir / "checkpoints" / ("9" * 30)).mkdir(),
    "a checkpoint in Arabic digits": lambda workdir: (workdir / "checkpoints" / "\u0665").mkdir(),
    "a folder that is no checkpoint": lambda workdir: (workdir / "checkpoints" / "notes").mkdir(),
    "a half-written checkpoint": lambda workdir: (
        workdir / "checkpoints" / "6.orbax-checkpoint-tmp" / "x"
    ).mkdir(parents=True),
    "a half-deleted checkpoint": lambda workdir: (
        workdir / "checkpoints" / "1.deleted" / "x"
    ).mkdir(parents=True),
    "something set aside before": lambda workdir: (
        workdir / "checkpoints" / "4.unreadable"
    ).write_text("x"),
    "a stale lock": lambda workdir: (workdir / "trainer.lock").write_text(
        '{"pid": 1, "host": "\x1b[31m", "since": "then"}'
    ),
    "a lock that is none": lambda workdir: (workdir / "trainer.lock").write_bytes(b"\xff" * 99),
    "a folder as lock": lambda workdir: (workdir / "trainer.lock").mkdir(),
    "a pipe as lock": lambda workdir: os.mkfifo(workdir / "trainer.lock"),
    "a folder for rows set aside": lambda workdir: (workdir / "metrics.jsonl.aside").mkdir(),
    "a pipe for rows set aside": lambda workdir: os.mkfifo(workdir / "metrics.jsonl.aside"),
    "the newest checkpoint, copied to another step": lambda workdir: shutil.copytree(
        workdir / "checkpoints" / "4", workdir / "checkpoints" / "40"
    ),
    "a checkpoint of another run": lambda workdir: _save_as_another(workdir / "checkpoints"),
}


def _harms() -> dict[Fault, list[tuple[str, Harm]]]:
    """Returns, for each fault, what can be done to a run's directory."""
    at = lambda pattern, harm: lambda workdir, draw: harm(_runs.find(workdir, pattern), draw)
    every = lambda patterns, harms: [
        (f"{pattern}: {name}", at(pattern, harm))
        for pattern, (name, harm) in itertools.product(patterns, harms.items())
    ]
    return {
        _FILE: every(_RUN_FILES, _FILES),
        _PLACE: every(_RUN_FILES, _PLACES),
        _FOLDER: every(_RUN_FOLDERS, _FOLDERS),
        _PERMISSION: every([".", *_RUN_FOLDERS, *_RUN_FILES], _MODES),
        _CONFIG: [(f"{text[:20]!r}", _config_text(text)) for text in _TEXTS]
        + [(name, _config_fields(change)) for name, change in _FIELDS.items()],
        _ROWS: [(f"{text[:30]!r}", _line(text)) for text in _LINES]
        + [("no end of the last", _unended)],
        _FOREIGN: [
            (name, lambda workdir, draw, make=make: make(workdir))
            for name, make in _FOREIGNERS.items()
        ],
    }


def _as_nobody(function: Callable[[], Any]) -> Any:
    """Calls a function without the privileges of an administrator, whom permissions do not stop."""
    if os.geteuid() != 0:
        return function()
    os.setegid(_UNPRIVILEGED)
    os.seteuid(_UNPRIVILEGED)
    try:
        return function()
    finally:
        os.seteuid(0)
        os.setegid(0)


def _own(workdir: Path) -> None:
    if os.geteuid() == 0:
        for path in [workdir, *workdir.rglob("*")]:
            os.chown(path, _UNPRIVILEGED, _UNPRIVILEGED, follow_symlinks=False)


def _attack(fault: Fault, harm: Harm, seed: int, how: str) -> Observed:
    with _runs.copy() as workdir:
        if fault is _PERMISSION:
            _own(workdir)
        harm(workdir, random.Random(seed))
        before = _runs.contents(workdir)
        call: Callable[[], Any] = functools.partial(_WAYS[how], workdir)
        is_right: Any = _runs.is_final_state if how == "train" else _runs.is_saved_state
        if how == "baseline":
            is_right = lambda value, said: True
        # Else there is another best.
        elif how == "best" and (workdir / "checkpoints" / str(_runs.best_step())).is_dir():
            is_right = functools.partial(_runs.is_saved_state, which="best")
        observed = _runs.judge(
            functools.partial(_as_nobody, call) if fault is _PERMISSION else call, is_right
        )
        trained = how == "train" and observed.verdict is Verdict.RIGHT
        if trained and fault is _CONFIG and json_differs(workdir):
            return Observed(Verdict.ACCEPTED, "trained on in the directory of another run")
        what = _runs.lost(before, workdir, observed, trained=trained)
        return Observed(Verdict.LOST, what) if what else observed


def json_differs(workdir: Path) -> bool:
    """Whether the configuration in a directory is not that of the template's run."""
    as_dict = lambda folder: training.read_config(folder).to_dict()
    return (
        judge_call(lambda: as_dict(workdir) == as_dict(_runs.template().workdir), bool).verdict
        is not Verdict.RIGHT
    )


def _baseline(workdir: Path) -> Any:
    training.read_config(workdir)
    return training.read_metrics(workdir)


_WAYS: dict[str, Callable[[Path], Any]] = {
    "train": _runs.train,
    "eval": _runs.restore,
    "best": lambda workdir: _runs.restore(workdir, "best"),
    "baseline": _baseline,
}


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields cases of all faults in turn, drawn without repetition as long as there are others."""
    draw = random.Random(seed)
    pools = {fault: draw.sample(harms, len(harms)) for fault, harms in _harms().items()}
    endless = {fault: itertools.cycle(harms) for fault, harms in pools.items()}
    ways = itertools.cycle(["train", "eval", "train", "best", "baseline"])
    for number in range(count):
        fault = list(pools)[number % len(pools)]
        name, harm = next(endless[fault])
        how = next(ways)
        run = functools.partial(_attack, fault, harm, draw.randrange(2**32), how)
        yield Case(fault, f"{name}, then {how}", run)


GROUP = Group("damage", 210, cases)
