"""Measures the kernels on an accelerator: each against its certificate, products beside XLA's and
PyTorch's, and attention by the whole map against blocks.

    python -m benchmarks.ops_device  # on the default device
    python -m benchmarks.ops_device --parts=products,attention --divide=64  # for a try elsewhere

- `kernels`, NVIDIA GPUs alone: the kernels of `benchmarks/sass.py`, timed on the device by its
  profiler, and the share of the bound that each reaches, beside what its machine code allows on
  paper. The bound is the time of the arithmetic that a term needs, at the rate of a loop of nothing
  but additions, measured on the same device.
- `tiles`, NVIDIA GPUs alone: the same kernels with each of their tiles.
- `products`: large square problems, as published for pairwise L1 distances on GPUs (NVIDIA cuVS),
  and layers of DeiT, beside the matrix product, `torch.cdist` and the backend `xla`.
- `attention`: forward with the gradients of queries, keys and values.

Training steps on an accelerator are those of `benchmarks/optimizer_step.py`.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

import benchmarks
from adder_flax import ops
from adder_flax.extras import MissingExtraError
from adder_flax.ops._cuda import TILES, CudaBackend, Kernel
from benchmarks import sass
from benchmarks.ops import (
    FUSED_SCORES,
    LAYERS,
    WIDTHS,
    Table,
    bench_fused,
    compile_with,
    fused_table,
)
from benchmarks.timing import gpu_events, measure, repeated

PARTS = ("kernels", "tiles", "products", "attention")
SQUARE = ((4096, 64), (4096, 256), (8192, 64), (8192, 256))  # rows and columns, width
IMAGES = 128  # of 197 tokens, in the layers
ATTENTION = ((192, 197), (96, 512), (48, 1024), (24, 2048), (12, 4096))  # heads of a batch x tokens
ROUNDS, CALLS, SECONDS_PER_ROW = 7, 10, 10.0
TRACED = 20  # calls of a kernel in a profile

# Each thread adds to so many sums, which depend on nothing but themselves.
_PEAK_SUMS, _PEAK_TURNS, _PEAK_UNROLLED, _PEAK_THREADS, _PEAK_BLOCKS_PER_CORE = 16, 4096, 4, 256, 8
_PEAK_SOURCE = f"""
extern "C" __global__ void __launch_bounds__({_PEAK_THREADS}) adder_flax_peak(
    const float* in, float* out) {{
  const float term = in[threadIdx.x];
  float sums[{_PEAK_SUMS}];
#pragma unroll
  for (int n = 0; n < {_PEAK_SUMS}; ++n) sums[n] = term * n;
#pragma unroll 1
  for (int turn = 0; turn < {_PEAK_TURNS}; ++turn)
#pragma unroll
    for (int again = 0; again < {_PEAK_UNROLLED}; ++again)
#pragma unroll
      for (int n = 0; n < {_PEAK_SUMS}; ++n) sums[n] += fabsf(term);
  float all = 0.0f;
#pragma unroll
  for (int n = 0; n < {_PEAK_SUMS}; ++n) all += sums[n];
  out[blockIdx.x * {_PEAK_THREADS} + threadIdx.x] = all;
}}
"""


def kernel_seconds(function: Callable, *operands) -> dict[str, float]:
    """Returns how long each of this project's kernels in a program takes, medians over calls."""
    jax.block_until_ready(function(*operands))
    seconds: dict[str, list[float]] = {}
    for event in gpu_events(functools.partial(function, *operands), TRACED):
        if event.name.startswith("adder_flax_"):
            seconds.setdefault(event.name, []).append(1e-9 * event.duration_ns)
    if not seconds:
        raise RuntimeError("expected this project's kernels in a stream of a GPU, got none")
    return {name: statistics.median(found) for name, found in seconds.items()}


def addition_rate(cores: int) -> float:
    blocks = cores * _PEAK_BLOCKS_PER_CORE
    kernel = Kernel("adder_flax_peak", _PEAK_SOURCE, blocks, _PEAK_THREADS, stage=0)
    result = jax.ShapeDtypeStruct((blocks * _PEAK_THREADS,), jnp.float32)
    run = jax.jit(lambda term: CudaBackend().launch(kernel, [term], [result]))
    (seconds,) = kernel_seconds(run, jnp.ones(_PEAK_THREADS)).values()
    additions = blocks * _PEAK_THREADS * _PEAK_TURNS * _PEAK_UNROLLED * _PEAK_SUMS
    return additions / seconds


def terms_of(case: sass.Case) -> int:
    (batch, rows, width), second = case.shapes[:2]
    return batch * rows * width * second[1 if case.options.get("axes", "nk") == "nk" else 2]


def certificates(name: str) -> Sequence[sass.Row | None]:
    """Returns the certificate of each kernel of a case, for H100s, or None without the tools."""
    try:
        return sass.certify(name, "h100")
    except (MissingExtraError, OSError):
        return [None] * len(sass.kernels_of(sass.CASES[name]))


def kernels_table() -> Table:
    titles = "kernel:20 us:7 T_terms/s:9 of_the_bound:12 on_paper:8 waves:5"
    return Table(*titles.split())


def compiled_case(case: sass.Case, backend: CudaBackend) -> tuple[Callable, list[jax.Array]]:
    like = sass.operands_of(case)
    keys = jax.random.split(jax.random.key(0), len(like))
    operands = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, like, strict=True)]
    function = functools.partial(getattr(backend, case.method), **case.options)
    return jax.jit(function).lower(*operands).compile(), operands


def labels(name: str) -> dict[str, str]:
    kernels = [kernel.name for kernel in sass.kernels_of(sass.CASES[name])]
    return dict(zip(kernels, sass.labels(name, len(kernels)), strict=True))


