"""A step's operations are a mean over the run where the model changes along it."""

import pytest

from adder_flax import training

BATCH, TOKENS, WIDTH, HIDDEN = 32, 17, 16, 32


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("start", "end", "blocks", "depth", "share"),
    [
        (0.25, 0.75, "together", 1, 0.75),
        # Block b computes L1 distances from the beginning of its turn: at 0.2, 0.4 and 0.6.
        (0.2, 0.8, "in_turn", 3, (0.8 + 0.6 + 0.4) / 3),
    ],
)
def test_distances_count_for_the_share_of_the_training_that_they_are_computed(
    start, end, blocks, depth, share, tiny_config
):
    config = tiny_config("multiplicative", **{"model.depth": depth, "model.mlp_linear": "adder"})
    config.model.update(anneal_start=start, anneal_end=end, anneal_blocks=blocks)
    operations = training.step_operations(training.build_run(config))
    elements = depth * BATCH * TOKENS * 2 * WIDTH * HIDDEN
    assert operations.l1_elements == pytest.approx(share * elements, rel=1e-6)
