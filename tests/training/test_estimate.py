"""``--mode=compile``: what a step takes, whether it fits, what would make it smaller."""

import dataclasses
import importlib.util
import re
import types

import jax
import pytest

from adder_flax import training
from adder_flax.app import modes
from adder_flax.training import RunError, estimate, topology_devices
from adder_flax.training.estimate import _excess, _working_memory
from adder_flax.training.topology import GIB, compiler_folder, memory_bytes
from tests.processes import run_code
from tests.training.tiny import TINY_FLAGS, make_config

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='compiling for TPUs needs libtpu: pip install "jax[tpu]"',
)
needs_gpu_compiler = pytest.mark.skipif(
    compiler_folder() is None, reason='needs pip install ".[gpu-compile]"'
)


@pytest.fixture(scope="module")
def estimated():
    """A run with averaged parameters on one device, and its estimate."""
    run = training.build_run(make_config("multiplicative", ema_decay=0.9))
    return run, estimate(run)


@pytest.mark.slow
def test_memory_by_kind_against_the_arrays_of_the_run(estimated):
    run, result = estimated
    state = run.init()
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    parameters = size(state["params"])
    assert result.memory["parameters"] == parameters == result.memory["averaged parameters"]
    assert result.memory["optimizer state"] == size(state["opt_state"])
    assert result.memory["batch"] == 32 * (8 * 8 + 4)
    assert result.memory["activations, gradients"] > result.memory["parameters"]
    assert result.total == sum(result.memory.values())
    assert (result.fits, result.num_devices) == (True, 1)


def test_what_to_change_comes_by_what_it_saves(estimated):
    run, result = estimated
    on_eight = dataclasses.replace(result, num_devices=8)
    fields = lambda advice: [re.match(r"--config\.([\w.]+)", line)[1] for line in advice]
    activations = ["model.remat", "accumulation_steps", "model.dtype"]
    assert fields(training.advise(run, result)) == activations
    assert fields(training.advise(run, on_eight)) == [*activations, "mesh.data"]
    heavy = dataclasses.replace(
        on_eight, memory=result.memory | {"optimizer state": 10 * result.total}
    )
    assert fields(training.advise(run, heavy)) == ["mesh.data", *activations]


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (372.53G) "
            "exceeds available HBM (15.75G).",
            371.53,
        ),
        ("Ran out of memory in memory space hbm. Used 20.27G of 15.75G hbm.", 19.27),
        ("something else", 0),
    ],
)
def test_the_size_that_does_not_fit_is_read_from_the_compilers_complaint(message, size):
    found = _excess(f"RESOURCE_EXHAUSTED: {message}", resident=GIB)
    assert found == pytest.approx(size * GIB, rel=1e-9)


@pytest.mark.parametrize(
    ("temporaries", "peak", "checked", "working"),
    # GiB: fits as laid out; not, but accepted; not checked.
    [(10, 9, 16, 10), (14, 12, 16, 10), (14, 12, None, 14)],
)
def test_what_was_accepted_is_counted_as_laid_out_or_at_its_peak(
    temporaries, peak, checked, working
):
    sizes = dict(argument=2, output=2, alias=2, temp=temporaries, generated_code=1)
    analysis = types.SimpleNamespace(
        **{f"{kind}_size_in_bytes": size * GIB for kind, size in sizes.items()},
        peak_memory_in_bytes=peak * GIB,
    )
    found = _working_memory(analysis, resident=2 * GIB, checked=checked and checked * GIB)
    assert found == {"activations, gradients": working * GIB, "program": GIB}


_ARGUMENTS_COUNT = """
import jax, jax.numpy as jnp
from adder_flax.training.estimate import _excess, _working_memory
from adder_flax.training.topology import GIB, topology_devices

on_chip = jax.sharding.SingleDeviceSharding(topology_devices("v5e:2x4")[0])
like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on_chip)
rows = GIB // (4 * 4096)  # 1 GiB in 4,096 columns


def program(held, column, row):
    products = jnp.sort(column[:, None] * row, axis=0)  # a sort needs its operand and its result
    return held + products[::1000].sum()


for gib in (2, 4):
    try:
        jax.jit(program, donate_argnums=0).lower(
            like(10 * rows, 4096), like(gib * rows), like(4096)
        ).compile()
        print("accepted")
    except jax.errors.JaxRuntimeError as error:
        print(_excess(str(error), resident=10 * GIB) / GIB)
"""


@needs_libtpu
def test_the_compilers_complaint_counts_arguments():
    assert run_code(_ARGUMENTS_COUNT).split() == ["accepted", "8.0"]


@pytest.mark.parametrize("name", ["cpu:", "cpu:none", "cpu:0", "h100:0", "h100:2x", "b200:2x2x2"])
def test_topologies_that_cannot_be_are_refused(name):
    with pytest.raises(RunError, match=f"as v5e:4x4, h100:8, cpu:8 or empty, got '{name}'"):
        topology_devices(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:2x2", r'libtpu.*got none; pip install "jax\[tpu\]=='),
        ("h100:8", r"compiler for NVIDIA GPUs.*got none; .*pip install .*gpu-compile"),
    ],
)
def test_a_topology_without_its_compiler_says_what_to_install(name, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=message):
        topology_devices(name)


@pytest.mark.unchecked
@pytest.mark.parametrize(("share", "usable"), [(None, 63_707_234_304), ("0.9", 76_448_681_164)])
def test_memory_of_a_gpu_is_what_programs_get_of_it(share, usable, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    if share is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    assert memory_bytes(gpu) == usable


def _on_gpus(*case):
    return pytest.param(*case, marks=[needs_gpu_compiler, pytest.mark.slow])


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        pytest.param(
            ["--config.topology=cpu:8", "--config.mesh.data=2", "--config.mesh.fsdp=4"],
            ("8 × cpu, mesh data 2 × fsdp 4 × tensor 1", "optimizer state", "fits"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--config.topology=v5e:2x4"],
            ("8 × TPU v5 lite on 2 hosts", "of 15.750 GiB: fits"),
            marks=needs_libtpu,
        ),
        _on_gpus(
            ["--config.topology=h100:2x2"],
            ("4 × NVIDIA H100 80GB HBM3 on 2 hosts", "of 59.332 GiB: fits"),
        ),
        _on_gpus(
            ["--config.topology=a100:1"], ("1 × NVIDIA A100-SXM4-80GB", "of 59.442 GiB: fits")
        ),
    ],
)
def test_devices_that_are_not_there_from_the_command_line(flags, parts, run_main):
    experiment = "--config=experiments/adder_deit_tiny.py"
    done = run_main("--mode=compile", experiment, *TINY_FLAGS, *flags)
    assert done.returncode == 0, done.stderr
    assert all(part in done.stdout for part in (*parts, "additions a step"))


def test_training_on_a_topology_is_refused(tiny_config, tmp_path):
    with pytest.raises(RunError, match="which is for --mode=compile"):
        modes.train(tiny_config(topology="v5e:2x4"), tmp_path)


@needs_libtpu
@pytest.mark.slow
def test_a_step_that_does_not_fit_says_so_and_what_to_change(run_main):
    wide = ["model.depth=1", "model.mlp_ratio=64.0", "batch_size=40000", "topology=v5e:2x4"]
    flags = [f"--config.{field}" for field in wide]
    done = run_main("--mode=compile", "--config=experiments/deit_tiny.py:fake", *flags)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "of 15.750 GiB: does not fit" in done.stdout
    assert "--config.model.remat=True" in done.stdout
