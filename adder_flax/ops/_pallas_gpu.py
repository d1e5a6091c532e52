"""NVIDIA GPU backend: Pallas kernels for Triton, tiled in registers.

**Bound.** A term of `l1` is two instructions, FADD d = x, -w and FADD total = total, |d|: the
absolute value is an operand modifier. A Hopper SM issues 128 float32 instructions a cycle, so an
H200 (132 SMs, 1.98 GHz) reaches at most 132 x 64 x 1.98e9 = 16.7e12 terms a second. The `hardtanh`
pullback is two instructions as well, and `sign` is three: see `reduce_rule`. A term of the additive
gradients needs one reciprocal, of which an SM starts 16 a cycle: 4.2e12 terms a second at most.
Additive scores share one between two terms, and take four instructions a term: 8.4e12 at most.

**Form.** Triton cannot take one column out of a tile that is spread over threads, so blocks are not
indexed as matrices here: the last axis of every block is the thread, laid out in `Tile.row_threads`
x `Tile.column_threads`, and the leading axes are registers of that thread. A step of the sum is
then plain register arithmetic on an outer product of `Tile.rows` by `Tile.columns`. Indices are
written so that the compiler knows their range, and puts all but one addition of them into the
instructions that load. Operands are read straight through the L1 cache, which holds the few rows
and columns that an SM works on, in 16-byte loads; there is no shared memory, no barrier and no
atomic, and each output has one owner, so results are the same bits on every run. Edges are handled
by reading the last valid element again and by not storing what it gives.

**Block sizes** come from compiling for sm_90 and reading the machine code: see `TILES`, and
`benchmarks/sass.py`, which prints what each kernel costs on which GPU, and needs none.

JAX declares its Triton lowering deprecated from 0.11 on, in favour of Mosaic GPU, whose interface
changes between the releases this package supports; when it is gone, this backend reports itself
unavailable and the XLA backend takes over.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from adder_flax.ops._arrays import upcast
from adder_flax.ops._pallas import SIGN_SLOPE, Operand, PallasBackend, Reduction, unless_empty

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    plgpu: Any = None

# Terms added in one turn of the loop, and length of the runs of neighbouring rows and
# columns that one thread owns: what one 16-byte load brings.
_RUN = 4

# Exponents whose product with another one in range neither overflows nor vanishes before
# tanh has saturated.
_LARGEST_EXPONENT = 87.0
# With one reciprocal for two terms, denominators 1 + e^2x are kept in units of 2^62: the
# product of two lies above 2^-124 then, whose reciprocal is a normal number, and one with
# exponents up to these lies below 2^125.
_UNIT = 2.0**62
_LARGEST_PAIRED_EXPONENT = 64.5


class Tile(NamedTuple):
    """The part of the output that one program computes.

    All sizes are powers of two, `rows` and `columns` at least 4.

    Attributes:
      rows: rows that each thread owns.
      columns: columns that each thread owns.
      row_threads: threads along the rows.
      column_threads: threads along the columns.
      arithmetic_share: share of the instructions of the inner loop, of `l1` in `TILES`, that are
        its arithmetic.
    """

    rows: int
    columns: int
    row_threads: int
    column_threads: int
    arithmetic_share: float

    def shape(self) -> tuple[int, int]:
        return self.rows * self.row_threads, self.columns * self.column_threads

    def threads(self) -> int:
        return self.row_threads * self.column_threads

    def cost(self, size: dict[str, int]) -> float:
        """Returns the relative time for a problem.

        It is its work, padded to whole tiles, in issue slots of a full device.
        """
        rows, columns = self.shape()
        programs = size["b"] * pl.cdiv(size["i"], rows) * pl.cdiv(size["j"], columns)
        idle = max(1.0, FULL_DEVICE_THREADS / (programs * self.threads()))
        return programs * rows * columns / self.arithmetic_share * idle


# The shares are counts from the machine code that XLA and ptxas emit for sm_90 (float32,
# aligned operands).
TILES = (
    Tile(8, 8, 8, 16, 0.94),
    Tile(4, 8, 8, 16, 0.91),
    Tile(4, 8, 4, 8, 0.92),
    Tile(4, 4, 4, 8, 0.85),
)
# For steps that add two terms at once; the arithmetic is that of `additive`.
PAIRED_TILES = (
    Tile(8, 4, 8, 4, 0.93),
    Tile(8, 4, 4, 8, 0.93),
    Tile(4, 4, 4, 8, 0.87),
)
# Totals and fixed operands that a thread can hold without spilling, with room for what
# the steps load.
_HELD_PER_THREAD = 96
# Two warps for each of the four schedulers of the 132 SMs of an H100 or H200.
FULL_DEVICE_THREADS = 132 * 4 * 2 * 32
# Fewest terms of a part of a sum: what begins and ends a part costs about as much as ten.
_SHORTEST_PART = 512


class PallasGpuBackend(PallasBackend):
    """Kernels for NVIDIA GPUs, of compute capability 8.0 or later.

    Args:
      interpret: run the kernels in Pallas's interpreter.
      tile: the tile to use in place of the one that `TILES` offers for each shape.
    """

    name = "pallas_gpu"
    platforms = ("cuda",)
    split_by = "rule"

    def __init__(self, interpret: bool = False, tile: Tile | None = None):
        super().__init__(interpret)
        self._tile = tile

    def why_unavailable(self):
        if plgpu is None:
            return "this JAX has no Triton lowering for Pallas"
        if jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) < 8:
            return "it needs a GPU of compute capability 8.0 or later"
        return None

    def run_kernel(self, reduction):
        size, out_types = reduction.sizes(), reduction.out_types()
        tile = self._tile or _choose_tile(reduction, len(out_types))
        rows, columns = tile.shape()
        # Narrow operands are converted once here: in the loop that would cost half an
        # instruction a term.
        operands = [
            _columns_contiguous(Operand(upcast(array)[0], axes))
            for array, axes in reduction.operands
        ]
        axes = [operand.axes for operand in operands]

        def kernel(*refs):
            inputs = list(zip(refs, axes, strict=False))
            _reduce_tile(reduction, tile, size, inputs, refs[len(axes) :])

        return pl.pallas_call(
            kernel,
            out_shape=out_types,
            grid=(size["b"] * pl.cdiv(size["i"], rows) * pl.cdiv(size["j"], columns),),
            compiler_params=plgpu.CompilerParams(num_warps=tile.threads() // 32, num_stages=1),
            interpret=self.interpret,
        )(*[operand.array for operand in operands])

    def multiply_add(self, a, b, c):
        # Spelled out, because Triton does not contract a product and a sum by itself
        # here.
        return (
            super().multiply_add(a, b, c) if self.interpret else _instruction("fma.rn.f32", a, b, c)
        )

    def saturate(self, a: jax.Array) -> jax.Array:
        """Clips to [0, 1] inside a kernel, for which the hardware has a modifier; NaN becomes 0."""
        if self.interpret:
            return jnp.where(a > 0, jnp.minimum(a, 1.0), 0.0)
        return jnp.minimum(jnp.maximum(a, 0.0), 1.0)

    def clip(self, a):
        # Triton's minimum and maximum drop NaN.
        return jnp.where(a != a, a, jnp.clip(a, -1.0, 1.0))

    def reduce_rule(self, g, w, x, rule):
        """Computes the sum through clip(d) = 2 sat(d/2 + 1/2) - 1.

        Here sat, clipping to [0, 1], costs nothing.

        With `hardtanh`, scaled operands make one saturating FADD of the rule and its difference,
        and one FFMA adds the product; `sign` takes the difference first, to see the smallest ones.
        Saturation turns NaN into 0, so where a NaN (or inf - inf) enters a sum it is put back
        through the extremes of w, which reveal it.
        """
        (x_array, w_array), (g_array,) = upcast(x.array, w.array), upcast(g.array)
        summed = "b" + w.axes
        parts = _parts(Reduction([g, w, x], step=None).sizes())
        if parts > 1:
            # Few outputs, of long sums: parts of the sums are computed side by side, and
            # added in order.
            g, w = (_cut(Operand(upcast(a.array)[0], a.axes), parts) for a in (g, w))
            x = Operand(jnp.repeat(x_array, parts, axis=0), x.axes)
            return self.reduce_rule(g, w, x, rule).reshape(-1, parts, *x_array.shape[1:]).sum(1)
        high, low = (extreme(w_array, summed.index("c")) for extreme in (jnp.max, jnp.min))
        if rule.name == "sign":
            scale, centre, offset = 1.0, jnp.zeros_like(high), 0.0
        else:
            # Centred, so that offsets that x and w share do not cost precision.
            centre = jnp.where(jnp.isfinite(high - low), high / 2 + low / 2, 0.0)
            scale, offset = rule.slope / 2, 0.5

        def shifted(a, centre):
            return scale * (a - centre)

        def begin(zero, x, centre, high, low, g_sum):
            held = offset - shifted(x, centre)
            highest, lowest = shifted(high, centre) + held, shifted(low, centre) + held
            undefined = (highest != highest) | (lowest != lowest)
            return (jnp.where(undefined, jnp.nan, zero - 0.5 * g_sum),), (held,)

        def step(totals, held, g_c, w_c):
            position = w_c + held[0]
            if rule.name == "sign":
                position = self.multiply_add(position, SIGN_SLOPE / 2, 0.5)
            return (self.multiply_add(g_c, self.saturate(position), totals[0]),)

        operands = [
            g,
            Operand(shifted(w_array, jnp.expand_dims(centre, summed.index("c"))), w.axes),
            Operand(x_array, x.axes),
            *(Operand(a, "j") for a in (centre, high, low)),
            Operand(g_array.sum(1 + g.axes.index("c")), "i"),
        ]
        (dx,) = self.run_kernel(Reduction(operands, step, begin, finish=_doubled))
        return dx

    @unless_empty
    def l1_pushforward(self, x, w, dx, rule, axes):
        """Computes the sum as `reduce_rule` does.

        What is not finite is told apart by another loop, if there is any.
        """
        (x, w, dx), width = upcast(x, w, dx), 1 + axes.index("k")
        if rule.name == "sign":
            scale, offset, centre = 1.0, 0.0, jnp.zeros((x.shape[0], 1, x.shape[2]), x.dtype)
        else:
            high, low = (extreme(w, 3 - width)[:, None] for extreme in (jnp.max, jnp.min))
            scale, offset = rule.slope / 2, 0.5
            centre = jnp.where(jnp.isfinite(high - low), high / 2 + low / 2, 0.0)
        rows = offset - scale * (x - centre)
        columns = scale * (w - (centre if axes == "nk" else jnp.swapaxes(centre, 1, 2)))
        strange = ~(jnp.isfinite(rows).all((1, 2)) & jnp.isfinite(columns).all((1, 2)))

        def begin(zero, dx_sum, strange):
            return (zero - 0.5 * dx_sum,), (strange,)

        def is_strange(strange):
            return strange > 0

        def position(row, column):
            distance = column + row
            return (
                self.multiply_add(distance, SIGN_SLOPE / 2, 0.5)
                if rule.name == "sign"
                else distance
            )

        def step(totals, _, row, column, dx_c):
            return (self.multiply_add(dx_c, self.saturate(position(row, column)), totals[0]),)

        def careful_step(totals, _, row, column, dx_c):
            at = position(row, column)
            return (self.multiply_add(dx_c, jnp.where(at != at, at, self.saturate(at)), totals[0]),)

        operands = [
            Operand(rows, "ic"),
            Operand(columns, "cj" if axes == "kn" else "jc"),
            Operand(dx, "ic"),
            Operand(dx.sum(2), "i"),
            Operand(strange.astype(jnp.float32), ""),
        ]
        careful = (is_strange, careful_step)
        (dy,) = self.run_kernel(Reduction(operands, step, begin, finish=_doubled, careful=careful))
        return dy

    @unless_empty
    def additive(self, query, key, v):
        """Computes the sum with one reciprocal for two hidden units.

        With d = 1 + e^2x, v/d + v'/d' = (v d' + v' d)/(d d').

        An SM starts 16 reciprocals a cycle, an eighth of what it issues otherwise. As in
        `hidden_operands`, but exact while q and k stay within 32.
        """
        (v,) = upcast(v)
        # By a power of two, to the bit, since it and its reciprocal are normal numbers; v
        # comes to lie in [-4, 4].
        exponent = jnp.clip(jnp.frexp(jnp.abs(v).max(1, keepdims=True))[1], -126, 126)
        scale = jnp.ldexp(jnp.float32(1.0), exponent)
        query, key = self.hidden_operands(query, key, largest=_LARGEST_PAIRED_EXPONENT)
        # Half of the unit in each factor, so that neither becomes denormal.
        query, key, v = (_even(a) for a in (query * _UNIT**-0.5, key * _UNIT**-0.5, v / scale))
        both = jnp.repeat(_UNIT * v.reshape(*v.shape[:-1], -1, 2).sum(-1), 2, axis=-1)
        operands = [
            Operand(query, "ic"),
            Operand(key, "jc"),
            Operand(-2.0 * v, "c"),
            Operand(both, "c"),
        ]

        def step(totals, _, query, key, v, both):
            d, other = (self.multiply_add(q, k, 1 / _UNIT) for q, k in zip(query, key, strict=True))
            weighted = self.multiply_add(v[0], other, v[1] * d)
            return (totals[0] + self.multiply_add(self.reciprocal(d * other), weighted, both[0]),)

        (scores,) = self.run_kernel(Reduction(operands, step, at_once=2))
        return scores * (scale / _UNIT)[:, :, None]

    def hidden_operands(self, query, key, largest=_LARGEST_EXPONENT):
        """Returns e^2q and e^2k.

        Their product gives tanh(q + k) = 1 - 2 / (1 + e^2q e^2k) without an exponential.

        Exact while each of q and k, after a shift that centres the keys of each hidden unit on
        zero, stays within half of the largest exponent, 43; beyond that they are taken as 43, which
        matters only where both are and their signs differ.
        """
        query, key = upcast(query, key)
        high, low = key.max(1, keepdims=True), key.min(1, keepdims=True)
        centre = jnp.where(jnp.isfinite(high - low), high / 2 + low / 2, 0.0)
        return tuple(
            jnp.exp(jnp.clip(2 * a, -largest, largest)) for a in (query + centre, key - centre)
        )

    def hidden(self, query, key):
        decay = self.multiply_add(query, key, 1.0)
        return self.multiply_add(self.reciprocal(decay), -2.0, 1.0)

    def reciprocal(self, a: jax.Array) -> jax.Array:
        """Computes 1/a inside a kernel, in one instruction; a denormal result is 0."""
        return 1.0 / a if self.interpret else _instruction("rcp.approx.ftz.f32", a)


def _even(array: jax.Array) -> jax.Array:
    """Returns an array whose last axis a zero makes even."""
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, array.shape[-1] % 2)])


def _doubled(total):
    # The slope of a rule lies in [-1, 1] and the hardware saturates to [0, 1]: half of
    # each term, and then twice all.
    return 2.0 * total


def _columns_contiguous(operand: Operand) -> Operand:
    """Returns columns with j last, padded to whole runs.

    Threads side by side own columns side by side, so with c last each 16-byte load would touch a
    cache line for each of them.
    """
    if operand.axes != "jc":
        return operand
    columns = jnp.swapaxes(operand.array, 1, 2)
    return Operand(jnp.pad(columns, ((0, 0), (0, 0), (0, -columns.shape[2] % _RUN))), "cj")


def _choose_tile(reduction: Reduction, outputs: int) -> Tile:
    held = outputs + sum(axes == "ij" for _, axes in reduction.operands)
    tiles = TILES if reduction.at_once == 1 else PAIRED_TILES
    fitting = [tile for tile in tiles if tile.rows * tile.columns * held <= _HELD_PER_THREAD]
    return min(fitting, key=lambda tile: tile.cost(reduction.sizes()))


def _parts(size: dict[str, int]) -> int:
    """Returns into how many parts to cut sums.

    Few outputs of long sums then still give the whole device work.
    """
    threads = size["b"] * size["i"] * size["j"] // (_RUN * _RUN)
    wanted = 1 << max(0, (2 * FULL_DEVICE_THREADS - 1).bit_length() - max(threads, 1).bit_length())
    return max(1, min(wanted, size["c"] // _SHORTEST_PART))


def _cut(operand: Operand, parts: int) -> Operand:
    """Returns an operand with its sums cut into parts, which follow each other along the batch.

    Zeros fill the last.
    """
    axis, array = 1 + operand.axes.index("c"), operand.array
    length = pl.cdiv(array.shape[axis], parts * _RUN) * _RUN
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, length * parts - array.shape[axis])
    array = jnp.pad(array, padding)
    array = jnp.moveaxis(
        array.reshape(*array.shape[:axis], parts, length, *array.shape[axis + 1 :]), axis, 1
    )
    return Operand(array.reshape(-1, *array.shape[2:]), operand.axes)


def _instruction(name, *args):
    """Applies one PTX instruction of float32 operands elementwise."""
    args = jnp.broadcast_arrays(*[jnp.asarray(a, jnp.float32) for a in args])
    slots = ", ".join(f"${n}" for n in range(len(args) + 1))
    (result,) = plgpu.elementwise_inline_asm(
        f"{name} {slots};",
        args=args,
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return result


def _reduce_tile(reduction, tile, size, inputs, out_refs):
    """The kernel: computes the tile of this program.

    Args:
      reduction: what to compute.
      tile: how to share it among threads.
      size: length of each axis.
      inputs: the reference and the axes of each operand, columns with j last.
      out_refs: references to the outputs.
    """
    blocks = [pl.cdiv(size[axis], length) for axis, length in zip("ij", tile.shape(), strict=True)]
    batch, block = _divmod(pl.program_id(0), blocks[0] * blocks[1])
    batch = _clip(batch, size["b"] - 1)
    block_i, block_j = _divmod(block, blocks[1])
    thread_i, thread_j = _divmod(
        lax.broadcasted_iota(jnp.int32, (1, 1, tile.threads()), 2), tile.column_threads
    )
    first = {
        "i": _first_of_runs(block_i, tile.rows, tile.row_threads, thread_i),
        "j": _first_of_runs(block_j, tile.columns, tile.column_threads, thread_j),
    }
    # The axes of a block: runs of rows, rows of a run, runs of columns, columns of a run,
    # threads.
    spread = {"i": lambda a: a[:, :, None, None], "j": lambda a: a[None, None]}
    at_once = reduction.at_once

    def fixed(ref, axes):
        at = [
            spread[axis](_inside(first[axis], length))
            for axis, length in zip(axes, ref.shape[1:], strict=True)
        ]
        return plgpu.load(ref.at[batch, *at]).astype(jnp.float32)

    def terms(ref, axes, c, count):
        """Returns the values of an operand at c, c + 1, ..."""
        kept = axes.replace("c", "")
        if not kept and ref.shape[1] % _RUN == 0:
            # One load for the run, of the same place in every thread.
            runs = c + lax.broadcasted_iota(jnp.int32, (_RUN, 1, 1, 1, 1, tile.threads()), 0)
            return _unstack(plgpu.load(ref.at[batch, runs]).astype(jnp.float32))
        if not kept:
            return [plgpu.load(ref.at[batch, c + n]).astype(jnp.float32) for n in range(count)]
        at = _inside(first[kept], ref.shape[1 + axes.index(kept)])
        if axes == "ic" and ref.shape[2] % _RUN == 0:
            runs = c + lax.broadcasted_iota(jnp.int32, (_RUN, 1, 1, 1), 0)
            values = _unstack(plgpu.load(ref.at[batch, at[None], runs]).astype(jnp.float32))
        else:
            indices = [(at, c + n) if axes == "ic" else (c + n, at) for n in range(count)]
            values = [plgpu.load(ref.at[batch, *index]).astype(jnp.float32) for index in indices]
        return [spread[kept](value) for value in values]

    def add_terms(step, c, totals, count):
        values = [terms(ref, axes, c, count) for ref, axes in inputs if "c" in axes]
        for n in range(0, count, at_once):
            totals = step(
                totals,
                held,
                *[value[n] if at_once == 1 else value[n : n + at_once] for value in values],
            )
        return totals

    def add_all(step, totals):
        runs, rest = divmod(size["c"], _RUN)

        def add_run(n, totals):
            return add_terms(step, _clip(n * _RUN, (runs - 1) * _RUN), totals, _RUN)

        return add_terms(
            step, jnp.int32(runs * _RUN), lax.fori_loop(0, runs, add_run, totals), rest
        )

    zero = jnp.zeros(
        (tile.rows // _RUN, _RUN, tile.columns // _RUN, _RUN, tile.threads()), jnp.float32
    )
    totals, held = reduction.begin(
        zero, *[fixed(ref, axes) for ref, axes in inputs if "c" not in axes]
    )
    if reduction.careful is None:
        totals = add_all(reduction.step, totals)
    else:
        needed, careful_step = reduction.careful
        add = [functools.partial(add_all, step) for step in (careful_step, reduction.step)]
        totals = lax.cond(needed(*held), *add, totals)
    at = [spread[axis](first[axis] + _run_positions()) for axis in "ij"]
    for ref, total in zip(out_refs, totals, strict=True):
        mask = (at[0] < size["i"]) & (at[1] < size["j"])
        plgpu.store(ref.at[batch, *at], reduction.finish(total), mask=mask)


def _divmod(a, b):
    return lax.div(a, b), lax.rem(a, b)


def _clip(index, last):
    """Returns an index that is known to lie from 0 to `last`, as it does.

    Sums of such indices are then known not to overflow, and become parts of the
    instructions that load, where each would be an addition of 64 bits.
    """
    return jnp.minimum(jnp.maximum(index, 0), last)


def _first_of_runs(block, per_thread, threads, thread):
    """Returns the first position of each run that a thread owns, as (runs, 1, threads)."""
    run = lax.broadcasted_iota(jnp.int32, (per_thread // _RUN, 1, 1), 0)
    return block * (per_thread * threads) + (run * threads + thread) * _RUN


def _run_positions():
    return lax.broadcasted_iota(jnp.int32, (1, _RUN, 1), 1)


def _inside(first, length):
    """Returns the positions of runs.

    Those beyond the end of an axis are moved onto its last elements.

    Where the axis is made of whole runs, runs move as a whole, so that Triton sees that they are
    contiguous.
    """
    if length % _RUN == 0:
        return _clip(first, length - _RUN) + _run_positions()
    return _clip(first + _run_positions(), length - 1)


def _unstack(values):
    """Returns the slices of a block along its leading axis.

    Triton has no such operation. Here every thread holds all of the axis, so each sum is over
    compile-time constants and one register, and costs nothing; on integers, so that the compiler
    may see that adding zero changes nothing.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    position = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    slices = [jnp.where(position == n, bits, 0).sum(0) for n in range(values.shape[0])]
    return [lax.bitcast_convert_type(slice_, jnp.float32) for slice_ in slices]
