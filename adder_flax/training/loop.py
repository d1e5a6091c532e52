"""The training loop: batches in, steps dispatched, metrics of step n-1 written after step n is on its way."""

import contextlib
import dataclasses
import math
import signal
import time
from pathlib import Path
from typing import Any

import jax

from adder_flax import data, ops
from adder_flax.errors import NonFiniteLossError, RunError
from adder_flax.interrupt import InterruptWatch
from adder_flax.training import sharding
from adder_flax.training.checkpoints import Checkpoints
from adder_flax.training.diagnose import explain_non_finite
from adder_flax.training.digests import take_digests
from adder_flax.training.lock import lock_workdir
from adder_flax.training.metrics import MetricWriter, Progress
from adder_flax.training.processes import StopVote
from adder_flax.training.profiler import Profiler
from adder_flax.training.setup import Run
from adder_flax.training.start_up import StartUp
from adder_flax.training.step import State, evaluation_params, step_keys
from adder_flax.training.workdir import changed_data, open_workdir, write_config, write_data


@dataclasses.dataclass(frozen=True)
class Result:
    """What a call of :func:`fit` ends with.

    Attributes:
      state: the train state.
      step: steps done.
      evaluation: metrics of the last evaluation on the whole evaluation split.
      interrupted: the signal that stopped the run, or None where it is complete.
    """

    state: State
    step: int
    evaluation: dict[str, float]
    interrupted: signal.Signals | None = None


class Evaluator:
    """Scores parameters on the whole evaluation split: no example dropped, none counted twice.

    Args:
      run: from :func:`adder_flax.training.build_run`.
    """

    def __init__(self, run: Run):
        self._run = run
        shards = sharding.num_batch_shards(run.mesh)
        batch_size = math.ceil(min(run.config.eval_batch_size, len(run.eval_source)) / shards) * shards
        self._batches = data.EvalPipeline(
            run.eval_source,
            batch_size,
            rows=sharding.local_rows(run.mesh, batch_size),
            num_threads=run.config.data.num_threads or None,
        )

    def __call__(self, params: Any) -> dict[str, float]:
        """Returns the task's scores of the split, ``{"eval/<name>": value}``."""
        sums = []
        with jax.set_mesh(self._run.mesh):
            for batch in self._batches:
                batch = sharding.put_batch(batch, self._run.mesh)
                sums.append(self._run.program.eval_step(params, batch, self._run.hyper))
                # Two batches are on their way at most, however fast they are read.
                jax.block_until_ready(sums[-2:][0])
        total = jax.tree.map(lambda *values: math.fsum(map(float, values)), *sums)
        if not total["count"]:
            source = self._run.eval_source
            raise RunError(
                f"expected a readable record in {source.name}/{source.split} to evaluate on, got none of "
                f"{len(source)}; the warnings name them: replace them, or set --config.data.data_dir"
            )
        return {f"eval/{name}": value for name, value in self._run.task.scores(total).items()}


