"""NVIDIA GPU backend: CUDA C++ kernels, compiled by NVRTC and launched by XLA.

**Bound.** A term of `l1` is two instructions, FADD d = x, -w and FADD total = total, |d|: the
absolute value is an operand modifier. A Hopper SM issues 128 float32 instructions a cycle, so an
H200 (132 SMs, 1.98 GHz) reaches at most 132 x 64 x 1.98e9 = 16.7e12 terms a second. The `hardtanh`
pullback is two instructions as well, and `sign` is three. A term of the additive gradients needs
one reciprocal, of which an SM starts 16 a cycle: 4.2e12 terms a second at most. Additive scores
share one between two terms, and take four instructions a term: 8.4e12 at most.

**Form.** All functions are one reduction over pairs, `cuda_kernels.cu`, with a step for each: see
there. It is specialised to the shape when a program is lowered, so that nearly all of the inner
loop is arithmetic: `benchmarks/sass.py` prints what each kernel costs on which GPU, and needs none;
`benchmarks/ops_device.py` measures it where there is one. Instructions are not all: loads that wait
in the loop cost more than what it takes to have the terms in shared memory before they are needed.

**Launch.** A kernel is handed to XLA as PTX, in a custom call of XLA's own. So XLA loads it on
every device that a program runs on, puts it on the right stream, and stores it with the program.
Nothing is built for the host, and no driver is asked for: programs compile ahead of time for GPUs
that are elsewhere.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from adder_flax.ops import _nvrtc
from adder_flax.ops._arrays import Operand, axis_lengths, to_nk, upcast
from adder_flax.ops._backend import Backend, up_to_float32
from adder_flax.ops._partition import result_type
from adder_flax.ops._xla import unless_empty

_SOURCE = Path(__file__).with_name("cuda_kernels.cu")
_TARGET = "__gpu$xla.gpu.ptx"
# `kRun` of the kernels: neighbouring rows, columns or terms that one load of 16 bytes brings.
_RUN = 4

# Exponents whose product with another one in range neither overflows nor vanishes before tanh has
# saturated.
_LARGEST_EXPONENT = 87.0
# With one reciprocal for two terms, denominators 1 + e^2x are kept in units of 2^62: the product of
# two lies above 2^-124 then, whose reciprocal is a normal number, and one with exponents up to
# these lies below 2^125.
_UNIT = 2.0**62
_LARGEST_PAIRED_EXPONENT = 64.5


class Tile(NamedTuple):
    """The part of the output that one block of threads computes.

    Attributes:
      rows, columns: that each thread owns, 4 or 8.
      row_threads, column_threads: along the rows and along the columns.
      efficiency: share of the bound that a core reaches with it in `l1`, between what begins and
        ends a block.
    """

    rows: int
    columns: int
    row_threads: int
    column_threads: int
    efficiency: float

    def blocks(self, size: dict[str, int]) -> int:
        rows, columns = self.rows * self.row_threads, self.columns * self.column_threads
        return size["b"] * -(-size["i"] // rows) * -(-size["j"] // columns)

    def threads(self) -> int:
        return self.row_threads * self.column_threads

    def cost(self, size: dict[str, int]) -> float:
        """Returns the relative time of the core with most blocks, in terms of whole tiles."""
        terms = self.rows * self.columns * self.threads() * (size["c"] + _TERMS_OF_A_BLOCK)
        return -(-self.blocks(size) // _CORES) * terms / self.efficiency


# Of an H100 or H200, on which all that follows was measured (`benchmarks/ops_device.py`).
_CORES = 132
TILES = (
    Tile(8, 8, 8, 16, 0.85),
    Tile(4, 8, 8, 16, 0.81),
    Tile(4, 8, 8, 8, 0.76),
    Tile(4, 4, 8, 16, 0.80),
    Tile(4, 4, 4, 8, 0.74),
    Tile(4, 8, 5, 25, 0.72),  # 200 columns: maps of 197 tokens, of 224 pixels in patches of 16
)
# What begins and ends a block, in terms of each of its outputs.
_TERMS_OF_A_BLOCK = 16
# Totals and fixed operands that a thread can hold without spilling, with room for what steps load.
_HELD_PER_THREAD = 96
# Terms that one stage may have: a multiple of a run, and two of the longest are in shared memory.
_STAGES = (16, 8, 4)
# With fewer outputs, sums are cut into parts: runs of outputs that give each scheduler of all cores
# the eight warps with which it waits for nobody.
_OUTPUT_RUNS_OF_FULL_DEVICE = _CORES * 4 * 8 * 32
# Fewest terms of a part of a sum.
_SHORTEST_PART = 512


class Reduction(NamedTuple):
    """What is reduced."""

    step: str  # what is added, a struct of the kernels
    axes: tuple[str, ...]  # of each operand after the batch
    columns: int  # of the result; operands may have some more
    totals: int  # how many sums a step adds to
    at_once: int  # how many terms it adds together

    def sizes(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Returns the length of each axis, from the shapes of the operands."""
        size = {}
        for axes, shape in zip(self.axes, shapes, strict=True):
            size.update(zip(axes, shape[1:], strict=True))
        # Some may have fewer members of the batch: they serve all, over and over.
        return size | {"b": max(shape[0] for shape in shapes), "j": self.columns}

    def shape(self, arrays: Sequence) -> tuple[int, int, int]:
        """Returns the shape of each result."""
        size = self.sizes([array.shape for array in arrays])
        return size["b"], size["i"], size["j"]


