"""``kfac.spectrum`` against the eigenvalues of the dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from adder_flax import ops
from kfac.solve import _solvers as solver
from tests.kfac.reference import (
    close,
    cross_entropy,
    dense_fisher,
    empirical,
    normal,
    per_example_gradients,
    random,
    system_of,
    tap,
)

pytestmark = pytest.mark.usefixtures("x64")
ADDER = kfac.L1Dense(distances=ops.adder_matmul)
SCALE = kfac.Scale(fn=lambda p, x: x * p["scale"] + p["bias"])
SHAPES = {
    "adder": {"kernel": (3, 4)},
    "scale": {"scale": (4,), "bias": (4,)},
    "head": {"kernel": (4, 3), "bias": (3,)},
}
ARGS = random(SHAPES), normal(5, 7, 3), jnp.arange(7) % 3


def network(params, x, labels):
    x = tap(params, x, "adder", ADDER)
    x = jnp.tanh(tap(params, x / 4, "scale", SCALE))
    return cross_entropy(tap(params, x, "head"), labels)


@pytest.mark.slow
def test_it_is_that_of_the_dense_matrix():
    """A Gauss rule of m nodes is exact for polynomials up to degree 2m - 1: vᵀFᵏv of the probe."""
    *_, curvature = empirical(network)(*ARGS)
    short = kfac.spectrum(curvature, ARGS[0], iterations=3)
    whole = kfac.spectrum(curvature, ARGS[0], iterations=20, probes=400)
    assert sorted(short) == sorted(whole) == ["adder", "head", "scale"]
    gradients = per_example_gradients(network, *ARGS)
    for i, (name, block) in enumerate(curvature.layers.blocks.items()):
        matrix, found = np.asarray(dense_fisher(block, gradients))[0], whole[name]
        expected = np.linalg.eigvalsh(matrix)
        close(found.largest, [expected[-1]], rtol=1e-10)
        close(found.weights.sum(-1), 1, rtol=1e-10)
        # All of the spectrum: every eigenvalue with weight is one of the matrix.
        kept = np.asarray(found.eigenvalues)[np.asarray(found.weights) > 1e-9]
        assert np.abs(kept[:, None] - expected).min(1).max() < 1e-9 * expected[-1]
        # Moments of the start, from dense powers.
        probe = probe_of(i, name, curvature)
        for degree in range(6):
            got = (short[name].weights * short[name].eigenvalues ** degree).sum(-1)
            moment = probe @ np.linalg.matrix_power(matrix, degree) @ probe
            close(got, [[moment]], rtol=1e-9)
        # What many probes say of the trace, and of how many directions a damping leaves.
        close(found.trace, [expected.sum()], rtol=0.2)
        middle = expected[-1] / 30
        got = found.mean(lambda e, middle=middle: e > middle)
        close(got, [np.mean(expected > middle)], rtol=0, atol=0.05)
        assert found.size == len(expected)


def probe_of(i, name, curvature):
    """The start that ``spectrum`` draws, in the order of the block's parameters."""
    system = system_of(name, "exact", curvature, ARGS[0])
    like, unflatten = solver.lane_flatten(system.params)
    (key,) = jax.random.split(jax.random.fold_in(jax.random.key(0), i), 1)
    signs = jax.random.rademacher(key, like.shape, like.dtype) / np.sqrt(like.shape[1])
    return np.concatenate([np.ravel(leaf) for leaf in unflatten(signs)])


def test_rows_that_fill_a_matrix_are_no_directions():
    """31 rows are filled to 32. Of a diagonal matrix any probe of signs tells the trace."""
    x = jnp.concatenate([jnp.eye(30), -jnp.eye(30)])
    params = {"kernel": jnp.ones((30, 1)), "bias": jnp.ones(1)}
    loss_fn = lambda p, x: kfac.tap(kfac.Dense(), p, x, path="").mean()
    curvature = kfac.curvature(loss_fn, fisher="empirical")(params, x)
    (found,) = kfac.spectrum(curvature, params, iterations=2).values()
    close(found.trace, [30 / 30 + 1], rtol=1e-12)


def test_bad_counts_are_refused():
    *_, curvature = empirical(network)(*ARGS)
    with pytest.raises(ValueError, match="expected iterations and probes from 1 on, got 0 and 1"):
        kfac.spectrum(curvature, ARGS[0], iterations=0)
