"""How the process of a command begins and ends: one message for what its user can mend."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adder_flax.app.ends import fitted
from tests.processes import ROOT

_PREPARE = "from adder_flax.app import ends\nends.prepare_output()\n"


def run(code, **options):
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60) | options
    return subprocess.run([sys.executable, "-c", _PREPARE + code], cwd=ROOT, **options)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        ("ends.RunError('expected a, got b\\x1b[31m')", 2, r"error: expected a, got b\\x1b\[31m"),
        ("ends.MissingExtraError('expected a, got none')", 1, "error: expected a, got none"),
        ("KeyboardInterrupt()", 130, "error: .*SIGINT; the same command goes on"),
        (
            *("RuntimeError('RESOURCE_EXHAUSTED: out of memory\\nstack')", 2),
            "error: expected enough memory, got: .*out of memory; see what --mode=compile says",
        ),
    ],
)
def test_what_a_user_can_mend_is_the_last_line(error, code, words):
    done = run(f"with ends.messages():\n    raise {error}")
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    assert re.match(words, done.stderr)


def test_what_is_no_mistake_of_the_user_keeps_its_traceback():
    done = run("with ends.messages():\n    [][1]")
    assert done.returncode == 1
    assert "IndexError" in done.stderr


def test_output_whose_reader_has_gone_ends_without_a_word():
    code = "with ends.messages():\n    for i in range(10**5): print('word' * 10)"
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        done = run(code, stdout=reader.stdin)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_an_ascii_terminal_is_written_to(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert run("print('3 × 5 \\udcff')").stdout == "3 \\xd7 5 \\udcff\n"


@pytest.mark.parametrize(("users", "expected"), [(None, "1"), ("3", "3")])
def test_the_process_is_prepared_before_anything_slow_is_imported(monkeypatch, users, expected):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if users:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", users)
    code = """
import os, sys
from adder_flax import app
told = lambda: f"{os.environ['OPENBLAS_NUM_THREADS']} {'numpy' in sys.modules}"
app.use_huge_pages = lambda: sys.exit(told())
app.main()"""
    assert run(code).stderr.split() == [expected, "False"]


_GRANTED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not _GRANTED.exists()
    or "[madvise]" not in _GRANTED.read_text()
    or any(Path("/dev").glob("nvidia[0-9]*")),
    reason="huge pages are not on request here",
)
def test_with_huge_pages_the_command_line_is_executed_again_once(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    code = """
import os
print(os.getpid(), flush=True)
from adder_flax import app
app.use_huge_pages()
print(os.environ["GLIBC_TUNABLES"])"""
    first, again, wish = run(code).stdout.splitlines()
    assert (first, wish) == (again, "glibc.malloc.hugetlb=1")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert len(run(code).stdout.splitlines()) == 2


def test_lines_fit_a_terminal_and_lose_no_word():
    text = "a\n" + "word " * 30 + "--config.optimizer.learning_rate=1e-3\n| table |"
    lines = fitted(text, terminal=True).split("\n")
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split() == text.split()
    assert (lines[0], lines[-1]) == ("a", "| table |")
    assert fitted(text, terminal=False) == text
