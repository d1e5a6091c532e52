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

import argparse
import ctypes
import functools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from adder_flax import attention, ops, own_cache
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
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Bounds:
    """Terms a second on all cores that no kernel can exceed.

    Each is the best of many short runs of several loops, of nothing but the instructions of a term.

    Attributes:
      rates: the terms a second, by name; none without a native library.
    """

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
    """Returns the bounds of the loops that the native library exports."""
    from adder_flax.ops import _cpu

    if jax.default_backend() != "cpu":
        return Bounds(None)
    if (reason := _cpu.CpuBackend().why_unavailable()) is not None:
        print(f"no bound: {reason}")
        return Bounds(None)
    return Bounds(_cpu.load_library())


def _loops(function):
    """Yields the loops that a symbol has and how many iterations last BOUND_SECONDS."""
    trial, number = 20_000, 0
    while function(number, 1) > 0:
        loop = functools.partial(function, number)
        seconds = min(_span_of(loop, trial)[1] for _ in range(5))
        yield loop, round(trial * BOUND_SECONDS / seconds)
        number += 1


def _span_of(loop, iterations: int) -> tuple[float, float]:
    """Returns when a run began, and how many seconds it took."""
    start = time.perf_counter()
    loop(iterations)
    return start, time.perf_counter() - start


def _rate_on_all_cores(loop, iterations: int) -> float:
    """Returns the terms a second of each core's best run, summed; only of runs during which all
    cores were at work, since they may be threads of one."""
    together = threading.Barrier(cores())
    spans: list[list[tuple[float, float]]] = [[] for _ in range(cores())]

    def work(mine):
        together.wait()
        mine.extend(_span_of(loop, iterations) for _ in range(BOUND_RUNS))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in spans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin = max(mine[0][0] for mine in spans)
    end = min(sum(mine[-1]) for mine in spans)
    best = [
        min((seconds for start, seconds in mine if begin <= start <= end - seconds), default=np.inf)
        for mine in spans
    ]
    terms = iterations * loop(1)
    return sum(terms / seconds for seconds in best)


def compile_with(backend: str | None, function: Callable, *arrays):
    """Returns the compiled function, traced under `backend` (or under none)."""
    if backend is None:
        return jax.jit(function).lower(*arrays).compile()
    with ops.use_backend(backend):
        return jax.jit(function).lower(*arrays).compile()


def megabytes(compiled) -> float:
    """Returns the temporary memory of a compiled function, in MB."""
    return compiled.memory_analysis().temp_size_in_bytes / 1e6


def with_gradients(function: Callable, count: int) -> Callable:
    """Returns a function that computes `function` and the gradients of its first `count` arguments
    for a cotangent."""

    def both(cotangent, *arrays):
        y, vjp = jax.vjp(function, *arrays)
        return y, vjp(cotangent)[:count]

    return both


def broadcast_matmul(x, w):
    return -jnp.abs(x[:, :, None] - w).sum(1)


def broadcast_scores(query, key):
    return -jnp.abs(query[:, :, None] - key[:, None]).sum(-1)


def broadcast_additive(query, key, v):
    return (v * jnp.tanh(query[:, :, None] + key[:, None])).sum(-1)


def peers(x: np.ndarray, w: np.ndarray) -> dict[str, Callable]:
    """Returns the pairwise L1 distances of rows of x and columns of w by those libraries that are
    installed."""
    found = {}
    columns = np.ascontiguousarray(w.T)
    try:
        import torch

        torch.set_num_threads(cores())
        x_torch, columns_torch = torch.from_numpy(x), torch.from_numpy(columns)
        found["torch"] = lambda: torch.cdist(x_torch, columns_torch, p=1)
    except ImportError:
        pass
    try:
        from scipy.spatial.distance import cdist

        found["scipy"] = lambda: cdist(x, columns, "cityblock")
    except ImportError:
        pass
    try:
        from sklearn.metrics.pairwise import manhattan_distances

        found["sklearn"] = lambda: manhattan_distances(x, columns)
    except ImportError:
        pass
    return found


