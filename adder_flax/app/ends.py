"""How the process of a command ends: its output, and one message for what the user can mend."""

import contextlib
import logging
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator

from adder_flax.errors import RunError, first_line
from adder_flax.extras import MissingExtraError

CLOSED_PIPE = 141
"""Exit code of a Unix tool whose reader has gone: 128 + SIGPIPE."""


def prepare_output() -> None:
    """Writes every line at once, to terminals of any encoding, and no warnings for developers."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


@contextlib.contextmanager
def messages() -> Iterator[None]:
    """Ends the process at an error; what its user can mend is one message.

    With ``--verbosity=1`` the traceback comes before it; what else is wrong keeps its own.
    """
    try:
        yield
    except (RunError, MissingExtraError) as error:
        _end(str(error), getattr(error, "exit_code", 1), error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        _leave(CLOSED_PIPE)
    except KeyboardInterrupt:
        _end(
            "expected to run to the end, got SIGINT; the same command goes on from what is saved",
            130,
        )
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            reason = first_line(error)[:1000]
            _end(f"expected enough memory, got: {reason}; see what --mode=compile says", 2, error)
        traceback.print_exc()
        _leave(1)


def fitted(text: str, *, terminal: bool) -> str:
    """Returns a text whose lines fit 80 columns on a terminal; programs get it as it is."""
    if not terminal:
        return text
    wrapper = textwrap.TextWrapper(80, subsequent_indent="  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    lines = (wrapper.fill(line) if len(line) > 80 else line for line in text.split("\n"))
    return "\n".join(lines)


def _end(message: str, code: int, error: BaseException | None = None) -> None:
    if error is not None and logging.getLogger("absl").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    fit = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in message.strip())
    print(fitted(f"error: {fit}", terminal=sys.stderr.isatty()), file=sys.stderr)
    _leave(code)


def _leave(code: int) -> None:
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        # The orderly way out would wait for peers that wait for this one.
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
