"""The operation counter against counts made by hand, by brute force, and published ones."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from adder_flax import ops
from adder_flax.counting import count_operations, declare_operations, energy


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_batched_product_is_batch_times_free_times_contracted():
    product = lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k)
    counted = count_operations(product, spec(2, 3, 5, 7), spec(2, 3, 11, 7))
    assert counted.multiplications == counted.additions == 2 * 3 * 5 * 11 * 7
    moved = 4 * (2 * 3 * (5 * 7 + 11 * 7 + 5 * 11))
    assert counted.bytes_moved == counted.bytes_at_boundary == moved


def test_softmax_by_hand():
    counted = count_operations(jax.nn.softmax, spec(4, 9))
    assert counted.additions == 36 + 36  # minus the maximum; the sum
    assert (counted.exponentials, counted.divisions, counted.multiplications) == (36, 36, 0)
    assert counted.comparisons == 36 + 4  # the maximum of each row; that maximum against −inf


@pytest.mark.parametrize(
    ("power", "multiplications", "divisions"), [(1, 0, 0), (2, 1, 0), (7, 4, 0), (-2, 1, 1)]
)
def test_integer_power_by_squaring(power, multiplications, divisions):
    counted = count_operations(lambda x: jax.lax.integer_pow(x, power), spec(3))
    assert (counted.multiplications, counted.divisions) == (3 * multiplications, 3 * divisions)


def test_loops_with_known_bounds_count_every_trip():
    def chain(x, w):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=13)[0]

    counted = count_operations(jax.jit(chain), spec(2, 5), spec(5, 5))
    assert counted.multiplications == 13 * 2 * 5 * 5
    assert counted.exponentials == 13 * 2 * 5
    inner = lambda carry, _: (carry * 2.0, None)
    outer = lambda carry, _: (jax.lax.scan(inner, carry, None, length=3)[0], None)
    nested = lambda x: jax.lax.scan(outer, x, None, length=4)[0]
    assert count_operations(nested, spec(5)).multiplications == 3 * 4 * 5
    counted = count_operations(lambda x: jax.lax.fori_loop(0, 6, lambda _, y: y * y, x), spec(3))
    assert counted.multiplications == 6 * 3


def test_while_counts_once_and_says_so():
    loop = lambda x: jax.lax.while_loop(lambda y: y[0] < 9, lambda y: y * 2, x)
    counted = count_operations(loop, spec(3))
    assert (counted.multiplications, counted.comparisons) == (3, 1)
    assert counted.uncounted == {"while: trips beyond the first": 1}


def test_conditional_counts_its_dearest_branch():
    branches = [lambda x: x, lambda x: x @ x, lambda x: x + x]
    choose = lambda i, x: jax.lax.switch(i, branches, x)
    counted = count_operations(choose, spec(dtype="int32"), spec(4, 4))
    assert counted.multiplications == counted.additions == 4**3


def test_custom_derivatives_and_rematerialisation_are_entered():
    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
    assert count_operations(square, spec(5)).multiplications == 5
    assert count_operations(jax.checkpoint(lambda x: x * x * x), spec(5)).multiplications == 10
    # Forward x·x, backward (2·x)·g; the cotangent of the sum is a broadcast.
    assert count_operations(jax.grad(lambda x: square(x).sum()), spec(5)).multiplications == 15


def test_sharded_map_counts_all_devices():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")
    mapped = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows
    )
    assert count_operations(mapped, spec(8, 3), spec(3, 5)).multiplications == 8 * 3 * 5


def test_pallas_kernel_counts_its_grid():
    def kernel(x, out):
        out[...] = x[...] * 2.0 + 1.0

    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    blocks = dict(grid=(4,), in_specs=[block], out_specs=block)
    double = pl.pallas_call(kernel, out_shape=spec(32, 128), **blocks, interpret=True)
    counted = count_operations(double, spec(32, 128))
    assert counted.multiplications == counted.additions == 32 * 128


def test_what_is_put_into_an_array_counts_by_its_elements():
    table, rows, more = spec(7, 4), spec(5, dtype="int32"), spec(5, 4)
    add = lambda x, i, u: x.at[i].add(u)
    assert count_operations(add, table, rows, more).counts["additions", "float32"] == 5 * 4
    largest = lambda x, i, u: x.at[i].max(u)
    assert count_operations(largest, table, rows, more).counts["comparisons", "float32"] == 5 * 4
    # The gradient of an embedding's table.
    lookup = jax.grad(lambda x, i: x[i].sum())
    counted = count_operations(lookup, table, rows).counts["additions", "float32"]
    assert counted == 2 * 5 * 4  # of the sum and into the table
    windows = lambda x: jax.lax.reduce_window(x, 1.0, jax.lax.mul, (2,), (1,), "VALID")
    assert count_operations(windows, spec(6)).multiplications == 5 * 2


def test_a_linear_solver_counts_what_it_runs():
    def solve(matrix, b):
        product, by_transpose = lambda x: matrix @ x, lambda _, x: matrix.T @ x
        return jax.lax.custom_linear_solve(product, b, lambda _, x: 2 * x, by_transpose)

    counted = count_operations(solve, spec(5, 5), spec(5))
    assert (counted.multiplications, counted.additions) == (5, 0)
    assert count_operations(jnp.linalg.solve, spec(4, 4), spec(4, 1)).uncounted == {
        "lu": 1,
        "triangular_solve": 2,
    }


@pytest.mark.parametrize(("axis", "rounds"), [(0, 3), (1, 2)])
def test_the_largest_are_sorted_out_along_their_axis(axis, rounds):
    counted = count_operations(lambda x: jax.lax.top_k(x, 2, axis=axis), spec(8, 3))
    assert counted.comparisons == 8 * 3 * rounds


def test_unknown_kernel_is_reported_and_a_declared_one_counted():
    call = jax.ffi.ffi_call("test_declared_kernel", spec(6))
    counted = count_operations(call, spec(6, 3))
    assert counted.uncounted == {"test_declared_kernel": 1}
    assert not counted.additions
    count = lambda equation: {"additions": 2 * equation.invars[0].aval.size}
    declare_operations("test_declared_kernel", count)
    counted = count_operations(call, spec(6, 3))
    assert counted.additions == 36
    assert not counted.uncounted


def _taps_by_brute_force(length, kernel, stride, pad, dilation, spread):
    """(output, tap) pairs of one dimension that land on an element, not on padding or a dilation
    zero."""
    positions = {spread * i + pad[0] for i in range(length)}
    padded = pad[0] + spread * (length - 1) + 1 + pad[1]
    outputs = (padded - dilation * (kernel - 1) - 1) // stride + 1
    return sum(
        o * stride + t * dilation in positions
        for o, t in itertools.product(range(outputs), range(kernel))
    )


@pytest.mark.parametrize(
    ("length", "kernel", "stride", "pad", "dilation", "spread"),
    [
        (9, 3, 1, (1, 1), 1, 1),
        (17, 4, 4, (0, 0), 1, 1),
        (11, 3, 2, (2, 0), 2, 1),
        (5, 3, 1, (2, 2), 1, 3),
    ],
)
def test_convolution_taps_by_brute_force(length, kernel, stride, pad, dilation, spread):
    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (stride,), (pad,), lhs_dilation=(spread,), rhs_dilation=(dilation,),
            dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2,
        )  # fmt: skip

    counted = count_operations(convolve, spec(3, length, 4), spec(kernel, 2, 6))
    taps = _taps_by_brute_force(length, kernel, stride, pad, dilation, spread)
    assert counted.multiplications == 3 * 6 * 2 * taps


def test_patch_convolution_equals_the_matrix_product():
    def patchify(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x, w = spec(2, 16, 16, 3), spec(4, 4, 3, 7)
    macs = 2 * 16 * (4 * 4 * 3) * 7
    assert count_operations(patchify, x, w).multiplications == macs
    # The gradients of a convolution without overlap are matrix products of the same size.
    backward = count_operations(jax.grad(lambda x, w: patchify(x, w).sum(), (0, 1)), x, w)
    assert backward.multiplications == 3 * macs


def test_moves_are_no_arithmetic():
    def moved(x):
        parts = jax.lax.unstack(jnp.tile(x, (2, 1)))
        return jnp.stack([part[::-1] for part in parts])

    counted = count_operations(moved, spec(3, 5))
    assert not counted.counts
    assert not counted.uncounted


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (2, 17, 5), (65, 3, 2)])
def test_adder_product_is_two_additions_an_element(m, k, n):
    counted = count_operations(ops.adder_matmul, spec(m, k), spec(k, n))
    assert counted.l1_elements == m * k * n
    assert counted.additions == 2 * m * k * n
    assert counted.multiplications == counted.comparisons == counted.exponentials == 0
    assert not counted.uncounted
    assert counted.with_one_addition_per_l1_element().additions == m * k * n
    # No term of the sum goes through memory: at most operands, result and its sign change move.
    assert counted.bytes_moved <= 4 * (m * k + k * n + 3 * m * n)


def test_l1_and_additive_scores():
    query, key = spec(2, 3, 5, 7), spec(2, 3, 11, 7)
    pairs = 2 * 3 * 5 * 11 * 7
    l1 = count_operations(ops.l1_scores, query, key)
    assert (l1.additions, l1.multiplications, l1.l1_elements) == (2 * pairs, 0, pairs)
    counted = count_operations(ops.additive_scores, query, key, spec(3, 7))
    assert counted.exponentials == counted.multiplications == counted.additions / 2 == pairs


def test_a_term_of_bytes_is_a_difference_of_bytes_and_a_wide_addition():
    counted = count_operations(ops.sad_matmul, spec(3, 4, dtype="uint8"), spec(4, 5, dtype="uint8"))
    assert counted.counts == {
        ("additions", "uint8"): 60,
        ("additions", "int32"): 60,
        ("l1_elements", "uint8"): 60,
    }
    assert counted.bytes_at_boundary == counted.bytes_moved == 12 + 20 + 4 * 15
    # Horowitz, 2014: 0.03 pJ for 8 bits, 0.1 pJ for 32.
    assert energy(counted).total_arithmetic_joules == pytest.approx(60 * 0.13e-12)
    accumulated = counted.with_one_addition_per_l1_element().counts
    assert accumulated["additions", "uint8"] == 0
    assert accumulated["additions", "int32"] == 60


def test_a_difference_without_absolute_value_is_no_l1_element():
    squares = lambda x, y: jnp.sum(jnp.square(x - y)) + jnp.sum(jnp.abs(x))
    assert count_operations(squares, spec(5), spec(5)).l1_elements == 0


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = self.linear(x)
        with jax.named_scope("gate"):
            return jnp.tanh(x)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.scale = nnx.Param(jnp.ones(3))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale


LAYERS = {"", *(f"blocks.{n}.{part}" for n in (0, 1) for part in ("linear", "gate"))}


@pytest.mark.parametrize("abstract", [True, False])
def test_layers_of_an_nnx_module(abstract):
    make = lambda: Network(nnx.Rngs(0))
    counted = count_operations(nnx.eval_shape(make) if abstract else make(), spec(2, 3))
    layers = counted.layers
    assert set(layers) == LAYERS
    assert layers["blocks.1.linear"].multiplications == 18
    assert layers["blocks.0.gate"].exponentials == 6
    assert layers[""].multiplications == 6
    assert counted.multiplications == sum(layer.multiplications for layer in layers.values()) == 42


def test_counting_leaves_the_model_as_it_was():
    model = Network(nnx.Rngs(0))
    count_operations(model, spec(2, 3))
    assert type(model) is Network
    assert type(model.blocks[0].linear) is nnx.Linear


def test_backward_pass_is_booked_under_its_layer():
    model = nnx.eval_shape(lambda: Network(nnx.Rngs(0)))
    counted = count_operations(nnx.grad(lambda model, x: model(x).sum()), model, spec(2, 3))
    assert set(counted.layers) == LAYERS
    assert counted.layers["blocks.1.linear"].multiplications == 3 * 18  # forward, input, weight
    assert counted.layers["blocks.0.linear"].multiplications == 2 * 18  # forward, weight


def test_views_move_nothing():
    counted = count_operations(lambda x: x.reshape(6).reshape(3, 2).T + 1.0, spec(2, 3))
    assert counted.bytes_moved == 4 * (6 + 1 + 6)


def test_energy_of_a_multiply_accumulate_and_of_an_adder_element():
    l1 = lambda x, w: -jnp.abs(x[:, :, None] - w).sum(1)
    for function, dtype, picojoules in (
        (jnp.matmul, "float32", 4.6),
        (l1, "float32", 1.8),
        (jnp.matmul, "float16", 1.5),
    ):
        operands = spec(1, 8, dtype=dtype), spec(8, 1, dtype=dtype)
        found = energy(count_operations(function, *operands)).total_arithmetic_joules
        assert found == pytest.approx(8 * picojoules * 1e-12)


def test_energy_of_memory_by_level():
    moved = energy(count_operations(jnp.matmul, spec(2, 8), spec(8, 2))).memory_joules
    assert moved["DRAM"] == (pytest.approx(36 * 4 * 162.5e-12), pytest.approx(36 * 4 * 162.5e-12))
    assert moved["8 KB cache"][0] == pytest.approx(36 * 4 * 1.25e-12)


def test_energy_names_a_missing_number_type():
    counted = count_operations(jnp.add, *[spec(2, dtype="float8_e4m3fn")] * 2)
    message = "expected a number type of the energy table.*got 'float8_e4m3fn'"
    with pytest.raises(KeyError, match=message):
        energy(counted)


def test_mixed_precision_is_counted_by_type():
    product = lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32)
    counted = count_operations(product, spec(2, 3, dtype="bfloat16"), spec(3, 5, dtype="bfloat16"))
    assert counted.counts == {("multiplications", "bfloat16"): 30, ("additions", "float32"): 30}


def test_random_bits_are_reported():
    key, draw = jax.eval_shape(lambda: jax.random.key(0)), lambda key: jax.random.normal(key, (4,))
    assert "random_bits" in count_operations(draw, key).uncounted


def test_counts_are_exact_integers():
    counted = count_operations(jnp.matmul, spec(10**5, 10**5), spec(10**5, 10**5))
    assert counted.multiplications == 10**15
    assert all(type(number) is int for number in counted.counts.values())


def test_a_reduction_of_two_arrays_runs_its_body_once_for_each_pair():
    both = lambda x, y: jax.lax.reduce(
        (x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,)
    )
    counted = count_operations(both, *2 * [jax.ShapeDtypeStruct((7,), "float32")])
    assert (counted.additions, counted.multiplications) == (7, 7)
