"""The reductions on eight simulated devices, in processes of their own: numbers, places, and what
moves."""

import pytest

from tests.processes import run_code

HEAD = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from adder_flax import ops

ops.set_backend(sys.argv[1])
assert jax.device_count() == 8
rng = np.random.default_rng(0)
normal = lambda *shape: rng.normal(size=shape).astype(np.float32)


def make_mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def place(mesh, *arrays_and_specs):
    return [
        jax.device_put(array, NamedSharding(mesh, P(*spec))) for array, spec in arrays_and_specs
    ]


def close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-4), got, expected)


MOVES = ("all-gather", "all-to-all", "collective-permute")


def as_on_one(function, arrays, unmoved=MOVES):
    # What a program gives, and its text, in which nothing moves; held to one device's numbers.
    run = jax.jit(function).lower(*arrays).compile()
    text, results = run.as_text(), run(*arrays)
    assert not any(move in text for move in unmoved), text
    close(results, function(*map(np.asarray, arrays)))
    return results, text
"""

UNDER_SHARD_MAP = """
x, w, q, k, v = normal(64, 48), normal(48, 80), normal(16, 17, 8), normal(16, 17, 8), normal(8)
mesh = make_mesh(data=8)


def loss(x, w, q, k, v):
    y = ops.adder_matmul(x, w, w_gradient=rule)
    s = ops.l1_scores(q, k) + ops.additive_scores(q, k, v)
    attended = ops.fused_attention(ops.additive_scores, q, k, k, (v,), key_block=5)
    return 1e-3 * ((y**2).sum() + (s**2).sum()) + attended.sum()


for rule in ("full", "sign"):
    for check in (True, False):
        # Checked types know that w and v are shared, and sum their gradients; unchecked ones leave that to the caller.
        specs = (P("data"), P(), P("data"), P("data"), P())
        summed = lambda x, wanted: jax.lax.psum(x, "data") if wanted else x
        total = jax.grad(lambda *a: summed(loss(*a), check), range(5))
        gradients = lambda *a: [summed(d, not (check or s)) for d, s in zip(total(*a), specs)]
        options = dict(in_specs=specs, out_specs=list(specs), check_vma=check)
        run = jax.shard_map(gradients, mesh=mesh, **options)
        close(jax.jit(run)(x, w, q, k, v), list(jax.grad(loss, range(5))(x, w, q, k, v)))
"""  # noqa: E501 - a program of its own

LOOPS_UNDER_SHARD_MAP = """
x, w = normal(16, 20), normal(20, 5)
mesh, specs = make_mesh(data=8), (P("data"), P())
loss = lambda x, w: 1e-3 * (ops.adder_matmul(x, w) ** 2).sum()
total = jax.grad(lambda x, w: jax.lax.psum(loss(x, w), "data"), (0, 1))
run = jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=specs)
close(jax.jit(run)(x, w), jax.grad(loss, (0, 1))(x, w))
"""

BATCH_SPLIT = """
mesh = make_mesh(data=8)
x, w, g = place(
    mesh, (normal(64, 48), ("data",)), (normal(48, 80), ()), (normal(64, 80), ("data",))
)


def step(x, w, g):
    y, vjp = jax.vjp(lambda x, w: ops.adder_matmul(x, w, w_gradient="sign"), x, w)
    return y, *vjp(g)


(y, dx, dw), text = as_on_one(step, (x, w, g), ("all-gather", "all-to-all"))
assert "all-reduce" in text  # of the gradient of w
assert y.sharding.spec[0] == dx.sharding.spec[0] == "data", (y.sharding, dx.sharding)
"""

MODEL_SPLIT = """
mesh = make_mesh(data=2, fsdp=2, tensor=2)
rows = ("data", "fsdp")
x, w1, w2 = place(mesh, (normal(64, 48), (rows,)), (normal(48, 80), ("fsdp", "tensor")),
                  (normal(80, 48), ("tensor", "fsdp")))

