"""Placement rules, and one device against eight simulated ones."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from adder_flax.training import RunError
from adder_flax.training.sharding import make_mesh, parameter_spec
from tests.processes import ROOT, simulated_devices


class _Mesh:
    def __init__(self, **shape):
        self.shape = {"data": 1, "fsdp": 1, "tensor": 1} | shape


@pytest.mark.parametrize(
    ("path", "shape", "mesh", "spec"),
    [
        ("params/blocks/0/attention/query/kernel", (192, 192), _Mesh(data=8), P(None, None)),
        ("params/blocks/0/attention/query/kernel", (192, 192), _Mesh(tensor=2, fsdp=2), P("fsdp", "tensor")),
        ("opt_state/0/mu/blocks/3/mlp/fc2/kernel", (768, 192), _Mesh(tensor=2, fsdp=4), P("tensor", "fsdp")),
        ("params/blocks/0/mlp/fc1/kernel", (192, 770), _Mesh(tensor=4), P(None, None)),
        ("params/pos_embed", (1, 17, 192), _Mesh(fsdp=8), P(None, None, "fsdp")),
        ("step", (), _Mesh(fsdp=8), P()),
    ],
)
def test_parameter_spec(path, shape, mesh, spec):
    assert parameter_spec(path, shape, mesh) == spec


@pytest.mark.parametrize("sizes", [(2, 1, 1), (-1, -1, 1), (0, 1, 1), (-1, 2, 1)])
def test_sizes_that_do_not_fill_the_devices_are_refused(sizes):
    with pytest.raises(RunError, match="mesh"):
        make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), jax.devices()[:1])


_LOSSES = """
import sys
from adder_flax import data, training
from adder_flax.training import sharding
import jax
from experiments import common
from tests.training.tiny import TINY

mechanism, *mesh = sys.argv[1:]
config = common.deit(mechanism, "tiny")
config.update_from_flattened_dict(TINY)
config.mesh.update(dict(zip(("data", "fsdp", "tensor"), map(int, mesh))))
run = training.build_run(config)
step = training.make_train_step(run.graphdef, run.optimizer, run.augment, seed=0)
step, state = jax.jit(step), run.init()
batches = data.TrainPipeline(run.train_source, config.batch_size, 0)
for i in range(4):
    state, metrics = step(state, sharding.put_batch(batches[i], run.mesh))
    print(float(metrics["loss"]), float(metrics["grad_norm"]))
print(*training.Evaluator(run)(state["params"]).values())
"""


def _losses(mechanism, *mesh):
    devices = np.prod(mesh)
    done = subprocess.run(
        [sys.executable, "-c", _LOSSES, mechanism, *map(str, mesh)],
        env=simulated_devices(devices) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return np.array([float(number) for number in done.stdout.split()])


_MECHANISMS = ("multiplicative", "additive", "adder")


@pytest.mark.parametrize(
    ("mechanism", "mesh"),
    [
        ("adder", (8, 1, 1)),
        ("multiplicative", (2, 2, 2)),
        *(pytest.param(m, s, marks=pytest.mark.slow) for m in _MECHANISMS for s in ((8, 1, 1), (1, 8, 1), (2, 2, 2))),
    ],
)
def test_eight_devices_give_the_numbers_of_one(mechanism, mesh):
    np.testing.assert_allclose(_losses(mechanism, *mesh), _losses(mechanism, 1, 1, 1), rtol=1e-4)
