"""Which backend runs: the choice, its place in the caches of jit, and what it tells."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from adder_flax import ops
from adder_flax.ops import _backend
from tests.processes import run_code, run_python


def test_a_jitted_function_is_traced_again_under_another_backend():
    traces = []

    @jax.jit
    def product(x, w):
        traces.append(_backend.resolve_backend(x.dtype).name)
        return ops.adder_matmul(x, w)

    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    for name in ("xla", "reference", "xla"):
        with ops.use_backend(name):
            product(x, w)
    assert traces == ["xla", "reference"]


def test_the_backward_pass_stays_on_the_backend_of_the_forward_pass():
    for name, loops in (("xla", True), ("reference", False)):  # over blocks of the 40 columns
        with ops.use_backend(name):
            y, vjp = jax.vjp(ops.adder_matmul, jnp.ones((2, 3)), jnp.ones((3, 40)))
        assert ("stablehlo.while" in jax.jit(vjp).lower(y).as_text()) == loops


def test_set_backend_holds_for_the_process_and_use_backend_within_its_block():
    begins_with = lambda name: ops.backend_report().startswith(f"ops backend: {name}")
    try:
        ops.set_backend("reference")
        assert begins_with("reference (asked for by name)")
        with ops.use_backend("xla"):
            assert begins_with("xla")
        with pytest.raises(ZeroDivisionError), ops.use_backend("xla"):
            1 / 0  # noqa: B018
        assert begins_with("reference")
    finally:
        ops.set_backend("auto")


def test_the_environment_sets_the_backend():
    code = "from adder_flax import ops; print(ops.backend_report())"
    printed = run_code(code, ADDER_FLAX_BACKEND="xla")
    assert printed.startswith("ops backend: xla (asked for by name)")


def test_an_unknown_name_in_the_environment_is_reported_on_first_use():
    code = "from adder_flax import ops; ops.adder_matmul([[1.0]], [[1.0]])"
    done = run_python("-c", code, ADDER_FLAX_BACKEND="fastest")
    assert "ADDER_FLAX_BACKEND" in done.stderr
    assert "'fastest'" in done.stderr


def test_an_unknown_backend_names_the_known_ones():
    with pytest.raises(ValueError, match="xla"), ops.use_backend("no_such_backend"):
        pass


def test_asking_for_a_backend_that_cannot_run_here_says_why(monkeypatch):
    class Absent(_backend.Backend):
        name = "xla"

        def why_unavailable(self):
            return "no such hardware"

    monkeypatch.setattr(_backend, "get_backend", lambda name: Absent())
    monkeypatch.setattr(_backend, "_why_unavailable", lambda name: "no such hardware")
    with _backend.use_backend("xla"), pytest.raises(ValueError, match="no such hardware"):
        _backend.resolve_backend(jnp.float32)


@pytest.mark.parametrize(("chosen", "builds"), [("auto", 1), ("xla", 0)])
def test_kernels_are_built_once_in_the_background_and_only_if_wanted(chosen, builds, monkeypatch):
    asked = []

    class Slow(_backend.Backend):
        name = "cpu_native"

        def why_unavailable(self):
            asked.append(self.name)
            time.sleep(0.2)  # while the caller asks too

    monkeypatch.setattr(_backend, "get_backend", lambda name: Slow())
    monkeypatch.setattr(_backend, "_reasons", {})
    threads = threading.active_count()
    with _backend._choice(chosen):
        ops.build_in_background()
    assert threading.active_count() - threads == builds
    if builds:
        assert _backend._why_unavailable("cpu_native") is None
    assert len(asked) == builds


def test_every_backend_implements_every_function():
    for backend in map(_backend.get_backend, _backend._BACKENDS):
        missing = {
            name
            for name, function in vars(_backend.Backend).items()
            if name.startswith(("l1", "additive")) and getattr(type(backend), name) is function
        }
        pushforwards = {"l1_pushforward_w", "l1_pushforward_both", "additive_pushforward"}
        missing -= {"l1_pullback"} | pushforwards  # which are made of others
        assert not missing, f"{backend.name}: {missing}"


class _Negated(_backend.Backend):
    """Computes the negative of each sum: no other backend gives such numbers."""

    name, platforms = "negated", ("cuda",)

    def l1(self, x, w, axes):
        return -_backend.get_backend("reference").l1(x, w, axes)


def test_the_platform_that_a_program_is_lowered_for_chooses(monkeypatch):
    monkeypatch.setattr(
        _backend, "_best_for", lambda platform, dtype: _Negated() if platform == "cuda" else xla
    )
    xla = _backend.get_backend("xla")
    x, w = jnp.ones((1, 5)), jnp.ones((5, 3))
    traced = jax.jit(lambda x, w: ops.adder_matmul(x, w)).trace(x, w)
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "tpu")
    }
    assert texts["cpu"] == texts["tpu"].replace("tpu", "cpu") != texts["cuda"]
    assert "stablehlo.reduce" in texts["cuda"]
