"""Programs that travel: what `jax.export` puts into them."""

import re

import jax
import numpy as np
import pytest
from jax import export

from adder_flax import ops
from adder_flax.ops import _cpu
from adder_flax.ops._cuda import CudaBackend
from tests.ops.programs import l1, normal

X, W = normal((7, 33), (33, 19))
GRADIENTS = jax.jit(jax.grad(lambda x, w: (ops.adder_matmul(x, w) ** 2).sum(), (0, 1)))


def _calls(exported):
    return set(re.findall(r"custom_call @([\w.$]+)", exported.mlir_module()))


def test_the_default_export_has_the_kernels_of_its_platform_where_they_are_portable():
    calls = {
        platform: _calls(export.export(GRADIENTS, platforms=[platform])(X, W))
        for platform in ("cpu", "cuda", "tpu")
    }
    assert calls == {"cpu": set(), "cuda": set(), "tpu": {"tpu_custom_call"}}


def _assert_computes_the_gradients(exported):
    for got, expected in zip(exported.call(X, W), GRADIENTS(X, W), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


def test_one_export_serves_several_platforms():
    exported = export.export(GRADIENTS, platforms=["tpu", "cpu"])(X, W)
    assert _calls(exported) == {"tpu_custom_call"}
    _assert_computes_the_gradients(exported)


@pytest.mark.unchecked  # a symbol is no integer
def test_rows_may_be_left_open():
    (rows,) = export.symbolic_shape("rows")
    like = jax.ShapeDtypeStruct((rows, 33), "float32")
    product = export.export(jax.jit(ops.adder_matmul))(like, W)
    norm = export.export(jax.jit(lambda x: ops.layer_norm(x, X[0], X[1])))(like)
    for x in (X[:1], X[:6]):
        np.testing.assert_allclose(product.call(x, W), l1(x, W.T), rtol=1e-5)
        np.testing.assert_allclose(norm.call(x), ops.layer_norm(x, X[0], X[1]), atol=1e-5)


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


def test_an_export_with_native_kernels_asked_for_has_none():
    """It runs where nobody has built them."""
    if reason := _cpu.CpuBackend().why_unavailable():
        pytest.skip(reason)
    with ops.use_backend("cpu_native"):
        exported = export.export(GRADIENTS)(X, W)
    assert _calls(exported) == set()
    _assert_computes_the_gradients(exported)
