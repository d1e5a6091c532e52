"""What one sees of a run while it trains: numbers, a bar, times, the timeline of some steps."""

import time
from collections.abc import Sequence
from pathlib import Path

import jax

import kfac
from adder_flax.extras import needs
from adder_flax.training.metrics import MetricWriter
from adder_flax.training.setup import Run
from adder_flax.training.step import Metrics

with needs("train"):
    from tqdm import tqdm


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