class Kernel(NamedTuple):
    """A reduction on operands of one shape.

    `blocks` of so many `threads` run it, with `stage` terms in shared memory at once.
    """

    name: str
    source: str
    blocks: int
    threads: int
    stage: int


class CudaBackend(Backend):
    """Kernels for NVIDIA GPUs, of compute capability 8.0 or later.

    Args:
      tile: the tile to use in place of the one that `TILES` offers for each shape.
    """

    name = "cuda"
    platforms = ("cuda",)
    split_by = "rule"
    supports = up_to_float32

    def __init__(self, tile: Tile | None = None):
        self._tile = tile

    def why_unavailable(self):
        if jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) < 8:
            return "it needs a GPU of compute capability 8.0 or later"
        try:
            _nvrtc.load_library()
        except OSError as error:
            return str(error)
        return None

    @unless_empty
    def l1(self, x, w, axes):
        operands = [Operand(x, "ic"), Operand(w, "cj" if axes == "kn" else "jc")]
        parts = _parts(operands)
        (y,) = self._reduce("L1", *(_cut(operand, parts) for operand in operands))
        return _joined(y, parts)

    @unless_empty
    def l1_pullback_x(self, x, w, g, rule, axes):
        w_axes = "jc" if axes == "kn" else "cj"
        return self._pull_back(Operand(g, "ic"), Operand(w, w_axes), x, rule)

    @unless_empty
    def l1_pullback_w(self, x, w, g, rule, axes):
        # The same sum with the roles of x and w exchanged.
        dw = self._pull_back(Operand(g, "ci"), Operand(x, "cj"), to_nk(w, axes), rule)
        return to_nk(dw, axes)

    def _pull_back(self, g, w, x, rule):
        """Computes sum over c of g[i, c] rule(w[c, j] - x[i, j]); see `Rule` in the kernels."""
        (x,) = upcast(x)
        g, w = (Operand(upcast(array)[0], axes) for array, axes in (g, w))
        parts = _parts([g, w])
        # Filled up with its last term w has no wider range.
        g, w = _cut(g, parts), _cut(w, parts, filling="edge")
        c = 1 + w.axes.index("c")
        high, low, centre, scale, _ = _range(w.array, c, rule)
        operands = [
            g,
            Operand(scale * (w.array - jnp.expand_dims(centre, c)), w.axes),
            Operand(x, "ij"),
            *(Operand(a, "j") for a in (centre, high, low)),
            Operand(g.array.sum(1 + g.axes.index("c")), "i"),
            Operand(jnp.full(1, rule.slope, jnp.float32), ""),
        ]
        (dx,) = self._reduce(f"Rule<{_is_sign(rule)}>", *operands)
        return _joined(dx, parts)

    @unless_empty
    def l1_pushforward(self, x, w, dx, rule, axes):
        """Computes the sum as the pullback does, what is not finite by another loop."""
        (x, w, dx), c = upcast(x, w, dx), 1 + axes.index("k")
        _, _, centre, scale, offset = _range(w, 3 - c, rule)
        centre = centre[:, None]
        rows = offset - scale * (x - centre)
        columns = scale * (w - to_nk(centre, axes))
        strange = ~(jnp.isfinite(rows).all((1, 2)) & jnp.isfinite(columns).all((1, 2)))
        w_axes = "cj" if axes == "kn" else "jc"
        summed = Operand(rows, "ic"), Operand(columns, w_axes), Operand(dx, "ic")
        fixed = Operand(dx.sum(2), "i"), Operand(strange.astype(jnp.float32), "")
        (dy,) = self._reduce(f"Pushforward<{_is_sign(rule)}>", *summed, *fixed)
        return dy

    @unless_empty
    def sad(self, x, w):
        """Computes the sum with four bytes in each word, which one instruction takes at once."""
        operands = [Operand(_words(x), "ic"), Operand(_words(w), "jc")]
        parts = _parts(operands)
        (y,) = self._reduce("Sad", *(_cut(operand, parts) for operand in operands))
        return _joined(jax.lax.bitcast_convert_type(y, jnp.int32), parts)

    @unless_empty
    def additive(self, query, key, v):
        """Computes the sum with one reciprocal for two hidden units.

        An SM starts 16 reciprocals a cycle, an eighth of what it issues otherwise. As in
        `_exponentials`, but exact while q and k stay within 32.
        """
        (v,) = upcast(v)
        # By a power of two, to the bit, since it and its reciprocal are normal numbers; v comes to
        # lie in [-4, 4].
        exponent = jnp.clip(jnp.frexp(jnp.abs(v).max(1, keepdims=True))[1], -126, 126)
        scale = jnp.ldexp(jnp.float32(1.0), exponent)
        query, key = _exponentials(query, key, largest=_LARGEST_PAIRED_EXPONENT)
        # Half of the unit in each factor, so that neither becomes denormal.
        query, key, v = (
            _filled_up(a, 2) for a in (query * _UNIT**-0.5, key * _UNIT**-0.5, v / scale)
        )
        both = jnp.repeat(_UNIT * v.reshape(*v.shape[:-1], -1, 2).sum(-1), 2, axis=-1)
        operands = Operand(query, "ic"), Operand(key, "jc"), Operand(-2.0 * v, "c")
        (scores,) = self._reduce("Additive", *operands, Operand(both, "c"), at_once=2)
        return scores * (scale / _UNIT)[:, :, None]

    @unless_empty
    def additive_pullback(self, query, key, v, g):
        query, key = _exponentials(query, key)
        operands = Operand(g, "ci"), Operand(query, "cj"), Operand(key, "ij")
        (dk,) = self._reduce("AdditivePullback<1>", *operands)
        operands = Operand(g, "ic"), Operand(key, "cj"), Operand(query, "ij")
        dq, dv = self._reduce("AdditivePullback<2>", *operands, totals=2)
        (v,) = upcast(v)
        return dq * v[:, None], dk * v[:, None], dv.sum(1)

    def _reduce(self, step: str, *operands: Operand, totals=1, at_once=1) -> list[jax.Array]:
        """Computes a `Reduction` of operands in the order of the step, the summed ones first;
        returns a float32 array (B, I, J) for each of its totals.
        """
        # Narrow ones are converted once here: in the loop that would cost half an instruction a
        # term.
        columns = axis_lengths(operands)["j"]
        wide = (Operand(upcast(array)[0], axes) for array, axes in operands)
        arrays, axes = zip(*map(_columns_contiguous, wide), strict=True)
        what = Reduction(step, axes, columns, totals, at_once)
        return _reduce_pairs.bind(*arrays, backend=self, what=what)

    def kernel(self, what: Reduction, shapes: Sequence[tuple[int, ...]]) -> Kernel:
        """Returns the kernel of a reduction of operands of these shapes."""
        size, totals = what.sizes(shapes), what.totals
        held = (totals + what.axes.count("ij")) * what.at_once
        tile, stage = self._tile or _choose_tile(size, held), _stage(size["c"])
        inputs = [f"in{n}" for n in range(len(shapes))]
        outputs = [f"out{n}" for n in range(totals)]
        parameters = [f"const float* {a}" for a in inputs] + [f"float* {a}" for a in outputs]
        given = [
            f"Operand<k{axes.upper() or 'One'}, {shape[0]}>{{{name}}}"
            for axes, shape, name in zip(what.axes, shapes, inputs, strict=True)
        ]
        name = "adder_flax_" + re.sub(r"\W+", "_", what.step).strip("_")
        source = (
            f'extern "C" __global__ void __launch_bounds__({tile.threads()}) {name}(\n'
            f"    {', '.join(parameters)}) {{\n"
            f"  Reduce<{what.step}, Tile<{', '.join(map(str, tile[:4]))}>, "
            f"Sizes<{', '.join(str(size[axis]) for axis in 'bijc')}, {stage}>>(\n"
            f"      {{{', '.join(outputs)}}}, {', '.join(given)});\n}}\n"
        )
        source = _SOURCE.read_text() + source
        return Kernel(name, source, tile.blocks(size), tile.threads(), stage)

    def launch(
        self, kernel: Kernel, arrays: Sequence[jax.Array], results: Sequence
    ) -> Sequence[jax.Array]:
        """Runs a kernel on arrays; `results` are the types of what it gives."""
        numbers = {
            **{"grid_x": kernel.blocks, "grid_y": 1, "grid_z": 1},
            **{"block_x": kernel.threads, "block_y": 1, "block_z": 1, "shared_mem_bytes": 0},
        }
        return jax.ffi.ffi_call(_TARGET, results)(
            *arrays,
            name=kernel.name,
            kernel_type="ptx",
            kernel_data=_nvrtc.compile_to_ptx(kernel.source),
            **{name: np.int32(number) for name, number in numbers.items()},
        )