class Table:
    """Rows that are printed as they come and kept for the summary.

    Args:
      columns: title and width of each column; cells come in this order.
    """

    def __init__(self, *columns: tuple[str, int]):
        self._columns = dict(columns)
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
        widths = self._columns.values()
        print(
            "  ".join(_cell(cell).rjust(width) for cell, width in zip(cells, widths, strict=True)),
            flush=True,
        )


def _cell(value) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return str(value)


def share(timings: Timings, name: str, terms: int, bounds: Bounds, bound: str) -> float | None:
    """Returns the part of a bound that the function of this name reaches, whose terms are so
    many."""
    seconds = timings.median(name)
    if bound not in bounds.rates or seconds is None:
        return None
    return terms / seconds / bounds.rates[bound]


def above_bounds(*tables: Table) -> list[str]:
    """Returns a line for each share of a bound that is more than the whole."""
    return [
        f"{column} of {', '.join(map(str, list(row.values())[:3]))}: {row[column]:.3f}"
        for table in tables
        for row in table.rows
        for column in ("bound", "dx bound")
        if (row.get(column) or 0) > 1
    ]


def matmul_table() -> Table:
    return Table(
        *(
            ("layer", 15),
            ("M x K x N", 13),
            ("backend", 10),
            ("fwd G/s", 7),
            ("bound", 5),
            ("/GEMM", 5),
        ),
        *(
            ("torch", 5),
            ("scipy", 5),
            ("sklearn", 7),
            ("broadcast", 9),
            ("dx G/s", 6),
            ("dx bound", 8),
        ),
        *(("train ms", 8), ("/broadcast", 10), ("MB", 5), ("broadcast MB", 12)),
    )


def bench_matmul(table: Table, layer: str, shape: tuple[int, int, int], backends, bounds) -> None:
    """Adds one row for each backend: forward, gradient of x, and forward with both gradients."""
    bounds.measure()
    m, k, n = shape
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((m, k), (k, n), (m, n)))
    arrays = {name: jnp.asarray(a) for name, a in (("x", x), ("w", w), ("g", g))}
    both = with_gradients(ops.adder_matmul, 2)
    pull_x = lambda x, w, g: jax.vjp(lambda x: ops.adder_matmul(x, w), x)[1](g)

    def prepared(backend, function, *names):
        operands = [arrays[name] for name in names]
        return functools.partial(compile_with(backend, function, *operands), *operands)

    fast = {"gemm": prepared(None, jnp.matmul, "x", "w")}
    for name in backends:
        fast[f"forward {name}"] = prepared(name, ops.adder_matmul, "x", "w")
        fast[f"dx {name}"] = prepared(name, pull_x, "x", "w", "g")
        fast[f"train {name}"] = prepared(name, both, "g", "x", "w")
    slow = {
        name: function for name, function in fast.items() if name.startswith(("forward", "train"))
    }
    others = {
        name: function for name, function in fast.items() if name.startswith("forward")
    } | peers(x, w)
    if m * k * n * 4 <= BROADCAST_LIMIT_BYTES:
        slow["broadcast"] = prepared(None, broadcast_matmul, "x", "w")
        slow["broadcast train"] = prepared(None, with_gradients(broadcast_matmul, 2), "g", "x", "w")
    quick, patient = (
        measure(fast, ROUNDS, SECONDS_PER_CASE),
        measure(slow, SLOW_ROUNDS, SECONDS_PER_CASE),
    )
    beside = measure(others, ROUNDS, SECONDS_PER_CASE)
    terms = m * k * n
    for name in backends:
        forward, dx, train = f"forward {name}", f"dx {name}", f"train {name}"
        table.add(
            layer,
            f"{m}x{k}x{n}",
            name,
            terms / quick.median(forward) / 1e9,
            share(quick, forward, terms, bounds, "forward"),
            quick.ratio(forward, "gemm"),
            *(beside.ratio(peer, forward) for peer in ("torch", "scipy", "sklearn")),
            patient.ratio("broadcast", forward),
            terms / quick.median(dx) / 1e9,
            share(quick, dx, terms, bounds, "gradient"),
            quick.median(train) * 1e3,
            patient.ratio("broadcast train", train),
            megabytes(fast[train].func),
            megabytes(slow["broadcast train"].func) if "broadcast train" in slow else None,
        )


