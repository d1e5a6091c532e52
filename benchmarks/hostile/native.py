"""Damage to the cache of native kernels and to the compiler that fills it; each case is a process
of its own."""

import functools
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from adder_flax.ops import _cpu
from benchmarks.hostile._weights import spread
from benchmarks.hostile.case import Case, Fault, Group, Observed, Verdict, judge_process

_PRODUCT = (
    "import logging, jax.numpy as jnp; from adder_flax import ops; "
    "print(ops.backend_report().splitlines()[0], ops.adder_matmul(jnp.ones((2, 3)), jnp.zeros((3, "
    "1))).ravel())"
)
_STRANGER = 12345
_KEPT = "nothing there is needed: the kernels are compiled anew, or XLA computes"


@functools.cache
def _kernels() -> bytes:
    return _cpu._compile(_cpu.find_compiler())


def _compiler(folder: Path, does: str) -> None:
    """Puts a compiler before all others."""
    path = folder / "bin" / "c++"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\nfor last; do :; done\n{does}\n'
    )
    path.chmod(0o755)


def _judge(folder: Path, backend: str) -> Observed:
    """Runs the product with the cache and the compiler of a folder: right numbers from the backend
    that is expected."""
    environment = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
        "JAX_PLATFORMS": "cpu",
    }
    (folder / "tmp").mkdir(exist_ok=True)

    def is_right(output: str) -> bool:
        return f"ops backend: {backend} on cpu" in output and "[-3. -3.]" in output

    return judge_process(["-c", _PRODUCT], env=environment, is_right=is_right, timeout=120)


def _damaged(
    damage: Callable[[np.random.Generator, Path], None], seed: int, index: int
) -> Observed:
    rng = np.random.default_rng((seed, index))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "library").write_bytes(_kernels())
        _compiler(folder, f'cp {folder}/library "$last"')
        first = _judge(folder, "cpu_native")
        files = list((folder / "cache" / "adder_flax").iterdir())
        if first.verdict is not Verdict.RIGHT or len(files) != 1:
            return Observed(Verdict.WRONG, f"before any damage: {first}")
        damage(rng, files[0])
        return _judge(folder, "cpu_native")


def _truncated(rng: np.random.Generator, path: Path) -> None:
    os.truncate(path, int(rng.integers(0, path.stat().st_size)))


def _bits(rng: np.random.Generator, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def _garbage(rng: np.random.Generator, path: Path) -> None:
    path.write_bytes(rng.bytes(int(rng.integers(0, 10_000))))


def _others(rng: np.random.Generator, path: Path) -> None:
    where = path if rng.random() < 0.5 else path.parent
    if os.geteuid() == 0 and rng.random() < 0.5:
        os.chown(where, _STRANGER, _STRANGER)
    else:
        where.chmod(
            stat.S_IMODE(where.stat().st_mode) | (stat.S_IWGRP, stat.S_IWOTH)[rng.integers(2)]
        )


def _no_file(rng: np.random.Generator, path: Path) -> None:
    kind, moved = rng.integers(5), path.with_name("moved")
    path.rename(moved)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(rng.choice(["/dev/zero", "moved", path.name, "/bin/sh"]))
    elif kind == 3:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        shutil.rmtree(path.parent)
        path.parent.write_text("no folder")


_DAMAGES = {
    "a cached library that ends early": _truncated,
    "flipped bits in a cached library": _bits,
    "garbage in place of a cached library": _garbage,
    "a cached library or its folder that others own or may write to": _others,
    "a FIFO, folder, link, socket in place of a cached library, or a file in place of its "
    "folder": _no_file,
}
_COMPILERS = (
    "exit 1",
    'echo broken > "$last"',
    "exit 0",
    'head -c 9000 LIBRARY > "$last"',
    "head -c 3000000 /dev/urandom; exit 1",
    "kill -9 $$",
    'mkdir "$last"',
    'mkfifo "$last"',
    'printf "\\033[31mTraceback"; exit 7',
    'ln -s "$last" "$last"',
    'cp /bin/sh "$last"',
    "exec no-such-program",
)


def _faulty_compiler(seed: int, index: int) -> Observed:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "library").write_bytes(_kernels())
        _compiler(
            folder, _COMPILERS[index % len(_COMPILERS)].replace("LIBRARY", f"{folder}/library")
        )
        return _judge(folder, "xla")


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields damaged caches and compilers."""
    kinds = [
        (Fault(what, _KEPT), functools.partial(_damaged, damage, seed + place))
        for place, (what, damage) in enumerate(_DAMAGES.items())
    ]
    faulty = Fault("a compiler that fails, dies, or makes what is no library", _KEPT)
    return spread([*kinds, (faulty, functools.partial(_faulty_compiler, seed))], count)


GROUP = Group("native", 72, cases)
