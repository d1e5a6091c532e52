"""The kernels through the compilers of hardware that is not here: for NVIDIA GPUs and for TPUs."""

import functools
import importlib.util
import os
import sys

import jax
import jax.numpy as jnp
import pytest

from adder_flax.ops._arrays import GradientRule
from adder_flax.ops._cuda import CudaBackend
from adder_flax.ops._pallas_tpu import PallasTpuBackend
from adder_flax.training.topology import compiler_folder
from tests.processes import run_python

BATCH, ROWS, COLUMNS, WIDTH = 2, 17, 37, 9
X, W = (BATCH, ROWS, WIDTH), (BATCH, WIDTH, COLUMNS)
KEY, G, V = (BATCH, COLUMNS, WIDTH), (BATCH, ROWS, COLUMNS), (BATCH, WIDTH)
HARDTANH = {"rule": GradientRule("hardtanh", 4.0), "axes": "kn"}
SIGN = {"rule": GradientRule("sign"), "axes": "kn"}
CALLS = [
    ("l1", (X, W), {"axes": "kn"}),
    ("l1", (X, KEY), {"axes": "nk"}),
    ("l1_pullback_x", (X, W, G), HARDTANH),
    ("l1_pullback_x", (X, W, G), SIGN),
    ("l1_pullback_w", (X, W, G), HARDTANH),
    ("l1_pushforward", (X, W, X), SIGN),
    ("additive", (X, KEY, V), {}),
    ("additive_pullback", (X, KEY, V, G), {}),
]


def _lowered(backend, platform, method, shapes, options, dtype=jnp.float32):
    function = jax.jit(functools.partial(getattr(backend, method), **options))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return function.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


needs_nvrtc = pytest.mark.skipif(
    CudaBackend().why_unavailable() is not None, reason="needs pip install nvidia-cuda-nvrtc-cu12"
)


@needs_nvrtc
@pytest.mark.parametrize(
    ("method", "shapes", "options", "dtype"),
    [
        *((*call, jnp.float32) for call in CALLS),
        *((*CALLS[0], dtype) for dtype in (jnp.bfloat16, jnp.float16)),
    ],
)
def test_every_function_lowers_to_ptx_for_cuda(method, shapes, options, dtype):
    text = _lowered(CudaBackend(), "cuda", method, shapes, options, dtype)
    assert "__gpu$xla.gpu.ptx" in text
    assert ".version 7.0" in text  # which every driver that JAX runs with reads
    assert "stablehlo.while" not in text  # no part of it fell back to the XLA backend


@pytest.mark.cases(4)
@pytest.mark.parametrize(("method", "shapes", "options"), CALLS)
def test_every_function_lowers_to_mosaic_kernels_for_tpu(method, shapes, options):
    assert "tpu_custom_call" in _lowered(PallasTpuBackend(), "tpu", method, shapes, options)


AHEAD_OF_TIME = """
import re, sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from adder_flax import ops
from adder_flax.training import topology_devices

topology, backend, call = sys.argv[1:]
mesh = jax.make_mesh(
    (2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=topology_devices(topology)
)
rows = ("data", "fsdp")
like = lambda shape, *spec: jax.ShapeDtypeStruct(
    shape, np.float32, sharding=NamedSharding(mesh, P(*spec))
)


def loss(w, v, x):
    tokens = ops.adder_matmul(x, w, w_gradient="sign").reshape(16, 65, 3, 64).swapaxes(1, 2)
    return (ops.l1_scores(tokens, tokens) + ops.additive_scores(tokens, tokens, v)).mean()


arrays = like((192, 192), "fsdp"), like((3, 64)), like((16 * 65, 192), rows)
with ops.use_backend(backend), jax.set_mesh(mesh):
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
text = compiled.as_text()
assert text.count(call) >= 6, text
# 16 images on 4 devices: no device sees the tokens or the maps of all of them.
assert not re.search(r"\\[(1040,192|16,3,65,6[45])\\]", text), text
print(compiled.memory_analysis())
"""


def _compile_ahead_of_time(*arguments):
    # The backend that was asked for by name cannot run here, only be compiled for.
    environment = dict(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = ("-W", "error::DeprecationWarning", "-c", AHEAD_OF_TIME, *arguments)
    done = run_python(*command, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "temp_size_in_bytes" in done.stdout


@pytest.mark.parametrize("topology", ["v5e:2x2", pytest.param("v6e:2x2", marks=pytest.mark.slow)])
def test_compiled_ahead_of_time_for_tpus_each_device_has_its_own_rows(topology):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed (pip install libtpu)")
    _compile_ahead_of_time(topology, "pallas_tpu", "tpu_custom_call")


@needs_nvrtc
@pytest.mark.skipif(compiler_folder() is None, reason='needs pip install ".[gpu-compile]"')
@pytest.mark.parametrize("topology", ["h100:2x2", pytest.param("a100:4", marks=pytest.mark.slow)])
def test_compiled_ahead_of_time_for_gpus_each_device_has_its_own_rows(topology):
    _compile_ahead_of_time(topology, "cuda", "__gpu$xla.gpu.ptx")
