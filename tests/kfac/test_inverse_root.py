"""The kernel that factorizes on NVIDIA GPUs: its source run on the host, its PTX, and its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax.ops import _nvrtc
from adder_flax.ops._cuda import Kernel
from benchmarks.inverse_root import first_line, ptx_of
from kfac.solve import _inverses
from kfac.solve._inverses import (
    PTX,
    ROWS,
    SOURCE,
    _root_and_inverse,
    _root_by_cholesky,
    _root_by_kernel,
)
from tests.kfac.reference import close
from tests.ops.cuda_on_host import COMPILER, run_on_host


@pytest.fixture
def on_host(monkeypatch):
    """The kernel's source in place of its PTX, run by the processor."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")

    def roots(matrices):
        kernel = Kernel(
            _inverses.KERNEL, SOURCE.read_text(), len(matrices), _inverses.THREADS, stage=0
        )
        like = jax.ShapeDtypeStruct(matrices.shape, matrices.dtype)
        return run_on_host(kernel, [matrices], [like])[0]

    monkeypatch.setattr(_inverses, "_roots", roots)
    monkeypatch.setattr(_inverses, "_root", _root_by_kernel)


def spd(lanes, rows, condition=1e3):
    rng = np.random.default_rng(rows)
    q, _ = np.linalg.qr(rng.normal(size=(lanes, rows, rows)))
    return (q * np.logspace(0, -np.log10(condition), rows)) @ q.mT


@pytest.mark.cases(2)
@pytest.mark.parametrize("rows", [1, 2, 33, 95, 96])
def test_the_kernel_gives_the_inverse_of_the_lower_root(on_host, rows):
    matrices = spd(2, rows)
    roots = _root_by_kernel(jnp.asarray(matrices, jnp.float32))
    exact = np.linalg.inv(np.linalg.cholesky(matrices))
    assert not np.triu(roots, 1).any()
    close(roots, exact, atol=1e-4 * abs(exact).max())


@pytest.mark.slow
def test_inverses_by_the_kernel_are_as_near_as_by_the_library(on_host, monkeypatch):
    matrices = spd(2, 200, condition=1e4)
    exact = np.linalg.inv(matrices)

    def error():
        _, inverses = _root_and_inverse(jnp.asarray(matrices, jnp.float32))
        return np.linalg.norm(np.asarray(inverses, np.float64) - exact) / np.linalg.norm(exact)

    by_kernel = error()
    monkeypatch.setattr(_inverses, "_root", _root_by_cholesky)
    assert by_kernel < 2 * error()


def test_a_matrix_that_is_not_positive_has_no_root_and_leaves_the_others_theirs(on_host):
    matrices = spd(3, ROWS)
    matrices[1, 50, 50] = -1.0
    roots = _root_by_kernel(jnp.asarray(matrices, jnp.float32))
    assert np.isnan(roots[1]).any()
    assert np.isfinite(roots[jnp.array([0, 2])]).all()


@pytest.mark.slow
def test_it_has_the_derivative_of_the_library(on_host):
    matrix, tangent = jnp.asarray(spd(2, 40), jnp.float32)
    tangent = tangent + tangent.T
    (_, by_rule), (_, by_library) = (
        jax.jvp(root_of, (matrix[None],), (tangent[None],))
        for root_of in (_root_by_kernel, _root_by_cholesky)
    )
    close(by_rule, by_library, atol=1e-3 * abs(by_library).max())


def test_it_is_in_programs_for_nvidia_gpus_alone_and_in_float32_alone():
    def program(dtype, platform, batch=()):
        matrices = jnp.broadcast_to(jnp.eye(200, dtype=dtype), (*batch, 3, 200, 200))
        function = _inverses._damped_inverse
        function = jax.vmap(function, in_axes=(0, None)) if batch else function
        traced = jax.jit(function).trace(matrices, jnp.ones(3, dtype))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    single = program(jnp.float32, "cuda")
    assert single.count("__gpu$xla.gpu.ptx") == 3  # 96, 96 and 8 rows
    assert single.count("grid_x = 3 : i32") == 3
    assert "potrf" not in single
    assert "grid_x = 6 : i32" in program(jnp.float32, "cuda", batch=(2,))
    for platform in ("cpu", "tpu", "rocm"):
        assert _inverses.KERNEL not in program(jnp.float32, platform)
    with jax.enable_x64(True):
        assert _inverses.KERNEL not in program(jnp.float64, "cuda")


def test_the_ptx_is_that_of_the_source():
    source, ptx = SOURCE.read_text(), PTX.read_text()
    assert ptx.splitlines()[0] == first_line(source)
    assert f".entry {_inverses.KERNEL}(" in ptx
    try:
        _nvrtc.load_library()
    except OSError as error:
        pytest.skip(str(error))
    if "release " + ".".join(map(str, _nvrtc._version())) in ptx:
        assert ptx == ptx_of(source)
