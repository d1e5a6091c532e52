"""The kernels of accelerators against float64 NumPy, on shapes that leave edges in every direction:
CUDA C++ compiled for the host, Pallas in its interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax.ops._arrays import GradientRule
from adder_flax.ops._cuda import TILES, CudaBackend
from adder_flax.ops._cuda import Tile as CudaTile
from adder_flax.ops._pallas_tpu import PallasTpuBackend, Tile
from adder_flax.ops._primitive import call
from tests.ops import programs
from tests.ops.cuda_on_host import CudaOnHost

# Small blocks, so that small arrays have several: (16, 32) on the GPU, (16, 128) and 128 terms on
# the TPU.
TILE = CudaTile(4, 4, 4, 8, 1.0)
BACKENDS = {
    "cuda": CudaOnHost(tile=TILE),
    "tpu": PallasTpuBackend(
        interpret=True, block=Tile(rows=16, columns=128, terms=128, band=8, unroll=8)
    ),
}
if jax.default_backend() == "gpu":
    BACKENDS |= {"gpu": CudaBackend(), "gpu, small blocks": CudaBackend(tile=TILE)}
RULES = (GradientRule("sign"), GradientRule("hardtanh"), GradientRule("hardtanh", 4.0))
OF_L1 = ("l1", "l1_pullback_x", "l1_pullback_w", "l1_pushforward")
FUNCTIONS = (*OF_L1, "additive", "additive_pullback")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def operands(shape, axes="kn", change=lambda x: x):
    """Standard normal x, w (in `axes`), g, dx and v; x and w changed."""
    b, m, n, k = shape
    w_shape = (b, k, n) if axes == "kn" else (b, n, k)
    x, w, g, dx, v = programs.normal((b, m, k), w_shape, (b, m, n), (b, m, k), (b, k))
    return dict(x=change(x), w=change(w), g=g, dx=dx, v=v)


def run(backend, function, arrays, rule, axes):
    """Calls one function of a backend, jitted."""
    x, w, g = arrays["x"], arrays["w"], arrays["g"]
    nk = w if axes == "nk" else w.swapaxes(1, 2)
    arguments, options = {
        "l1": ((x, w), {"axes": axes}),
        "l1_pullback_x": ((x, w, g), {"rule": rule, "axes": axes}),
        "l1_pullback_w": ((x, w, g), {"rule": rule, "axes": axes}),
        "l1_pushforward": ((x, w, arrays["dx"]), {"rule": rule, "axes": axes}),
        "additive": ((x, nk, arrays["v"]), {}),
        "additive_pullback": ((x, nk, arrays["v"], g), {}),
    }[function]
    return jax.jit(functools.partial(getattr(backend, function), **options))(*arguments)


def expected(function, arrays, rule, axes):
    """The same in float64."""
    x, w, g, dx, v = (np.asarray(arrays[name], np.float64) for name in ("x", "w", "g", "dx", "v"))
    w = w if axes == "nk" else w.swapaxes(1, 2)
    by_x, by_w = programs.l1_gradients(x, w, g, rule.name, rule.name, rule.slope)
    slopes = programs.factor(rule.name, programs.differences(x, w), rule.slope)
    return dict(
        l1=programs.l1(x, w),
        l1_pullback_x=by_x,
        l1_pullback_w=by_w if axes == "nk" else by_w.swapaxes(1, 2),
        l1_pushforward=(dx[:, :, None] * slopes).sum(3),
        additive=programs.additive(x, w, v),
        additive_pullback=programs.additive_gradients(x, w, v, g),
    )[function]


def check(backend, function, arrays, rule=RULES[2], axes="kn", tolerance=2e-5):
    """Compares, allowing for rounding in proportion to the number of terms."""
    atol = tolerance * np.sqrt(max(arrays["g"].shape))
    results = (f(function, arrays, rule, axes) for f in (functools.partial(run, backend), expected))
    for got, truth in zip(*map(jax.tree.leaves, results), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, truth, rtol=tolerance, atol=atol)


@pytest.mark.cases(2)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function(backend, function):
    """Of B, M, N and K, the last no multiple of the GPU's runs."""
    axes = "nk" if function == "l1_pullback_w" else "kn"
    check(backend, function, operands((2, 17, 37, 6), axes), axes=axes)


@pytest.mark.cases(1)
@pytest.mark.parametrize("function", ["l1", "l1_pullback_x"])
def test_several_blocks_with_ties_and_a_common_offset(backend, function):
    """All are multiples, and the TPU needs several blocks of each axis."""
    arrays = operands((1, 20, 132, 140), "nk", lambda x: 1000 + np.round(4 * x) / 4)
    assert (arrays["x"][0, 0] == arrays["w"][0, 0]).any()
    check(backend, function, arrays, GradientRule("sign"), "nk")


@pytest.mark.cases(1)
@pytest.mark.parametrize("function", ["l1_pullback_x", "l1_pushforward"])
def test_hardtanh_far_from_zero(backend, function):
    """Where a slope that is no power of two would round away what the values differ in."""
    arrays = operands((1, 5, 9, 8), change=lambda x: 100_000 + x / 8)
    check(backend, function, arrays, GradientRule("hardtanh", 3.0))


@pytest.mark.cases(1)
@pytest.mark.parametrize("function", ["l1_pullback_x", "l1_pushforward"])
def test_the_sign_of_the_smallest_differences(backend, function):
    arrays = operands((1, 5, 9, 8), change=lambda x: x * np.float32(1e-34))
    check(backend, function, arrays, GradientRule("sign"))


