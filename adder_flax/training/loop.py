"""The training loop: batches in, steps dispatched, metrics of the step before out."""

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import kfac
from adder_flax import data, ops
from adder_flax.errors import NonFiniteLossError, RunError
from adder_flax.training import sharding, workdir
from adder_flax.training.checkpoints import Checkpoints, take_digests
from adder_flax.training.diagnose import explain_non_finite
from adder_flax.training.metrics import MetricWriter, Progress, profiled
from adder_flax.training.processes import InterruptWatch, StopVote
from adder_flax.training.program import Run
from adder_flax.training.step import (
    Metrics,
    State,
    evaluation_params,
    make_eval_step,
    step_keys,
    take_apart,
)


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


class Trainer:
    """One run from its first or restored step to its last."""

    _lock: workdir.Lock | None
    _checkpoints: Checkpoints
    _watch: InterruptWatch
    _writer: MetricWriter
    _progress: Progress
    # The newest step and its metrics, until the next one is under way: only then does the host
    # wait for them.
    _newest: tuple[int, Metrics] | None
    # Speed is measured from this step on: what else took time before does not count.
    _clock: tuple[int, float]

    def __init__(self, run: Run, workdir: str | Path, *, start_time: float | None = None):
        self._run = run
        self._workdir = Path(workdir)
        self._times = [start_time or time.monotonic(), time.monotonic()]
        self._evaluate = Evaluator(run)
        self._batches = run.batches(sharding.local_rows(run.mesh, run.config.batch_size))

    def fit(self) -> Result:
        """Trains until the last step, or until SIGINT, SIGTERM or SIGHUP: both leave a checkpoint.

        Raises:
          NonFiniteLossError: the loss, a gradient, the state or an evaluation's loss is infinite or
            NaN; it is not saved, and earlier checkpoints stay.
          RunError: a checkpoint cannot be read or written.
        """
        run, main_host = self._run, jax.process_index() == 0
        with contextlib.ExitStack() as stack:
            self._lock = stack.enter_context(workdir.lock_workdir(self._workdir))
            place = workdir.open_workdir(self._workdir, run.config) / "checkpoints"
            self._checkpoints = stack.enter_context(
                Checkpoints(place, of=workdir.fingerprint(run.config))
            )
            self._watch = stack.enter_context(InterruptWatch())
            if self._checkpoints.steps:
                workdir.check_jax_settings(self._workdir)
                state = self._checkpoints.restore(run.abstract_state)
            else:
                state = run.init()
            start, skipped = int(state["step"]), int(state["skipped"])
            if skipped and run.config.non_finite == "stop":  # no step would be sound
                raise RunError(
                    f"expected config.non_finite='skip' of a run that has left out {skipped} "
                    "batches, got 'stop'; set --config.non_finite=skip"
                )
            changed = workdir.changed_data(self._workdir, self._marks)
            if start > run.num_steps:
                raise RunError(
                    f"expected a run of at least the {start} steps that were done, got one of "
                    f"{run.num_steps}{f': {changed}' if changed else ''}; put the data back as "
                    "it was, or choose another --workdir"
                )
            is_writing = main_host and start < run.num_steps
            self._writer = stack.enter_context(
                MetricWriter(self._workdir, start_step=start, enabled=is_writing)
            )
            self._progress = Progress(run.num_steps, start, enabled=main_host)
            stack.callback(self._progress.close)
            # After all that can do without kernels: they may have to be built.
            self._progress.line(f"kernels  {ops.backend_report()}")
            self._times.append(time.monotonic())
            if changed:
                self._progress.line(f"warning: {changed}")
            if start == run.num_steps:
                self._progress.line(f"already complete at step {start}")
                evaluation, stopped = self._evaluate(evaluation_params(state)), None
            else:
                if start:
                    self._progress.line(f"resuming at step {start} of {run.num_steps}")
                state, evaluation, stopped = self._steps(state, start)
            self._checkpoints.wait()
        done = int(state["step"])
        return Result(state, done, evaluation, stopped if done < run.num_steps else None)

    def _marks(self) -> dict[str, list[float]]:
        """What tells the records of the run from those of another data set, by split."""
        sources = self._run.train_source, self._run.eval_source
        return {source.split: source.marks() for source in sources}

    def _steps(
        self, state: State, start: int
    ) -> tuple[State, dict[str, float], signal.Signals | None]:
        run, evaluation, stopped = self._run, {}, None
        stop_vote = StopVote(run.mesh)
        self._newest, self._clock = None, (start, time.monotonic())
        steps = profiled(
            range(start, run.num_steps), run.config.profile_steps, self._workdir / "profile"
        )
        with (
            jax.set_mesh(run.mesh),
            contextlib.closing(steps),
            contextlib.closing(self._batches.iterate(start)) as batches,
        ):
            for step in steps:
                batch = sharding.put_batch(next(batches), run.mesh)
                state, metrics = run.train_step(state, batch, run.hyper)
                self._flush(state)
                self._newest = (step + 1, metrics)
                if step == start:
                    jax.block_until_ready(metrics)
                    workdir.write_config(self._workdir, run.config)
                    workdir.write_data(self._workdir, self._marks())
                    workdir.write_jax_settings(self._workdir)
                    self._progress.line(_spent([*self._times, time.monotonic()]))
                    self._clock = (step + 1, time.monotonic())
                self._progress.advance()
                stopped = stop_vote.cast(self._watch.signal)
                evaluates, saves = (
                    (step + 1) % (every or run.steps_per_epoch) == 0 or step + 1 == run.num_steps
                    for every in (run.config.eval_every_steps, run.config.checkpoint_every_steps)
                )
                if evaluates or saves or stopped is not None:
                    self._flush(state)
                    evaluation = self._save(state, step + 1, evaluates) or evaluation
                    self._clock = (step + 1, time.monotonic())
                if stopped is not None:
                    break
        return state, evaluation, stopped

    def _save(self, state: State, step: int, evaluates: bool) -> dict[str, float]:
        run, evaluation, score = self._run, {}, None
        if self._lock is not None:
            self._lock.check()
        digests, non_finite = take_digests(state)
        if non_finite:
            names = ", ".join(non_finite[:3]) + (", …" if len(non_finite) > 3 else "")
            raise self._not_saved("a finite train state", step, f"an infinity or NaN in {names}")
        if evaluates:
            evaluation = self._evaluate(evaluation_params(state))
            loss = evaluation["eval/loss"]
            if run.config.non_finite == "stop" and not math.isfinite(loss):
                raise self._not_saved("a finite loss in the evaluation", step, str(loss))
            self._writer.write(step, evaluation)
            self._progress.line(_describe(step, run, evaluation))
            score = evaluation[f"eval/{run.task.best.name}"] * (1 if run.task.best.largest else -1)
        self._checkpoints.save(step, state, score=score, digests=digests)
        return evaluation

    def _flush(self, state: State) -> None:
        """Writes the newest metrics, unless they say that the run has to stop.

        No step since has changed the parameters then.
        """
        if self._newest is None:
            return
        (step, metrics), self._newest = self._newest, None
        if self._run.config.non_finite == "stop" and not metrics["finite"]:
            raise NonFiniteLossError(
                f"expected a finite loss and gradient, got a non-finite one at step {step} of "
                f"{self._run.num_steps}: {self._explain_non_finite(state, step - 1)}. "
                f"{self._kept()}. Go on past such batches with --workdir="
                f"{self._workdir} --config.non_finite=skip, or begin anew with a lower "
                "--config.optimizer.learning_rate or a longer --config.optimizer.warmup_epochs"
            )
        if step % self._run.config.log_every_steps == 0 or step == self._run.num_steps:
            self._log(step, metrics)

    def _log(self, step: int, metrics: Metrics) -> None:
        run, (first, since) = self._run, self._clock
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
        if step > first:
            rate = (step - first) * run.config.batch_size / (time.monotonic() - since)
            scalars[f"train/{run.task.unit}_per_second"] = rate
            left = Progress.interval((run.num_steps - step) * run.config.batch_size / rate)
            shown += [f"{rate:.0f} {run.task.unit}/s", f"{left} left"]
        self._writer.write(step, scalars)
        self._progress.show("  ".join(shown))

    def _explain_non_finite(self, state: State, index: int) -> str:
        run = self._run
        if jax.process_count() > 1:
            return "one process alone, resumed at the last checkpoint, names the layer"
        batch = sharding.put_batch(self._batches[index], run.mesh)
        augment_key, dropout_key = step_keys(run.config.seed, index)
        examples = run.task.examples(augment_key, batch)
        parts = run.program.parts({**run.numbers, "step": index})
        loss = lambda *args: parts.loss(*args).loss
        batch = examples, dropout_key, state.get("model_state", {})
        return explain_non_finite(loss, state["params"], jax.jit(jax.grad(loss)), *batch)

    def _not_saved(self, expected: str, step: int, got: str) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"expected {expected} after step {step} of {self._run.num_steps}, got {got}; the state "
            f"is not saved. {self._kept()}. Lower --config.optimizer.learning_rate or lengthen "
            "--config.optimizer.warmup_epochs"
        )

    def _kept(self) -> str:
        self._checkpoints.wait()
        return f"Checkpoints kept: {self._checkpoints.steps or 'none yet'}"


def _spent(times: list[float]) -> str:
    set_up, ready, computed = (after - before for before, after in pairwise(times))
    return (
        f"first step done {times[-1] - times[0]:.1f} s after the start: {set_up:.1f} set-up, "
        f"{ready:.1f} parameters and kernels, {computed:.1f} compiling and computing"
    )


def _describe(step: int, run: Run, evaluation: dict[str, float]) -> str:
    best = f"eval/{run.task.best.name}"
    scores = {best: evaluation[best]} | evaluation
    shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in scores.items())
    return (
        f"step {step}/{run.num_steps}  epoch {step / run.steps_per_epoch:.1f}  "
        f"{run.eval_source.split} {shown}"
    )
