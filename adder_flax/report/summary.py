"""The table before training: where a model's parameters, operations and energy are."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from adder_flax import ops
from adder_flax.counting.energy import HOROWITZ_45NM, energy
from adder_flax.counting.operations import Operations, count_operations
from adder_flax.text import si


@dataclasses.dataclass(frozen=True)
class SummaryRow:
    """A part of a model ("total" in the last row): how many numbers are trained in it, and what one
    example takes, with the modelled energy of that arithmetic.
    """

    part: str
    parameters: int
    operations: Operations
    joules: float


def summary_rows(model: nnx.Module, *inputs: jax.ShapeDtypeStruct) -> list[SummaryRow]:
    """One row per part of a model in the order of the forward pass, then the total.

    Nothing is computed: the model may be abstract (``nnx.eval_shape``).

    Args:
      model: any NNX module. Its ``part_names``, if it has them, say what the parts are called, by
        the beginning of a path (``*`` stands for any word, the first that fits counts), in the
        order of the rows; what they leave out goes under its top-level name.
      *inputs: shapes of what it is called with, for a batch of one.

    Example:
      >>> from adder_flax.models import VisionTransformer
      >>> sizes = dict(image_size=8, patch_size=2, channels=1, width=16, depth=2, num_heads=2)
      >>> make = lambda: VisionTransformer(**sizes, num_classes=10, rngs=nnx.Rngs(0))
      >>> rows = summary_rows(nnx.eval_shape(make), jax.ShapeDtypeStruct((1, 8, 8, 1), float))
      >>> [(row.part, row.parameters) for row in rows if row.part in ("patch embedding", "head")]
      [('patch embedding', 80), ('head', 170)]
    """
    # Every backend counts as the formula; this one has nothing to build first.
    with ops.use_backend("reference"):
        counted = count_operations(model, *inputs)
    names: Mapping[str, str] = getattr(model, "part_names", {})
    parameters: Counter[str] = Counter()
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        parameters[_part(path, names)] += math.prod(leaf.get_value().shape)
    layers: dict[str, list[Operations]] = {}
    for name, layer in counted.layers.items():
        layers.setdefault(_part(tuple(name.split(".")), names), []).append(layer)
    rows = [
        (part, parameters[part], Operations.total(layers.get(part, [])))
        for part in dict.fromkeys((*names.values(), *parameters, *layers))
        if part in parameters or part in layers
    ]
    rows.append(("total", parameters.total(), counted))
    return [SummaryRow(*row, energy(row[-1]).total_arithmetic_joules) for row in rows]


def summary_text(model: nnx.Module, *inputs: jax.ShapeDtypeStruct) -> str:
    """:func:`summary_rows` as an aligned table of plain text, its conventions below."""
    rows = summary_rows(model, *inputs)
    cells = [["part", "parameters", "multiplications", "additions", "exponentials", "energy"]]
    for row in rows:
        of = row.operations
        counts = map(si, (of.multiplications, of.additions, of.exponentials))
        cells.append([row.part, f"{row.parameters:,}", *counts, f"{si(row.joules)}J"])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([part.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])])
        for part, *numbers in cells
    ]
    lines.insert(-1, "-" * len(lines[0]))
    lines.append(
        f"for one example, forward; energy of the arithmetic alone, modelled: {HOROWITZ_45NM.name}"
    )
    total = rows[-1].operations
    if total.l1_elements:
        fewer = total.with_one_addition_per_l1_element()
        lines.append(
            f"an adder element |x - w| is 2 additions ({si(total.l1_elements)} elements); at 1 "
            f"addition: {si(fewer.additions)} additions, "
            f"{si(energy(fewer).total_arithmetic_joules)}J"
        )
    least, most = energy(total).memory_joules["DRAM"]
    lines.append(
        f"memory traffic, if all of it were DRAM: {si(least)}J (weights, example) to {si(most)}J "
        "(each operation)"
    )
    if total.uncounted:
        lines.append(f"not counted: {dict(total.uncounted)}")
    return "\n".join(lines)


def _part(path: tuple[Any, ...], names: Mapping[str, str]) -> str:
    words = list(map(str, path))
    for prefix, part in names.items():
        wanted = prefix.split(".")
        fits = (here in ("*", word) for here, word in zip(wanted, words, strict=False))
        if len(wanted) <= len(words) and all(fits):
            return part
    return words[0] or "elsewhere"
