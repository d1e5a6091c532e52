"""What one learns from a run: operation counts, spectra, maps, walks, energy, figures."""

from adder_flax.analysis.energy import HOROWITZ_45NM, Energy, EnergyTable, energy
from adder_flax.analysis.operations import Operations, count_operations, declare_operations

__all__ = [
    "HOROWITZ_45NM",
    "Energy",
    "EnergyTable",
    "Operations",
    "count_operations",
    "declare_operations",
    "energy",
]
