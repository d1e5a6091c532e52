"""``kfac.spectrum`` against the eigenvalues of the dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from adder_flax import ops
from kfac.solve import _solvers as solver
from tests.kfac.reference import (
    cross_entropy,
    dense_fisher,
    normal,
    per_example_gradients,
    system_of,
)

pytestmark = pytest.mark.usefixtures("x64")
NUM_EXAMPLES = 7
ADDER = kfac.L1Dense(distances=ops.adder_matmul)
SCALE = kfac.Scale(fn=lambda p, x: x * p["scale"] + p["bias"])


def network(params, x, labels):
    x = kfac.tap(ADDER, params["adder"], x, path="adder")
    x = jnp.tanh(kfac.tap(SCALE, params["scale"], x / 4, path="scale"))
    return cross_entropy(kfac.tap(kfac.Dense(), params["head"], x, path="head"), labels)


def made():
    params = {
        "adder": {"kernel": normal(0, 3, 4)},
        "scale": {"scale": normal(1, 4), "bias": normal(2, 4)},
        "head": {"kernel": normal(3, 4, 3), "bias": normal(4, 3)},
    }
    return params, normal(5, NUM_EXAMPLES, 3), jnp.arange(NUM_EXAMPLES) % 3


@pytest.mark.slow
def test_moments_and_eigenvalues_are_those_of_the_dense_matrix():
    """A Gauss rule of m nodes is exact for polynomials up to degree 2m - 1: vᵀFᵏv of the probe."""
    params, x, labels = made()
    curvature = kfac.curvature(network, fisher="empirical", has_aux=True)(params, x, labels)
    short = kfac.spectrum(curvature, params, iterations=3)
    whole = kfac.spectrum(curvature, params, iterations=20, probes=2)
    gradients = per_example_gradients(network, params, x, labels)
    assert sorted(short) == sorted(whole) == ["adder", "head", "scale"]
    for i, (name, block) in enumerate(curvature.layers.blocks.items()):
        matrix = np.asarray(dense_fisher(block, gradients))[0]
        expected = np.linalg.eigvalsh(matrix)
        np.testing.assert_allclose(whole[name].largest, [expected[-1]], rtol=1e-10)
        np.testing.assert_allclose(whole[name].weights.sum(-1), 1, rtol=1e-10)
        # All of the spectrum: every eigenvalue with weight is one of the matrix.
        kept = np.asarray(whole[name].eigenvalues)[np.asarray(whole[name].weights) > 1e-9]
        assert np.abs(kept[:, None] - expected).min(1).max() < 1e-9 * expected[-1]
        # Moments of the start, from dense powers.
        for degree in range(6):
            got = (short[name].weights * short[name].eigenvalues ** degree).sum(-1)
            probe = probe_of(i, name, curvature, params)
            moment = probe @ np.linalg.matrix_power(matrix, degree) @ probe
            np.testing.assert_allclose(got, [[moment]], rtol=1e-9)


def probe_of(i, name, curvature, params):
    """The start that ``spectrum`` draws, in the order of the block's parameters."""
    system = system_of(name, "exact", curvature, params)
    like, unflatten = solver.lane_flatten(system.params)
    (key,) = jax.random.split(jax.random.fold_in(jax.random.key(0), i), 1)
    signs = jax.random.rademacher(key, like.shape, like.dtype) / np.sqrt(like.shape[1])
    return np.concatenate([np.ravel(leaf) for leaf in unflatten(signs)])


@pytest.mark.slow
def test_traces_of_many_probes_are_near_and_damping_counts_directions():
    params, x, labels = made()
    curvature = kfac.curvature(network, fisher="empirical", has_aux=True)(params, x, labels)
    found = kfac.spectrum(curvature, params, iterations=20, probes=400)
    gradients = per_example_gradients(network, params, x, labels)
    for name, block in curvature.layers.blocks.items():
        eigenvalues = np.linalg.eigvalsh(np.asarray(dense_fisher(block, gradients))[0])
        np.testing.assert_allclose(found[name].trace, [eigenvalues.sum()], rtol=0.2)
        middle = eigenvalues[-1] / 30
        share = np.mean(eigenvalues > middle)
        got = found[name].mean(lambda e, middle=middle: e > middle)
        np.testing.assert_allclose(got, [share], atol=0.05)
        assert found[name].size == len(eigenvalues)


def test_rows_that_fill_a_matrix_are_no_directions():
    """31 rows are filled to 32. Of a diagonal matrix any probe of signs tells the trace."""
    x = jnp.concatenate([jnp.eye(30), -jnp.eye(30)])
    params = {"kernel": jnp.ones((30, 1)), "bias": jnp.ones(1)}
    loss_fn = lambda p, x: kfac.tap(kfac.Dense(), p, x, path="").mean()
    curvature = kfac.curvature(loss_fn, fisher="empirical")(params, x)
    (found,) = kfac.spectrum(curvature, params, iterations=2).values()
    np.testing.assert_allclose(found.trace, [30 / 30 + 1], rtol=1e-12)


def test_bad_counts_are_refused():
    params, x, labels = made()
    curvature = kfac.curvature(network, fisher="empirical", has_aux=True)(params, x, labels)
    with pytest.raises(ValueError, match="expected iterations and probes from 1 on, got 0 and 1"):
        kfac.spectrum(curvature, params, iterations=0)
