"""Measures the adder and additive reductions against the machine's bound, XLA's GEMM and other
libraries.

    python -m benchmarks.ops  # DeiT-Tiny's layers on 8 images of 197 tokens: under three minutes
    python -m benchmarks.ops --full  # three models, three batches, five lengths: half an hour

Every ratio is a median over rounds in which the sides take turns, so that other work on the machine
falls on all. The bound is the best of many short runs of loops of nothing but the instructions of a
term, on registers, on all cores, taken anew before every row; a kernel above it ends the benchmark
with an error, since then it is none. `ADDER_FLAX_CPU=znver3` in the environment gives the kernels
of a machine without AVX-512 (and `XLA_FLAGS=--xla_cpu_max_isa=AVX2` such code of XLA's). PyTorch,
SciPy and scikit-learn are compared with where they are installed
(`pip install torch scipy scikit-learn`); a missing one leaves its column empty.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import benchmarks
from adder_flax import attention, ops, own_cache
from adder_flax.ops import _cpu
from benchmarks.timing import Timings, measure

# Inner widths of the linear layers of a transformer block, as multiples of the model width.
LAYERS = {"qkv": (1, 3), "proj": (1, 1), "fc1": (1, 4), "fc2": (4, 1)}
WIDTHS = {"DeiT-Tiny": 192, "DeiT-Small": 384, "DeiT-Base": 768}
# Images x tokens: ImageNet with 16x16 patches, CIFAR with 4x4, digits.
TOKENS = ((8, 197), (32, 65), (64, 17))
ATTENTION = ((24, 197), (96, 65), (192, 17), (3, 1024), (1, 4096))  # heads of a batch x tokens
# Of DeiT-Tiny, at about as many tokens in all; the last two tell how memory grows.
FUSED = ((24, 197), (12, 384), (9, 512), (6, 768), (3, 1024), (3, 2048), (3, 4096))
FUSED_SCORES = ("adder", "gaussian", "additive", "dot")
HEAD_DIM = 64
BROADCAST_LIMIT_BYTES = 2 << 30
ROUNDS, SECONDS_PER_CASE = 15, 3.0
SLOW_ROUNDS = 3  # of what takes a hundred times longer
# Shorter than a time slice of a busy machine; many, because a core may settle in a slower order.
BOUND_SECONDS, BOUND_RUNS = 0.001, 50
BOUNDS = {
    "multiply-add": "AdderFlaxBoundMultiplyAdd",
    "forward": "AdderFlaxBoundForward",
    "gradient": "AdderFlaxBoundHardtanh",
    "additive": "AdderFlaxBoundAdditive",
}


def cores() -> int:
    return len(os.sched_getaffinity(0))


class Bounds:
    """Terms a second on all cores that no kernel can exceed, if there is a native library."""

    def __init__(self, library: ctypes.CDLL | None, symbols: dict[str, str] = BOUNDS):
        self.rates: dict[str, float] = {}
        self._loops = {}
        for name, symbol in symbols.items() if library else ():
            function = getattr(library, symbol)
            function.argtypes, function.restype = [ctypes.c_int64] * 2, ctypes.c_int64
            self._loops[name] = list(_loops(function))

    def measure(self) -> None:
        """Runs the loops; a rate that was seen before stays if it is higher."""
        for name, loops in self._loops.items():
            rates = [_rate_on_all_cores(loop, iterations) for loop, iterations in loops]
            self.rates[name] = max(*rates, self.rates.get(name, 0.0))


def native_bounds() -> Bounds:
    reason = _cpu.CpuBackend().why_unavailable()
    if jax.default_backend() == "cpu" and reason:
        print(f"no bound: {reason}")
    return Bounds(_cpu.load_library() if jax.default_backend() == "cpu" and not reason else None)


def _loops(function):
    """Yields the loops that a symbol has and how many iterations last BOUND_SECONDS."""
    trial, number = 20_000, 0
    while function(number, 1) > 0:
        loop = functools.partial(function, number)
        seconds = min(_span_of(loop, trial)[1] for _ in range(5))
        yield loop, round(trial * BOUND_SECONDS / seconds)
        number += 1


def _span_of(loop, iterations: int) -> tuple[float, float]:
    start = time.perf_counter()
    loop(iterations)
    return start, time.perf_counter() - start


def _rate_on_all_cores(loop, iterations: int) -> float:
    # The best run of each core, of those during which all were at work: they may be threads of one.
    together = threading.Barrier(cores())

    def work(_):
        together.wait()
        return [_span_of(loop, iterations) for _ in range(BOUND_RUNS)]

    with ThreadPoolExecutor(cores()) as threads:
        spans = list(threads.map(work, range(cores())))
    begin = max(mine[0][0] for mine in spans)
    end = min(sum(mine[-1]) for mine in spans)
    terms, total = iterations * loop(1), 0.0
    for mine in spans:
        together_ran = (took for start, took in mine if begin <= start <= end - took)
        total += terms / min(together_ran, default=np.inf)
    return total


def compile_with(backend: str | None, function: Callable, *arrays):
    with ops.use_backend(backend) if backend else contextlib.nullcontext():
        return jax.jit(function).lower(*arrays).compile()


def megabytes(compiled) -> float:
    return compiled.memory_analysis().temp_size_in_bytes / 1e6


def with_gradients(function: Callable, count: int) -> Callable:
    def both(cotangent, *arrays):
        y, vjp = jax.vjp(function, *arrays)
        return y, vjp(cotangent)[:count]

    return both


def peers(x: np.ndarray, w: np.ndarray) -> dict[str, Callable]:
    """Returns functions of other libraries for the L1 distances of rows of x and columns of w."""
    found, columns = {}, np.ascontiguousarray(w.T)
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(cores())
        given = torch.from_numpy(x), torch.from_numpy(columns)
        found["torch"] = lambda: torch.cdist(*given, p=1)
    with contextlib.suppress(ImportError):
        from scipy.spatial.distance import cdist

        found["scipy"] = lambda: cdist(x, columns, "cityblock")
    with contextlib.suppress(ImportError):
        from sklearn.metrics.pairwise import manhattan_distances

        found["sklearn"] = lambda: manhattan_distances(x, columns)
    return found


class Table:
    """Rows that are printed as they come and kept for the summary; columns are given as
    `title:width`, where _ stands for a space, and cells come in this order."""

    def __init__(self, *columns: str):
        pairs = (column.rsplit(":", 1) for column in columns)
        self._columns = {title.replace("_", " "): int(width) for title, width in pairs}
        self.rows: list[dict] = []

    def print_titles(self) -> None:
        self._print(self._columns)

    def add(self, *cells) -> None:
        self.rows.append(dict(zip(self._columns, cells, strict=True)))
        self._print(cells)

    def values(self, column: str, **wanted) -> list[float]:
        """Returns the numbers in a column, of the rows whose other cells are as wanted."""
        rows = [row for row in self.rows if all(row[name] == cell for name, cell in wanted.items())]
        return [row[column] for row in rows if row[column] is not None]

    def _print(self, cells) -> None:
        widths = zip(map(_cell, cells), self._columns.values(), strict=True)
        print("  ".join(cell.rjust(width) for cell, width in widths), flush=True)


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return "" if value is None else str(value)


def share(timings: Timings, name: str, terms: int, bounds: Bounds, bound: str) -> float | None:
    """Returns the part of a bound that the function of this name, of so many terms, reaches."""
    seconds = timings.median(name)
    if bound not in bounds.rates or seconds is None:
        return None
    return terms / seconds / bounds.rates[bound]


def above_bounds(table: Table) -> list[str]:
    return [
        f"{column} of {', '.join(map(str, list(row.values())[:3]))}: {row[column]:.3f}"
        for row in table.rows
        for column in ("bound", "dx bound")
        if (row[column] or 0) > 1
    ]


def pairs_table() -> Table:
    titles = "sums:15 shape:13 backend:10 fwd_G/s:7 bound:5 /GEMM:5 torch:5 scipy:5 sklearn:7"
    titles += " broadcast:9 dx_G/s:6 dx_bound:8 train_ms:8 /broadcast:10 MB:5 broadcast_MB:12"
    return Table(*titles.split())


class Sums(NamedTuple):
    """What is measured in a row: sums over pairs, their operands, and what they stand beside."""

    name: str
    shape: tuple[int, ...]
    terms: int
    function: Callable
    operands: tuple
    product: Callable
    naive: Callable
    bound: str = "forward"  # which no forward pass exceeds
    beside: dict[str, Callable] = {}  # other libraries' functions, without arguments
    pull: Callable | None = None  # the first operand's gradient, of the operands and a cotangent


def layer_sums(name: str, shape: tuple[int, int, int]) -> Sums:
    (m, k, n), rng = shape, np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((m, k), (k, n)))
    pull = lambda x, w, g: jax.vjp(lambda x: ops.adder_matmul(x, w), x)[1](g)
    operands = jnp.asarray(x), jnp.asarray(w)
    naive = lambda x, w: -jnp.abs(x[:, :, None] - w).sum(1)
    sums = name, shape, m * k * n, ops.adder_matmul, operands, jnp.matmul, naive
    return Sums(*sums, beside=peers(x, w), pull=pull)


def score_sums(name: str, shape: tuple[int, int]) -> Sums:
    (heads, tokens), rng = shape, np.random.default_rng(0)
    size = (heads, tokens, HEAD_DIM)
    operands = tuple(jnp.asarray(rng.normal(size=size), jnp.float32) for _ in range(2))
    shared = (size, heads * tokens**2 * HEAD_DIM)
    product = lambda q, k, *_: jnp.einsum("bmd,bnd->bmn", q, k)
    if name == "l1":
        naive = lambda q, k: -jnp.abs(q[:, :, None] - k[:, None]).sum(-1)
        return Sums(name, *shared, ops.l1_scores, operands, product, naive)
    naive = lambda q, k, v: (v * jnp.tanh(q[:, :, None] + k[:, None])).sum(-1)
    operands = (*operands, jnp.ones(HEAD_DIM))
    return Sums(name, *shared, ops.additive_scores, operands, product, naive, "additive")


def bench_pairs(table: Table, sums: Sums, backends, bounds) -> None:
    """Adds one row for each backend: forward, gradient of x, and forward with all gradients."""
    bounds.measure()
    shape = jax.eval_shape(sums.function, *sums.operands).shape
    g = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)

    def prepared(backend, function, *operands):
        return functools.partial(compile_with(backend, function, *operands), *operands)

    def prepared_train(backend, function):
        return prepared(backend, with_gradients(function, len(sums.operands)), g, *sums.operands)

    forwards, trains = {}, {}
    fast = {"gemm": prepared(None, sums.product, *sums.operands)}
    for name in backends:
        forwards[f"forward {name}"] = prepared(name, sums.function, *sums.operands)
        trains[f"train {name}"] = prepared_train(name, sums.function)
        if sums.pull is not None:
            fast[f"dx {name}"] = prepared(name, sums.pull, *sums.operands, g)
    slow = forwards | trains
    if sums.terms * 4 <= BROADCAST_LIMIT_BYTES:
        slow["broadcast"] = prepared(None, sums.naive, *sums.operands)
        slow["broadcast train"] = prepared_train(None, sums.naive)
    quick = measure(fast | forwards | trains, ROUNDS, SECONDS_PER_CASE)
    patient = measure(slow, SLOW_ROUNDS, SECONDS_PER_CASE)
    beside = measure(forwards | sums.beside, ROUNDS, SECONDS_PER_CASE)
    rate = lambda name: (seconds := quick.median(name)) and sums.terms / seconds / 1e9
    for name in backends:
        forward, dx, train = f"forward {name}", f"dx {name}", f"train {name}"
        table.add(
            *(sums.name, "x".join(map(str, sums.shape)), name, rate(forward)),
            share(quick, forward, sums.terms, bounds, sums.bound),
            quick.ratio(forward, "gemm"),
            *(beside.ratio(peer, forward) for peer in ("torch", "scipy", "sklearn")),
            *(patient.ratio("broadcast", forward), rate(dx)),
            share(quick, dx, sums.terms, bounds, "gradient"),
            quick.median(train) * 1e3,
            patient.ratio("broadcast train", train),
            megabytes(slow[train].func),
            megabytes(slow["broadcast train"].func) if "broadcast train" in slow else None,
        )


def fused_table() -> Table:
    titles = "attention:9 B_x_N_x_d:10 whole_ms:8 fused_ms:8 whole/fused:11 whole_MB:8 fused_MB:8"
    return Table(*titles.split())


def bench_fused(table: Table, score: str, shape: tuple[int, int]) -> None:
    """Adds a row: attention with its gradients, by the whole map and block by block."""
    heads, tokens = shape
    rng = np.random.default_rng(0)
    size = (1, tokens, heads, HEAD_DIM)
    operands = [jnp.asarray(rng.normal(size=size), jnp.float32) for _ in range(4)]
    learned = attention.get_score(score).learned_parameters(heads, HEAD_DIM, HEAD_DIM, {})
    parameters = {name: p.init(jax.random.key(0), p.shape) for name, p in learned.items()}

    def compiled(key_block):
        options = dict(score=score, parameters=parameters, key_block=key_block)
        function = with_gradients(functools.partial(attention.attend, **options), 3)
        return functools.partial(compile_with(None, function, *operands), *operands)

    functions = {"whole": compiled(None), "fused": compiled(ops.preferred_key_block(1 << 20))}
    timings = measure(functions, ROUNDS, SECONDS_PER_CASE)
    table.add(
        score,
        f"{heads}x{tokens}x{HEAD_DIM}",
        *(timings.median(name) * 1e3 for name in functions),
        timings.ratio("whole", "fused"),
        *(megabytes(function.func) for function in functions.values()),
    )


def fused_from(table: Table, score: str) -> int | None:
    """Returns from how many tokens on blocks were faster; None if not at the last number."""
    rows = [row for row in table.rows if row["attention"] == score]
    slower = [n for n, row in enumerate(rows) if row["whole/fused"] < 1]
    faster = rows[slower[-1] + 1 :] if slower else rows
    return int(faster[0]["B x N x d"].split("x")[1]) if faster else None


def print_summary(layers: Table, scores: Table, fused: Table) -> None:
    best = layers.rows[0]["backend"]
    of = functools.partial(layers.values, backend=best)
    rows = [row for row in layers.rows if row["backend"] == best and row["broadcast MB"]]
    memory = [row["MB"] / row["broadcast MB"] for row in rows]
    adder = {row["B x N x d"]: row["fused MB"] for row in fused.rows if row["attention"] == "adder"}
    grown = adder[f"3x4096x{HEAD_DIM}"] / adder[f"3x1024x{HEAD_DIM}"]
    of_l1 = dict(backend=best, sums="l1", shape=f"24x197x{HEAD_DIM}")
    lines = [
        ("adder_matmul forward, times faster than torch.cdist(p=1)", of("torch"), min),
        ("  the same on the XLA backend", layers.values("torch", backend="xla"), min),
        ("adder_matmul forward, as a multiple of XLA's GEMM of that shape", of("/GEMM"), max),
        ("  its share of the instruction bound", of("bound"), min),
        ("  share of the bound of the gradient of x", of("dx bound"), min),
        ("forward and both gradients, times faster than the broadcast", of("/broadcast"), min),
        ("  temporary memory over the broadcast's", memory, max),
        ("fused adder attention: memory at N = 4096 over that at N = 1024", [grown], max),
    ]
    text = "l1_scores forward and gradients at N = 197, times faster than the broadcast"
    lines.insert(-1, (text, scores.values("/broadcast", **of_l1), min))
    print(f"\n{'median':>84}  {'worst':>7}")
    for text, values, worst in lines:
        if values:
            print(f"{text:77}{statistics.median(values):7.3g}  {worst(values):7.3g}")
    shortest = ", ".join(f"{score} {fused_from(fused, score)}" for score in FUSED_SCORES)
    print(f"fused attention is faster from so many of the measured tokens on: {shortest}")


LEGEND = """
G/s        billions of terms |x - w| (or tanh) a second; bound: their share of the instruction bound, measured before
/GEMM      time beside XLA's matrix product of the same shape, as a multiple of it
torch ...  how many times faster than torch.cdist(p=1), scipy cdist, sklearn manhattan_distances and the broadcast
dx         gradient of x by the hardtanh rule
train      forward with all gradients; /broadcast: how many times faster than jax.grad of the broadcast
MB         temporary memory of `train`
"""  # noqa: E501 - lines of another language


def main() -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--full", action="store_true", help="all models, batches and lengths")
    few = None if parser.parse_args().full else 1
    backends = [name for name in ops.available_backends() if name != "reference"]

    print(ops.backend_report())
    print(own_cache.processor_name())
    bounds = native_bounds()
    bounds.measure()
    for name, rate in bounds.rates.items():
        print(f"bound, {name}: {rate / 1e9:.1f} G terms/s on {cores()} cores")
    print(LEGEND)

    layers, scores, fused = pairs_table(), pairs_table(), fused_table()
    layers.print_titles()
    cases = itertools.product(list(WIDTHS.items())[:few], TOKENS[:few], LAYERS.items())
    for (model, width), (images, tokens), (layer, (inputs, outputs)) in cases:
        shape = (images * tokens, inputs * width, outputs * width)
        bench_pairs(layers, layer_sums(f"{model} {layer}", shape), backends, bounds)
    for name in ("l1", "additive"):
        for shape in ATTENTION[: 2 * few if few else None]:
            bench_pairs(scores, score_sums(name, shape), backends, bounds)
    print()
    fused.print_titles()
    for score in FUSED_SCORES:
        for shape in FUSED:
            bench_fused(fused, score, shape)
    print_summary(layers, scores, fused)
    if lines := above_bounds(layers) + above_bounds(scores):
        sys.exit(
            "expected no kernel above its bound, got " + "; ".join(lines) + "; measure again on a "
            "machine that does nothing else, or mend the loops in cpu_kernels.cc"
        )


if __name__ == "__main__":
    main()
