"""Checkpoints of a run: the only module that calls Orbax.

A checkpoint is the train state as plain nested dicts under ``<workdir>/checkpoints/<step>``. The newest ones and the
one with the best evaluation accuracy are kept. Writing happens on a background thread.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from adder_flax.errors import RunError, writing

_ACCURACY = "eval/accuracy"


class Checkpoints:
    """The checkpoints in one directory.

    Args:
      directory: created if it does not exist.
      keep_last: how many of the newest are kept beside the best one.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory, Checkpoints(directory) as checkpoints:
      ...     checkpoints.save(7, {"step": jax.numpy.int32(7)}, accuracy=0.5)
      ...     checkpoints.wait()
      ...     checkpoints.steps
      [7]
    """

    def __init__(self, directory: str | Path, *, keep_last: int = 1):
        self._directory = Path(directory).absolute()
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics[_ACCURACY], n=1, keep_checkpoints_without_metrics=False
        )
        self._checkpointer = ocp.training.Checkpointer(
            self._directory,
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep_last), best]),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc_info) -> None:
        with writing("a checkpoint", self._directory):
            self._checkpointer.close()

    @property
    def steps(self) -> list[int]:
        """Steps that can be loaded, in order."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def accuracy(self, step: int) -> float | None:
        """Evaluation accuracy saved with a checkpoint, or None where it was not evaluated."""
        metrics = next(c.metrics for c in self._checkpointer.checkpoints if c.step == step)
        return metrics[_ACCURACY] if metrics else None

    @property
    def best_step(self) -> int | None:
        """Step of the checkpoint with the highest evaluation accuracy."""
        scored = [(self.accuracy(step), step) for step in self.steps if self.accuracy(step) is not None]
        return max(scored)[1] if scored else None

    def save(self, step: int, state: Any, *, accuracy: float | None = None) -> None:
        """Starts writing a checkpoint; returns once the state may be donated again.

        Raises:
          RunError: this or the previous checkpoint could not be written (a full disk, say).
        """
        metrics = {_ACCURACY: accuracy} if accuracy is not None else None
        with writing("a checkpoint", self._directory):
            self._checkpointer.save_async(step, state, force=True, overwrite=True, metrics=metrics)

    def wait(self) -> None:
        """Blocks until every checkpoint is on disk."""
        with writing("a checkpoint", self._directory):
            self._checkpointer.wait()

    def restore(self, abstract_state: Any, step: int | None = None) -> Any:
        """Loads a checkpoint onto the shapes and shardings of ``abstract_state``.

        Args:
          abstract_state: the state's tree of ``jax.ShapeDtypeStruct`` with shardings.
          step: which one; by default the newest readable one. Newer ones are set aside as ``<step>.unreadable``.

        Raises:
          RunError: there is no such checkpoint, or none can be read.
        """
        if step is not None:
            if step not in self.steps:
                raise RunError(
                    f"expected a checkpoint at one of the steps {self.steps} in {self._directory}, got {step}; "
                    "choose one of these with --checkpoint"
                )
            return self._load(step, abstract_state)
        failures: dict[int, str] = {}
        for candidate in reversed(self.steps):
            state, failure = self._try(candidate, abstract_state)
            if failure is None:
                self._set_aside(failures)
                return state
            failures[candidate] = failure
        raise RunError(
            f"expected a readable checkpoint in {self._directory}, got "
            + (f"only unreadable ones: {failures}; restore one from a copy" if failures else "none; train first")
        )

    def _load(self, step: int, abstract_state: Any) -> Any:
        return self._checkpointer.load(step, abstract_state)

    def _try(self, step: int, abstract_state: Any) -> tuple[Any, str | None]:
        """Returns the state of a checkpoint, or None and why it cannot be read, the same in all processes."""
        state = failure = None
        try:
            state = self._load(step, abstract_state)
        except Exception as error:
            failure = _first_line(error)
        if jax.process_count() > 1 and multihost_utils.process_allgather(np.int32(failure is not None)).any():
            failure = failure or "another process could not read it"
        return state, failure

    def _set_aside(self, failures: dict[int, str]) -> None:
        """Renames checkpoints that cannot be read; only once an older one could, so that the fault is theirs."""
        for step, reason in failures.items():
            aside = self._directory / f"{step}.unreadable"
            logging.warning("Checkpoint %d cannot be read (%s); set aside as %s", step, reason, aside)
            if jax.process_index() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                (self._directory / str(step)).rename(aside)
        if failures:
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("unreadable checkpoints are set aside")
            self._checkpointer.reload()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
