"""Grids of runs: tuned by the same budget, on paired seeds, with what differences are worth."""

from adder_flax.compare.cells import StoppedError
from adder_flax.compare.page import write_results
from adder_flax.compare.plan import Arm, Cell, Plan
from adder_flax.compare.records import Record, Records
from adder_flax.compare.run import Comparison, describe, overview, supervise, work
from adder_flax.compare.search import Tuning, unfold
from adder_flax.paired import (
    LEAST_SEEDS,
    Difference,
    best_of_fewer,
    cost_ratios,
    first_reaching,
    holm,
    interquartile_mean,
    paired_difference,
    performance_profiles,
    profile_scores,
    verdict,
)

__all__ = [
    "LEAST_SEEDS",
    "Arm",
    "Cell",
    "Comparison",
    "Difference",
    "Plan",
    "Record",
    "Records",
    "StoppedError",
    "Tuning",
    "best_of_fewer",
    "cost_ratios",
    "describe",
    "first_reaching",
    "holm",
    "interquartile_mean",
    "overview",
    "paired_difference",
    "performance_profiles",
    "profile_scores",
    "supervise",
    "unfold",
    "verdict",
    "work",
    "write_results",
]
