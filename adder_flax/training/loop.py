"""The training loop: batches in, steps dispatched, metrics of the step before out."""

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from adder_flax import data, ops
from adder_flax.errors import NonFiniteLossError, RunError
from adder_flax.training import sharding
from adder_flax.training.checkpoints import Checkpoints
from adder_flax.training.diagnose import explain_non_finite
from adder_flax.training.digests import take_digests
from adder_flax.training.fingerprint import fingerprint
from adder_flax.training.metrics import DeferredMetrics, MetricWriter, Profiler, Progress
from adder_flax.training.processes import InterruptWatch, StopVote
from adder_flax.training.setup import Run
from adder_flax.training.skeleton import take_apart
from adder_flax.training.step import State, evaluation_params, make_eval_step, step_keys
from adder_flax.training.workdir import (
    Lock,
    changed_data,
    check_jax_settings,
    lock_workdir,
    open_workdir,
    write_config,
    write_data,
    write_jax_settings,
)


def marks_of(run: Run) -> dict[str, list[float]]:
    """Returns what tells the records of a run from those of another data set, by split."""
    return {source.split: source.marks() for source in (run.train_source, run.eval_source)}


class Evaluator:
    """Scores parameters on the whole evaluation split: no example dropped, none counted twice."""

    def __init__(self, run: Run):
        self._run = run
        shards = sharding.num_batch_shards(run.mesh)
        batch_size = (
            math.ceil(min(run.config.eval_batch_size, len(run.eval_source)) / shards) * shards
        )
        self._batches = data.EvalPipeline(
            run.eval_source, batch_size, rows=sharding.local_rows(run.mesh, batch_size)
        )

    def __call__(self, params: Any) -> dict[str, float]:
        """Returns the task's scores of the split, ``{"eval/<name>": value}``."""
        return self._score(self._run.program.eval_step, params)

    def score(self, model: nnx.Module) -> dict[str, float]:
        """Returns the same of another model with the inputs and outputs of the run's."""
        skeleton, params = take_apart(model)
        return self._score(jax.jit(make_eval_step(skeleton, self._run.program.task)), params)

    def _score(self, eval_step: Callable[..., Any], params: Any) -> dict[str, float]:
        sums = []
        with jax.set_mesh(self._run.mesh):
            for batch in self._batches:
                batch = sharding.put_batch(batch, self._run.mesh)
                sums.append(eval_step(params, batch, self._run.hyper))
                # Two batches are on their way at most, however fast they are read.
                jax.block_until_ready(sums[-2:][0])
        total = jax.tree.map(lambda *values: math.fsum(map(float, values)), *sums)
        if not total["count"]:
            source = self._run.eval_source
            raise RunError(
                f"expected a readable record in {source.name}/{source.split} to evaluate on, got "
                f"none of {len(source)}; the warnings name them: replace them, or set "
                "--config.data.data_dir"
            )
        return {f"eval/{name}": value for name, value in self._run.task.scores(total).items()}


@dataclasses.dataclass(frozen=True)
class Result:
    """What :meth:`Trainer.fit` ends with."""

    state: State
    step: int
    evaluation: dict[str, float]
    interrupted: signal.Signals | None = None


class _Outputs(NamedTuple):
    lock: Lock | None
    checkpoints: Checkpoints
    writer: MetricWriter
    progress: Progress
    metrics: DeferredMetrics