def mlp(x, w1, w2):
    hidden = ops.adder_matmul(x, w1, w_gradient="sign")
    return hidden, ops.adder_matmul(hidden, w2, w_gradient="sign")

# Weights are gathered over fsdp; activations, of 64 rows, are not.
(hidden, y), _ = as_on_one(mlp, (x, w1, w2), ["[64,"])
assert hidden.sharding.spec == P(rows, "tensor"), hidden.sharding
assert y.sharding.spec[0] == rows, y.sharding
as_on_one(jax.grad(lambda *a: 1e-4 * (mlp(*a)[1] ** 2).sum(), (0, 1, 2)), (x, w1, w2), ())
"""

HEADS_SPLIT = """
mesh = make_mesh(data=2, fsdp=2, tensor=2)
heads = (("data", "fsdp"), "tensor")
q, k, v = place(
    mesh, (normal(4, 6, 17, 8), heads), (normal(4, 6, 17, 8), heads), (normal(6, 8), ("tensor",))
)


def step(*arrays):
    scores = lambda q, k, v: ops.l1_scores(q, k) + ops.additive_scores(q, k, v)
    s, vjp = jax.vjp(scores, *arrays)
    return s, *vjp(jnp.sin(s))


results, _ = as_on_one(step, (q, k, v))
assert all(tuple(r.sharding.spec)[:2] == heads for r in results[:3]), [r.sharding for r in results]
"""

UNEVEN_AND_MAPPED = """
mesh = make_mesh(data=8)
x, w = place(mesh, (normal(8, 3, 48), ("data",)), (normal(48, 83), ()))
expected = ops.adder_matmul(np.asarray(x), np.asarray(w))
close(jax.jit(jax.vmap(ops.adder_matmul, (0, None)))(x, w), expected)
close(jax.jit(jax.vmap(jax.vmap(ops.adder_matmul, (0, None)), (0, None)))(x, w), expected)
columns = NamedSharding(mesh, P(None, None, "data"))
constrained = lambda x, w: jax.lax.with_sharding_constraint(ops.adder_matmul(x, w), columns)
cut = jax.jit(lambda x, w: constrained(x, w)[..., :80])(x, w)  # 83 columns over 8 devices
close(cut, expected[..., :80])
close(ops.adder_matmul(x, w), expected)  # not jitted
"""

LAYER_NORM = """
mesh = make_mesh(data=8)
(x, g), (rows, g_rows) = (
    place(mesh, *[(normal(*shape), ("data",)) for _ in range(2)])
    for shape in ((16, 5, 48), (80, 48))
)
scale, bias = place(mesh, (normal(48), ()), (normal(48), ()))


def step(x, g, scale, bias):
    y, pullback = jax.vjp(ops.layer_norm, x, scale, bias)
    return y, *pullback(g)


for arrays in ((x, g, scale, bias), (rows, g_rows, scale, bias)):
    results, _ = as_on_one(step, arrays)
    assert all(r.sharding.spec[0] == "data" for r in results[:2]), [r.sharding for r in results]

# Features that are split are needed whole.
features = place(mesh, (normal(6, 48), (None, "data")))[0]
close(jax.jit(ops.layer_norm)(features, scale, bias), ops.layer_norm(np.asarray(features), scale, bias))
"""  # noqa: E501 - a program of its own

BYTES = """
mesh = make_mesh(data=4, tensor=2)
rng = np.random.default_rng(0)
columns = jnp.asarray(rng.integers(0, 256, (33, 40)), jnp.uint8)
table = dict(excess=normal(33), scale=normal(33), bias=normal(33), epsilon=1e-5)
layer = lambda x: ops.sad_norm(x, ops.SadWeights(columns), grid=(-2.0, 0.02, 255), **table)
attention = lambda q, k, v: ops.sad_attention(q, k, v, lowest=-2.0, step=0.1, levels=40)
(x,) = place(mesh, (normal(8, 3, 40), ("data",)))
heads = place(mesh, *[(normal(8, n, 2, 8), ("data", None, "tensor")) for n in (5, 6, 6)])
for function, arrays, places in (
    (layer, [x], P("data")), (attention, heads, P("data", None, "tensor"))
):
    y, _ = as_on_one(function, arrays)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, places), y.ndim), y.sharding
    np.testing.assert_array_equal(y, function(*map(np.asarray, arrays)))