# The reduction as a primitive: compiled when a program is lowered, for the shape that it has there.
_reduce_pairs = Primitive("adder_flax_reduce_pairs")
_reduce_pairs.multiple_results = True


def _abstract_eval(*arrays, backend, what):
    like = arrays[0]
    return [like.update(shape=what.shape(arrays), dtype=jnp.float32, weak_type=False)] * what.totals


_reduce_pairs.def_abstract_eval(_abstract_eval)


def _run(*arrays, backend, what):
    results = [result_type(what.shape(arrays), jnp.float32, *arrays)] * what.totals
    return backend.launch(backend.kernel(what, [a.shape for a in arrays]), arrays, results)


mlir.register_lowering(_reduce_pairs, mlir.lower_fun(_run, multiple_results=True))


def _batch(arrays, dims, **static):
    """Puts the mapped axis before the batch; operands without it serve all of its members."""
    members = max(a.shape[0 if dim != 0 else 1] for a, dim in zip(arrays, dims, strict=True))

    def joined(array, dim):
        if dim is None:
            return array
        array = jnp.moveaxis(array, dim, 0)
        repeats = members // array.shape[1]
        if repeats > 1:
            array = jnp.tile(array, (1, repeats, *[1] * (array.ndim - 2)))
        return array.reshape(-1, *array.shape[2:])

    results = _reduce_pairs.bind(*map(joined, arrays, dims), **static)
    return [r.reshape(-1, members, *r.shape[1:]) for r in results], [0] * len(results)


