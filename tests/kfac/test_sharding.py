"""Eight devices compute what one does, with the all-reduces one expects."""

import subprocess
import sys
import textwrap

import pytest

from tests.processes import ROOT, simulated_devices

pytestmark = pytest.mark.slow

PROGRAM = textwrap.dedent(
    """
    import jax, jax.numpy as jnp, numpy as np, kfac
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    jax.config.update("jax_enable_x64", True)
    normal = lambda seed, *shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape))
    params = {"a": {"kernel": normal(0, 16, 24), "bias": normal(1, 24)}, "b": {"kernel": normal(2, 24, 8)}}
    x, labels = normal(3, 32, 16), jnp.arange(32) % 8

    def loss_fn(params, x, labels):
        x = jnp.tanh(kfac.tap(kfac.Dense(), params["a"], x, path="a"))
        logits = kfac.tap(kfac.Dense(), params["b"], x, path="b")
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean(), logits

    layers = kfac.find_layers(loss_fn, params, x, labels)
    function = kfac.value_grad_and_curvature(loss_fn, has_aux=True)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    put = lambda tree, *specs: jax.device_put(tree, NamedSharding(mesh, P(*specs)))

    for name, options in {"kron": {}, "exact": {"curvature": "exact", "max_iterations": 4}}.items():
        optimizer = kfac.cg_fac(1.0, layers, **options)

        @jax.jit
        def step(params, state, x, labels):
            (loss, _), grads, curvature = function(params, x, labels, key=jax.random.key(0))
            return optimizer.update(grads, state, params, curvature=curvature)

        state = optimizer.init(params)
        expected = step(params, state, x, labels)[0]
        batch = put(x, "data"), put(labels, "data")
        for placed in ("replicated", "fsdp"):
            sharded = put(params) if placed == "replicated" else jax.tree.map(lambda p: put(p, "data"), params)
            arguments = (sharded, put(state), *batch)
            got = step(*arguments)[0]
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12), got, expected)
            if placed == "replicated":
                text = step.lower(*arguments).compile().as_text()
                print(name, "all-reduce", text.count(" all-reduce("), "all-gather", text.count(" all-gather("))
    """
)


@pytest.fixture(scope="module")
def report():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=simulated_devices(8), cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = {}
    for line in done.stdout.splitlines():
        name, _, reduces, _, gathers = line.split()
        counts[name] = int(reduces), int(gathers)
    return counts


def test_eight_devices_agree_with_one(report):
    assert set(report) == {"kron", "exact"}


def test_factors_are_reduced_once_and_iterations_stay_on_the_device(report):
    # Loss, gradients, factors and the quadratic model; no reduction per CG iteration (they would stand in its loop
    # once, but nothing of the loop depends on the batch).
    reduces, gathers = report["kron"]
    assert 1 <= reduces <= 12
    assert gathers == 0


def test_exact_products_are_reduced_once_per_product(report):
    reduces, gathers = report["exact"]
    assert 1 <= reduces <= 16
    assert gathers == 0
