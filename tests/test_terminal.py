"""How a process ends: by a signal at any moment, an error, or output that nobody takes; in one line
at most."""

import re
import signal
import subprocess
import sys

import pytest

from tests.processes import ROOT

_PREPARE = (
    "from adder_flax import interrupt; interrupt.end_at_signals()\nfrom adder_flax import "
    "terminal\n"
)
_PREPARE += "terminal.prepare()\n"


def run(code, **options):
    options = {"stdout": subprocess.PIPE} | options
    return subprocess.run(
        [sys.executable, "-c", _PREPARE + code],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        **options,
    )


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "busy",
    ["import time; time.sleep(60)", "import hashlib; hashlib.pbkdf2_hmac('md5', b'', b'', 10**9)"],
)
def test_a_signal_that_nobody_expects_ends_at_once(number, busy):
    code = f"print('ready', flush=True)\nwith terminal.messages():\n    {busy}"
    with subprocess.Popen(
        [sys.executable, "-c", _PREPARE + code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()
        process.send_signal(number)
        try:
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert errors.count("\n") == 1
    assert errors.startswith(f"{number.name}: ended at once")


def test_a_run_may_hold_one_signal_and_no_second():
    hold = (
        "import os, signal, time\nwith interrupt.InterruptWatch() as watch:\n    watch.hold_one()\n"
    )
    send = "    os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.5)\n"
    once, twice = run(hold + send + "print(watch.signal.name)"), run(hold + send + send)
    assert (once.returncode, once.stdout) == (0, "SIGHUP\n")
    assert twice.returncode == 128 + signal.SIGHUP
    assert twice.stderr.startswith("SIGHUP: ended at once")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            "OSError(28, 'No space left on device')",
            2,
            "error: expected room on the disk, .*No space left",
        ),
        ("OSError(5, 'Input/output error')", 2, "error: expected files .*Input/output"),
        ("MemoryError()", 2, "error: expected enough memory"),
        (
            "terminal.RunError('expected a, got b\\x1b[31m')",
            2,
            r"error: expected a, got b\\x1b\[31m",
        ),
        ("KeyboardInterrupt()", 130, "error: .*SIGINT"),
        (
            "RuntimeError('can\\'t start new thread')",
            2,
            "error: expected enough memory and threads",
        ),
        (
            "type('JaxRuntimeError', (RuntimeError,), {})('INTERNAL: lost\\nstack')",
            1,
            "error: expected devices .*lost;",
        ),
    ],
)
def test_an_error_is_the_last_line(error, code, words):
    done = run(
        "import atexit; atexit.register(print, 'later')\nwith terminal.messages():\n    raise "
        f"{error}"
    )
    assert done.returncode == code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert re.match(words, done.stderr)


def test_what_is_no_mistake_of_the_user_keeps_its_traceback():
    done = run("with terminal.messages():\n    [][1]")
    assert done.returncode == 1
    assert "IndexError" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_python_ends_is_not_taken_for_a_crash(number):
    late = (
        "import os\nclass Late:\n    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, "
        f"{int(number)})\n"
    )
    done = run(f"{late}kept = Late()\nprint('all is saved')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "all is saved\n", "")


def test_tasks_that_fail_beside_the_one_that_is_waited_for_say_nothing():
    """Of many arrays that cannot be read, one is the error; asyncio logs the others with their
    tracebacks."""
    code = """
import asyncio
async def fail():
    raise ValueError("an array")
async def read():
    tasks = [asyncio.create_task(fail()) for _ in range(3)]
    await asyncio.sleep(0)
    await tasks[0]
try:
    asyncio.run(read())
except ValueError as error:
    print(error)
"""
    assert (done := run(code)).stdout == "an array\n"
    assert done.stderr == ""


def test_output_that_nobody_takes_is_one_message_or_none():
    code = "with terminal.messages():\n    for i in range(10**5): print('word' * 10)"
    with open("/dev/full", "w") as full:
        done = run(code, stdout=full)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: expected to write to the standard output, got: [Errno 28] No space left on device; "
        "send it elsewhere, the same command goes on"
    ]
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        done = run(code, stdout=reader.stdin)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_an_ascii_terminal_is_written_to(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run("print('3 × 5 µJ ― √2 \\udcff 字')")
    assert (done.returncode, done.stdout) == (0, "3 x 5 uJ - sqrt2 ? ?\n")
