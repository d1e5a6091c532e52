"""The mode ``compare`` of the command."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from adder_flax.compare.cells import StoppedError
from adder_flax.compare.page import write_results
from adder_flax.compare.run import (
    Comparison,
    describe,
    is_worker,
    overview,
    parent_lives,
    supervise,
    work,
)
from adder_flax.compare.slurm import read_options, supervise_on_slurm
from adder_flax.errors import RunError


def run(config: Any, workdir: str | Path, workers: int, slurm: str | None = None) -> None:
    """Runs what is left of a comparison and writes its tables.

    Args:
      config: see ``CompareSettings``.
      workdir: of the comparison.
      workers: processes; 0 runs nothing.
      slurm: options of the jobs that the workers are; None runs them on this machine.

    Raises:
      RunError: what its user must mend.
      SystemExit: after SIGINT, SIGTERM or SIGHUP, with exit code 128 + signal.
    """
    if jax.process_count() > 1:
        raise RunError(
            f"expected a comparison in processes of their own, got {jax.process_count()} of one "
            "run; unset JAX_*, start it on each host with the same --workdir"
        )
    comparison = Comparison(config, workdir)
    if (place := is_worker()) is not None:
        number, count = place
        first = number * len(comparison.plan.arms) // count
        _work(comparison, first, parent_lives)
        return
    known = set(comparison.records.all())
    show_new = lambda: _show_new(comparison, known)
    if workers and slurm is not None:
        supervise_on_slurm(workers, comparison.workdir, read_options(slurm), show_new)
    elif workers == 1:
        _work(comparison, show=True)
    elif workers:
        supervise(workers, comparison.workdir, show_new)
    comparison.prepare()
    print(overview(comparison, max(workers, 1)), flush=True)
    files = write_results(comparison)
    print("results at " + ", ".join(str(path) for path in files[:3]))


def _work(
    comparison: Comparison,
    first_arm: int = 0,
    alive: Callable[[], bool] = lambda: True,
    *,
    show: bool = False,
) -> None:
    comparison.prepare()
    if show:
        print(overview(comparison), flush=True)
    try:
        for record in work(comparison, first_arm, alive):
            print(describe(record, comparison.best.name), flush=True)
    except StoppedError as stopped:
        print(f"{stopped}; the same command goes on from there", flush=True)
        sys.exit(stopped.exit_code)


def _show_new(comparison: Comparison, known: set[str]) -> None:
    for name, record in comparison.records.all().items():
        if name not in known:
            known.add(name)
            print(describe(record, comparison.best.name), flush=True)
