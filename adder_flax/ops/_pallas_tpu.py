"""TPU backend: Pallas kernels on the vector unit.

**Bound.** A vector register holds 8 x 128 float32 values, and a v5e core issues four vector
operations a cycle. A term of `l1` is three of them (subtract, absolute value, add), a term of the
`hardtanh` pullback four (subtract, clip, multiply, add), of `sign` five, and of the additive scores
three and a tanh on the transcendental unit: at 1.5 GHz, 2.0, 1.5, 1.2 and 1.5e12 terms a second and
core at most.

**Form.** All functions are one reduction over pairs, out[b, i, j] = sum over c of a term of
operands at b, i, j, c: rows (axes i, c), columns (c, j), one number for each c, or what is fixed
during the sum (i j, i or j). A program of the grid (B, I, J, C) adds the terms of one block of c to
one block of the output, which stays in VMEM while c advances. In it, bands of `Tile.band` rows are
finished one after another, with totals in registers. Columns are read along lanes, one sublane a
term. Rows come with c along lanes: a lane is copied to all lanes by a permutation, which is paid
once for each eight rows and shared by all columns of the block; so blocks are wide. Results are the
same bits on every run: nothing is shared between programs but the output that one of them owns.

**Block sizes** come from the instruction bundles that the TPU compiler emits for v5e: with the
sizes of `Tile`, its inner loops issue 78 % (`l1`), 84 % (`hardtanh`), 87 % (`sign`) and 81 %
(additive) of those bounds.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adder_flax.ops._arrays import Operand, axis_lengths, to_nk, upcast
from adder_flax.ops._backend import Backend, up_to_float32
from adder_flax.ops._partition import result_type
from adder_flax.ops._xla import unless_empty

_LANES = 128
_SUBLANES = 8
# Makes +-1 of any difference of two unequal floats when the product is clipped to [-1, 1], but for
# subnormal differences, below the reciprocal, which count as almost equal.
_SIGN_SLOPE = 2.0**126


class Tile(NamedTuple):
    """Sizes of blocks; the first three, of one program, are upper bounds, and shorter axes take
    less.
    """

    rows: int = 256  # of the output, a multiple of `band`
    columns: int = 768  # of the output, a multiple of 128
    terms: int = 512  # of the sum, a multiple of 128
    band: int = 32  # rows whose totals are kept in registers at a time, a multiple of 8
    unroll: int = 32  # terms written out in the inner loop, a multiple of 8; a divisor of 128


class Reduction(NamedTuple):
    """One reduction over pairs, in functions of float32 blocks that broadcast to one of the output.

    `step(totals, held, *values)` returns the totals with one term added; `values` are the operands
    with a `c`, `held` those without. `finish` is applied to each total after the last term.
    """

    operands: Sequence[Operand]
    step: Callable
    totals: int = 1
    finish: Callable = lambda total: total


class PallasTpuBackend(Backend):
    """Kernels for TPUs from v5e on.

    Args:
      interpret: run the kernels in Pallas's interpreter: anywhere, slowly, for tests.
      block: sizes of blocks, where not the default ones.
    """

    name = "pallas_tpu"
    platforms = ("tpu",)
    split_by = "mesh"
    portable = True
    supports = up_to_float32

    def __init__(self, interpret: bool = False, block: Tile | None = None):
        self.interpret = interpret
        self._block = block or Tile()

    @unless_empty
    def l1(self, x, w, axes):
        def step(totals, _, x_c, w_c):
            return (totals[0] + jnp.abs(x_c - w_c),)

        operands = [Operand(x, "ic"), Operand(w, "cj" if axes == "kn" else "jc")]
        (y,) = self._reduce(Reduction(operands, step, finish=jnp.negative))
        return y

    @unless_empty
    def l1_pullback_x(self, x, w, g, rule, axes):
        columns = Operand(w, "jc" if axes == "kn" else "cj")
        return self._reduce_rule(Operand(g, "ic"), columns, Operand(x, "ij"), rule)

    @unless_empty
    def l1_pullback_w(self, x, w, g, rule, axes):
        # The same sum with the roles of x and w exchanged.
        operands = Operand(g, "ci"), Operand(x, "cj"), Operand(to_nk(w, axes), "ij")
        return to_nk(self._reduce_rule(*operands, rule), axes)

    def _reduce_rule(self, g: Operand, w: Operand, x: Operand, rule) -> jax.Array:
        """Computes sum over c of g[i, c] rule(w[c, j] - x[i, j])."""

        def step(totals, held, g_c, w_c):
            return (totals[0] + g_c * _apply(rule, w_c - held[0]),)

        (dx,) = self._reduce(Reduction([g, w, x], step))
        return dx

    @unless_empty
    def l1_pushforward(self, x, w, dx, rule, axes):
        def step(totals, _, x_c, w_c, dx_c):
            return (totals[0] + dx_c * _apply(rule, w_c - x_c),)

        operands = [Operand(x, "ic"), Operand(w, "cj" if axes == "kn" else "jc"), Operand(dx, "ic")]
        (dy,) = self._reduce(Reduction(operands, step))
        return dy

    @unless_empty
    def additive(self, query, key, v):
        def step(totals, _, query_c, key_c, v_c):
            return (totals[0] + v_c * jnp.tanh(query_c + key_c),)

        operands = [Operand(query, "ic"), Operand(key, "jc"), Operand(v, "c")]
        (scores,) = self._reduce(Reduction(operands, step))
        return scores

    @unless_empty
    def additive_pullback(self, query, key, v, g):
        def slope_step(totals, held, g_c, query_c):
            hidden = jnp.tanh(query_c + held[0])
            return (totals[0] + g_c * (1.0 - hidden * hidden),)

        def slope_and_value_step(totals, held, g_c, key_c):
            hidden = jnp.tanh(held[0] + key_c)
            return totals[0] + g_c * (1.0 - hidden * hidden), totals[1] + g_c * hidden

        (dk,) = self._reduce(
            Reduction([Operand(g, "ci"), Operand(query, "cj"), Operand(key, "ij")], slope_step)
        )
        operands = [Operand(g, "ic"), Operand(key, "cj"), Operand(query, "ij")]
        dq, dv = self._reduce(Reduction(operands, slope_and_value_step, totals=2))
        (v,) = upcast(v)
        return dq * v[:, None], dk * v[:, None], dv.sum(1)

    def _reduce(self, reduction: Reduction) -> Sequence[jax.Array]:
        """Computes the reduction; returns one float32 array (B, I, J) for each of its totals."""
        size = axis_lengths(reduction.operands)
        arrays = [operand.array for operand in reduction.operands]
        out_type = result_type((size["b"], size["i"], size["j"]), jnp.float32, *arrays)
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
            out_shape=[out_type] * reduction.totals,
            grid=(size["b"], *steps.values()),
            in_specs=[spec(a) for a in axes],
            out_specs=[spec("ij")] * reduction.totals,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
            interpret=self.interpret,
        )(*[operand.array for operand in operands])


def _apply(rule, difference):
    slope = _SIGN_SLOPE if rule.name == "sign" else rule.slope
    return jnp.clip(difference if slope == 1 else slope * difference, -1.0, 1.0)


def _block_length(length: int, largest: int, multiple: int) -> int:
    """Returns the multiple up to `largest` covering an axis with little overhang and few blocks."""
    return min(range(largest, 0, -multiple), key=lambda n: pl.cdiv(length, n) * (n + multiple / 4))


def _laid_out(operand: Operand) -> Operand:
    """Returns an operand with two axes: rows have c last, columns c first, and 1 stands for a
    missing axis.
    """
    # Single rows of a packed narrower dtype cannot be read at a variable position.
    (array,), axes = upcast(operand.array), operand.axes
    if axes in ("ci", "jc"):
        return Operand(jnp.swapaxes(array, 1, 2), axes[::-1])
    if axes == "j":
        return Operand(array[:, None], "1j")
    if axes in ("i", "c"):
        return Operand(array[:, :, None], axes + "1")
    return operand._replace(array=array)


def _add_block(reduction, block, count, block_count, inputs, out_refs):
    """The kernel: adds the terms of one block, `block_count` long, of the `count` of c; `inputs`
    are the reference and the axes of each operand.
    """
    rows, columns = out_refs[0].shape[1:]
    step, last_step = pl.program_id(3), pl.cdiv(count, block_count) - 1
    last_count = count - last_step * block_count

    @pl.loop(0, rows // block.band)
    def _(n):
        band = pl.ds(n * block.band, block.band)
        held = [
            ref[0, band if axes[0] == "i" else slice(None)]
            for ref, axes in inputs
            if "c" not in axes
        ]
        zero = jnp.zeros((block.band, columns), jnp.float32)
        totals = tuple(jnp.where(step == 0, zero, ref[0, band]) for ref in out_refs)

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
