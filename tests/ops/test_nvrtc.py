"""The compiler of the CUDA kernels: that it is found or missed in one message, and what is kept."""

import jax.numpy as jnp
import pytest

from adder_flax import ops
from adder_flax.ops import _backend, _nvrtc

PROGRAM = """
extern "C" __global__ void doubled(const float* x, float* y) {
  y[threadIdx.x] = 2 * x[threadIdx.x];
}
"""


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """How often NVRTC was called, in an empty cache."""
    try:
        _nvrtc.load_library()
    except OSError as error:
        pytest.skip(str(error))
    calls, compile_ = [], _nvrtc._compile
    monkeypatch.setattr(_nvrtc, "_compile", lambda source: calls.append(0) or compile_(source))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def test_a_program_is_compiled_once_for_all_gpus_and_drivers(compiled):
    ptx = _nvrtc.compile_to_ptx(PROGRAM)
    assert ".entry doubled" in ptx
    assert ".version 7.0\n.target sm_80\n" in ptx
    assert _nvrtc.compile_to_ptx(PROGRAM) == ptx
    assert len(compiled) == 1
    _nvrtc.compile_to_ptx(PROGRAM.replace("2", "3"))
    assert len(compiled) == 2


def test_a_program_that_is_refused_is_reported_and_not_kept(compiled, tmp_path):
    with pytest.raises(RuntimeError, match="no_such_name"):
        _nvrtc.compile_to_ptx(PROGRAM.replace("2 * x", "no_such_name * x"))
    assert not list(tmp_path.rglob("*.ptx"))


def test_without_it_the_backend_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_nvrtc, "_candidates", lambda: ["libno_such_nvrtc.so"])
    monkeypatch.setattr(_backend, "_reasons", {})
    _nvrtc.load_library.cache_clear()
    message = "pip install nvidia-cuda-nvrtc-cu12"
    with ops.use_backend("cuda"), pytest.raises(ValueError, match=message):
        ops.adder_matmul(jnp.ones((2, 3)), jnp.ones((3, 4)))
