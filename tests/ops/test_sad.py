"""Sums of absolute differences of bytes: the integers of NumPy in int64, on every backend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from adder_flax import ops
from adder_flax.ops._backend import get_backend
from adder_flax.ops._cuda import CudaBackend
from adder_flax.ops._cuda import Tile as CudaTile
from adder_flax.ops._primitive import call
from tests.ops.cuda_on_host import CudaOnHost

BACKENDS = {
    "reference": get_backend("reference"),
    "xla": get_backend("xla"),
    "cpu_native": get_backend("cpu_native"),
    "cuda on the host": CudaOnHost(tile=CudaTile(4, 4, 4, 8, 1.0)),
    "without kernels for bytes": get_backend("pallas_tpu"),
}
if jax.default_backend() == "gpu":
    BACKENDS["cuda"] = CudaBackend()


def available(name):
    if name == "cpu_native" and name not in ops.available_backends():
        pytest.skip(BACKENDS[name].why_unavailable())
    return BACKENDS[name]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return available(request.param)


def truth(x, w):
    """x (..., M, K) and w (..., N, K) in int64."""
    x, w = np.asarray(x, np.int64), np.asarray(w, np.int64)
    return np.abs(x[..., :, None, :] - w[..., None, :, :]).sum(-1)


def random_bytes(seed, *shape, dtype=np.uint8):
    limits = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(limits.min, limits.max + 1, shape, dtype)


def check(backend, x, w):
    got = jax.jit(functools.partial(call, backend, "sad"))(x, w)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, truth(x, w))


def random_shapes(count):
    """M, N, K: edges of tiles, panels and words, single ones included."""
    rng = np.random.default_rng(0)
    return [tuple(map(int, rng.integers(1, [15, 40, 70]))) for _ in range(count)]


# Each shape is a program of its own, which the host's compiler takes two seconds for.
@pytest.mark.cases(12)
@pytest.mark.parametrize(("m", "n", "k"), random_shapes(40))
def test_ten_thousand_random_cases(backend, m, n, k):
    check(backend, random_bytes(m, 250, m, k), random_bytes(n, 250, n, k))


@pytest.mark.cases(6)
@pytest.mark.parametrize("k", [1, 1500, 5000, 33_001])
def test_the_farthest_bytes_in_sums_of_several_pieces(backend, k):
    x, w = np.zeros((1, 3, k), np.uint8), np.full((1, 2, k), 255, np.uint8)
    check(backend, x, w)
    w[0, 1] = random_bytes(3, k)
    check(backend, x, w)


def test_sums_are_int32_where_others_have_64_bits(backend):
    with jax.enable_x64(True):
        check(backend, random_bytes(1, 1, 3, 5000), random_bytes(2, 1, 2, 5000))


@pytest.mark.parametrize("empty", ["b", "m", "n", "k"])
def test_no_members_rows_columns_or_terms(backend, empty):
    size = {"b": 2, "m": 3, "n": 4, "k": 5} | {empty: 0}
    b, m, n, k = size.values()
    check(backend, np.ones((b, m, k), np.uint8), np.zeros((b, n, k), np.uint8))


@pytest.mark.parametrize("name", ["xla", "cpu_native"])
def test_the_longest_sum_still_fits(name):
    k = 2**23
    check(available(name), np.zeros((1, 1, k), np.uint8), np.full((1, 1, k), 255, np.uint8))


def test_many_terms_are_shared_out_over_threads():
    backend = available("cpu_native")
    for batch, m, n in [(3, 200, 197), (1, 2000, 7), (1, 7, 2000)]:
        check(backend, random_bytes(1, batch, m, 193), random_bytes(2, batch, n, 193))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_matmul_takes_both_kinds_of_bytes_packed_or_not(dtype):
    x, w = random_bytes(1, 2, 5, 19, dtype=dtype), random_bytes(2, 19, 7, dtype=dtype)
    expected = truth(x, w.T)
    packed = ops.sad_pack(w)
    inside = jax.jit(lambda x, w: ops.sad_matmul(x, ops.sad_pack(w)))
    for function in (ops.sad_matmul, jax.jit(ops.sad_matmul), inside):
        np.testing.assert_array_equal(function(x, w), expected)
        np.testing.assert_array_equal(function(x, packed), expected)
    np.testing.assert_array_equal(ops.sad_matmul(x[0, 0], packed), expected[0, 0])
    assert jax.eval_shape(ops.sad_matmul, x, packed) == jax.ShapeDtypeStruct((2, 5, 7), jnp.int32)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_scores_broadcast_over_leading_axes(dtype):
    query = random_bytes(1, 2, 3, 17, 24, dtype=dtype)
    key = random_bytes(2, 3, 29, 24, dtype=dtype)
    np.testing.assert_array_equal(ops.sad_scores(query, key), truth(query, key))


@pytest.mark.cases(2)
def test_one_operand_is_shared_along_a_mapped_axis(backend):
    x, w = random_bytes(1, 2, 4, 3, 9), random_bytes(2, 4, 6, 9)
    of_pairs = functools.partial(call, backend, "sad")
    got = jax.jit(jax.vmap(of_pairs, in_axes=(0, None)))(x, w)
    np.testing.assert_array_equal(got, truth(x, w))
    got = jax.jit(jax.vmap(of_pairs, in_axes=(None, 2), out_axes=1))(w, x.transpose(1, 2, 0, 3))
    np.testing.assert_array_equal(got.swapaxes(0, 1), truth(w, x))


def test_xla_holds_nothing_of_the_size_of_all_terms():
    types = jax.ShapeDtypeStruct((512, 512), jnp.uint8)
    with ops.use_backend("xla"):
        compiled = jax.jit(ops.sad_matmul).lower(types, types).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 512 * 512


def test_nothing_flows_back_through_bytes():
    ones = jnp.ones((3, 2), jnp.uint8)
    loss = lambda x: (ops.sad_matmul(jnp.round(x).astype(jnp.uint8), ones).sum() * x).sum()
    np.testing.assert_array_equal(jax.grad(loss)(jnp.full(3, 4.0)), [18.0] * 3)


BYTES = jax.ShapeDtypeStruct((2, 3), jnp.uint8)
LONG = BYTES.update(shape=(1, 2**23 + 1))
FLOATS = jax.ShapeDtypeStruct((3, 4), jnp.float32)
REFUSED = {
    "floats": (TypeError, ops.sad_matmul, FLOATS, FLOATS, "got float32; round it first"),
    "floats and bytes": (TypeError, ops.sad_matmul, BYTES, FLOATS, "got uint8 and float32"),
    "two kinds": (TypeError, ops.sad_scores, BYTES, jax.ShapeDtypeStruct((4, 3), jnp.int8), "int8"),
    "widths": (ValueError, ops.sad_matmul, BYTES, BYTES, r"got \(2, 3\) and \(2, 3\)"),
    "heads": (ValueError, ops.sad_scores, BYTES, BYTES.update(shape=(2, 4)), "the same d"),
    "no matrix": (ValueError, ops.sad_matmul, BYTES, BYTES.update(shape=(3,)), r"shape \(K, N\)"),
    "long": (ValueError, ops.sad_matmul, LONG, LONG.update(shape=LONG.shape[::-1]), "2.*8388609"),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(case):
    error, function, x, w, message = REFUSED[case]
    with pytest.raises(error, match=message):
        jax.eval_shape(function, x, w)


# -------------------------------------------------------------------------------------------------
# What stands between sums
# -------------------------------------------------------------------------------------------------


def normed(x, columns, grid, excess, scale, bias, epsilon, gelu):
    """An adder layer of bytes and its norm in float64."""
    lowest, step, levels = grid
    if x.dtype != np.uint8:
        x = np.clip(np.rint((x - np.float32(lowest)) / np.float32(step)), 0, levels)
    y = -(truth(x, columns) * float(np.float32(step)) + excess)
    y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt(np.square(y).mean(-1, keepdims=True) + epsilon) * scale + bias
    return y * (1 + scipy.special.erf(y / np.sqrt(2))) / 2 if gelu else y


# Rows, terms and outputs: edges of tiles, panels, lanes and pieces.
NORMED = [(1, 8, 2), (5, 13, 5), (7, 1, 33), (100, 192, 48), (6, 1030, 17), (13, 40, 200)]


def layer_of(m, k, n, *, floating=True):
    rng = np.random.default_rng(m)
    grid = (-2.0, 0.25, 15)
    x = rng.normal(size=(m, k)).astype(np.float32) if floating else random_bytes(m, m, k) % 16
    own = dict(excess=rng.random(n), scale=rng.normal(size=n), bias=rng.normal(size=n))
    own = {name: np.float32(value) for name, value in (own | {"epsilon": 1e-5}).items()}
    return x, random_bytes(k, n, k) % 16, dict(grid=grid, **own)


def sad_norm(x, columns, **options):
    return ops.sad_norm(x, ops.SadWeights(jnp.asarray(columns)), **options)


def use(name):
    return ops.use_backend(name) if name in ops.available_backends() else pytest.skip(name)


@pytest.mark.cases(4)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("name", ["cpu_native", "xla"])
def test_a_layer_of_bytes_and_its_norm(name, floating, gelu):
    for m, k, n in NORMED:
        x, columns, own = layer_of(m, k, n, floating=floating)
        with use(name):
            got = sad_norm(x, columns, **own, gelu=gelu)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, normed(x, columns, **own, gelu=gelu), atol=3e-5)


@pytest.mark.parametrize("name", ["cpu_native", "xla"])
def test_bytes_of_the_next_layer_are_the_nearest(name):
    x, columns, own = layer_of(13, 40, 200)
    lowest, step, levels = -0.1, 0.05, 31
    with use(name):
        got = sad_norm(x, columns, **own, gelu=True, to=(lowest, step, levels))
    assert got.dtype == jnp.uint8
    places = (normed(x, columns, **own, gelu=True) - lowest) / step
    assert np.abs(got - np.clip(places, 0, levels)).max() < 0.5 + 1e-3
    assert set(np.unique(got)) == set(range(levels + 1))


# Images, queries, keys, heads, widths of keys and of values.
ATTENDED = [(1, 1, 1, 1, 1, 1), (2, 5, 7, 3, 8, 16), (3, 25, 13, 2, 13, 5), (1, 31, 70, 1, 24, 40)]


def heads_of(b, m, n, h, d, v):
    rng = np.random.default_rng(m)
    shapes = (b, m, h, d), (b, n, h, d), (b, n, h, v)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    head = np.arange(h)
    ends = dict(lowest=-1.5 - head / 4, step=0.1 + head / 10, factor=0.5**head)
    return arrays, {name: np.float32(end) for name, end in ends.items()}


@pytest.mark.parametrize("name", ["cpu_native", "xla"])
def test_attention_from_sums_of_bytes(name):
    for shape in ATTENDED:
        (query, key, value), ends = heads_of(*shape)
        with use(name):
            got = ops.sad_attention(query, key, value, **ends, levels=31)
        lowest, step, factor = (ends[end][:, None] for end in ("lowest", "step", "factor"))
        highest = lowest + step * np.float32(31)
        q, k = (np.clip(np.rint((x - lowest) / step), 0, 31) for x in (query, key))
        beyond = np.abs(key - np.clip(key, lowest, highest)).sum(-1)
        q, k, mixed = (np.moveaxis(x, 2, 1) for x in (q, k, value))
        scores = truth(q, k) * step[:, None].astype(float) + np.moveaxis(beyond, 2, 1)[:, :, None]
        expected = scipy.special.softmax(-factor[:, None] * scores, axis=-1) @ mixed
        np.testing.assert_allclose(got, np.moveaxis(expected, 1, 2), atol=1e-5)


def test_far_scores_weigh_nothing_and_are_finite():
    (query, key, value), _ = heads_of(1, 6, 9, 1, 8, 4)
    got = ops.sad_attention(query, key, value, lowest=-2.0, step=0.1, levels=63, factor=1e4)
    nearest = np.abs(query[0, :, None, 0] - key[0, None, :, 0]).sum(-1).argmin(1)
    np.testing.assert_allclose(got[0], value[0, nearest], atol=1e-5)


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_layers_and_attention_without_rows_terms_or_outputs(empty):
    shape = [3, 4, 5]
    shape[empty] = 0
    x, columns, own = layer_of(*shape)
    assert sad_norm(x, columns, **own).shape == (shape[0], shape[2])
    (query, key, value), ends = heads_of(*shape[:2], 3, 2, 4, shape[2])
    y = ops.sad_attention(query, key, value, **ends, levels=31)
    assert y.shape == (*shape[:2], 2, shape[2])


@pytest.mark.unchecked
def test_shapes_that_do_not_fit_are_refused_before_a_kernel_reads_beyond_them():
    x, columns, own = layer_of(3, 8, 4)
    with pytest.raises(ValueError, match=r"got \(3, 6\) and \(8, 4\)"):
        sad_norm(x[:, :6], columns, **own)
    with pytest.raises(ValueError, match="broadcast"):
        sad_norm(x, columns, **own | {"scale": np.ones(3)})
    (query, key, value), ends = heads_of(2, 5, 7, 2, 8, 4)
    others = (query[..., :4], key, value), (query, key[:1], value), (query, key, value[:, 1:])
    for other in others:
        with pytest.raises(ValueError, match="the same leading axes, heads and d; got"):
            ops.sad_attention(*other, **ends, levels=31)


def test_leading_axes_mapped_axes_and_threads_change_nothing():
    x, columns, own = layer_of(24, 40, 33)
    layer = functools.partial(sad_norm, columns=columns, **own)
    expected = layer(x)
    np.testing.assert_array_equal(jax.jit(layer)(x.reshape(2, 3, 4, 40)).reshape(24, 33), expected)
    np.testing.assert_array_equal(jax.vmap(layer)(x.reshape(2, 12, 40)).reshape(24, 33), expected)
    arrays, ends = heads_of(4, 9, 7, 2, 8, 4)
    attention = functools.partial(ops.sad_attention, **ends, levels=31)
    expected = attention(*arrays)
    np.testing.assert_array_equal(jax.vmap(attention)(*arrays), expected)
    for i in range(4):
        np.testing.assert_array_equal(attention(*(a[i] for a in arrays)), expected[i])


@pytest.mark.slow
def test_what_is_no_byte_has_the_gradient_of_the_formula():
    _, columns, own = layer_of(6, 8, 10)
    x = random_bytes(0, 6, 8) % 16
    given = own | dict(scale=1.0, bias=0.0)
    normal = normed(x, columns, **given, gelu=False).astype(np.float32)

    layer = lambda scale, bias: sad_norm(
        x, columns, **own | dict(scale=scale, bias=bias), gelu=True
    )
    formula = lambda scale, bias: jax.nn.gelu(normal * scale + bias, approximate=False)
    got, expected = (
        jax.grad(lambda *a, f=f: (f(*a) * jnp.arange(10)).sum(), (0, 1))(own["scale"], own["bias"])
        for f in (layer, formula)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-4), got, expected)
    arrays, ends = heads_of(1, 3, 4, 1, 4, 2)
    attended = lambda value: ops.sad_attention(*arrays[:2], value, **ends, levels=31)
    weights = attended(np.eye(4, dtype=np.float32)[None, :, None, :])[0, :, 0]
    gradient = jax.grad(lambda value: attended(value).sum())(arrays[2])
    np.testing.assert_allclose(gradient[0, :, 0, 0], weights.sum(0), atol=1e-5)