batching.primitive_batchers[_reduce_pairs] = _batch


def _is_sign(rule) -> str:
    return str(rule.name == "sign").lower()


def _range(w, axis, rule):
    """Returns what moves a rule into [0, 1], where saturation clips for nothing: the extremes of w
    along its contracted axis, their centre, and the scale and the offset of differences.

    A rule is 2 sat(scale (w - x) + offset) - 1.
    """
    high, low = w.max(axis), w.min(axis)
    if rule.name == "sign":
        return high, low, jnp.zeros_like(high), 1.0, 0.0
    # Centred, so that offsets that x and w share do not cost precision.
    centre = jnp.where(jnp.isfinite(high - low), high / 2 + low / 2, 0.0)
    return high, low, centre, rule.slope / 2, 0.5


def _exponentials(query, key, largest=_LARGEST_EXPONENT):
    """Returns e^2q and e^2k: tanh(q + k) = 1 - 2 / (1 + e^2q e^2k) needs no other exponential.

    Exact while each of q and k, after a shift that centres the keys of each hidden unit on zero,
    stays within half of the largest exponent, 43; beyond that they are taken as 43, which matters
    only where both are and their signs differ.
    """
    query, key = upcast(query, key)
    high, low = key.max(1, keepdims=True), key.min(1, keepdims=True)
    centre = jnp.where(jnp.isfinite(high - low), high / 2 + low / 2, 0.0)
    return tuple(
        jnp.exp(jnp.clip(2 * a, -largest, largest)) for a in (query + centre, key - centre)
    )


