"""The oracle against Jacobians by hand, closed solutions and finite differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from kfac import oracle
from tests.kfac.reference import close

N, INPUTS, HIDDEN, CLASSES = 7, 3, 4, 5


def net(params, x):
    return jnp.tanh(x @ params["a"]["kernel"] + params["a"]["bias"]) @ params["b"]["kernel"]


@pytest.fixture
def problem():
    draw = np.random.default_rng(0).normal
    params = {
        "a": {"kernel": draw(size=(INPUTS, HIDDEN)), "bias": draw(size=HIDDEN)},
        "b": {"kernel": draw(size=(HIDDEN, CLASSES))},
    }
    return params, draw(size=(N, INPUTS)), np.arange(N) % CLASSES


def by_hand(params, x, labels):
    """Blocks and gradients of the net with softmax cross-entropy, example by example, in NumPy."""
    a, bias, b = params["a"]["kernel"], params["a"]["bias"], params["b"]["kernel"]
    sums: dict[str, list] = {"a": [0, 0], "b": [0, 0]}
    for row, label in zip(x, labels, strict=True):
        h = np.tanh(row @ a + bias)
        p = softmax(h @ b)
        # d z_c / d pre_j = (1 − h_j²) b_jc; d pre_j / d bias_j = 1, d pre_j / d a_ij = row_i.
        inner = ((1 - h**2)[:, None] * b).T
        # In order of their paths, bias before kernel.
        of_a = np.concatenate([inner, np.einsum("i,cj->cij", row, inner).reshape(CLASSES, -1)], 1)
        of_b = np.einsum("j,cd->cjd", h, np.eye(CLASSES)).reshape(CLASSES, -1)
        for name, jacobian in (("a", of_a), ("b", of_b)):
            sums[name][0] += jacobian.T @ (np.diag(p) - np.outer(p, p)) @ jacobian / N
            sums[name][1] += jacobian.T @ (p - np.eye(CLASSES)[label]) / N
    return sums


@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}])
def test_blocks_and_gradients_are_those_of_a_jacobian_by_hand(problem, options):
    found = oracle.layerwise_curvature(net, *problem, **options)
    for name, (matrix, gradient) in by_hand(*problem).items():
        close(found[name].matrix, matrix, rtol=1e-12, atol=1e-14)
        close(found[name].gradient, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_a_block_is_the_curvature_of_the_loss_where_outputs_are_linear(likelihood):
    draw = np.random.default_rng(1).normal
    params, x = {"kernel": draw(size=(2, 3))}, draw(size=(4, 5, 2))  # five positions each
    targets = draw(size=(4, 5, 3)) if likelihood == "gaussian" else softmax(draw(size=(4, 5, 3)))
    if likelihood == "categorical":
        targets = targets / targets.sum(-1, keepdims=True)

    def outputs(params, x):
        return x @ params["kernel"]

    def loss(vector):
        return oracle.mean_loss(outputs, {"kernel": vector.reshape(2, 3)}, x, targets, likelihood)

    layer = oracle.layerwise_curvature(outputs, params, x, targets, likelihood)["kernel"]
    at, v, h = params["kernel"].ravel(), draw(size=6), 1e-4
    ahead, here, behind = loss(at + h * v), loss(at), loss(at - h * v)
    assert layer.gradient @ v == pytest.approx((ahead - behind) / (2 * h), rel=1e-6)
    assert v @ layer.matrix @ v == pytest.approx((ahead - 2 * here + behind) / h**2, rel=1e-5)


@pytest.mark.parametrize("relative", [False, True])
def test_the_step_solves_the_damped_system(problem, relative):
    layers = oracle.layerwise_curvature(net, *problem)
    found = oracle.layerwise_step(layers, 0.1, relative=relative)
    for name, layer in layers.items():
        gamma = 0.1 * np.linalg.eigvalsh(layer.matrix).mean() if relative else 0.1
        x = np.linalg.solve(layer.matrix + gamma * np.eye(len(layer.matrix)), layer.gradient)
        close(found.steps[name], -x, rtol=1e-10, atol=1e-14)


def test_a_matrix_that_is_singular_is_refused(problem):
    layers = oracle.layerwise_curvature(net, *problem)
    with pytest.raises(ValueError, match=r"positive definite G \+ γI of .*raise damping"):
        oracle.layerwise_step(layers, -1.0)


def test_a_layer_without_curvature_stands_still():
    layer = oracle.LayerCurvature({"kernel": (2,)}, np.zeros((2, 2)), np.zeros(2))
    found = oracle.layerwise_step({"kernel": layer}, 0.1, relative=True)
    np.testing.assert_array_equal(found.steps["kernel"], 0)
    (row, _) = oracle.compare_step({"kernel": np.zeros(2)}, found)
    assert row.cosine == 0
    assert np.isnan([row.share, row.best_share]).all()


def test_one_step_without_damping_reaches_least_squares():
    draw = np.random.default_rng(2).normal
    x, y, params = draw(size=(20, 3)), draw(size=(20, 2)), {"kernel": draw(size=(3, 2))}
    layers = oracle.layerwise_curvature(lambda p, x: x @ p["kernel"], params, x, y, "gaussian")
    update = oracle.layerwise_step(layers, 0.0).update(params)
    solution = np.linalg.lstsq(x, y, rcond=None)[0]
    close(params["kernel"] + update["kernel"], solution, rtol=1e-10)


def test_the_oracle_has_all_of_its_own_decrease_and_others_have_less(problem):
    params, *_ = problem
    found = oracle.layerwise_step(oracle.layerwise_curvature(net, *problem), 1e-2)
    own = found.update(params)
    for row in oracle.compare_step(own, found):
        assert dataclasses.astuple(row)[2:4] == pytest.approx((1, 1))
        assert (row.share, row.best_share) == pytest.approx((1, 1))
        assert row.predicted == pytest.approx(row.predicted_oracle)
        assert row.predicted < 0
    # Twice as long a step has lost everything: q(sΔ) = (s² − 2s) ½ Δᵀ(G + γI)Δ.
    for row in oracle.compare_step(jax.tree.map(lambda u: 2 * u, own), found):
        assert (row.length_ratio, row.best_share) == pytest.approx((2, 1))
        assert row.share == pytest.approx(0, abs=1e-12)
    gradient = {n: layer.unpack(-layer.gradient) for n, layer in found.layers.items()}
    update = {"a": {p[2:]: v for p, v in gradient["a"].items()}}
    update["b"] = {p[2:]: v for p, v in gradient["b"].items()}
    for row in oracle.compare_step(update, found)[:-1]:
        g, gamma = found.layers[row.name].gradient, found.damping[row.name]
        damped = found.layers[row.name].matrix + gamma * np.eye(row.size)
        best = (g @ g) ** 2 / (g @ damped @ g) / (g @ np.linalg.solve(damped, g))
        assert row.best_share == pytest.approx(best)
        assert 0 < best < 1
