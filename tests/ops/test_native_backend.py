"""The native CPU backend: threads, layouts, awkward numbers, and the life of its compiled
library."""

import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax import ops, own_cache
from adder_flax.ops import _cpu
from tests.ops.programs import differences, factor, l1, normal
from tests.processes import ROOT, run_code, run_python, simulated_devices

pytestmark = pytest.mark.skipif(
    _cpu.CpuBackend().why_unavailable() is not None,
    reason="needs a C++ compiler for the native backend",
)

CODE = (
    "from adder_flax import ops; import jax.numpy as jnp; print(ops.backend_report()); "
    "print(ops.adder_matmul(jnp.ones((2, 3)), jnp.zeros((3, 1))).ravel())"
)


def _gradients(x, w, g, rule="hardtanh"):
    product = lambda x, w: ops.adder_matmul(x, w, x_gradient=rule, w_gradient=rule)
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(g)


def _assert_as_reference(function, *arrays, atol):
    """Compares with the reference backend, NaN and infinities included."""
    results = []
    for backend in ("reference", "cpu_native"):
        with ops.use_backend(backend):
            results.append(jax.jit(function)(*arrays))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol), *results)


# One row or column more or less than a tile, a panel and a vector; and a contraction longer than
# one packed piece.
@pytest.mark.parametrize(
    "shape", [(13, 16, 64), (12, 15, 65), (11, 17, 63), (5, 3100, 33), (1600, 40, 18)]
)
@pytest.mark.parametrize("rule", ["sign", "hardtanh", "full", "additive"])
def test_edges_of_tiles_panels_and_pieces(shape, rule):
    rows, depth, columns = shape
    x, w, g = normal((rows, depth), (depth, columns), (rows, columns))
    run = lambda x, w, g: _gradients(x, w, g, rule)
    if rule == "additive":
        run = lambda x, w, g: ops.additive_scores(x, w.T, jnp.ones(depth))
    _assert_as_reference(run, x, w, g, atol=2e-6 * max(shape))


def test_nan_and_infinities_propagate_through_every_value_and_gradient():
    x, w, g = normal((9, 40), (40, 70), (9, 70))
    x[1, 2], x[3], x[5, 6] = np.nan, np.inf, -np.inf
    w[6, 3], w[7, 8], w[9, 10] = -np.inf, np.nan, np.inf
    g[8, 0] = np.nan
    for rule in ("sign", "hardtanh", "full"):
        _assert_as_reference(lambda *a, rule=rule: _gradients(*a, rule), x, w, g, atol=1e-4)
    query, key, g = normal((2, 9, 20), (2, 40, 20), (2, 9, 40))
    query[0, 1, 2], query[0, 3], key[0, 5, 6], key[1, 7, 8] = np.nan, np.inf, np.inf, -np.inf
    for score in (ops.l1_scores, lambda q, k: ops.additive_scores(q, k, jnp.ones(20))):
        both = lambda q, k, g, score=score: (score(q, k), jax.vjp(score, q, k)[1](g))
        _assert_as_reference(both, query, key, g, atol=1e-4)


def test_huge_values_do_not_overflow_the_max_form():
    x, w = normal((7, 32), (32, 80))
    x[0], w[:, 0] = 3e38, 3e38  # their sum overflows, their difference does not
    with ops.use_backend("cpu_native"):
        y = np.asarray(ops.adder_matmul(x, w))
    assert y[0, 0] == 0
    assert np.isneginf(y[0, 1])
    assert np.isfinite(y[1:, 1:]).all()


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_no_less_exact_than_plain_differences(offset):
    query, noise = normal((50, 64), (50, 64))
    query = query + np.float32(offset)
    key = query + np.float32(1e-3) * noise  # near pairs on the diagonal, far ones off it
    errors = {}
    for backend in ("reference", "cpu_native"):
        with ops.use_backend(backend):
            got = np.asarray(ops.l1_scores(query, key), np.float64)
        errors[backend] = np.abs(got / l1(query, key) - 1).max()
    # The max form is kept where distances are at least an eighth of the norms, so it may lose a
    # factor of eight.
    assert errors["cpu_native"] <= max(8 * errors["reference"], 2e-6)


