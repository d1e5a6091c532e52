"""Scores on a whole split."""

import math
from typing import Any

import jax

from adder_flax import data
from adder_flax.errors import RunError
from adder_flax.training import sharding
from adder_flax.training.setup import Run


class Evaluator:
    """Scores parameters on the whole evaluation split: no example dropped, none counted twice.

    Args:
      run: from :func:`adder_flax.training.build_run`.
    """

    def __init__(self, run: Run):
        self._run = run
        shards = sharding.num_batch_shards(run.mesh)
        batch_size = (
            math.ceil(min(run.config.eval_batch_size, len(run.eval_source)) / shards) * shards
        )
        self._batches = data.EvalPipeline(
            run.eval_source,
            batch_size,
            rows=sharding.local_rows(run.mesh, batch_size),
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
                f"expected a readable record in {source.name}/{source.split} to evaluate on, got "
                f"none of {len(source)}; the warnings name them: replace them, or set "
                "--config.data.data_dir"
            )
        return {f"eval/{name}": value for name, value in self._run.task.scores(total).items()}
