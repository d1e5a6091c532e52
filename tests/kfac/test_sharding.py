"""Eight devices compute what one does, with the all-reduces one expects."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kfac
from tests.kfac.reference import close, cross_entropy, empirical, normal, random, tap
from tests.processes import run_code

pytestmark = pytest.mark.slow


def run_on_eight(function):
    """The lines that a function of this module prints in a process of its own."""
    code = "import jax; jax.config.update('jax_enable_x64', True); from tests.kfac import "
    code += f"test_sharding; test_sharding.{function.__name__}()"
    return run_code(code, devices=8).splitlines()


def put(mesh, tree, *axes):
    return jax.device_put(tree, NamedSharding(mesh, P(*axes)))


def counts_of_collectives():
    params = random({"a": {"kernel": (16, 24), "bias": (24,)}, "b": {"kernel": (24, 8)}})
    x, labels = normal(3, 32, 16), jnp.arange(32) % 8

    def loss_fn(params, x, labels):
        return cross_entropy(tap(params, jnp.tanh(tap(params, x, "a")), "b"), labels)

    layers = kfac.find_layers(loss_fn, params, x, labels)
    function = empirical(loss_fn, fisher="mc")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    batch = put(mesh, (x, labels), "data")
    for name, optimizer in {
        "kron": kfac.kfac(1.0, layers, step="clip"),
        "exact": kfac.cg_fac(1.0, layers, iterations=4),
    }.items():

        @jax.jit
        def step(params, state, x, labels, optimizer=optimizer):
            _, grads, curvature = function(params, x, labels, key=jax.random.key(0))
            return optimizer.update(grads, state, params, curvature=curvature)[0]

        state = optimizer.init(params)
        expected = step(params, state, x, labels)
        for axes in ((), ("data",)):  # replicated and FSDP
            arguments = (put(mesh, params, *axes), put(mesh, state), *batch)
            close(step(*arguments), expected, rtol=1e-8, atol=1e-12)
            if not axes:
                text = step.lower(*arguments).compile().as_text()
                print(name, text.count(" all-reduce("), text.count(" all-gather("))


def test_eight_devices_agree_with_one_and_reduce_each_sum_once():
    """Loss, gradients, factors and the quadratic model; each exact product. Nothing of the loop of
    CG on factors depends on the batch, or a reduction would stand there once."""
    lines = [line.split() for line in run_on_eight(counts_of_collectives)]
    counts = {name: (int(reduces), int(gathers)) for name, reduces, gathers in lines}
    assert counts.keys() == {"kron", "exact"}
    for name, most in (("kron", 12), ("exact", 16)):
        reduces, gathers = counts[name]
        assert 1 <= reduces <= most
        assert gathers == 0


def costs():
    """Ten layers of one shape and one of another: lanes that eight devices do not share evenly.
    Under jax.set_mesh."""
    layers, width = 10, 64  # products outweigh averages, which are whole on each device
    shapes = {str(i): {"kernel": (width, width)} for i in range(layers)}
    params = random(shapes | {"out": {"kernel": (width, 8), "bias": (8,)}})
    params = jax.tree.map(lambda p: p / width**0.5, params)
    x = normal(99, 32, width)

    def loss_fn(params, x):
        for name in params:
            x = tap(params, jnp.tanh(x), name)
        return (x**2).sum(-1).mean(), x

    found = kfac.find_layers(loss_fn, params, x)
    function = empirical(loss_fn, fisher="ggn", likelihood="gaussian")
    optimizer = kfac.scale_by_kfac(found, kfac.KfacOptions(iterations=3, damping=0.1))
    results = []
    for shape in ((1, 1), (4, 2)):
        devices = jax.devices()[: shape[0] * shape[1]]
        types = (AxisType.Auto,) * 2
        mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=types, devices=devices)
        with jax.set_mesh(mesh):
            own, batch = put(mesh, params), put(mesh, x, ("data", "tensor"))
            _, grads, curvature = jax.jit(function)(own, batch, key=put(mesh, jax.random.key(0)))
            args = put(mesh, grads), put(mesh, optimizer.init(params)), own
            compiled = jax.jit(optimizer.update).lower(*args, curvature=curvature).compile()
            results.append(jax.device_get(compiled(*args, curvature=curvature)[0]))
        turns = map(int, re.findall(r"known_trip_count\W+n\W+(\d+)", compiled.as_text()))
        print(compiled.cost_analysis()["flops"], max(turns, default=0))
    close(*results, rtol=1e-8, atol=1e-12)


def test_each_device_solves_for_its_own_layers():
    one, eight = (tuple(map(float, line.split())) for line in run_on_eight(costs))
    assert eight[0] < 0.3 * one[0]  # 2 lanes of 10, and the one of the other shape on each
    # Inversions go lane by lane: both factors of ten layers, which have one size.
    assert (one[1], eight[1]) == (20, 3)
