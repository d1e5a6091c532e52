"""Where a run's numbers go: ``metrics.jsonl``, TensorBoard, a bar; the timeline of some steps."""

import json
import re
import resource
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from adder_flax.errors import writing
from adder_flax.extras import needs
from adder_flax.files import append, write_whole
from adder_flax.training.workdir import read_file

with needs("train"):
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
    from tqdm import tqdm

_NAME = "metrics.jsonl"
_FLUSH_SECONDS = 120  # as long may TensorBoard wait for an event


class MetricWriter:
    """Writes scalars by step to ``<workdir>/metrics.jsonl`` and TensorBoard events.

    A resumed run repeats the steps after its checkpoint. Their rows, and lines that are no rows,
    are moved to ``metrics.jsonl.aside`` on opening: nothing that was written is lost. TensorBoard
    is told to forget what earlier files say of these steps.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as workdir, MetricWriter(workdir) as writer:
      ...     writer.write(1, {"train/loss": 2.5})
      ...     read_metrics(workdir)
      [{'step': 1, 'train/loss': 2.5}]
    """

    def __init__(self, workdir: str | Path, *, start_step: int = 0, enabled: bool = True):
        self._workdir = Path(workdir)
        self._events: EventsWriter | None = None
        if not enabled:
            return
        _set_rows_aside(self._workdir, start_step)
        folder, self._flushed = self._workdir / "tensorboard", time.monotonic()
        with writing("metrics", workdir):
            self._add("")
            folder.mkdir(parents=True, exist_ok=True)
            # In this thread: that of tensorboardX.SummaryWriter ends at the first failure without
            # a word, and whoever hands it the eleventh event after that waits for ever. Its own
            # name has whole seconds: the second of two starts within one would empty the file of
            # the first.
            self._events = events = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
            if start_step:
                began = SessionLog(status=SessionLog.START)
                events.write_event(_event(start_step + 1, session_log=began))

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._events is not None:
            try:
                self._events.close()
            except OSError as error:
                logging.warning("The last events for TensorBoard could not be written: %s", error)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one row; values are plain floats."""
        if self._events is None:
            return
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        with writing("metrics", self._workdir):
            self._add(json.dumps({"step": step, **scalars}) + "\n")
            self._events.write_event(_event(step, summary=Summary(value=values)))
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._events.flush()
                self._flushed = time.monotonic()

    def _add(self, text: str) -> None:
        # Opened each time: rows in a file that somebody moved since would be lost.
        with (self._workdir / _NAME).open("a") as file:
            file.write(text)


def _event(step: int, **what: Any) -> Event:
    return Event(wall_time=time.time(), step=step, **what)


def read_metrics(workdir: str | Path) -> list[dict[str, float]]:
    """Returns the rows of ``metrics.jsonl``; a line cut short by a crash, say, is left out."""
    return [row for line in _lines(Path(workdir)) if (row := _row(line)) is not None]


def _lines(workdir: Path) -> list[bytes]:
    # Not splitlines: it would split at characters that JSON allows in a text.
    return [line for line in re.split(rb"(?<=\n)", read_file(workdir / _NAME) or b"") if line]


def _row(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line)
        numbers = isinstance(row, dict) and all(
            type(value) in (int, float) for value in row.values()
        )
        return row if numbers and type(row["step"]) is int else None
    except (ValueError, KeyError, RecursionError):
        return None


def _set_rows_aside(workdir: Path, start_step: int) -> None:
    path, aside = workdir / _NAME, workdir / f"{_NAME}.aside"
    kept, later, strange = [], [], []
    for line in _lines(workdir):
        row = _row(line)
        (strange if row is None else kept if row["step"] <= start_step else later).append(line)
    moved = later + strange
    ends = not kept or kept[-1].endswith(b"\n")
    if ends and not moved:
        return
    with writing("metrics", workdir):
        if moved:
            append(aside, b"".join(line.rstrip(b"\n") + b"\n" for line in moved))
        # At once: a run killed here keeps its rows.
        write_whole(path, b"".join([*kept, b"" if ends else b"\n"]))
    if moved:
        logging.warning(
            "%s: %d rows after step %d, which are repeated, and %d lines that are no rows are now "
            "in %s",
            *(path, len(later), start_step, len(strange), aside),
        )


class Progress:
    """A progress bar on a terminal, plain lines elsewhere.

    Of several hosts the first alone has it ``enabled``.
    """

    def __init__(self, num_steps: int, start_step: int = 0, *, enabled: bool = True):
        self._enabled = enabled
        self._bar = tqdm(
            total=num_steps,
            initial=start_step,
            unit="step",
            dynamic_ncols=True,
            smoothing=0.1,
            disable=None if enabled else True,  # None: where there is no terminal
        )
        self.advance, self.close = self._bar.update, self._bar.close

    interval = staticmethod(tqdm.format_interval)

    def show(self, text: str) -> None:
        """Shows the newest training numbers: beside the bar, or as a line of their own."""
        if self._bar.disable:
            self.line(text)
        else:
            self._bar.set_postfix_str(text)

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        if self._enabled:
            tqdm.write(text)


def profiled(steps: Iterable[int], window: Sequence[int], directory: Path) -> Generator[int]:
    """Yields steps, and records the timeline of a window of them.

    Both its ends are included, and counted from 1 as in the log. XProf (``pip install xprof``,
    ``xprof --logdir=<directory>``) and https://ui.perfetto.dev open what is left in
    ``<directory>/plugins/profile/<time>``.
    """
    first, last = window or (0, 0)
    recording = False
    try:
        for step in steps:
            if recording and step >= last:
                jax.profiler.stop_trace()
                recording = False
            elif first <= step + 1 <= last and not recording:
                jax.profiler.start_trace(str(directory), create_perfetto_trace=True)
                recording = True
            yield step
    finally:
        if recording:
            jax.profiler.stop_trace()


def peak_memory() -> int:
    """Returns the most bytes in use at once so far: on the fullest device, on CPU in the process.

    >>> peak_memory() > 2**20
    True
    """
    on_devices = [device.memory_stats() for device in jax.local_devices()]
    if all(on_devices):
        return max(stats["peak_bytes_in_use"] for stats in on_devices)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
