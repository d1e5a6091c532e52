"""The reductions under `jax.shard_map`, on eight simulated devices in a process of their own."""

import subprocess
import sys

import pytest

from tests.processes import ROOT, simulated_devices

CODE = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from adder_flax import ops

rng = np.random.default_rng(0)
x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((64, 48), (48, 80), (64, 80)))
q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((16, 17, 8), (16, 17, 8), (8,)))
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

def all_of_it(x, w, g, q, k, v):
    y, vjp = jax.vjp(ops.adder_matmul, x, w)
    s, pull = jax.vjp(lambda q, k: ops.l1_scores(q, k) + ops.additive_scores(q, k, v), q, k)
    dx, dw = vjp(g)
    return y, dx, dw, s, *pull(s)

def sharded(*arrays):
    y, dx, dw, *rest = all_of_it(*arrays)
    return y, dx, jax.lax.psum(dw, "data"), *rest

rows = P("data")
specs = (rows, P(), rows, rows, rows, P())
run = jax.jit(jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=(rows, rows, P(), rows, rows, rows),
                            check_vma=False))
with ops.use_backend("{backend}"):
    got, expected = run(x, w, g, q, k, v), jax.jit(all_of_it)(x, w, g, q, k, v)
assert len(got[0].sharding.device_set) == 8
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), got, tuple(expected))
"""


@pytest.mark.parametrize("backend", ["xla", "cpu_native"])
def test_on_eight_devices_as_on_one(backend):
    done = subprocess.run(
        [sys.executable, "-c", CODE.replace("{backend}", backend)],
        env=simulated_devices(8),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