def bench_kernels(table: Table, name: str, additions: float) -> None:
    case = sass.CASES[name]
    function, operands = compiled_case(case, CudaBackend())
    seconds = kernel_seconds(function, *operands)
    # A core starts an eighth as many special functions in a cycle as additions.
    cost = max(case.arithmetic["lanes"], 8 * case.arithmetic.get("special", 0))
    for (kernel, label), row in zip(labels(name).items(), certificates(name), strict=True):
        rate = terms_of(case) / seconds[kernel]
        on_paper = (row.share_of_bound, row.waves) if row else (None, None)
        table.add(label, 1e6 * seconds[kernel], rate / 1e12, rate * cost / additions, *on_paper)


def tiles_table() -> Table:
    return Table("kernel, us:20", *(f"{t[0]}x{t[1]}x({t[2]},{t[3]}):11" for t in TILES))


def bench_tiles(table: Table) -> None:
    with ThreadPoolExecutor() as pool:  # compilers leave Python's lock alone
        compiled = {
            (name, tile): pool.submit(compiled_case, case, CudaBackend(tile=tile))
            for name, case in sass.CASES.items()
            for tile in TILES
        }
        for name in sass.CASES:
            seconds = []
            for tile in TILES:
                function, operands = compiled[name, tile].result()
                seconds.append(kernel_seconds(function, *operands))
            for kernel, label in labels(name).items():
                table.add(label, *(1e6 * of_tile[kernel] for of_tile in seconds))


def torch_cdist(x: jax.Array, w: jax.Array) -> Callable | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    distances = functools.partial(torch.cdist, *map(torch.from_dlpack, (x, w.T.copy())), p=1)
    run = repeated(distances, CALLS)
    return lambda: (run(), torch.cuda.synchronize())[1]


def products_table() -> Table:
    titles = "product:16 M_x_K_x_N:17 backend:10 fwd_T/s:7 bound:5 /GEMM:5 torch:5 dx_T/s:6"
    return Table(*titles.split(), "dx bound:8", "sign dx T/s:11")


def bench_product(
    table: Table, name: str, shape: tuple[int, int, int], limit: float | None
) -> None:
    """Adds a row for each backend; `limit` is the most terms a second, where it is known."""
    m, k, n = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = map(jax.random.normal, keys, ((m, k), (k, n), (m, n)))

    def pullback(rule):
        return lambda x, w, g: jax.vjp(lambda x: ops.adder_matmul(x, w, x_gradient=rule), x)[1](g)

    def calls(backend, function, *operands):
        compiled = compile_with(backend, function, *operands)
        return repeated(functools.partial(compiled, *operands), CALLS)

    backends = [b for b in ops.available_backends() if b not in ("reference", "cpu_native")]
    functions = {"gemm": calls(None, functools.partial(jnp.matmul, precision="highest"), x, w)}
    for backend in backends:
        functions[f"forward {backend}"] = calls(backend, ops.adder_matmul, x, w)
        functions[f"hardtanh {backend}"] = calls(backend, pullback("hardtanh"), x, w, g)
        functions[f"sign {backend}"] = calls(backend, pullback("sign"), x, w, g)
    if (peer := torch_cdist(x, w)) is not None:
        functions["torch"] = peer
    timings = measure(functions, ROUNDS, SECONDS_PER_ROW)
    terms = m * k * n
    for backend in backends:
        kinds = [f"{kind} {backend}" for kind in ("forward", "hardtanh", "sign")]
        forward, dx, sign = (timings.median(kind) / CALLS for kind in kinds)
        beside = timings.ratio(kinds[0], "gemm"), timings.ratio("torch", kinds[0])
        rates = [(terms / t / 1e12, limit and terms / t / limit) for t in (forward, dx)]
        table.add(name, f"{m}x{k}x{n}", backend, *rates[0], *beside, *rates[1], terms / sign / 1e12)


def started(table: Table) -> Table:
    print()
    table.print_titles()
    return table


def main() -> None:
    parser = benchmarks.parser(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--divide", type=int, default=1, help="numbers of rows and heads by this")
    arguments = parser.parse_args()
    parts, divide, device = arguments.parts.split(","), arguments.divide, jax.devices()[0]
    print(f"{ops.backend_report()}\n{device.device_kind}, JAX {jax.__version__}")

    additions = None
    if "cuda" in ops.available_backends():
        additions = addition_rate(device.core_count)
        per_core = additions / device.core_count / 1e9
        print(f"float32 additions: {additions / 1e12:.1f} T/s, {per_core:.0f} G/s a core")
    if additions is None and "kernels" in parts:
        print("kernels: no NVIDIA GPU here; benchmarks/sass.py reads their machine code")
    if additions is not None and "kernels" in parts:
        table = started(kernels_table())
        for name in sass.CASES:
            bench_kernels(table, name, additions)
    if additions is not None and "tiles" in parts:
        bench_tiles(started(tiles_table()))
    if "products" in parts:
        table = started(products_table())
        limit = additions and additions / 2
        for side, width in SQUARE:
            shape = (side // divide, width, side // divide)
            bench_product(table, "square", shape, limit)
        for model, width in WIDTHS.items():
            for layer, (inputs, outputs) in LAYERS.items():
                shape = (IMAGES * 197 // divide, inputs * width, outputs * width)
                bench_product(table, f"{model} {layer}", shape, limit)
    if "attention" in parts:
        table = started(fused_table())
        for score in FUSED_SCORES:
            for heads, tokens in ATTENTION:
                bench_fused(table, score, (max(heads // divide, 1), tokens))


if __name__ == "__main__":
    main()
