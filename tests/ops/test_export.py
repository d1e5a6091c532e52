"""Programs that travel: what `jax.export` puts into them, and that they run where nothing else was
traced."""

import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import export

from adder_flax import ops
from adder_flax.ops import _cpu, _cpu_exported
from adder_flax.ops._cuda import CudaBackend
from tests.processes import ROOT, simulated_devices

RNG = np.random.default_rng(0)
X, W = (RNG.normal(size=shape).astype(np.float32) for shape in ((7, 33), (33, 19)))

GRADIENTS = jax.jit(jax.grad(lambda x, w: (ops.adder_matmul(x, w) ** 2).sum(), (0, 1)))


def _calls(exported):
    return set(re.findall(r"custom_call @([\w.$]+)", exported.mlir_module()))


def test_the_default_export_has_the_kernels_of_its_platform_where_they_are_portable():
    calls = {
        platform: _calls(export.export(GRADIENTS, platforms=[platform])(X, W))
        for platform in ("cpu", "cuda", "tpu")
    }
    assert calls == {"cpu": set(), "cuda": set(), "tpu": {"tpu_custom_call"}}


def test_one_export_serves_several_platforms():
    exported = export.export(GRADIENTS, platforms=["tpu", "cpu"])(X, W)
    assert _calls(exported) == {"tpu_custom_call"}
    for got, expected in zip(exported.call(X, W), GRADIENTS(X, W), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


def test_rows_may_be_left_open():
    (rows,) = export.symbolic_shape("rows")
    exported = export.export(jax.jit(ops.adder_matmul))(
        jax.ShapeDtypeStruct((rows, 33), "float32"), W
    )
    for count in (1, 6):
        expected = -np.abs(X[:count, :, None].astype(np.float64) - W).sum(1)
        np.testing.assert_allclose(exported.call(X[:count], W), expected, rtol=1e-5)


def test_an_export_with_cuda_kernels_holds_them_whole():
    pytest.importorskip("flatbuffers")
    if reason := CudaBackend().why_unavailable():
        pytest.skip(reason)
    call = "__gpu$xla.gpu.ptx"
    allowed = [export.DisabledSafetyCheck.custom_call(call)]
    with ops.use_backend("cuda"):
        exported = export.export(GRADIENTS, platforms=["cuda"], disabled_checks=allowed)(X, W)
    stored = export.deserialize(exported.serialize())
    assert _calls(stored) == {call}
    assert stored.mlir_module().count(".target sm_80") == 2  # the product and the gradient of x


RUN = """
import sys
import adder_flax.ops
import numpy as np
from jax import export
with open(sys.argv[1], "rb") as file:
    exported = export.deserialize(file.read())
arrays = np.load(sys.argv[2])
for got, expected in zip(exported.call(arrays["x"], arrays["w"]), (arrays["dx"], arrays["dw"])):
    np.testing.assert_array_equal(got, expected)
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Paths of a program with native kernels, and of what goes in and comes out."""
    pytest.importorskip("flatbuffers")
    if reason := _cpu.CpuBackend().why_unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("stored")
    allowed = [
        export.DisabledSafetyCheck.custom_call(_cpu_exported.EXPORTED_PREFIX + kernel)
        for kernel in _cpu_exported.KERNELS
    ]
    with ops.use_backend("cpu_native"):
        with pytest.raises(ValueError, match="compatibility guarantees"):
            export.export(GRADIENTS)(X, W)
        (folder / "program").write_bytes(
            export.export(GRADIENTS, disabled_checks=allowed)(X, W).serialize()
        )
        dx, dw = GRADIENTS(X, W)
    np.savez(folder / "arrays.npz", x=X, w=W, dx=dx, dw=dw)
    return str(folder / "program"), str(folder / "arrays.npz")


def _run(stored, **environment):
    command = [sys.executable, "-c", RUN, *stored]
    return subprocess.run(
        command,
        env=simulated_devices(1) | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_program_with_native_kernels_runs_after_an_import_alone(stored):
    done = _run(stored)
    assert done.returncode == 0, done.stderr


def test_where_the_kernels_cannot_be_built_it_says_so(stored, tmp_path):
    done = _run(stored, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert (
        "expected to build the kernels that this program was exported with, got: found no C++ "
        "compiler" in done.stderr
    )
