"""Where a run's numbers go: ``metrics.jsonl``, TensorBoard, a bar; the timeline of some steps."""

import json
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

import kfac
from adder_flax.errors import writing
from adder_flax.extras import needs
from adder_flax.files import append, write_whole
from adder_flax.training.setup import Run
from adder_flax.training.step import Metrics
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
    are moved to ``metrics.jsonl.aside`` on opening: nothing that was written is lost.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as workdir, MetricWriter(workdir) as writer:
      ...     writer.write(1, {"train/loss": 2.5})
      ...     read_metrics(workdir)
      [{'step': 1, 'train/loss': 2.5}]
    """

    def __init__(self, workdir: str | Path, *, start_step: int = 0, enabled: bool = True):
        self._workdir = Path(workdir)
        self._events: _Events | None = None
        if not enabled:
            return
        _set_rows_aside(self._workdir, start_step)
        with writing("metrics", workdir):
            self._add("")
            self._events = _Events(self._workdir / "tensorboard", start_step)

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
        with writing("metrics", self._workdir):
            self._add(json.dumps({"step": step, **scalars}) + "\n")
            self._events.write(step, scalars)

    def _add(self, text: str) -> None:
        # Opened each time: rows in a file that somebody moved since would be lost.
        with (self._workdir / _NAME).open("a") as file:
            file.write(text)


class _Events:
    """A file of events for TensorBoard, which forgets what earlier ones say of steps after a start.

    It is written in this thread: that of ``tensorboardX.SummaryWriter`` ends at the first failure
    without a word, and whoever hands it the eleventh event after that waits for ever.
    """

    def __init__(self, directory: Path, start_step: int):
        directory.mkdir(parents=True, exist_ok=True)
        # Its own name has whole seconds: the second of two starts within one would empty
        # the file of the first.
        self._writer = EventsWriter(str(directory / "events"), f".{time.time_ns()}")
        self._flushed = time.monotonic()
        if start_step:
            self._add(start_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(step, summary=Summary(value=values))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.write_event(Event(wall_time=time.time(), step=step, **what))


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
    ends = not kept or kept[-1].endswith(b"\n")
    if not later and not strange and ends:
        return
    with writing("metrics", workdir):
        if later or strange:
            append(aside, b"".join(line.rstrip(b"\n") + b"\n" for line in later + strange))
        # At once: a run killed here keeps its rows.
        write_whole(path, b"".join([*kept, b"" if ends else b"\n"]))
    if later or strange:
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

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info) -> None:
        self._bar.close()

    def advance(self) -> None:
        """Counts one step."""
        self._bar.update()

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


class DeferredMetrics:
    """Holds the metrics of the newest step until the next one is under way.

    Only then does the host wait for them.
    """

    def __init__(self, run: Run, writer: MetricWriter, progress: Progress, step: int):
        self._run, self._writer, self._progress = run, writer, progress
        self._newest: tuple[int, Metrics] | None = None
        self.restart_clock(step)

    def restart_clock(self, step: int) -> None:
        """Measures speed from this step on: what else took time since the last does not count."""
        self._clock = (step, time.monotonic())

    def put(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a step that was handed to the devices."""
        self._newest = (step, metrics)

    def flush(self) -> int | None:
        """Writes what was put last; returns its step where it is to stop the run, not finite."""
        if self._newest is None:
            return None
        (step, metrics), self._newest = self._newest, None
        if self._run.config.non_finite == "stop" and not metrics["finite"]:
            return step
        if step % self._run.config.log_every_steps == 0 or step == self._run.num_steps:
            self._write(step, metrics)
        return None

    def _write(self, step: int, metrics: Metrics) -> None:
        run = self._run
        optimizer = kfac.telemetry(jax.device_get(metrics["optimizer"]))
        scalars = {
            "train/loss": float(metrics["loss"]),
            **{f"train/{name}": float(value) for name, value in metrics["task"].items()},
            "train/grad_norm": float(metrics["grad_norm"]),
            "train/learning_rate": float(metrics["learning_rate"]),
            **{name: float(value) for name, value in optimizer.items()},
        }
        shown = [f"step {step}/{run.num_steps}", f"loss {scalars['train/loss']:.4f}"]
        shown += [f"{name} {scalars[f'train/{name}']:.3f}" for name in metrics["task"]]
        first, since = self._clock
        if step > first:
            rate = (step - first) * run.config.batch_size / (time.monotonic() - since)
            scalars[f"train/{run.task.unit}_per_second"] = rate
            left = tqdm.format_interval((run.num_steps - step) * run.config.batch_size / rate)
            shown += [f"{rate:.0f} {run.task.unit}/s", f"{left} left"]
        self._writer.write(step, scalars)
        self._progress.show("  ".join(shown))


class Profiler:
    """Records the timeline of a window of steps, both ends included, counted from 1 as in the log.

    XProf (``pip install xprof``, ``xprof --logdir=<directory>``) and https://ui.perfetto.dev open
    what it leaves in ``<directory>/plugins/profile/<time>``.
    """

    def __init__(self, window: Sequence[int], directory: str | Path):
        self._window, self._directory = tuple(window) or (0, 0), str(directory)
        self._recording = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._recording:
            jax.profiler.stop_trace()

    def before_step(self, step: int) -> None:
        """Starts or ends the recording where the window asks for it, after so many steps."""
        first, last = self._window
        if self._recording and step >= last:
            jax.profiler.stop_trace()
            self._recording = False
        elif first <= step + 1 <= last and not self._recording:
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self._recording = True


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
