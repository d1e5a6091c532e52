"""The mode ``compare`` of the command."""

import sys
from pathlib import Path
from typing import Any

import jax

from adder_flax.compare.cells import StoppedError
from adder_flax.compare.page import write_results
from adder_flax.compare.run import Comparison, describe, overview, supervise, work
from adder_flax.compare.trivial import add_trivial
from adder_flax.errors import RunError
from adder_flax.training.workdir import HeldError, lock_workdir


def run(config: Any, workdir: str | Path, workers: int) -> None:
    """Runs what is left of a comparison by so many workers and writes its tables.

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
    known, best = set(comparison.records.all()), comparison.best.name

    def show_new() -> None:
        for name, record in comparison.records.all().items():
            if name not in known:
                known.add(name)
                print(describe(record, best), flush=True)

    if workers:
        comparison.check()
    if workers == 1:
        print(overview(comparison), flush=True)
        try:
            for record in work(comparison):
                print(describe(record, best), flush=True)
        except StoppedError as stopped:
            print(f"{stopped}; the same command goes on from there", flush=True)
            sys.exit(stopped.exit_code)
    elif workers:
        supervise(workers, comparison.workdir, show_new)
    print(overview(comparison, max(workers, 1)), flush=True)
    if not any(comparison.finished()):
        print(f"no run of it is finished; nothing is written to {comparison.results}")
        return
    try:
        with lock_workdir(comparison.results, "results.lock"):
            if workers:
                add_trivial(comparison)
            files = write_results(comparison)
        print("results at " + ", ".join(str(path) for path in files[:3]))
    except HeldError:  # workers end at once, when all records are there
        print(f"another process writes the results to {comparison.results}")
