"""A configuration small enough that a run takes seconds."""

import pytest

from adder_flax.experiments import common
from tests.training.tiny import TINY


@pytest.fixture
def tiny_config():
    """Returns ``make(mechanism="adder", **fields)``: one block of width 16 on the handwritten
    digits."""

    def make(mechanism="adder", **fields):
        config = common.deit(mechanism, "tiny")
        config.update_from_flattened_dict(TINY | fields)
        return config

    return make
