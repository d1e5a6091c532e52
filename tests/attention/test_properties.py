"""What the papers state about the mechanisms, as tests."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from adder_flax import attention
from tests.attention.test_functions import NAMES, call, make_inputs, make_parameters


def maps_of(name, inputs, **options):
    """The map as a function of arrays among the options, jitted."""
    run = lambda parameters, **arrays: call(
        name, *inputs, parameters, **arrays, **options, return_weights=True
    )[1]
    return jax.jit(run)


@pytest.mark.parametrize("name", NAMES)
def test_a_scalar_bias_changes_nothing_and_a_per_key_bias_does(name):
    inputs, parameters = make_inputs(6, 6), make_parameters(name)
    maps = functools.partial(maps_of(name, inputs, identity=False), parameters)
    weights = maps(key_bias=jnp.zeros(6))
    np.testing.assert_allclose(maps(key_bias=jnp.full(6, 3.7)), weights, rtol=1e-5)
    preferred = maps(key_bias=jnp.array([0.0, 0.0, 5.0, 0.0, 0.0, 0.0]))
    assert np.all(preferred[..., 2] > weights[..., 2])


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_additive_scores_are_bounded_by_the_norm_of_v(size):
    query, key, _ = (np.swapaxes(x, 1, 2) * size for x in make_inputs(40, 50))
    parameters = make_parameters("additive")
    scores = attention.additive_scores(query, key, **parameters)
    bound = np.abs(parameters["v"]).sum(-1)[:, None, None]
    assert np.all(np.abs(scores) <= bound * (1 + 1e-6))
    if size == 1e3:  # saturated, the bound is nearly reached: it is the right one
        assert np.max(np.abs(scores) / bound) > 0.95


def test_layer_norm_makes_additive_scores_blind_to_the_size_of_the_inputs():
    query, key, _ = (np.swapaxes(x, 1, 2) for x in make_inputs(4, 5))
    score = jax.jit(lambda q, k, p: attention.additive_scores(q, k, **p))
    plain, normalised = make_parameters("additive"), make_parameters("additive", layer_norm=True)
    of = lambda size, p: score(size * query, size * key, p)
    np.testing.assert_allclose(of(1e3, normalised), of(1, normalised), rtol=1e-3, atol=1e-3)
    assert not np.allclose(of(1e3, plain), of(1, plain), atol=0.1)


@pytest.mark.parametrize("alpha", [0.25, 3.0])
def test_only_the_ratio_of_v_and_temperature_is_identifiable(alpha):
    inputs = make_inputs(6, 6)
    for name, array in (("additive", "v"), ("bilinear", "kernel")):
        parameters = make_parameters(name)
        scaled = parameters | {array: alpha * parameters[array]}
        run = maps_of(name, inputs)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
        plain, hotter = run(parameters, temperature=1.0), run(scaled, temperature=1.0)
        close(run(scaled, temperature=alpha), plain)
        close(hotter, run(parameters, temperature=1 / alpha))
        assert not np.allclose(hotter, plain, atol=1e-2)


@pytest.mark.parametrize("dim", [4, 64])
def test_gaussian_equals_scaled_dot_product_on_the_sphere(dim):
    query, key, value = make_inputs(17, 17, q_dim=dim, k_dim=dim)
    standard = lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    query, key = standard(query), standard(key)
    gaussian, dot = (maps_of(name, (query, key, value))({}) for name in ("gaussian", "dot"))
    np.testing.assert_allclose(gaussian, dot, rtol=1e-5, atol=1e-7)
    key *= np.linspace(0.5, 2.0, 17, dtype=np.float32)[:, None, None]  # off the sphere
    gaussian, dot = (maps_of(name, (query, key, value))({}) for name in ("gaussian", "dot"))
    assert not np.allclose(gaussian, dot, rtol=0.1, atol=1e-3)


@pytest.mark.parametrize("name", ["dot", "adder", "gaussian"])
@pytest.mark.parametrize("dim", [16, 192])
def test_variance_of_the_scores(name, dim):
    """d, 2d(1 - 2/π) and 2d: after the variance-matched scale every mechanism's logits have unit
    variance."""
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(1, 1000, dim)).astype(np.float32) for _ in range(2))
    score = attention.get_score(name)
    scale = attention.resolve_scale(score, "variance_matched", dim)
    scores = np.asarray(score.function(query, key)) * scale
    independent = scores[0][np.arange(1000), np.arange(1000)]
    # The standard error of a variance from n normal samples is √(2/n); scores are heavier-tailed at
    # small dim.
    assert abs(independent.var() - 1.0) < 5 * math.sqrt(2 / 1000)
    for rule in (None, "sqrt_dim"):
        assert attention.resolve_scale(name, rule, dim) == dim**-0.5


def test_identity_raises_singular_values_of_a_symmetric_positive_semidefinite_map_by_one():
    query, _, value = make_inputs(12, 12, batch=(1,), heads=1, kv_heads=1)
    score = np.asarray(attention.adder_scores(query[0, :, 0], query[0, :, 0]), np.float64)
    kernel = np.exp(score / 4)  # the Laplacian kernel of distinct points is positive definite
    weights = kernel / kernel.sum(-1).max()
    np.testing.assert_allclose(
        np.linalg.svd(weights + np.eye(12), compute_uv=False),
        np.linalg.svd(weights, compute_uv=False) + 1,
        rtol=1e-10,
    )
    maps = [maps_of("adder", (query, query, value), identity=i)({}) for i in (None, False)]
    np.testing.assert_allclose((maps[0] - maps[1])[0, 0], np.eye(12), atol=1e-6)
    np.testing.assert_allclose(maps[0].sum(-1), 2.0, rtol=1e-6)


ONE, FIRST = np.ones((1, 1, 1), np.float32), [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("dot", {}, FIRST),
        ("adder", {}, FIRST),
        ("gaussian", {}, FIRST),
        ("bilinear", dict(kernel=ONE), FIRST),
        # tanh of 100 + 100, of 100 - 100 and of 100 + 0, times 10⁴
        ("additive", dict(query_kernel=ONE, key_kernel=ONE, v=1e4 * ONE[0]), [0.5, 0.0, 0.5]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_logits_of_ten_thousand_do_not_overflow(name, parameters, expected, dtype):
    query = jnp.array([100.0, -100.0, 0.0], dtype).reshape(1, 3, 1, 1)
    options = dict(scale=1.0, identity=False, return_weights=True)
    out, weights = call(name, query, query, query, parameters, **options)
    assert np.all(np.isfinite(out.astype(jnp.float32)))
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(weights[0, 0, 0], expected, atol=1e-6)


def test_subtracting_the_maximum_changes_nothing():
    logits = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    plain = scipy.special.softmax(np.float64(logits), axis=-1)
    np.testing.assert_allclose(attention.masked_softmax(logits), plain, rtol=1e-5)
    # Of float32 near 1e4: ± 5e-4.
    np.testing.assert_allclose(attention.masked_softmax(logits + 1e4), plain, rtol=2e-3)
    far = attention.masked_softmax(jnp.array([1e4 + 1.0, 1e4, -1e4]))
    np.testing.assert_allclose(far, [1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0.0], rtol=1e-6)