@pytest.mark.cases(2)
@pytest.mark.parametrize("function", ["l1", "l1_pullback_x", "l1_pushforward", "additive"])
def test_nan_and_infinity_go_where_they_go_in_the_formula(backend, function):
    arrays = operands((1, 6, 7, 8), "nk")
    arrays["x"][0, 1, 2] = arrays["w"][0, 3, 4] = np.nan
    arrays["x"][0, 2, 5] = arrays["w"][0, 5, 6] = np.inf
    arrays["x"][0, 4, 7] = arrays["w"][0, 0, 7] = np.inf  # inf - inf
    with np.errstate(invalid="ignore"):
        truth = expected(function, arrays, GradientRule("hardtanh"), "nk")
    assert 0 < np.isnan(truth).sum() < truth.size
    got = run(backend, function, arrays, GradientRule("hardtanh"), "nk")
    np.testing.assert_allclose(got, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.cases(4)
@pytest.mark.parametrize("empty", range(4))
def test_empty_axes(backend, empty):
    shape = tuple(0 if axis == empty else length for axis, length in enumerate((2, 3, 4, 5)))
    for function in FUNCTIONS:
        check(backend, function, operands(shape), tolerance=0)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("rule", "offset"), [("sign", 0.0), ("hardtanh", 0.0), ("hardtanh", 1e5)])
def test_few_outputs_of_long_sums_are_cut_into_parts(rule, offset):
    """1,100 rows make two parts of 560, the last of which is filled up."""
    backend, rule = CudaOnHost(), GradientRule(rule, 3.0)
    arrays = operands((1, 1100, 6, 5), change=lambda x: x + np.float32(offset))
    jaxpr = jax.make_jaxpr(lambda **a: run(backend, "l1_pullback_w", a, rule, "kn"))(**arrays)
    assert "f32[2,560" in str(jaxpr)
    check(backend, "l1_pullback_w", arrays, rule)


def test_rounding_of_long_sums_grows_with_a_part_of_them():
    check(CudaOnHost(), "l1", operands((1, 2, 3, 20_000)), tolerance=1e-6)


def test_saturated_hidden_units(backend):
    """Preactivations far beyond where tanh is 1 in float32, from terms that cancel and terms that
    do not."""
    arrays = operands((1, 5, 9, 8), change=lambda x: 10 * x)
    arrays["x"] += 500
    arrays["w"] -= 500
    check(backend, "additive", arrays, tolerance=1e-4)


@pytest.mark.cases(2)
@pytest.mark.parametrize("hidden_units", [1, 7, 12])
def test_hidden_units_in_pairs(backend, hidden_units):
    """Weights of all sizes; preactivations of which each is the difference of two that are large;
    an odd one out."""
    arrays = operands((2, 5, 9, hidden_units))
    arrays["v"] *= np.float32(10.0) ** np.random.default_rng(1).integers(-20, 20, arrays["v"].shape)
    arrays["x"] += 28 * (-1.0) ** np.arange(5)[:, None]
    arrays["w"] -= 28 * (-1.0) ** np.arange(9)
    scale = np.abs(arrays["v"]).max()
    got = run(backend, "additive", arrays, RULES[0], "kn")
    np.testing.assert_allclose(
        got / scale, expected("additive", arrays, RULES[0], "kn") / scale, atol=2e-5
    )


@pytest.mark.cases(1)
def test_operands_that_are_shared_along_mapped_axes(backend):
    """Queries mapped over one axis, keys over another, pairs of both over a third."""
    x, w, g = programs.normal((3, 2, 5, 8), (4, 2, 9, 8), (5, 9))
    rule = GradientRule("hardtanh")

    def gradients(x, w):
        l1 = lambda x, w: call(backend, "l1", x, w, axes="nk", x_rule=rule, w_rule=rule)
        y, vjp = jax.vjp(l1, x, w)
        return y, *vjp(jnp.broadcast_to(g, y.shape))

    by_keys = jax.vmap(gradients, (None, 0))
    y, dx, dw = jax.jit(jax.vmap(jax.vmap(by_keys, (0, None)), (1, 1)))(x, w)
    x = x[:, None]
    by_x, by_w = programs.l1_gradients(x, w, g, "hardtanh", "hardtanh")
    for got, truth in ((y, programs.l1(x, w)), (dx, by_x), (dw, by_w)):
        np.testing.assert_allclose(got, np.moveaxis(truth, 2, 0), rtol=1e-5, atol=1e-4)


def test_other_dtypes_are_left_to_xla(backend):
    assert backend.supports(jnp.bfloat16)
    assert not backend.supports(jnp.float64)


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["kn", "nk"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 2, 1, 3), (3, 1, 65, 2), (1, 65, 17, 197), (1, 197, 197, 64)]
)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sweep(backend, function, shape, axes, rule):
    check(backend, function, operands(shape, axes), rule, axes)


@pytest.mark.cases(4)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_narrow_inputs_are_summed_in_float32(backend, function, dtype, rule):
    arrays = operands((2, 17, 37, 6))
    arrays |= {name: arrays[name].astype(dtype) for name in ("x", "w", "dx", "v")}
    check(backend, function, arrays, rule)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [*TILES, None], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_cuda_tiles(function, tile):
    check(CudaOnHost(tile=tile), function, operands((1, 70, 150, 12)))


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_tpu_blocks_of_full_size(function):
    check(PallasTpuBackend(interpret=True), function, operands((1, 300, 65, 650)))
