"""What a training step computes, as a mean over the steps of a run."""

from itertools import pairwise

import jax

from adder_flax.counting.operations import Operations, count_operations
from adder_flax.training.setup import Run, abstract_batch


def step_operations(run: Run) -> Operations:
    """Returns the operations of a training step; nothing is computed.

    Of a model that changes along the training, with a method ``stages()``, each stage counts for
    its length: in the program of the step it is a conditional, which alone would count as its
    dearest branch.
    """
    whole = count_operations(
        run.train_step, run.abstract_state, abstract_batch(run), run.abstract_hyper
    )
    model = run.model(run.abstract_state["params"])
    stages = getattr(model, "stages", list)()
    if not stages:
        return whole
    counts: dict[tuple[str, str], float] = dict(whole.counts)
    parts: list[tuple[float, float | None]] = [(-1.0, None)]
    ends = sorted({0.0, *stages, 1.0})
    parts += [(end - start, (start + end) / 2) for start, end in pairwise(ends)]
    for weight, progress in parts:
        for what, number in _differentiated(run, progress).items():
            counts[what] = counts.get(what, 0.0) + weight * number
    mean = {what: round(number) for what, number in counts.items()}
    return Operations(mean, uncounted=whole.uncounted)


def _differentiated(run: Run, progress: float | None) -> dict[tuple[str, str], int]:
    """Counts loss and gradient once a share of the steps is done, or with that share traced."""

    def loss_and_gradient(step, params, *args):
        step = step if progress is None else progress * run.num_steps
        loss = run.program.parts({**run.numbers, "step": step}).loss
        return jax.value_and_grad(lambda params: loss(params, *args).loss)(params)

    key = jax.eval_shape(lambda: jax.random.key(0))
    examples = jax.eval_shape(run.program.parts(run.numbers).examples, key, abstract_batch(run))
    step, params = jax.ShapeDtypeStruct((), "int32"), run.abstract_state["params"]
    args = examples, key, run.abstract_state.get("model_state", {})
    return dict(count_operations(loss_and_gradient, step, params, *args).counts)
