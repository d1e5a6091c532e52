"""Metrics of training steps, written one step late."""

import time

import jax

import kfac
from adder_flax.training.metrics import MetricWriter, Progress
from adder_flax.training.setup import Run
from adder_flax.training.step import Metrics


class DeferredMetrics:
    """Holds the metrics of the newest step until the next one is under way.

    Only then does the host wait for them.

    Args:
      run: whose steps they are.
      writer: takes the numbers of logged steps.
      progress: shows them.
      step: where the run starts or resumes.
    """

    def __init__(self, run: Run, writer: MetricWriter, progress: Progress, step: int):
        self._run, self._writer, self._progress = run, writer, progress
        self._newest: tuple[int, Metrics] | None = None
        self.restart_clock(step)

    def restart_clock(self, step: int) -> None:
        """Measures speed from this step on.

        What else took time since the last one does not count.
        """
        self._clock = (step, time.monotonic())

    def is_logged(self, step: int) -> bool:
        """Whether the numbers of a step are written."""
        return step % self._run.config.log_every_steps == 0 or step == self._run.num_steps

    def put(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a step that was handed to the devices."""
        self._newest = (step, metrics)

    def flush(self) -> int | None:
        """Fetches what was put last and writes it.

        Returns:
          The number of that step where it was not finite and the run is to stop at such steps.
        """
        if self._newest is None:
            return None
        (step, metrics), self._newest = self._newest, None
        if self._run.config.non_finite == "stop" and not metrics["finite"]:
            return step
        if self.is_logged(step):
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
            **{name: float(value) for name, value in (optimizer | metrics["diagnostics"]).items()},
        }
        shown = [f"step {step}/{run.num_steps}", f"loss {scalars['train/loss']:.4f}"]
        shown += [f"{name} {scalars[f'train/{name}']:.3f}" for name in metrics["task"]]
        first, since = self._clock
        if step > first:
            rate = (step - first) * run.config.batch_size / (time.monotonic() - since)
            scalars[f"train/{run.task.unit}_per_second"] = rate
            remaining = _duration((run.num_steps - step) * run.config.batch_size / rate)
            shown += [f"{rate:.0f} {run.task.unit}/s", f"{remaining} left"]
        self._writer.write(step, scalars)
        self._progress.show("  ".join(shown))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
