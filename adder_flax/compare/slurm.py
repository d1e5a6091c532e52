"""Workers of a comparison as jobs of SLURM, which submitit submits."""

import getpass
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adder_flax.compare.run import WORKER
from adder_flax.errors import RunError, first_line
from adder_flax.extras import needs
from adder_flax.training.processes import InterruptWatch

_POLL_SECONDS = 1.0
_QUEUE_SECONDS = 15.0
_MOST_REQUEUES = 1000
_WARNING_SECONDS = 120
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# With a checkpoint, or at once between two cells.
_STOPPED = {code for number in _SIGNALS for code in (128 + number, -number)}


class Worker:
    """What a job runs: a command.

    Where SLURM takes the node away, it is stopped with a checkpoint and requeued.

    Args:
      command: of the worker.
      environ: in which it runs, beside the job's own.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]):
        self._command, self._environ = list(command), dict(environ)
        self._child: subprocess.Popen | None = None
        self._end: threading.Thread | None = None

    def __call__(self) -> int:
        """Runs the command and returns its exit code.

        Raises:
          RuntimeError: it ended with an error.
        """
        # SLURM sends its warning to every process of the job; this one alone passes it on, as
        # SIGTERM.
        ignore = lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self._child = subprocess.Popen(
            self._command, env=os.environ | self._environ, preexec_fn=ignore
        )
        # In a thread, as the signal's handler waits too.
        self._end = threading.Thread(target=self._child.wait, daemon=True)
        self._end.start()
        while self._end.is_alive():
            self._end.join(_POLL_SECONDS)
        code = self._child.returncode
        if code and code not in _STOPPED:
            raise RuntimeError(f"exit code {code}")
        return code

    def checkpoint(self) -> Any:
        """Stops the command; returns what is submitted again.

        submitit calls it at SLURM's warning.
        """
        with needs("slurm"):
            from submitit.helpers import DelayedSubmission

        if self._child is not None and self._end is not None:
            self._child.send_signal(signal.SIGTERM)
            while self._end.is_alive():
                time.sleep(_POLL_SECONDS / 10)
        return DelayedSubmission(Worker(self._command, self._environ))


def read_options(text: str) -> dict[str, str | int]:
    """Returns options of jobs from the command line.

    Args:
      text: submitit's names of them, ``partition=gpu,gpus_per_node=1,time=720``; time is in
        minutes.

    Raises:
      RunError: not of this form.

    Example:
      >>> read_options("partition=gpu,time=720")
      {'partition': 'gpu', 'time': 720}
    """
    options: dict[str, str | int] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name.isidentifier() and equals and value):
            raise RunError(
                f"expected --slurm as name=value, with commas between them, got {part!r}; mend it"
            )
        options[name] = int(value) if value.isdecimal() else value
    return options


def supervise_on_slurm(
    workers: int, workdir: Path, options: Mapping[str, Any], poll: Callable[[], None]
) -> None:
    """Starts this very command as several jobs of SLURM, and waits for all.

    Args:
      workers: number of jobs, of one task each.
      workdir: on a file system that all nodes share; scripts and output of the jobs go to
        ``slurm/`` in it.
      options: of the jobs, from :func:`read_options`.
      poll: called every second.

    Raises:
      RunError: no SLURM, options that it does not have, or a job that ended with an error.
      SystemExit: after SIGINT, SIGTERM or SIGHUP, upon which the jobs are cancelled, with exit code
        128 + signal.
    """
    jobs = _submit(workers, workdir / "slurm", options)
    with InterruptWatch() as watch:
        looked = time.monotonic()
        while waited_for := [job for job in jobs if not job.paths.result_pickle.exists()]:
            time.sleep(_POLL_SECONDS)
            poll()
            if watch.signal is not None:
                for job in jobs:
                    job.cancel(check=False)
                sys.exit(128 + watch.signal)
            if time.monotonic() > looked + _QUEUE_SECONDS:
                looked, queued = time.monotonic(), _queued()
                if not any(
                    job.job_id in queued or job.paths.result_pickle.exists() for job in waited_for
                ):
                    break
    poll()
    for job in jobs:
        if (failure := _failure(job)) is not None:
            raise RunError(
                f"expected all cells to be run, got job {job.job_id}: {failure}; the same command "
                f"goes on, {job.paths.stdout} and {job.paths.stderr} have more"
            )


def _queued() -> set[str]:
    """Returns the numbers of this user's jobs that wait or run.

    From squeue, as few clusters let sacct have them.
    """
    command = ["squeue", "--noheader", "--format=%i", f"--user={getpass.getuser()}"]
    return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())


def _failure(job: Any) -> str | None:
    """Returns how a job failed that has left the queue, None if it did not."""
    if not job.paths.result_pickle.exists():
        return "it ended without a result, as one that is killed or cancelled does"
    error = job.exception()
    if error is None:
        return None
    said = (
        job.paths.stderr.read_text(errors="replace").splitlines()
        if job.paths.stderr.exists()
        else []
    )
    messages = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    return messages[-1] if messages else str(error).strip().splitlines()[-1]


def _submit(workers: int, folder: Path, options: Mapping[str, Any]) -> list[Any]:
    with needs("slurm"):
        import submitit
    try:
        executor = submitit.SlurmExecutor(folder, max_num_timeout=_MOST_REQUEUES)
        executor.update_parameters(
            **{"job_name": "compare", "signal_delay_s": _WARNING_SECONDS} | dict(options)
        )
        command = [sys.executable, *sys.argv]
        environs = [{WORKER: f"{number}/{workers}"} for number in range(workers)]
        return [executor.submit(Worker(command, environ)) for environ in environs]
    except (
        RuntimeError,
        ValueError,
        TypeError,
        OSError,
        submitit.core.utils.FailedJobError,
    ) as error:
        raise RunError(
            f"expected to submit jobs to SLURM, got {first_line(error)}; see --slurm"
        ) from error
