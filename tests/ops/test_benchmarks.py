"""The benchmarks of the kernels run, and their shares, ratios and verdicts follow from their
times."""

import jax.numpy as jnp
import pytest

from adder_flax.ops import _cpu
from benchmarks import ops, ops_device, sass
from benchmarks.timing import Timings


@pytest.mark.parametrize("limit", [pytest.param(2e12, marks=pytest.mark.slow), None])
def test_a_product_on_a_device(limit):
    table = ops_device.products_table()
    ops_device.bench_product(table, "small", (8, 4, 16), limit=limit)
    (row,) = table.rows
    assert row["backend"] == "xla"
    assert row["fwd T/s"] > 0
    for rate, bound in (("fwd T/s", "bound"), ("dx T/s", "dx bound")):
        assert row[bound] == (limit and pytest.approx(row[rate] / 2))


@pytest.mark.slow
def test_kernels_beside_their_bound(monkeypatch):
    """Of a kernel of 100 us, where the device adds 20 T times a second."""
    monkeypatch.setattr(ops_device, "compiled_case", lambda case, backend: (None, []))
    names = [kernel.name for case in sass.CASES.values() for kernel in sass.kernels_of(case)]
    monkeypatch.setattr(ops_device, "kernel_seconds", lambda *_: dict.fromkeys(names, 1e-4))
    table = ops_device.kernels_table()
    for name in ("l1 fc1", "additive pullback"):
        ops_device.bench_kernels(table, name, additions=20e12)
    product, *pullback = table.rows
    assert product["T terms/s"] == pytest.approx(64 * 197 * 192 * 768 / 1e-4 / 1e12)
    assert product["of the bound"] == pytest.approx(product["T terms/s"] * 2 / 20)
    assert [row["kernel"] for row in pullback] == ["additive pullback 1", "additive pullback 2"]
    # A reciprocal takes the time of eight additions.
    assert pullback[0]["of the bound"] == pytest.approx(192 * 197**2 * 64 / 1e-4 * 8 / 20e12)
    tiles = ops_device.tiles_table()
    ops_device.bench_tiles(tiles)
    assert len(tiles.rows) == len(sass.CASES) + 1


def test_from_where_blocks_are_faster():
    table = ops.fused_table()
    found = {"adder": (0.9, 1.2, 0.8, 1.1, 2.0), "dot": (2.0, 1.0, 1.5), "additive": (2.0, 0.9)}
    for score, ratios in found.items():
        for tokens, ratio in zip((17, 65, 197, 512, 1024), ratios, strict=False):
            table.add(score, f"3x{tokens}x64", 1.0, 1.0, ratio, 1.0, 1.0)
    assert [ops.fused_from(table, score) for score in found] == [512, 17, None]


@pytest.mark.slow
def test_sums_beside_their_product_and_their_broadcast():
    table, bounds = ops.pairs_table(), ops.Bounds(None)
    ops.bench_pairs(table, ops.layer_sums("small", (8, 4, 16)), ["xla"], bounds)
    ops.bench_pairs(table, ops.score_sums("additive", (2, 8)), ["xla"], bounds)
    layer, scores = table.rows
    assert layer["dx G/s"] > 0
    assert scores["dx G/s"] is None
    assert all(row["/broadcast"] > 0 and row["/GEMM"] > 0 for row in table.rows)


@pytest.mark.slow
def test_attention_by_the_map_and_in_blocks():
    table = ops.fused_table()
    ops.bench_fused(table, "additive", (2, 8))
    row = table.rows[0]
    assert row["whole MB"] > 0
    assert row["whole/fused"] > 0


def test_gradients_of_the_first_arguments():
    both = ops.with_gradients(lambda x, y: x * y, 1)
    y, gradients = both(jnp.float32(2.0), jnp.float32(3.0), jnp.float32(5.0))
    assert (float(y), [float(g) for g in gradients]) == (15.0, [10.0])


def test_a_share_of_a_bound_and_one_that_is_none():
    bounds = ops.Bounds(None)
    bounds.rates["forward"] = 4e9
    table = ops.pairs_table()
    for seconds in (0.5, 0.2):
        timings = Timings({"forward x": [seconds] * 3})
        part = ops.share(timings, "forward x", 10**9, bounds, "forward")
        table.add("l1", "1x2x3", "x", *[1.0] * 13)
        table.rows[-1]["bound"] = part
    assert [row["bound"] for row in table.rows] == [0.5, 1.25]
    assert ops.above_bounds(table) == ["bound of l1, 1x2x3, x: 1.250"]
    assert ops.share(timings, "forward x", 10**9, bounds, "gradient") is None


@pytest.mark.skipif(_cpu.CpuBackend().why_unavailable() is not None, reason="needs a C++ compiler")
def test_the_bounds_of_the_native_library(monkeypatch):
    monkeypatch.setattr(ops, "BOUND_SECONDS", 1e-4)
    bounds = ops.native_bounds()
    bounds.measure()
    assert bounds.rates.keys() == ops.BOUNDS.keys()
    first = dict(bounds.rates)
    bounds.measure()
    assert all(rate >= first[name] > 0 for name, rate in bounds.rates.items())
