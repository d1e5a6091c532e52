"""A step's operations are a mean over the run where the model changes along it."""

import pytest

from adder_flax import training
from adder_flax.experiments import common
from tests.training.tiny import TINY

BATCH, TOKENS, WIDTH, HIDDEN, DEPTH = 32, 17, 16, 32, 3


def counted(**fields):
    config = common.deit("multiplicative", "tiny")
    config.update_from_flattened_dict(TINY | {"model.depth": DEPTH})
    config.model.update(mlp_linear="adder", **fields)
    return training.step_operations(training.build_run(config))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("start", "end", "blocks", "share"),
    [
        (0.0, 0.0, "together", 1.0),
        (0.25, 0.75, "together", 0.75),
        # Block b computes L1 distances from the beginning of its turn: at 0.2, 0.4 and 0.6.
        (0.2, 0.8, "in_turn", (0.8 + 0.6 + 0.4) / 3),
    ],
)
def test_distances_count_for_the_share_of_the_training_that_they_are_computed(
    start, end, blocks, share
):
    operations = counted(anneal_start=start, anneal_end=end, anneal_blocks=blocks)
    elements = DEPTH * BATCH * TOKENS * 2 * WIDTH * HIDDEN
    assert operations.l1_elements == pytest.approx(share * elements, rel=1e-6)