def scores_table() -> Table:
    return Table(
        *(
            ("scores", 8),
            ("B x N x d", 10),
            ("backend", 10),
            ("fwd G/s", 7),
            ("bound", 5),
            ("/GEMM", 5),
        ),
        *(("broadcast", 9), ("train ms", 8), ("/broadcast", 10), ("MB", 5), ("broadcast MB", 12)),
    )


def bench_scores(table: Table, name: str, shape: tuple[int, int], backends, bounds) -> None:
    """Adds one row for each backend: forward, and forward with all gradients."""
    bounds.measure()
    heads, tokens = shape
    rng = np.random.default_rng(0)
    query, key = (
        jnp.asarray(rng.normal(size=(heads, tokens, HEAD_DIM)), jnp.float32) for _ in range(2)
    )
    g = jnp.asarray(rng.normal(size=(heads, tokens, tokens)), jnp.float32)
    if name == "l1":
        score, naive, operands, bound = ops.l1_scores, broadcast_scores, (query, key), "forward"
    else:
        score, naive, bound = ops.additive_scores, broadcast_additive, "additive"
        operands = (query, key, jnp.ones(HEAD_DIM))

    def prepared(backend, function, *operands):
        return functools.partial(compile_with(backend, function, *operands), *operands)

    fast = {"gemm": prepared(None, lambda q, k: jnp.einsum("bmd,bnd->bmn", q, k), query, key)}
    for backend in backends:
        fast[f"forward {backend}"] = prepared(backend, score, *operands)
        fast[f"train {backend}"] = prepared(
            backend, with_gradients(score, len(operands)), g, *operands
        )
    slow = {
        name: function for name, function in fast.items() if name.startswith(("forward", "train"))
    }
    terms = heads * tokens**2 * HEAD_DIM
    if terms * 4 <= BROADCAST_LIMIT_BYTES:
        slow["broadcast"] = prepared(None, naive, *operands)
        slow["broadcast train"] = prepared(None, with_gradients(naive, len(operands)), g, *operands)
    quick, patient = (
        measure(fast, ROUNDS, SECONDS_PER_CASE),
        measure(slow, SLOW_ROUNDS, SECONDS_PER_CASE),
    )
    for backend in backends:
        forward, train = f"forward {backend}", f"train {backend}"
        table.add(
            name,
            f"{heads}x{tokens}x{HEAD_DIM}",
            backend,
            terms / quick.median(forward) / 1e9,
            share(quick, forward, terms, bounds, bound),
            quick.ratio(forward, "gemm"),
            patient.ratio("broadcast", forward),
            quick.median(train) * 1e3,
            patient.ratio("broadcast train", train),
            megabytes(fast[train].func),
            megabytes(slow["broadcast train"].func) if "broadcast train" in slow else None,
        )


def fused_table() -> Table:
    return Table(
        *(
            ("attention", 9),
            ("B x N x d", 10),
            ("whole ms", 8),
            ("fused ms", 8),
            ("whole/fused", 11),
        ),
        *(("whole MB", 8), ("fused MB", 8)),
    )


def bench_fused(table: Table, score: str, shape: tuple[int, int]) -> None:
    """Adds one row: attention with the gradients of queries, keys and values, by the whole map and
    block by block."""
    heads, tokens = shape
    rng = np.random.default_rng(0)
    operands = [
        jnp.asarray(rng.normal(size=(1, tokens, heads, HEAD_DIM)), jnp.float32) for _ in range(4)
    ]
    learned = attention.get_score(score).learned_parameters(heads, HEAD_DIM, HEAD_DIM, {})
    parameters = {name: p.init(jax.random.key(0), p.shape) for name, p in learned.items()}

    def compiled(key_block):
        function = functools.partial(
            attention.attend, score=score, parameters=parameters, key_block=key_block
        )
        return functools.partial(
            compile_with(None, with_gradients(function, 3), *operands), *operands
        )

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
    """Returns from which of the measured numbers of tokens on blocks were faster at each; None if
    not at the last."""
    rows = [row for row in table.rows if row["attention"] == score]
    slower = [n for n, row in enumerate(rows) if row["whole/fused"] < 1]
    faster = rows[slower[-1] + 1 :] if slower else rows
    return int(faster[0]["B x N x d"].split("x")[1]) if faster else None


