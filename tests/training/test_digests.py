"""Digests against a second implementation, what they must notice, and what must not change them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax.training.checkpoints import take_digests
from tests.processes import run_code


def digest(x):
    return take_digests({"x": x})[0]["x"]


def reference(x):
    """The definition in 64-bit integers, element by element."""
    total, modulus = 0, 2**32
    raw = np.asarray(x)
    bits = raw.view(f"uint{8 * raw.dtype.itemsize}") if raw.dtype != bool else raw
    for index, element in enumerate(bits.ravel().tolist()):
        mixed = (element + index * 0x9E3779B1) * 0x85EBCA6B % modulus
        mixed = (mixed ^ mixed >> 15) * 0xC2B2AE35 % modulus
        total += mixed ^ mixed >> 16
    return total % modulus


@pytest.mark.cases(9)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 4)])
def test_a_digest_is_what_its_definition_says(dtype, shape):
    x = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    assert digest(x) == reference(x)


def test_any_one_bit_and_any_exchange_of_elements_is_noticed():
    x = np.asarray(jax.random.normal(jax.random.key(1), (4, 8)))
    expected = digest(x)
    for bit in range(8 * x.nbytes):
        flipped = bytearray(x.tobytes())
        flipped[bit // 8] ^= 1 << bit % 8
        assert digest(np.frombuffer(flipped, x.dtype).reshape(x.shape)) != expected
    assert digest(np.float32([1, 2, 3, -1])) != digest(np.float32([-1, 2, 3, 1]))
    assert digest(x[::-1]) != expected
    assert digest(np.zeros_like(x)) != digest(np.zeros((4, 9), x.dtype))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_arrays_that_are_not_finite_are_named(value):
    params = {"a": jnp.ones(5), "b": jnp.ones((2, 3)).at[1, 2].set(value)}
    assert take_digests({"step": jnp.int32(3), "params": params})[1] == ["params/b"]


_SPLIT = """
import json, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from adder_flax.training.checkpoints import take_digests
mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
x[7, 5] = np.nan
out = [take_digests({"x": jax.device_put(x, NamedSharding(mesh, spec))})
       for spec in (P(), P("a"), P("a", "b"), P(None, "b"), P(("a", "b")))]
print(json.dumps([*out, take_digests({"x": x})]))
"""


@pytest.mark.slow
def test_however_an_array_is_split_over_devices_its_digest_is_the_same():
    outcomes = json.loads(run_code(_SPLIT, devices=8))
    assert len(outcomes) == 6
    assert all(outcome == outcomes[-1] for outcome in outcomes)
    assert outcomes[-1][1] == ["x"]