class Trainer:
    """One run from its first or restored step to its last.

    Args:
      run: from :func:`adder_flax.training.build_run`.
      workdir: where metrics and checkpoints go.
      start_time: ``time.time()`` when the process began, for the report of how long it took to the first step.
    """

    def __init__(self, run: Run, workdir: str | Path, *, start_time: float | None = None):
        self._run = run
        self._workdir = Path(workdir)
        self._start_up = StartUp(start_time or time.time())
        self._num_records = {source.split: len(source) for source in (run.train_source, run.eval_source)}
        self._evaluate = Evaluator(run)
        self._batches = data.TrainPipeline(
            run.train_source,
            run.config.batch_size,
            run.config.seed,
            rows=sharding.local_rows(run.mesh, run.config.batch_size),
            num_threads=run.config.data.num_threads or None,
        )
        self._stop_vote = StopVote(run.mesh)
        self._profiler = Profiler(run.config.profile_steps, self._workdir / "profile")
        self._pending: tuple[int, Any] | None = None
        self._window = (0, time.time())
        self._evaluation: dict[str, float] = {}
        self._interrupted: signal.Signals | None = None

    def fit(self) -> Result:
        """Trains until the last step, or until SIGINT, SIGTERM or SIGHUP asks to stop; both leave a checkpoint.

        Raises:
          NonFiniteLossError: the loss or a gradient is infinite or NaN; the state before it is checkpointed.
          RunError: a checkpoint cannot be read or written.
        """
        run, main_host = self._run, jax.process_index() == 0
        with (
            lock_workdir(self._workdir),
            Checkpoints(open_workdir(self._workdir, run.config) / "checkpoints") as self._checkpoints,
            InterruptWatch() as watch,
        ):
            state = self._checkpoints.restore(run.abstract_state) if self._checkpoints.steps else run.init()
            start = int(state["step"])
            changed = changed_data(self._workdir, self._num_records)
            if start > run.num_steps:
                raise RunError(
                    f"expected a run of at least the {start} steps that were done, got one of {run.num_steps}"
                    f"{f': {changed}' if changed else ''}; put the data back as it was, or choose another --workdir"
                )
            self._start_up.parameters_ready()
            with (
                MetricWriter(
                    self._workdir, start_step=start, enabled=main_host and start < run.num_steps
                ) as self._writer,
                Progress(run.num_steps, start, enabled=main_host) as self._progress,
            ):
                # After all that can do without kernels: they may have to be built.
                self._progress.line(f"kernels  {ops.backend_report()}")
                self._start_up.kernels_ready()
                if start == run.num_steps:
                    self._progress.line(f"already complete at step {start}")
                elif start:
                    self._progress.line(f"resuming at step {start} of {run.num_steps}")
                if changed:
                    self._progress.line(f"warning: {changed}")
                self._window = (start, time.time())
                state = self._steps(state, start, watch)
            self._checkpoints.wait()
        done = int(state["step"])
        interrupted = self._interrupted if done < run.num_steps else None
        return Result(state, done, self._evaluation, interrupted)

    def _steps(self, state: State, start: int, watch: InterruptWatch) -> State:
        run = self._run
        if start == run.num_steps:
            self._evaluation = self._evaluate(evaluation_params(state))
            return state
        with (
            jax.set_mesh(run.mesh),
            self._profiler,
            contextlib.closing(self._batches.iterate(start)) as batches,
        ):
            for step in range(start, run.num_steps):
                self._profiler.before_step(step)
                batch = sharding.put_batch(next(batches), run.mesh)
                # Before the step, which gives the memory of the old parameters away.
                diagnose = run.settings.attention_diagnostics and self._is_logged(step + 1)
                diagnostics = run.program.diagnose(state["params"], batch, step, run.hyper) if diagnose else {}
                state, metrics = run.train_step(state, batch, run.hyper)
                metrics["diagnostics"] = diagnostics
                self._flush(state)
                self._pending = (step + 1, metrics)
                if step == start:
                    self._report_first_step(metrics)
                    watch.hold_one()
                self._progress.advance()
                self._interrupted = self._stop_vote.cast(watch.signal)
                self._after_step(state, step + 1, stopping=self._interrupted is not None)
                if self._interrupted is not None:
                    break
        return state

    def _after_step(self, state: State, step: int, *, stopping: bool) -> None:
        """Evaluates and checkpoints where the configuration, the end or an interruption asks for it."""
        run = self._run
        every = lambda steps: step % (steps or run.steps_per_epoch) == 0 or step == run.num_steps
        evaluate = every(run.config.eval_every_steps)
        if not (evaluate or stopping or every(run.config.checkpoint_every_steps)):
            return
        self._flush(state)
        digests = self._checked_digests(state, step)
        if evaluate:
            self._evaluation = self._evaluate(evaluation_params(state))
            self._check_evaluation(step)
            self._writer.write(step, self._evaluation)
            self._progress.line(_describe(step, run, self._evaluation))
        best = run.task.best
        score = self._evaluation[f"eval/{best.name}"] * (1 if best.largest else -1) if evaluate else None
        self._checkpoints.save(step, state, score=score, digests=digests)
        self._window = (step, time.time())

    def _flush(self, state: State) -> None:
        """Fetches the metrics of the step before the newest one and writes them."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        if self._run.config.non_finite == "stop" and not metrics["finite"]:
            self._stop_non_finite(state["params"], step)
        if not self._is_logged(step):
            return
        scalars = {
            "train/loss": float(metrics["loss"]),
            **{f"train/{name}": float(value) for name, value in metrics["task"].items()},
            "train/grad_norm": float(metrics["grad_norm"]),
            "train/learning_rate": float(metrics["learning_rate"]),
            **{name: float(value) for name, value in (metrics["optimizer"] | metrics["diagnostics"]).items()},
        }
        shown = f"step {step}/{self._run.num_steps}  loss {scalars['train/loss']:.4f}"
        shown += "".join(f"  {name} {float(value):.3f}" for name, value in metrics["task"].items())
        first_step, since = self._window
        if step > first_step:
            rate = (step - first_step) * self._run.config.batch_size / (time.time() - since)
            scalars[f"train/{self._run.task.unit}_per_second"] = rate
            remaining = (self._run.num_steps - step) * self._run.config.batch_size / rate
            shown += f"  {rate:.0f} {self._run.task.unit}/s  {_duration(remaining)} left"
        self._writer.write(step, scalars)
        self._progress.show(shown)

    def _is_logged(self, step: int) -> bool:
        return step % self._run.config.log_every_steps == 0 or step == self._run.num_steps

    def _explain_non_finite(self, params: Any, index: int) -> str:
        run = self._run
        if jax.process_count() > 1:
            return "one process alone, resumed at the last checkpoint, names the layer"
        batch = sharding.put_batch(self._batches[index], run.mesh)
        augment_key, dropout_key = step_keys(run.config.seed, index)
        examples = run.task.examples(augment_key, batch)
        loss = lambda *args: run.loss(*args).loss
        return explain_non_finite(loss, params, jax.jit(jax.grad(loss)), examples, dropout_key)

    def _checked_digests(self, state: State, step: int) -> dict[str, int]:
        """Returns what a checkpoint of the state is verified by, unless the state is not worth one."""
        digests, non_finite = take_digests(state)
        if non_finite:
            names = ", ".join(non_finite[:3]) + (", …" if len(non_finite) > 3 else "")
            raise self._not_saved("a finite train state", step, f"an infinity or NaN in {names}")
        return digests

    def _check_evaluation(self, step: int) -> None:
        loss = self._evaluation["eval/loss"]
        if self._run.config.non_finite == "stop" and not math.isfinite(loss):
            raise self._not_saved("a finite loss in the evaluation", step, str(loss))

    def _not_saved(self, expected: str, step: int, got: str) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"expected {expected} after step {step} of {self._run.num_steps}, got {got}; the state is not saved. "
            f"Checkpoints kept: {self._kept()}. Lower --config.optimizer.learning_rate or "
            "lengthen --config.optimizer.warmup_epochs"
        )

    def _kept(self) -> list[int] | str:
        self._checkpoints.wait()
        return self._checkpoints.steps or "none yet"

    def _stop_non_finite(self, params: Any, step: int) -> None:
        raise NonFiniteLossError(
            f"expected a finite loss and gradient, got a non-finite one at step {step} of {self._run.num_steps}: "
            f"{self._explain_non_finite(params, step - 1)}. "
            f"Checkpoints kept: {self._kept()}. Lower --config.optimizer.learning_rate, "
            "lengthen --config.optimizer.warmup_epochs, or go on past such batches with --config.non_finite=skip"
        )

    def _report_first_step(self, metrics: Any) -> None:
        jax.block_until_ready(metrics)
        write_config(self._workdir, self._run.config)
        write_data(self._workdir, self._num_records)
        self._progress.line(self._start_up.report())
        self._window = (self._pending[0], time.time())


def _describe(step: int, run: Run, evaluation: dict[str, float]) -> str:
    best = f"eval/{run.task.best.name}"
    scores = {best: evaluation[best]} | evaluation
    shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in scores.items())
    return f"step {step}/{run.num_steps}  epoch {step / run.steps_per_epoch:.1f}  test {shown}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
