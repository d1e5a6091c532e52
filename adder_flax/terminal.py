"""The process of a command: its output on any terminal, and its end in one message."""

import codecs
import contextlib
import errno
import io
import os
import sys
import threading
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from logging import LogRecord
from typing import Any

from adder_flax.errors import RunError, first_line
from adder_flax.extras import needs

with needs("train"):
    from absl import logging

CLOSED_PIPE = 141
"""Exit code of a Unix tool whose reader has gone: 128 + SIGPIPE."""

_ASCII = {
    "×": "x",
    "→": "->",
    "―": "-",
    "–": "-",
    "—": "-",
    "…": "...",
    "·": "*",
    "≥": ">=",
    "≤": "<=",
    "−": "-",
    "√": "sqrt",
}
_FAILURES: dict[str, Callable[[Exception], str]] = {}


class _Output(io.TextIOWrapper):
    """A text stream whose failures are errors of the run, and which writes every line at once."""

    def write(self, text: str) -> int:
        with _output_errors(self):
            return super().write(text)

    def flush(self) -> None:
        with _output_errors(self):
            super().flush()


class _ReaderGoneError(Exception):
    """The other end of a pipe was closed."""


@contextlib.contextmanager
def _output_errors(stream: io.TextIOWrapper) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):  # what is left in the buffer must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise _ReaderGoneError from error
        raise RunError(
            f"expected to write to the standard output, got: {error}; send it elsewhere, the same "
            "command goes on"
        ) from error


def plainer(error: UnicodeError) -> tuple[str, int]:
    """Stands in for characters that a terminal does not have, as an error handler of codecs.

    Example:
      >>> codecs.register_error("plainer", plainer)
      >>> "3 × 5 µs é".encode("ascii", "plainer")
      b'3 x 5 us e'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_plain(c) for c in error.object[error.start : error.end]), error.end


def _plain(character: str) -> str:
    text = (
        _ASCII.get(character)
        or unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    )
    return {"μ": "u", "µ": "u"}.get(character) or text or "?"


def prepare() -> None:
    """Makes the standard streams fit for any terminal.

    None of what they meet ends in a traceback.
    """
    codecs.register_error("plainer", plainer)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    streams: Any = sys  # which the library's types let be any that are written to
    sys.stdout = _Output(
        streams.stdout.detach(), sys.stdout.encoding, "plainer", line_buffering=True
    )
    streams.stderr.reconfigure(errors="plainer", line_buffering=True)
    # Threads that write behind a run's back complain to whoever waits for them; warnings are for
    # developers.
    threading.excepthook = lambda args: logging.warning(
        "%s: %s", args.thread and args.thread.name, args.exc_value
    )
    sys.unraisablehook = lambda unraisable: logging.debug("ignored: %s", unraisable.exc_value)
    logging.use_absl_handler()
    logging.get_absl_handler().addFilter(_is_for_users)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _is_for_users(record: LogRecord) -> bool:
    """Leaves out what a library says of an exception that it raises as well."""
    return not record.exc_info or logging.get_verbosity() >= logging.DEBUG


def explain_failures(explain: Callable[[Exception], str]) -> None:
    """Lets a function make the message of a failure that nothing else explains.

    It makes "" where it cannot either.
    """
    _FAILURES["explain"] = explain


@contextlib.contextmanager
def messages() -> Iterator[None]:
    """Ends the process at an error.

    It gives one message where the user can mend the error, and nothing comes after that.

    It does not wait for threads or for other processes, which notice and end too: the orderly way
    out would wait for peers that wait for this one. With ``--verbosity=1`` the traceback comes
    before the message.
    """
    try:
        yield
    except _ReaderGoneError:
        os._exit(CLOSED_PIPE)
    except RunError as error:
        end(str(error), error.exit_code, error)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            end(
                f"expected room on the disk, got: {error}; free some space, the same command goes "
                "on",
                2,
                error,
            )
        end(
            f"expected files and devices that can be used, got: {error}; mend that and run the "
            "command again",
            2,
            error,
        )
    except MemoryError as error:
        end(
            f"expected enough memory, got none ({first_line(error)}); see what --mode=compile says",
            2,
            error,
        )
    except KeyboardInterrupt:
        end(
            "expected to run to the end, got SIGINT; the same command goes on from what was saved",
            130,
        )
    except Exception as error:
        reason = first_line(error)[:1000]
        if "RESOURCE_EXHAUSTED" in str(error) or "std::bad_alloc" in str(error):
            end(f"expected enough memory, got: {reason}; see what --mode=compile says", 2, error)
        if "can't start new thread" in str(error):
            end(
                f"expected enough memory and threads, got: {reason}; raise limits (ulimit -v, -u) "
                "or leave more",
                2,
                error,
            )
        if explained := _FAILURES.get("explain", lambda error: "")(error):
            end(explained, 1, error)
        # Of XLA and the devices; JAX need not have been imported.
        if type(error).__name__ == "JaxRuntimeError":
            end(
                f"expected devices that compute, got: {reason}; see to them, the same command goes "
                "on",
                1,
                error,
            )
        _leave(traceback.format_exc(), 1)


def end(message: str, code: int, error: BaseException | None = None) -> None:
    """Ends the process with a message."""
    if error is not None and logging.get_verbosity() >= logging.DEBUG:
        traceback.print_exception(error)
    _leave(
        "error: "
        + "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in message.strip()),
        code,
    )


def _leave(text: str, code: int) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        logging.flush()
        print(text, file=sys.stderr, flush=True)
    os._exit(code)
