"""The operation counter against counts made by hand, by brute force, and published ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from adder_flax import ops
from adder_flax.counting import count_operations, declare_operations, energy


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def scanned(body, trips):
    return lambda x: jax.lax.scan(lambda carry, _: (body(carry), None), x, None, length=trips)[0]


@jax.custom_vjp
def square(x):
    return x * x


square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))


def on_four_devices(x, w):
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows)(x, w)


def in_blocks(x):
    def kernel(x, out):
        out[...] = x[...] * 2.0 + 1.0

    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    blocks = dict(grid=(4,), in_specs=[block], out_specs=block)
    return pl.pallas_call(kernel, out_shape=spec(32, 128), **blocks, interpret=True)(x)


def own_solver(matrix, b):
    product, by_transpose = lambda x: matrix @ x, lambda _, x: matrix.T @ x
    return jax.lax.custom_linear_solve(product, b, lambda _, x: 2 * x, by_transpose)


def patchify(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (4, 4), "VALID", dimension_numbers=numbers)


def moved(x):
    return jnp.stack([part[::-1] for part in jax.lax.unstack(jnp.tile(x, (2, 1)))])


def both_reduced(x, y):
    body = lambda a, b: (a[0] + b[0], a[1] * b[1])
    return jax.lax.reduce((x, y), (0.0, 1.0), body, (0,))


power = lambda n: lambda x: jax.lax.integer_pow(x, n)
dearest = lambda i, x: jax.lax.switch(i, [lambda x: x, lambda x: x @ x, lambda x: x + x], x)
windows = lambda x: jax.lax.reduce_window(x, 1.0, jax.lax.mul, (2,), (1,), "VALID")
of_patches = jax.grad(lambda x, w: patchify(x, w).sum(), (0, 1))
# No difference and absolute value of one term.
no_l1 = lambda x, y: jnp.sum(jnp.square(x - y)) + jnp.sum(jnp.abs(x))
SCORES = spec(2, 3, 5, 7), spec(2, 3, 11, 7)
PAIRS = 2 * 3 * 5 * 11 * 7
PUT = spec(7, 4), spec(5, dtype="int32"), spec(5, 4)
PATCHES = spec(2, 16, 16, 3), spec(4, 4, 3, 7)
MACS = 2 * 16 * (4 * 4 * 3) * 7
KINDS = dict(add="additions", mul="multiplications", div="divisions")
KINDS |= dict(exp="exponentials", cmp="comparisons", l1="l1_elements")
ADD, CMP = ("additions", "float32"), ("comparisons", "float32")  # without those of indices


@pytest.mark.parametrize(
    ("function", "operands", "expected"),
    [
        (partial(jnp.einsum, "bhqd,bhkd->bhqk"), SCORES, dict(mul=PAIRS, add=PAIRS)),
        # Minus the maximum, the sum; the maximum of each row, and that maximum against −inf.
        (jax.nn.softmax, [spec(4, 9)], dict(add=36 + 36, exp=36, div=36, mul=0, cmp=36 + 4)),
        (power(1), [spec(3)], dict(mul=0, div=0)),
        (power(2), [spec(3)], dict(mul=3, div=0)),
        (power(7), [spec(3)], dict(mul=3 * 4, div=0)),  # by squaring
        (power(-2), [spec(3)], dict(mul=3, div=3)),
        # Loops count every trip, a conditional its dearest branch.
        (jax.jit(scanned(lambda x: jnp.tanh(x @ x), 13)), [spec(5, 5)], dict(mul=1625, exp=325)),
        (scanned(scanned(lambda x: x * 2.0, 3), 4), [spec(5)], dict(mul=3 * 4 * 5)),
        (lambda x: jax.lax.fori_loop(0, 6, lambda _, y: y * y, x), [spec(3)], dict(mul=6 * 3)),
        (dearest, [spec(dtype="int32"), spec(4, 4)], dict(mul=4**3, add=4**3)),
        # What is inside of custom derivatives, rematerialisation, devices and kernels.
        (square, [spec(5)], dict(mul=5)),
        (jax.grad(lambda x: square(x).sum()), [spec(5)], dict(mul=15)),  # x·x, (2·x)·g
        (jax.checkpoint(lambda x: x * x * x), [spec(5)], dict(mul=10)),
        (on_four_devices, [spec(8, 3), spec(3, 5)], dict(mul=8 * 3 * 5)),
        (in_blocks, [spec(32, 128)], dict(mul=32 * 128, add=32 * 128)),
        (own_solver, [spec(5, 5), spec(5)], dict(mul=5, add=0)),
        # What is put into an array, by its elements; of an embedding, of the sum and into it.
        (lambda x, i, u: x.at[i].add(u), PUT, {ADD: 5 * 4}),
        (lambda x, i, u: x.at[i].max(u), PUT, {CMP: 5 * 4}),
        (jax.grad(lambda x, i: x[i].sum()), PUT[:2], {ADD: 2 * 5 * 4}),
        (windows, [spec(6)], dict(mul=5 * 2)),
        (both_reduced, [spec(7), spec(7)], dict(add=7, mul=7)),  # once for each pair
        (lambda x: jax.lax.top_k(x, 2, axis=0), [spec(8, 3)], dict(cmp=8 * 3 * 3)),
        (lambda x: jax.lax.top_k(x, 2, axis=1), [spec(8, 3)], dict(cmp=8 * 3 * 2)),
        # Convolutions without overlap, and gradients of one, are matrix products.
        (patchify, PATCHES, dict(mul=MACS)),
        (of_patches, PATCHES, dict(mul=3 * MACS)),
        (moved, [spec(3, 5)], {}),
        (ops.l1_scores, SCORES, dict(add=2 * PAIRS, mul=0, l1=PAIRS)),
        (ops.additive_scores, [*SCORES, spec(3, 7)], dict(exp=PAIRS, mul=PAIRS, add=2 * PAIRS)),
        (no_l1, [spec(5), spec(5)], dict(l1=0)),
        (jnp.matmul, [spec(10**5, 10**5)] * 2, dict(mul=10**15)),
    ],
)
def test_counts_by_hand(function, operands, expected):
    counted = count_operations(function, *operands)
    of = lambda kind: counted.counts[kind] if kind in (ADD, CMP) else getattr(counted, KINDS[kind])
    assert {kind: of(kind) for kind in expected} == expected
    assert expected or not counted.counts
    assert not counted.uncounted
    assert all(type(number) is int for number in counted.counts.values())


def test_what_cannot_be_counted_is_said():
    loop = lambda x: jax.lax.while_loop(lambda y: y[0] < 9, lambda y: y * 2, x)
    counted = count_operations(loop, spec(3))
    assert (counted.multiplications, counted.comparisons) == (3, 1)
    assert counted.uncounted == {"while: trips beyond the first": 1}
    solved = count_operations(jnp.linalg.solve, spec(4, 4), spec(4, 1))
    assert solved.uncounted == {"lu": 1, "triangular_solve": 2}
    key, draw = jax.eval_shape(lambda: jax.random.key(0)), lambda key: jax.random.normal(key, (4,))
    assert "random_bits" in count_operations(draw, key).uncounted


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
    positions = spread * np.arange(length) + pad[0]
    padded = positions[-1] + 1 + pad[1]
    starts = np.arange(0, padded - dilation * (kernel - 1), stride)
    return np.isin(starts[:, None] + dilation * np.arange(kernel), positions).sum()


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_distance_by_hand_is_one_whatever_it_is_summed_in(dtype):
    by_hand = lambda x, w: -jnp.abs(x[:, :, None] - w).sum(1)
    counted = count_operations(by_hand, spec(2, 3, dtype=dtype), spec(3, 5, dtype=dtype))
    assert counted.l1_elements == 2 * 3 * 5
    assert counted.with_one_addition_per_l1_element().additions == 2 * 3 * 5


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
    model = nnx.eval_shape(make) if abstract else make()
    counted = count_operations(model, spec(2, 3))
    layers = counted.layers
    assert set(layers) == LAYERS
    assert layers["blocks.1.linear"].multiplications == 18
    assert layers["blocks.0.gate"].exponentials == 6
    assert layers[""].multiplications == 6
    assert counted.multiplications == sum(layer.multiplications for layer in layers.values()) == 42
    # The model is left as it was.
    assert type(model) is Network
    assert type(model.blocks[0].linear) is nnx.Linear


def test_backward_pass_is_booked_under_its_layer():
    model = nnx.eval_shape(lambda: Network(nnx.Rngs(0)))
    counted = count_operations(nnx.grad(lambda model, x: model(x).sum()), model, spec(2, 3))
    assert set(counted.layers) == LAYERS
    assert counted.layers["blocks.1.linear"].multiplications == 3 * 18  # forward, input, weight
    assert counted.layers["blocks.0.linear"].multiplications == 2 * 18  # forward, weight


def test_bytes_of_a_product_and_of_views_which_move_nothing():
    counted = count_operations(partial(jnp.einsum, "bhqd,bhkd->bhqk"), *SCORES)
    product = 4 * (2 * 3 * (5 * 7 + 11 * 7 + 5 * 11))
    assert counted.bytes_moved == counted.bytes_at_boundary == product
    counted = count_operations(lambda x: x.reshape(6).reshape(3, 2).T + 1.0, spec(2, 3))
    assert counted.bytes_moved == 4 * (6 + 1 + 6)


def test_energy_of_a_multiply_accumulate_and_of_an_adder_element():
    l1 = lambda x, w: -jnp.abs(x[:, :, None] - w).sum(1)
    cases = (jnp.matmul, "float32", 4.6), (l1, "float32", 1.8), (jnp.matmul, "float16", 1.5)
    for function, dtype, picojoules in cases:
        operands = spec(1, 8, dtype=dtype), spec(8, 1, dtype=dtype)
        found = energy(count_operations(function, *operands)).total_arithmetic_joules
        assert found == pytest.approx(8 * picojoules * 1e-12)


def test_energy_of_memory_by_level():
    moved = energy(count_operations(jnp.matmul, spec(2, 8), spec(8, 2))).memory_joules
    assert moved["DRAM"] == (pytest.approx(36 * 4 * 162.5e-12), pytest.approx(36 * 4 * 162.5e-12))
    assert moved["8 KB cache"][0] == pytest.approx(36 * 4 * 1.25e-12)
    # A number type that the table lacks is named.
    counted = count_operations(jnp.add, *[spec(2, dtype="float8_e4m3fn")] * 2)
    message = "expected a number type of the energy table.*got 'float8_e4m3fn'"
    with pytest.raises(KeyError, match=message):
        energy(counted)


def test_mixed_precision_is_counted_by_type():
    product = lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32)
    counted = count_operations(product, spec(2, 3, dtype="bfloat16"), spec(3, 5, dtype="bfloat16"))
    assert counted.counts == {("multiplications", "bfloat16"): 30, ("additions", "float32"): 30}
