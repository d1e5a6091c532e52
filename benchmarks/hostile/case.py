"""A hostile case, and the verdict on what the product made of it."""

import dataclasses
import enum
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from adder_flax import training

ROOT = Path(__file__).parents[2]


class Verdict(enum.Enum):
    """What came of a case.

    The first two are what should come, all others are faults of the product.
    """

    MESSAGE = "one message"
    RIGHT = "done right"
    ACCEPTED = "nonsense accepted"
    TRACEBACK = "traceback"
    HANG = "hang"
    CRASH = "crash"
    WRONG = "wrong values"
    LOST = "lost data"

    @property
    def sound(self) -> bool:
        """Whether the product did what it should."""
        return self in (Verdict.MESSAGE, Verdict.RIGHT)


@dataclasses.dataclass(frozen=True)
class Observed:
    """A verdict, and what a person saw: the message, or the end of the output."""

    verdict: Verdict
    seen: str = ""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of trouble: a row of the page "What can go wrong".

    Attributes:
      what: the trouble, in the words of someone who has it.
      kept: what is not lost by it.
    """

    what: str
    kept: str


@dataclasses.dataclass(frozen=True)
class Case:
    """One instance of a fault.

    Attributes:
      fault: its kind.
      name: what tells it from the others of its kind; with the group's seed it can be made again.
      run: makes the trouble and judges what comes of it. It cleans up after itself.
    """

    fault: Fault
    name: str
    run: Callable[[], Observed]


@dataclasses.dataclass(frozen=True)
class Group:
    """Cases of one kind of attack.

    Attributes:
      name: for ``--groups``.
      count: how many cases a full run has.
      cases: ``(seed, count) → cases``; the first ``count`` of them, spread over all its faults.
    """

    name: str
    count: int
    cases: Callable[[int, int], Iterator[Case]]


def judge_call(
    function: Callable[[], object], is_right: Callable[[object], Verdict | bool] | None = None
) -> Observed:
    """Calls what ``main.py`` would call, and judges how it ends.

    Args:
      function: raises ``training.RunError`` for what its user must mend: ``main.py`` makes one
        message of that and of nothing else.
      is_right: judges what the function returns; without it nothing but a message is right.
    """
    try:
        value = function()
    except training.RunError as error:
        return Observed(*_message(str(error)))
    except SystemExit as end:
        if end.code in (0, None):
            return Observed(Verdict.ACCEPTED, "ended as if all were well")
        return Observed(*_message(str(end.code).removeprefix("error: ")))
    except BaseException:
        return Observed(Verdict.TRACEBACK, traceback.format_exc()[-2000:])
    if is_right is None:
        return Observed(Verdict.ACCEPTED, repr(value)[:200])
    verdict = is_right(value)
    if isinstance(verdict, Verdict):
        return Observed(verdict)
    return Observed(Verdict.RIGHT if verdict else Verdict.WRONG)


def judge_process(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    is_right: Callable[[str], Verdict | bool] | None = None,
    exit_codes: Sequence[int] = (),
    **options,
) -> Observed:
    """Runs Python with these arguments in a process of its own, and judges how it ends.

    Args:
      arguments: of ``python``.
      env: variables that are set beside those of this process; "" removes one.
      timeout: seconds after which it hangs.
      is_right: judges the output of a process that ends with 0; without it nothing but a message is
        right.
      exit_codes: further codes with which it may end without a message, such as 128 + a signal that
        was sent.
      **options: of ``subprocess.run``.
    """
    environment = {
        k: v for k, v in (os.environ | dict(env or {})).items() if v or k not in (env or {})
    }
    options = {"cwd": ROOT, "stdin": subprocess.DEVNULL} | options
    if "stdout" not in options:
        options["stdout"] = subprocess.PIPE
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=environment,
            stderr=subprocess.PIPE,
            timeout=timeout,
            **options,
        )
    except subprocess.TimeoutExpired:
        return Observed(Verdict.HANG, f"no end after {time.monotonic() - began:.0f} s")
    out, err = ((stream or b"").decode(errors="replace") for stream in (done.stdout, done.stderr))
    if "Traceback (most recent call last)" in out + err:
        return Observed(Verdict.TRACEBACK, (out + err)[-2000:])
    if done.returncode < 0 or done.returncode in (134, 135, 136, 139):
        return Observed(Verdict.CRASH, f"exit code {done.returncode}: {err[-500:]}")
    if done.returncode == 0 or done.returncode in exit_codes:
        if is_right is None:
            return Observed(Verdict.ACCEPTED, (out + err)[-500:])
        verdict = is_right(out)
        return Observed(
            verdict
            if isinstance(verdict, Verdict)
            else [Verdict.WRONG, Verdict.RIGHT][bool(verdict)]
        )
    _, error, message = (
        err.rpartition("\nerror: ") if "\nerror: " in err else err.rpartition("error: ")
    )
    if not error:
        return Observed(
            Verdict.TRACEBACK, f"exit code {done.returncode} without a message: {err[-500:]}"
        )
    if err.startswith("error: ") + err.count("\nerror: ") > 1:
        return Observed(Verdict.TRACEBACK, f"several messages: {err[-1000:]}")
    return Observed(*_message(message))


def _message(text: str) -> tuple[Verdict, str]:
    """Judges a message: says what was expected, of one screen, without a traceback or control
    characters in it."""
    text = text.rstrip("\n")
    if not text.strip() or "Traceback" in text:
        return Verdict.TRACEBACK, text[-2000:]
    if "expected" not in text.lower():
        return Verdict.TRACEBACK, f"another library's words alone: {text}"
    if len(text) > 4000 or any(ord(c) < 32 and c not in "\n\t" for c in text):
        return Verdict.TRACEBACK, f"not fit for a terminal ({len(text)} characters): {text[:500]!r}"
    return Verdict.MESSAGE, text
