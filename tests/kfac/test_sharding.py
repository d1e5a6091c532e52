"""Eight devices compute what one does, with the all-reduces one expects."""

import textwrap

import pytest

from tests.processes import run_code

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

    for name, optimizer in {
        "kron": kfac.kfac(1.0, layers, step="clip"),
        "exact": kfac.cg_fac(1.0, layers, iterations=4),
    }.items():

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
    """  # noqa: E501 - a program of its own
)


# Ten layers of one shape and one of another: lanes that eight devices do not share evenly. Under
# jax.set_mesh.
SHARED = textwrap.dedent(
    """
    import re
    import jax, jax.numpy as jnp, numpy as np, kfac
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    jax.config.update("jax_enable_x64", True)
    LAYERS, WIDTH = 10, 64  # products outweigh averages, which are whole on each device
    normal = lambda seed, *shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape) / WIDTH**0.5)
    params = {str(i): {"kernel": normal(i, WIDTH, WIDTH)} for i in range(LAYERS)}
    params["out"] = {"kernel": normal(50, WIDTH, 8), "bias": normal(51, 8)}
    x = WIDTH**0.5 * normal(99, 32, WIDTH)

    def loss_fn(params, x):
        for name, layer in params.items():
            x = kfac.tap(kfac.Dense(), layer, jnp.tanh(x), path=name)
        return (x ** 2).sum(-1).mean(), x

    layers = kfac.find_layers(loss_fn, params, x)
    function = kfac.value_grad_and_curvature(loss_fn, fisher="ggn", likelihood="gaussian", has_aux=True)
    replicated = lambda mesh, tree: jax.device_put(tree, NamedSharding(mesh, P()))

    optimizer = kfac.scale_by_kfac(layers, kfac.KfacOptions(iterations=3, damping=0.1))
    results = {}
    for count in (1, 8):
        mesh = jax.make_mesh((count // 2 or 1, min(count, 2)), ("data", "tensor"),
                             axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:count])
        with jax.set_mesh(mesh):
            own, batch = replicated(mesh, params), jax.device_put(x, NamedSharding(mesh, P(("data", "tensor"))))
            _, grads, curvature = jax.jit(function)(own, batch, key=replicated(mesh, jax.random.key(0)))
            state, grads = replicated(mesh, optimizer.init(params)), replicated(mesh, grads)
            compiled = jax.jit(optimizer.update).lower(grads, state, own, curvature=curvature).compile()
            updates = compiled(grads, state, own, curvature=curvature)[0]
        turns = max(map(int, re.findall(r'known_trip_count\\W+n\\W+(\\d+)', compiled.as_text())), default=0)
        results[count] = jax.device_get(updates), compiled.cost_analysis()["flops"], turns
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12), results[8][0], results[1][0])
    print(*results[1][1:], *results[8][1:])
    """  # noqa: E501 - a program of its own
)


def test_each_device_solves_for_its_own_layers():
    printed = run_code(SHARED, devices=8)
    flops, turns, flops_of_eight, turns_of_eight = map(float, printed.split())
    assert flops_of_eight < 0.3 * flops  # 2 lanes of 10, and the one of the other shape on each
    # Inversions go lane by lane: both factors of ten layers, which have one size.
    assert (turns, turns_of_eight) == (20, 3)


def test_eight_devices_agree_with_one_and_reduce_each_sum_once():
    """Loss, gradients, factors and the quadratic model; each exact product. Nothing of the loop of
    CG on factors depends on the batch, or a reduction would stand there once."""
    counts = {}
    for line in run_code(PROGRAM, devices=8).splitlines():
        name, _, reduces, _, gathers = line.split()
        counts[name] = int(reduces), int(gathers)
    assert counts.keys() == {"kron", "exact"}
    for name, most in (("kron", 12), ("exact", 16)):
        reduces, gathers = counts[name]
        assert 1 <= reduces <= most
        assert gathers == 0