@pytest.mark.parametrize("slope", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("offset", [0.0, 7.5, 1e3])
def test_a_clipped_gradient_is_exact_beside_the_limit(slope, offset):
    x, w, g = normal((50, 64), (64, 90), (50, 90))
    x, w = (values + np.float32(offset) for values in (x, w))
    product = lambda x: ops.adder_matmul(x, w, x_gradient="hardtanh", hardtanh_slope=slope)
    with ops.use_backend("cpu_native"):
        got = np.asarray(jax.vjp(product, x)[1](g)[0], np.float64)
    exact = (g[..., None] * factor("hardtanh", differences(x, w.T), slope)).sum(1)
    # Intervals are kept up to eight limits from zero, and may lose a factor of sixteen.
    assert (np.abs(got - exact) / np.abs(g).sum(1, keepdims=True)).max() <= 16 * 2**-23


def test_huge_cotangents_do_not_overflow_the_clipped_gradient():
    x, w, g = normal((6, 40), (40, 70), (6, 70))
    x[0], w[0] = 6.0, 6.5
    g[0], g[1] = 0.0, 1e36
    g[0, 3] = 1e38  # times six and a half it overflows, times their difference it does not
    _assert_as_reference(lambda *arrays: _gradients(*arrays)[1], x, w, g, atol=1e-4)
    with ops.use_backend("cpu_native"):
        _, dx, _ = _gradients(x, w, g)
    assert dx[0, 0] == np.float32(5e37)


def test_tanh_is_exact_to_float32_rounding():
    x = np.concatenate([np.linspace(-12, 12, 4001), np.logspace(-30, 1, 999), [0.0, -0.0]])
    x = x.astype(np.float32)
    with ops.use_backend("cpu_native"):
        got = ops.additive_scores(x[:, None], jnp.zeros((1, 1)), jnp.ones(1))[:, 0]
    np.testing.assert_allclose(got, np.tanh(x.astype(np.float64)), rtol=5e-7)


def test_a_row_does_not_depend_on_its_batch():
    x, w, g = normal((1100, 96), (96, 80), (1100, 80))
    x[502] *= 100  # with another neighbour in the part
    x[504, 5] = 1e4
    with ops.use_backend("cpu_native"):
        y, dx, _ = _gradients(x, w, g)
        y_part, dx_part, _ = _gradients(x[501:508], w, g[501:508])
    np.testing.assert_array_equal(y[501:508], y_part)
    np.testing.assert_array_equal(dx[501:508], dx_part)


def test_vmap_broadcasts_what_is_not_mapped():
    x, w, g = normal((3, 10, 20), (4, 20, 30), (3, 4, 10, 30))
    by_w, by_x = (None, 0, 0), (0, None, 0)
    for mapped, arrays in (
        (jax.vmap(_gradients, by_x), (x, w[0], g[:, 0])),
        (jax.vmap(_gradients, by_w), (x[0], w, g[0])),
        (jax.vmap(_gradients), (x, w[:3], g[:, 0])),
        (jax.vmap(jax.vmap(_gradients, by_w), by_x), (x, w, g)),
    ):
        _assert_as_reference(mapped, *arrays, atol=1e-4)


def test_inside_loops_and_parallel_branches_nothing_waits_for_itself():
    x, w = normal((300, 96), (96, 96))

    def step(_, carry):
        # Independent calls, large enough to use threads, which XLA may run at the same time.
        return sum(ops.adder_matmul(carry + i, w) for i in range(3)) / 300 + 1

    loop = lambda x: jax.lax.fori_loop(0, 20, jax.checkpoint(step), x)
    _assert_as_reference(loop, x, atol=1e-3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("devices", [1, 8])
def test_same_bits_on_any_number_of_threads(devices, tmp_path):
    code = (
        "import jax, numpy as np; from adder_flax import ops; rng = np.random.default_rng(0); "
        "x, w = rng.normal(size=(400, 96)).astype('f'), rng.normal(size=(96, 130)).astype('f'); "
        "q = rng.normal(size=(6, 65, 64)).astype('f'); "
        "ops.set_backend('cpu_native'); "
        "y, vjp = jax.vjp(lambda x, w: ops.adder_matmul(x, w, w_gradient='sign'), x, w); "
        "z, full = jax.vjp(ops.adder_matmul, np.tile(x, (8, 1)), w); "
        "s, pull = jax.vjp(ops.l1_scores, q, q[::-1].copy()); "
        "given = y, *vjp(np.sin(y)), s, *pull(np.sin(s)), z, *full(np.sin(z)); "
        f"np.savez(r'{tmp_path}/out.npz', *given)"
    )
    results = []
    for threads in ("1", "5"):
        run_code(code, devices=devices, PJRT_NPROC=threads)
        results.append(dict(np.load(tmp_path / "out.npz")))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_without_a_compiler_one_line_and_the_xla_backend(tmp_path):
    done = run_python("-c", CODE, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.startswith("ops backend: xla on cpu")
    assert "[-3. -3.]" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "cpu_native" in line]
    assert len(lines) == 1
    assert "compiler" in lines[0]


def _write_compiler(path, script):
    """One that tells its version, then runs a script."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{script}\n')
    path.chmod(0o755)


def test_a_compiler_that_fails_is_reported(tmp_path):
    _write_compiler(tmp_path / "c++", "echo no such header >&2\nexit 1")
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_python("-c", CODE, PATH=path, XDG_CACHE_HOME=str(tmp_path))
    assert "no such header" in done.stderr
    assert "[-3. -3.]" in done.stdout


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a compiler that is quick, since it has a library already.

    `cache.load()` gives what was loaded and how many times the compiler was called.
    """
    source, library = tmp_path / "empty.c", tmp_path / "library.so"
    source.write_text("int AdderFlaxL1Forward;")
    _cpu._run(_cpu.find_compiler(), "-x", "c", "-shared", str(source), "-o", str(library))
    compiler = tmp_path / "c++"
    script = f'echo >> {tmp_path}/calls\nfor last; do :; done\ncp {library} "$last"'
    _write_compiler(compiler, script)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def load():
        loaded = _cpu._cached_or_compiled(str(compiler))
        return loaded, len((tmp_path / "calls").read_text())

    return types.SimpleNamespace(load=load, folder=tmp_path / "cache" / "adder_flax")


@pytest.mark.parametrize("damage", ["truncated", "a flipped bit"])
def test_a_library_is_compiled_once_and_anew_where_it_is_damaged(cache, damage):
    assert cache.load()[1] == cache.load()[1] == 1  # the second time from the cache
    (file,) = cache.folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:4096] if damage == "truncated" else content[:-100] + b"?" * 100)
    loaded, calls = cache.load()
    assert hasattr(loaded, "AdderFlaxL1Forward")
    assert calls == cache.load()[1] == 2


def test_without_any_cache_the_kernels_are_there(cache, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(own_cache, "folder", lambda: tmp_path / "file" / "a")
    assert hasattr(cache.load()[0], "AdderFlaxL1Forward")
    assert "expected to keep compiled kernels" in caplog.text


def test_the_processor_to_compile_for_can_be_named(monkeypatch):
    compiler = _cpu.find_compiler()
    before = _cpu._fingerprint(compiler)
    monkeypatch.setenv("ADDER_FLAX_CPU", "abacus")
    assert _cpu._fingerprint(compiler) != before
    with pytest.raises(RuntimeError, match="abacus"):
        _cpu._compile(compiler)


@pytest.mark.slow
def test_processes_that_start_together_share_one_cache(tmp_path):
    environment = simulated_devices(1) | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", CODE]
    processes = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0
        assert output.startswith("ops backend: cpu_native on cpu")
        assert "[-3. -3.]" in output
    assert [path.suffix for path in (tmp_path / "adder_flax").iterdir()] == [".so"]
