"""Comparisons of runs that take seconds."""

import ml_collections

from adder_flax import settings
from adder_flax.experiments import common
from tests.training.tiny import TINY


def make_config(*, base=None, **fields):
    """A comparison of one-block transformers on the handwritten digits."""
    of_runs = common.deit("multiplicative", "tiny")
    of_runs.update_from_flattened_dict(TINY | (base or {}))
    return ml_collections.ConfigDict(
        settings.defaults(settings.CompareSettings) | {"base": of_runs} | fields
    )
