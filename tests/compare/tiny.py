"""Comparisons of runs that take seconds."""

import ml_collections

from adder_flax import settings
from adder_flax.compare.blocks import as_markdown
from adder_flax.compare.page import page_of
from adder_flax.compare.table import rows_of
from adder_flax.experiments import common
from tests.training.tiny import TINY


def make_config(*, base=None, **fields):
    """A comparison of one-block transformers on the handwritten digits."""
    of_runs = common.deit("multiplicative", "tiny")
    of_runs.update_from_flattened_dict(TINY | (base or {}))
    return ml_collections.ConfigDict(
        settings.defaults(settings.CompareSettings) | {"base": of_runs} | fields
    )


def page_of_records(comparison):
    """The page of a comparison as its records stand, in Markdown; no figure is saved."""
    return as_markdown(page_of(comparison, rows_of(comparison)))