def _filled_up(array: jax.Array, run: int) -> jax.Array:
    """Returns an array whose last axis zeros fill up to whole runs of this length."""
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % run)])


def _words(array: jax.Array) -> jax.Array:
    array = _filled_up(array, 4)
    return jax.lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, 4), jnp.float32)


def _columns_contiguous(operand: Operand) -> Operand:
    """Returns columns with j last, filled up to whole runs.

    Threads side by side own columns side by side, so with c last each 16-byte load would touch a
    cache line for each of them.
    """
    array, axes = operand
    if axes not in ("jc", "cj"):
        return operand
    columns = array if axes == "cj" else jnp.swapaxes(array, 1, 2)
    return Operand(_filled_up(columns, _RUN), "cj")


def _choose_tile(size: dict[str, int], held: int) -> Tile:
    fitting = [tile for tile in TILES if tile.rows * tile.columns * held <= _HELD_PER_THREAD]
    return min(fitting, key=lambda tile: tile.cost(size))


def _stage(terms: int) -> int:
    """Returns the longest stage of those that leave fewest terms beyond the end of a sum."""
    return min(_STAGES, key=lambda stage: -(-terms // stage) * stage)


def _parts(operands: Sequence[Operand]) -> int:
    """Returns into how many parts to cut sums, which are computed side by side.

    Few outputs of long sums then still give the whole device work, and their rounding grows with a
    part and not with the sum.
    """
    size = axis_lengths(operands)
    runs = size["b"] * size["i"] * size["j"] // (_RUN * _RUN)
    full = (_OUTPUT_RUNS_OF_FULL_DEVICE - 1).bit_length()
    wanted = 1 << max(0, full - max(runs, 1).bit_length())
    return max(1, min(wanted, size["c"] // _SHORTEST_PART))


def _cut(operand: Operand, parts: int, *, filling: str = "constant") -> Operand:
    """Returns an operand with its sums cut into parts, each of which has the whole batch; the last
    is filled up with zeros or, by `"edge"`, with its last term.
    """
    if parts == 1:
        return operand
    axis, array = 1 + operand.axes.index("c"), operand.array
    length = -(-array.shape[axis] // (parts * _STAGES[0])) * _STAGES[0]
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, length * parts - array.shape[axis])
    array = jnp.pad(array, padding, mode=filling)
    array = array.reshape(*array.shape[:axis], parts, length, *array.shape[axis + 1 :])
    array = jnp.moveaxis(array, axis, 0)
    return Operand(array.reshape(-1, *array.shape[2:]), operand.axes)


def _joined(result: jax.Array, parts: int) -> jax.Array:
    if parts == 1:
        return result
    return result.reshape(parts, -1, *result.shape[1:]).sum(0, dtype=result.dtype)
