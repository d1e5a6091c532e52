"""Operations of any JAX function, counted kind by kind, and the energy that they model."""

from adder_flax.counting.energy import HOROWITZ_45NM, Energy, EnergyTable, energy
from adder_flax.counting.operations import Operations, count_operations, declare_operations

__all__ = [
    "HOROWITZ_45NM",
    "Energy",
    "EnergyTable",
    "Operations",
    "count_operations",
    "declare_operations",
    "energy",
]
