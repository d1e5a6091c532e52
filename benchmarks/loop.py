"""What the training loop adds to its jitted step: the time of a step in the loop against that of
the bare step.

    python -m benchmarks.loop
    python -m benchmarks.loop --batch_size=512 --steps=60

The bare step runs on the run's first batch, which lies on the device, back to back. The loop beside
it is that of a run: it reads, shuffles and transfers batches, fetches the metrics of every step,
writes those of every tenth, and looks for signals. Evaluation and checkpoints are not in the
measured time. The two take turns, each first in every other round; printed are medians over the
rounds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

from adder_flax import training
from adder_flax.experiments import common
from adder_flax.training import sharding


def make_config(options: argparse.Namespace) -> Any:
    """Returns a run on the handwritten digits of as many steps as are measured, and one before
    them."""
    config = common.deit("multiplicative", "tiny")
    config.update_from_flattened_dict(
        {
            "model.width": 64,
            "model.num_heads": 4,
            "model.depth": options.depth,
            "batch_size": options.batch_size,
            "num_epochs": (options.steps + 1) / (1437 // options.batch_size),
            "log_every_steps": 10,
            "eval_every_steps": options.steps + 1,
            "checkpoint_every_steps": options.steps + 1,
        }
    )
    return config


def bare_seconds(run: training.Run) -> float:
    """Seconds that the jitted step takes alone."""
    state = run.init()
    batches = run.batches()
    batch = sharding.put_batch(batches[0], run.mesh)
    with jax.set_mesh(run.mesh):
        state, metrics = run.train_step(state, batch, run.hyper)
        jax.block_until_ready((state, metrics))
        start = time.perf_counter()
        for _ in range(run.num_steps - 1):
            state, metrics = run.train_step(state, batch, run.hyper)
        jax.block_until_ready((state, metrics))
    return (time.perf_counter() - start) / (run.num_steps - 1)


def loop_seconds(run: training.Run) -> float:
    """Seconds that a step takes in the loop, from the end of the first to that of the last."""
    with tempfile.TemporaryDirectory() as workdir:
        result = training.Trainer(run, workdir).fit()
        if result.interrupted:
            raise SystemExit(128 + result.interrupted)
        rows = [row for row in training.read_metrics(workdir) if "train/images_per_second" in row]
    return run.config.batch_size / rows[-1]["train/images_per_second"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the figures.

    Args:
        arguments: command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--steps", type=int, default=59)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    run = training.build_run(make_config(options))
    loop_seconds(run)  # compiles, and reads the data into memory
    measures = {"bare": bare_seconds, "loop": loop_seconds}
    rounds = []
    for i in range(options.rounds):
        names = list(measures) if i % 2 == 0 else reversed(measures)
        rounds.append({name: measures[name](run) for name in names})
    bare, loop = (1000 * statistics.median(times[name] for times in rounds) for name in measures)
    overhead = 100 * (statistics.median(times["loop"] / times["bare"] for times in rounds) - 1)
    print(
        f"bare step {bare:.1f} ms, in the loop {loop:.1f} ms, overhead {overhead:+.1f} % "
        f"({options.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
