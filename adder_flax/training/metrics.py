"""Where a run's numbers go: ``metrics.jsonl``, TensorBoard events, and the terminal."""

import contextlib
import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import tensorboardX
from tqdm import tqdm

from adder_flax.errors import writing


class MetricWriter:
    """Writes scalars by step to ``<workdir>/metrics.jsonl`` and TensorBoard events.

    A resumed run repeats the steps after its checkpoint, so rows after ``start_step`` are dropped on opening.

    Args:
      workdir: directory of the run.
      start_step: the step that the run starts or resumes from.
      enabled: False on every host but the first.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as workdir, MetricWriter(workdir) as writer:
      ...     writer.write(1, {"train/loss": 2.5})
      ...     read_metrics(workdir)
      [{'step': 1, 'train/loss': 2.5}]
    """

    def __init__(self, workdir: str | Path, *, start_step: int = 0, enabled: bool = True):
        self._workdir = Path(workdir)
        self._file = self._events = None
        if not enabled:
            return
        path = self._workdir / "metrics.jsonl"
        kept = [row for row in read_metrics(workdir) if row["step"] <= start_step]
        whole = path.with_suffix(".jsonl.part")
        with writing("metrics", workdir):
            whole.write_text("".join(json.dumps(row) + "\n" for row in kept))
            whole.replace(path)  # at once: a run killed here keeps its log
            self._file = path.open("a", buffering=1)
        self._events = tensorboardX.SummaryWriter(
            str(self._workdir / "tensorboard"), purge_step=start_step + 1 if start_step else None
        )

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._file is not None:
            # Every row was written at once: what cannot be written now was complained of then.
            with contextlib.suppress(OSError):
                self._file.close()
            self._events.close()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one row; values are plain floats.

        Raises:
          RunError: it could not be written (a full disk, say).
        """
        if self._file is None:
            return
        with writing("metrics", self._workdir):
            self._file.write(json.dumps({"step": step, **scalars}) + "\n")
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)


def read_metrics(workdir: str | Path) -> list[dict[str, float]]:
    """Returns the rows of ``metrics.jsonl``; a last line cut short by a crash is left out."""
    path = Path(workdir) / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class Progress:
    """A progress bar on a terminal, plain lines elsewhere.

    Args:
      num_steps: steps of the whole run.
      start_step: where it starts or resumes.
      enabled: False on every host but the first.
    """

    def __init__(self, num_steps: int, start_step: int = 0, *, enabled: bool = True):
        self._enabled = enabled
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=num_steps, initial=start_step, unit="step", dynamic_ncols=True, smoothing=0.1)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self) -> None:
        """Counts one step."""
        if self._bar is not None:
            self._bar.update()

    def show(self, text: str) -> None:
        """Shows the newest training numbers: beside the bar, or as a line of their own."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            self.line(text)

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        if self._enabled:
            tqdm.write(text)


def peak_memory() -> int:
    """Returns the most bytes that were in use at once so far: on the fullest device, or in this process on CPU.

    Example:
      >>> peak_memory() > 2**20
      True
    """
    on_devices = [device.memory_stats() for device in jax.local_devices()]
    if all(on_devices):
        return max(stats["peak_bytes_in_use"] for stats in on_devices)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
