"""TPU backend: Pallas kernels on the vector unit.

**Bound.** A vector register holds 8 x 128 float32 values, and a v5e core issues four vector
operations a cycle. A term of `l1` is three of them (subtract, absolute value, add), a term of the
`hardtanh` pullback four (subtract, clip, multiply, add), of `sign` five, and of the additive scores
three and a tanh on the transcendental unit: at 1.5 GHz, 2.0, 1.5, 1.2 and 1.5e12 terms a second and
core at most.

**Form.** A program of the grid (B, I, J, C) adds the terms of one block of c to one block of the
output, which stays in VMEM while c advances. In it, bands of `Tile.band` rows are finished one
after another, with totals in registers. Columns are read along lanes, one sublane a term. Rows come
with c along lanes: a lane is copied to all lanes by a permutation, which is paid once for each
eight rows and shared by all columns of the block; so blocks are wide. Results are the same bits on
every run: nothing is shared between programs but the output that one of them owns.

**Block sizes** come from the instruction bundles that the TPU compiler emits for v5e: with the
sizes of `Tile`, its inner loops issue 78 % (`l1`), 84 % (`hardtanh`), 87 % (`sign`) and 81 %
(additive) of those bounds.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adder_flax.ops._arrays import upcast
from adder_flax.ops._pallas import Operand, PallasBackend

_LANES = 128
_SUBLANES = 8


class Tile(NamedTuple):
    """Sizes of blocks; the first three are upper bounds, and shorter axes take less.

    Attributes:
      rows: rows of the output in one program, a multiple of `band`.
      columns: columns of the output in one program, a multiple of 128.
      terms: terms of the sum in one program, a multiple of 128.
      band: rows whose totals are kept in registers at a time, a multiple of 8.
      unroll: terms written out in the inner loop, a multiple of 8; a divisor of 128.
    """

    rows: int = 256
    columns: int = 768
    terms: int = 512
    band: int = 32
    unroll: int = 32


class PallasTpuBackend(PallasBackend):
    """Kernels for TPUs from v5e on.

    Args:
      interpret: run the kernels in Pallas's interpreter.
      block: sizes of blocks, where not the default ones.
    """

    name = "pallas_tpu"
    platforms = ("tpu",)
    split_by = "mesh"
    portable = True

    def __init__(self, interpret: bool = False, block: Tile | None = None):
        super().__init__(interpret)
        self._block = block or Tile()

    def run_kernel(self, reduction):
        size, out_types = reduction.sizes(), reduction.out_types()
        operands = [_laid_out(operand) for operand in reduction.operands]
        axes = [operand.axes for operand in operands]
        length = {
            "i": _block_length(size["i"], self._block.rows, self._block.band),
            "j": _block_length(size["j"], self._block.columns, _LANES),
            "c": _block_length(size["c"], self._block.terms, _LANES),
            "1": 1,
        }
        steps = {axis: pl.cdiv(size[axis], length[axis]) for axis in "ijc"}

        def spec(axes):
            def index(b, i, j, c):
                position = {"i": i, "j": j, "c": c, "1": 0}
                return b, *[position[axis] for axis in axes]

            return pl.BlockSpec((1, *[length[axis] for axis in axes]), index)

        def kernel(*refs):
            inputs = list(zip(refs, axes, strict=False))
            _add_block(reduction, self._block, size["c"], length["c"], inputs, refs[len(axes) :])

        return pl.pallas_call(
            kernel,
            out_shape=out_types,
            grid=(size["b"], *steps.values()),
            in_specs=[spec(a) for a in axes],
            out_specs=[spec("ij")] * len(out_types),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
            interpret=self.interpret,
        )(*[operand.array for operand in operands])


def _block_length(length: int, largest: int, multiple: int) -> int:
    """Returns the multiple up to `largest` covering an axis with little overhang and few blocks."""
    return min(range(largest, 0, -multiple), key=lambda n: pl.cdiv(length, n) * (n + multiple / 4))


def _laid_out(operand: Operand) -> Operand:
    """Returns an operand in float32 with two axes.

    Rows have c last, columns have c first, and 1 stands for a missing axis.

    Converted here because single rows of a packed narrower dtype cannot be read at a variable
    position.
    """
    (array,), axes = upcast(operand.array), operand.axes
    if axes in ("ci", "jc"):
        return Operand(jnp.swapaxes(array, 1, 2), axes[::-1])
    if axes == "j":
        return Operand(array[:, None], "1j")
    if axes in ("i", "c"):
        return Operand(array[:, :, None], axes + "1")
    return operand._replace(array=array)


def _add_block(reduction, block, count, block_count, inputs, out_refs):
    """The kernel: adds the terms of one block of c.

    Args:
      reduction: what to compute.
      block: sizes of blocks.
      count: length of c.
      block_count: length of a block of c.
      inputs: the reference and the axes of each operand.
      out_refs: references to the outputs.
    """
    rows, columns = out_refs[0].shape[1:]
    step, last_step = pl.program_id(3), pl.cdiv(count, block_count) - 1
    last_count = count - last_step * block_count

    @pl.loop(0, rows // block.band)
    def _(n):
        band = pl.ds(n * block.band, block.band)
        fixed = [
            ref[0, band if axes[0] == "i" else slice(None)]
            for ref, axes in inputs
            if "c" not in axes
        ]
        begun, held = reduction.begin(jnp.zeros((block.band, columns), jnp.float32), *fixed)
        totals = tuple(
            jnp.where(step == 0, first, ref[0, band])
            for first, ref in zip(begun, out_refs, strict=True)
        )

        def add_terms(c, totals, count):
            values = [
                _terms(ref, axes, band, c, count, columns) for ref, axes in inputs if "c" in axes
            ]
            for n in range(count):
                totals = reduction.step(totals, held, *[value[n] for value in values])
            return totals

        def add_all(count):
            turns, rest = divmod(count, block.unroll)

            def turn(n, totals):
                return add_terms(n * block.unroll, totals, block.unroll)

            return add_terms(turns * block.unroll, lax.fori_loop(0, turns, turn, totals), rest)

        if last_count == block_count:
            totals = add_all(block_count)
        else:
            totals = lax.cond(
                step == last_step, lambda: add_all(last_count), lambda: add_all(block_count)
            )
        for ref, total in zip(out_refs, totals, strict=True):
            ref[0, band] = jnp.where(step == last_step, reduction.finish(total), total)


def _multiple_of(place: Any, size: int) -> Any:
    return pl.multiple_of(place, size)  # of plain numbers too, which its annotation forgets


def _terms(ref, axes, band, c, count, columns):
    """Returns the values of an operand at c, c + 1, ..., where c is a multiple of 8."""
    if axes != "ic":
        groups = [
            ref[0, pl.ds(_multiple_of(c + n, _SUBLANES), _SUBLANES)]
            for n in range(0, count, _SUBLANES)
        ]
        return [groups[n // _SUBLANES][n % _SUBLANES : n % _SUBLANES + 1] for n in range(count)]
    lane = c % _LANES if isinstance(c, int) else lax.rem(c, _LANES)
    values = ref[0, band, pl.ds(_multiple_of(c - lane, _LANES), _LANES)]
    copies = [
        jnp.take_along_axis(values, jnp.full(values.shape, lane + n), axis=1) for n in range(count)
    ]
    return [jnp.concatenate([copy] * (columns // _LANES), axis=1) for copy in copies]
