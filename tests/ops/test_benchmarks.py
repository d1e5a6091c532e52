"""The benchmarks of the kernels run, and their shares, ratios and verdicts follow from their
times."""

import jax.numpy as jnp
import pytest

from benchmarks import ops, ops_device


def test_a_product_on_a_device():
    table = ops_device.products_table()
    ops_device.bench_product(table, "small", (8, 4, 16), limit=2e12)
    assert [row["backend"] for row in table.rows] == ["xla"]
    row = table.rows[0]
    assert row["fwd T/s"] > 0
    assert row["bound"] == pytest.approx(row["fwd T/s"] / 2)
    assert row["dx bound"] == pytest.approx(row["dx T/s"] / 2)


def test_a_product_without_a_known_bound():
    table = ops_device.products_table()
    ops_device.bench_product(table, "small", (8, 4, 16), limit=None)
    assert table.rows[0]["bound"] is None


def test_from_where_blocks_are_faster():
    table = ops.fused_table()
    for score, ratios in {
        "adder": (0.9, 1.2, 0.8, 1.1, 2.0),
        "dot": (2.0, 1.0, 1.5),
        "additive": (2.0, 0.9),
    }.items():
        for tokens, ratio in zip((17, 65, 197, 512, 1024), ratios, strict=False):
            table.add(score, f"3x{tokens}x64", 1.0, 1.0, ratio, 1.0, 1.0)
    assert [ops.fused_from(table, score) for score in ("adder", "dot", "additive")] == [
        512,
        17,
        None,
    ]


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