def print_summary(matmul: Table, scores: Table, fused: Table) -> None:
    """Prints the median and the worst over all shapes of what this package is measured by."""
    best = matmul.rows[0]["backend"]
    memory = [
        row["MB"] / row["broadcast MB"]
        for row in matmul.rows
        if row["backend"] == best and row["broadcast MB"]
    ]
    adder = {row["B x N x d"]: row["fused MB"] for row in fused.rows if row["attention"] == "adder"}
    long, short = (adder[f"3x{tokens}x{HEAD_DIM}"] for tokens in (4096, 1024))
    lines = [
        (
            "adder_matmul forward, times faster than torch.cdist(p=1)",
            matmul.values("torch", backend=best),
            min,
        ),
        ("  the same on the XLA backend", matmul.values("torch", backend="xla"), min),
        (
            "adder_matmul forward, as a multiple of XLA's GEMM of that shape",
            matmul.values("/GEMM", backend=best),
            max,
        ),
        ("  its share of the instruction bound", matmul.values("bound", backend=best), min),
        ("  share of the bound of the gradient of x", matmul.values("dx bound", backend=best), min),
        (
            "forward and both gradients, times faster than the broadcast",
            matmul.values("/broadcast", backend=best),
            min,
        ),
        ("  temporary memory over the broadcast's", memory, max),
        (
            "l1_scores forward and gradients at N = 197, times faster than the broadcast",
            scores.values(
                "/broadcast", backend=best, scores="l1", **{"B x N x d": f"24x197x{HEAD_DIM}"}
            ),
            min,
        ),
        (
            "fused adder attention: memory at N = 4096 over that at N = 1024",
            [long / short],
            max,
        ),
    ]
    print(f"\n{'median':>84}  {'worst':>7}")
    for text, values, worst in lines:
        if values:
            print(f"{text:77}{statistics.median(values):7.3g}  {worst(values):7.3g}")
    shortest = ", ".join(f"{score} {fused_from(fused, score)}" for score in FUSED_SCORES)
    print(
        f"fused attention is faster from so many of the measured numbers of tokens on: {shortest}"
    )


LEGEND = """
G/s        billions of terms |x - w| (or tanh) a second; bound: their share of the instruction bound, measured before
/GEMM      time beside XLA's matrix product of the same shape, as a multiple of it
torch ...  how many times faster than torch.cdist(p=1), scipy cdist, sklearn manhattan_distances and the broadcast
dx         gradient of x by the hardtanh rule
train      forward with all gradients; /broadcast: how many times faster than jax.grad of the broadcast
MB         temporary memory of `train`
"""  # noqa: E501 - lines of another language


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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

    matmul, scores, fused = matmul_table(), scores_table(), fused_table()
    matmul.print_titles()
    for model, width in list(WIDTHS.items())[:few]:
        for images, tokens in TOKENS[:few]:
            for layer, (inputs, outputs) in LAYERS.items():
                shape = (images * tokens, inputs * width, outputs * width)
                bench_matmul(matmul, f"{model} {layer}", shape, backends, bounds)
    print()
    scores.print_titles()
    for name in ("l1", "additive"):
        for shape in ATTENTION[: 2 * few if few else None]:
            bench_scores(scores, name, shape, backends, bounds)
    print()
    fused.print_titles()
    for score in FUSED_SCORES:
        for shape in FUSED:
            bench_fused(fused, score, shape)
    print_summary(matmul, scores, fused)
    if lines := above_bounds(matmul, scores):
        sys.exit(
            "expected no kernel above its bound, got " + "; ".join(lines) + "; measure again on a "
            "machine that does nothing else, or mend the loops in cpu_kernels.cc"
        )


if __name__ == "__main__":
    main()