class Trainer:
    """One run from its first or restored step to its last."""

    def __init__(self, run: Run, workdir: str | Path, *, start_time: float | None = None):
        self._run = run
        self._workdir = Path(workdir)
        self._times = [start_time or time.monotonic(), time.monotonic()]
        self._evaluate = Evaluator(run)
        self._batches = run.batches(sharding.local_rows(run.mesh, run.config.batch_size))
        self._profiler = Profiler(run.config.profile_steps, self._workdir / "profile")

    def fit(self) -> Result:
        """Trains until the last step, or until SIGINT, SIGTERM or SIGHUP: both leave a checkpoint.

        Raises:
          NonFiniteLossError: the loss, a gradient, the state or an evaluation's loss is infinite or
            NaN; it is not saved, and earlier checkpoints stay.
          RunError: a checkpoint cannot be read or written.
        """
        run, workdir, main_host = self._run, self._workdir, jax.process_index() == 0
        with (
            lock_workdir(workdir) as lock,
            Checkpoints(
                open_workdir(workdir, run.config) / "checkpoints", of=fingerprint(run.config)
            ) as checkpoints,
            InterruptWatch() as watch,
        ):
            if checkpoints.steps:
                check_jax_settings(workdir)
                state = checkpoints.restore(run.abstract_state)
            else:
                state = run.init()
            start, skipped = int(state["step"]), int(state["skipped"])
            if skipped and run.config.non_finite == "stop":  # no step would be sound
                raise RunError(
                    f"expected config.non_finite='skip' of a run that has left out {skipped} "
                    "batches, got 'stop'; set --config.non_finite=skip"
                )
            changed = self._check_data(start)
            with (
                MetricWriter(
                    workdir, start_step=start, enabled=main_host and start < run.num_steps
                ) as writer,
                Progress(run.num_steps, start, enabled=main_host) as progress,
            ):
                # After all that can do without kernels: they may have to be built.
                progress.line(f"kernels  {ops.backend_report()}")
                self._times.append(time.monotonic())
                if changed:
                    progress.line(f"warning: {changed}")
                if start == run.num_steps:
                    progress.line(f"already complete at step {start}")
                    evaluation, stopped = self._evaluate(evaluation_params(state)), None
                else:
                    if start:
                        progress.line(f"resuming at step {start} of {run.num_steps}")
                    metrics = DeferredMetrics(run, writer, progress, start)
                    outputs = _Outputs(lock, checkpoints, writer, progress, metrics)
                    state, evaluation, stopped = self._steps(state, start, outputs, watch)
            checkpoints.wait()
        done = int(state["step"])
        return Result(state, done, evaluation, stopped if done < run.num_steps else None)

    def _check_data(self, start: int) -> str | None:
        changed = changed_data(self._workdir, lambda: marks_of(self._run))
        if start > self._run.num_steps:
            raise RunError(
                f"expected a run of at least the {start} steps that were done, got one of "
                f"{self._run.num_steps}{f': {changed}' if changed else ''}; put the data back as "
                "it was, or choose another --workdir"
            )
        return changed

    def _steps(
        self, state: State, start: int, outputs: _Outputs, watch: InterruptWatch
    ) -> tuple[State, dict[str, float], signal.Signals | None]:
        run, evaluation, stop_vote, stopped = self._run, {}, StopVote(self._run.mesh), None
        with (
            jax.set_mesh(run.mesh),
            self._profiler,
            contextlib.closing(self._batches.iterate(start)) as batches,
        ):
            for step in range(start, run.num_steps):
                self._profiler.before_step(step)
                batch = sharding.put_batch(next(batches), run.mesh)
                state, metrics = run.train_step(state, batch, run.hyper)
                self._flush(outputs, state)
                outputs.metrics.put(step + 1, metrics)
                if step == start:
                    jax.block_until_ready(metrics)
                    write_config(self._workdir, run.config)
                    write_data(self._workdir, marks_of(run))
                    write_jax_settings(self._workdir)
                    outputs.progress.line(_spent([*self._times, time.monotonic()]))
                    outputs.metrics.restart_clock(step + 1)
                outputs.progress.advance()
                stopped = stop_vote.cast(watch.signal)
                evaluates, saves = (
                    (step + 1) % (steps or run.steps_per_epoch) == 0 or step + 1 == run.num_steps
                    for steps in (run.config.eval_every_steps, run.config.checkpoint_every_steps)
                )
                if evaluates or saves or stopped is not None:
                    self._flush(outputs, state)
                    evaluation = self._save(state, step + 1, outputs, evaluates) or evaluation
                    outputs.metrics.restart_clock(step + 1)
                if stopped is not None:
                    break
        return state, evaluation, stopped

    def _save(
        self, state: State, step: int, outputs: _Outputs, evaluates: bool
    ) -> dict[str, float]:
        run, evaluation, score = self._run, {}, None
        if outputs.lock is not None:
            outputs.lock.check()
        digests, non_finite = take_digests(state)
        if non_finite:
            names = ", ".join(non_finite[:3]) + (", …" if len(non_finite) > 3 else "")
            got = f"an infinity or NaN in {names}"
            raise self._not_saved("a finite train state", step, got, _kept(outputs.checkpoints))
        if evaluates:
            evaluation = self._evaluate(evaluation_params(state))
            loss = evaluation["eval/loss"]
            if run.config.non_finite == "stop" and not math.isfinite(loss):
                expected, kept = "a finite loss in the evaluation", _kept(outputs.checkpoints)
                raise self._not_saved(expected, step, str(loss), kept)
            outputs.writer.write(step, evaluation)
            outputs.progress.line(_describe(step, run, evaluation))
            score = evaluation[f"eval/{run.task.best.name}"] * (1 if run.task.best.largest else -1)
        outputs.checkpoints.save(step, state, score=score, digests=digests)
        return evaluation

    def _flush(self, outputs: _Outputs, state: State) -> None:
        """Writes the metrics that were put last, unless they say that the run has to stop.

        No step since has changed the parameters then.
        """
        step = outputs.metrics.flush()
        if step is not None:
            raise NonFiniteLossError(
                f"expected a finite loss and gradient, got a non-finite one at step {step} of "
                f"{self._run.num_steps}: {self._explain_non_finite(state, step - 1)}. "
                f"{_kept(outputs.checkpoints)}. Go on past such batches with --workdir="
                f"{self._workdir} --config.non_finite=skip, or begin anew with a lower "
                "--config.optimizer.learning_rate or a longer --config.optimizer.warmup_epochs"
            )

    def _explain_non_finite(self, state: State, index: int) -> str:
        run = self._run
        if jax.process_count() > 1:
            return "one process alone, resumed at the last checkpoint, names the layer"
        batch = sharding.put_batch(self._batches[index], run.mesh)
        augment_key, dropout_key = step_keys(run.config.seed, index)
        examples = run.task.examples(augment_key, batch)
        loss = lambda *args: run.parts.loss(*args).loss
        batch = examples, dropout_key, state.get("model_state", {})
        return explain_non_finite(loss, state["params"], jax.jit(jax.grad(loss)), *batch)

    def _not_saved(self, expected: str, step: int, got: str, kept: str) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"expected {expected} after step {step} of {self._run.num_steps}, got {got}; the state "
            f"is not saved. {kept}. Lower --config.optimizer.learning_rate or lengthen "
            "--config.optimizer.warmup_epochs"
        )


def _spent(times: list[float]) -> str:
    set_up, ready, computed = (after - before for before, after in pairwise(times))
    return (
        f"first step done {times[-1] - times[0]:.1f} s after the start: {set_up:.1f} set-up, "
        f"{ready:.1f} parameters and kernels, {computed:.1f} compiling and computing"
    )


def _kept(checkpoints: Checkpoints) -> str:
    checkpoints.wait()
    return f"Checkpoints kept: {checkpoints.steps or 'none yet'}"


def _describe(step: int, run: Run, evaluation: dict[str, float]) -> str:
    best = f"eval/{run.task.best.name}"
    scores = {best: evaluation[best]} | evaluation
    shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in scores.items())
    return (
        f"step {step}/{run.num_steps}  epoch {step / run.steps_per_epoch:.1f}  "
        f"{run.eval_source.split} {shown}"
    )
