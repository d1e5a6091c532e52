"""Energy that counted operations would take on a 45 nm chip, arithmetic and memory apart.

This models an ASIC with the arithmetic units that the function needs. It says nothing about a GPU,
on which an addition and a multiply-accumulate take one issue slot each.
"""

import dataclasses
from collections.abc import Mapping

from adder_flax.counting.operations import Operations

PICOJOULE = 1e-12


@dataclasses.dataclass(frozen=True)
class EnergyTable:
    """Energy of single operations.

    Only additions and multiplications are in published tables; the rest is composed of them. A
    comparison is a subtraction. A division is 7.1 multiplications, as measured on a Cortex-M4F
    (PMC8934428, Table 3), and a root is given the same. An exponential (or logarithm, tanh, erf) is
    10 multiplications and 10 additions, which is what the Cephes ``expf`` does: range reduction and
    a polynomial of degree 5.

    Attributes:
      name: what the table is, for headings.
      addition, multiplication: {dtype: pJ}.
      memory: {level: pJ per byte}.
    """

    name: str
    addition: Mapping[str, float]
    multiplication: Mapping[str, float]
    memory: Mapping[str, float]

    def picojoules(self, kind: str, dtype: str) -> float:
        """Energy of one operation, in pJ; raises KeyError for a number type without an entry."""
        if dtype == "bool":
            return 0.0
        if dtype not in self.addition or dtype not in self.multiplication:
            raise KeyError(
                f"expected a number type of the energy table {self.name!r}, one of "
                f"{sorted(self.addition)}; got {dtype!r} ({kind}). Pass a table that has it: "
                "energy(…, table=dataclasses.replace(table, addition=…, multiplication=…))."
            )
        multiplications, additions = _COMPOSITION[kind]
        return multiplications * self.multiplication[dtype] + additions * self.addition[dtype]


# kind: (multiplications, additions)
_COMPOSITION = {
    "additions": (0, 1),
    "multiplications": (1, 0),
    "comparisons": (0, 1),
    "exponentials": (10, 10),
    "divisions": (7.1, 0),
    "roots": (7.1, 0),
}

HOROWITZ_45NM = EnergyTable(
    name="45 nm, 0.9 V (Horowitz, ISSCC 2014)",
    addition={"float32": 0.9, "float16": 0.4, "bfloat16": 0.4}
    | {"int32": 0.1, "uint32": 0.1, "int8": 0.03, "uint8": 0.03},
    multiplication={"float32": 3.7, "float16": 1.1, "bfloat16": 1.1}
    | {"int32": 3.1, "uint32": 3.1, "int8": 0.2, "uint8": 0.2},
    # Per 64-bit word: 10 pJ, 20 pJ, 100 pJ; for DRAM the lower end of 1.3 to 2.6 nJ.
    memory={"8 KB cache": 10 / 8, "32 KB cache": 20 / 8, "1 MB cache": 100 / 8, "DRAM": 1300 / 8},
)
"""M. Horowitz, "Computing's energy problem (and what we can do about it)", ISSCC 2014. The table
has no bfloat16, which is given the figures of float16."""


@dataclasses.dataclass(frozen=True)
class Energy:
    """Modelled energy of one call, in joules.

    Attributes:
      arithmetic_joules: {kind: J}.
      memory_joules: {level: (least, most)}: arguments and results moved once, and every equation
        through memory.
    """

    arithmetic_joules: Mapping[str, float]
    memory_joules: Mapping[str, tuple[float, float]]

    @property
    def total_arithmetic_joules(self) -> float:
        """Energy of the arithmetic alone, the number that published comparisons give."""
        return sum(self.arithmetic_joules.values())


def energy(operations: Operations, table: EnergyTable = HOROWITZ_45NM) -> Energy:
    """Energy of counted operations, by kind of operation and by level of memory.

    Raises:
      KeyError: if the table has no entry for a number type that occurs.

    >>> import jax, jax.numpy as jnp
    >>> from adder_flax.counting import count_operations
    >>> x = jax.ShapeDtypeStruct((1, 1), "float32")
    >>> mac = energy(count_operations(jnp.matmul, x, x))
    >>> round(mac.total_arithmetic_joules * 1e12, 6)  # pJ
    4.6
    """
    joules: dict[str, float] = {}
    for (kind, dtype), number in operations.counts.items():
        if kind in _COMPOSITION:
            more = number * table.picojoules(kind, dtype) * PICOJOULE
            joules[kind] = joules.get(kind, 0.0) + more
    least, most = operations.bytes_at_boundary or 0, operations.bytes_moved
    memory = lambda pj: (least * pj * PICOJOULE, most * pj * PICOJOULE)
    return Energy(joules, {level: memory(pj) for level, pj in table.memory.items()})
