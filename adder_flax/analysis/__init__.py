"""What one learns from a run: operation counts, spectra, maps, walks, energy, figures."""

from adder_flax.analysis._style import save_figure
from adder_flax.analysis.energy import HOROWITZ_45NM, Energy, EnergyTable, energy
from adder_flax.analysis.figures import attention_figure, curves_figure
from adder_flax.analysis.maps import (
    entropy,
    has_identity,
    mean_distance,
    patch_attention,
    patch_grid,
    stochastic_part,
)
from adder_flax.analysis.operations import Operations, count_operations, declare_operations
from adder_flax.analysis.summary import SummaryRow, summary_rows, summary_text

__all__ = [
    "HOROWITZ_45NM",
    "Energy",
    "EnergyTable",
    "Operations",
    "SummaryRow",
    "attention_figure",
    "count_operations",
    "curves_figure",
    "declare_operations",
    "energy",
    "entropy",
    "has_identity",
    "mean_distance",
    "patch_attention",
    "patch_grid",
    "save_figure",
    "stochastic_part",
    "summary_rows",
    "summary_text",
]
