"""What the digests of its arrays add to the time of a checkpoint.

    python -m benchmarks.checkpoints
    python -m benchmarks.checkpoints --mechanism=multiplicative --size=small --rounds=9

The state is that of a whole run (parameters, moments of AdamW, running average) with random numbers
in all of it, which compress as trained ones do. A checkpoint with digests and one without take
turns; printed are medians of the time until it is on disk, and of the part of it for which a run
waits. The first digests of a process compile: that is measured apart.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from adder_flax import training
from adder_flax.experiments import common
from adder_flax.training.digests import take_digests


def random_state(run: training.Run) -> Any:
    """Returns a train state of normally distributed numbers."""
    leaves, structure = jax.tree.flatten(run.init())
    keys = jax.random.split(jax.random.key(0), len(leaves))
    fill = lambda leaf, key: (
        jax.random.normal(key, leaf.shape, leaf.dtype) if leaf.dtype == jnp.float32 else leaf
    )
    return jax.block_until_ready(structure.unflatten(map(fill, leaves, keys)))


def save_seconds(
    checkpoints: training.Checkpoints, step: int, state: Any, *, digests: bool
) -> tuple[float, float]:
    """Returns the seconds until a checkpoint is on disk, and those for which a run waits."""
    start = time.perf_counter()
    checkpoints.save(step, state, digests=None if digests else {})
    waited = time.perf_counter() - start
    checkpoints.wait()
    return time.perf_counter() - start, waited


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the figures.

    Args:
        arguments: command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mechanism", default="adder")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    run = training.build_run(common.deit(options.mechanism, options.size, "fake"))
    state = random_state(run)
    leaves = jax.tree.leaves(state)
    print(f"{len(leaves)} arrays, {sum(leaf.nbytes for leaf in leaves) / 2**20:.0f} MiB")
    first, again = (_seconds(lambda: take_digests(state)) for _ in range(2))
    print(f"digests: {first:.3f} s the first time in a process, {again:.3f} s again")
    rounds = []
    with tempfile.TemporaryDirectory() as folder, training.Checkpoints(folder) as checkpoints:
        for step in range(2 * options.rounds + 2):
            digests = step % 4 in (0, 3)  # each is first in every other round
            rounds.append((digests, *save_seconds(checkpoints, step, state, digests=digests)))
    for number, what in ((1, "until it is on disk"), (2, "that a run waits")):
        with_, without = (
            statistics.median(times[number] for times in rounds[2:] if times[0] == digests)
            for digests in (True, False)
        )
        print(
            f"{what}: {with_:.3f} s with digests, {without:.3f} s without, "
            f"{100 * (with_ / without - 1):+.1f} %"
        )


def _seconds(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