"""

EXPLICIT_AXES = """
mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
x, w = place(mesh, (normal(16, 5, 48), ("data",)), (normal(48, 80), (None, "tensor")))
q, k, v = place(
    mesh,
    (normal(4, 6, 17, 8), ("data", "tensor")),
    (normal(6, 17, 8), ("tensor",)),
    (normal(8), ()),
)


def loss(x, w, q, k, v):
    y = ops.adder_matmul(x, w, w_gradient="sign")
    s = ops.l1_scores(q, k) + ops.additive_scores(q, k, ops.layer_norm(v, v, v))
    return 1e-3 * ((y**2).sum() + (s**2).sum() + ops.layer_norm(q, v, v).sum())


arrays = (x, w, q, k, v)
with jax.set_mesh(mesh):
    y, gradients = jax.jit(ops.adder_matmul)(x, w), jax.jit(jax.grad(loss, range(5)))(*arrays)
    assert y.sharding.spec == P("data", None, "tensor"), y.sharding
    for d, a in zip(gradients, arrays):
        assert d.sharding.is_equivalent_to(a.sharding, a.ndim), (d.sharding, a.sharding)
close(gradients, jax.grad(loss, range(5))(*map(np.asarray, arrays)))
"""

# As it is where JAX no longer has its private set of primitives that need devices.
WITHOUT_RULES = """
from adder_flax.ops import _primitive

_primitive._with_devices.discard(_primitive._pairs)
_primitive._with_devices = None
x, w = normal(16, 5), normal(5, 3)
exact = -abs(np.float64(x)[:, :, None] - w).sum(1)
signs = np.sign(np.float64(w) - x[:, :, None]).sum(2)
placed = place(make_mesh(data=8), (x, ("data",)), (w, ()))
close(jax.jit(ops.adder_matmul)(*placed), exact)
total = lambda x, w: ops.adder_matmul(x, w, x_gradient="sign").sum()
close(jax.jit(jax.grad(total))(*placed), signs)
"""


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("code", "backend"),
    [
        pytest.param(UNDER_SHARD_MAP, "xla", id="shard_map-xla", marks=pytest.mark.slow),
        pytest.param(LOOPS_UNDER_SHARD_MAP, "xla", id="shard_map-loops"),
        pytest.param(UNDER_SHARD_MAP, "cpu_native", id="shard_map-cpu_native"),
        pytest.param(BATCH_SPLIT, "cpu_native", id="batch"),
        pytest.param(MODEL_SPLIT, "cpu_native", id="model"),
        pytest.param(HEADS_SPLIT, "cpu_native", id="heads"),
        pytest.param(UNEVEN_AND_MAPPED, "cpu_native", id="uneven"),
        pytest.param(LAYER_NORM, "cpu_native", id="layer_norm", marks=pytest.mark.slow),
        pytest.param(BYTES, "cpu_native", id="bytes", marks=pytest.mark.slow),
        pytest.param(WITHOUT_RULES, "cpu_native", id="without_rules"),
        pytest.param(EXPLICIT_AXES, "xla", id="explicit-xla", marks=pytest.mark.slow),
        pytest.param(EXPLICIT_AXES, "cpu_native", id="explicit-cpu_native"),
    ],
)
def test_on_eight_devices_as_on_one(code, backend):
    run_code(HEAD + code, backend, devices=8)
