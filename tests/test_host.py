"""Threads and memory in huge pages, in processes of their own, which ask when they start."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

_PREPARED = """
import os, resource, sys
from pathlib import Path
from adder_flax import host

host._PAGES = Path(sys.argv[1])
host._ACCELERATORS = sys.argv[2:]
"""
_ASKS = f"""{_PREPARED}
print("once or twice")
host.use_huge_pages()
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), *sys.argv[2:])
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = bytearray(2**28)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_STARTS = f"""{_PREPARED}
from adder_flax import start

def told(path, line):
    sys.exit(f"{{line == [path, *sys.orig_argv[1:]]}} {{'jax' in sys.modules}}")

os.execv = told
start.main()
"""
_THREADS = """
import os, sys
from adder_flax import host, start

host.use_huge_pages = lambda: sys.exit(
    f"{os.environ['OPENBLAS_NUM_THREADS']} {'numpy' in sys.modules}"
)
start.main()
"""
_WISH = "glibc.malloc.hugetlb=1"
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="a setting of the GNU C library"
)


def run(program: str, *arguments: str, tunables: str | None = None) -> tuple[int, list[str], str]:
    """Returns the number of the process, the lines that it printed, and its errors."""
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if tunables is not None:
        environment["GLIBC_TUNABLES"] = tunables
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        printed, errors = process.communicate()
    return process.pid, printed.splitlines(), errors


@pytest.fixture
def pages(tmp_path):
    """Writes what a system says of huge pages, and returns where."""

    def write(text: str) -> str:
        path = tmp_path / "enabled"
        path.write_text(text, encoding="ascii")
        return str(path)

    return write


@pytest.mark.parametrize("tunables", [None, "", "glibc.malloc.check=0"])
def test_the_process_starts_anew_with_its_command_line_under_its_number(pages, tunables):
    where = pages("always [madvise] never\n")
    number, printed, _ = run(_ASKS, where, "no such device", tunables=tunables)
    wish = f"glibc.malloc.check=0:{_WISH}" if tunables else _WISH
    assert printed[:-1] == ["once or twice"] * 2 + [f"{number} {wish} no such device"]


@pytest.mark.parametrize(
    ("says", "tunables", "devices"),
    [
        ("always madvise [never]", None, ()),
        ("[always] madvise never", None, ()),
        ("[madvise]", "glibc.malloc.hugetlb=0", ()),
        ("[madvise]", None, ("null",)),
        (None, None, ()),
    ],
    ids=["none are granted", "all are huge", "the user said", "an accelerator", "unknown"],
)
def test_nothing_happens_where_it_would_not_help(pages, says, tunables, devices):
    where = "no such file" if says is None else pages(says)
    number, printed, _ = run(_ASKS, where, *devices, tunables=tunables)
    assert printed[:-1] == ["once or twice", " ".join([str(number), str(tunables), *devices])]


def test_what_comes_from_a_pipe_or_is_refused_goes_on(pages):
    program = _ASKS.replace("sys.argv[1]", repr(pages("[madvise]"))).replace("sys.argv[2:]", "()")
    done = subprocess.run(
        [sys.executable, "-"], input=program, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("once or twice\n")
    assert done.stdout.count("once") == 1
    assert len(done.stdout.splitlines()) == 3
    refused = f"{_PREPARED}\nsys.executable = '/no/such/program'\n"
    _, printed, errors = run(_ASKS.replace(_PREPARED, refused), pages("[madvise]"))
    assert (len(printed), errors) == (3, "")


@pytest.mark.skipif(
    not _PAGES.exists() or "[madvise]" not in _PAGES.read_text(), reason="not on request here"
)
def test_a_block_is_mapped_in_huge_pages():
    _, printed, _ = run(_ASKS, str(_PAGES))
    assert int(printed[-1]) < 2**28 / 4096 / 16  # of 65,536 pages, or of 128 huge ones


def test_the_command_asks_before_it_imports_anything_slow(pages):
    _, _, errors = run(_STARTS, pages("[madvise]"))
    assert errors.split() == ["True", "False"]


@pytest.mark.parametrize(("users", "expected"), [(None, "1"), ("3", "3")])
def test_the_command_leaves_cores_to_xla_before_openblas_is_loaded(monkeypatch, users, expected):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if users:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", users)
    _, _, errors = run(_THREADS)
    assert errors.split() == [expected, "False"]
