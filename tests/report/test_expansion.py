"""The expansion against dense Hessians and finite differences; along steps, against the loss
itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from adder_flax import ops
from adder_flax.experiments import common
from adder_flax.layers import AdderLinear
from adder_flax.report import second_order_along, second_order_terms
from adder_flax.training import build_run
from tests.training.tiny import TINY


@pytest.mark.slow
def test_terms_against_a_dense_hessian():
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.standard_normal((20, 3))), jnp.asarray(rng.standard_normal(20))
    loss = lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)
    w = {"a": jnp.asarray(rng.standard_normal((3, 4))), "b": jnp.asarray(rng.standard_normal(4))}
    update = jax.tree.map(lambda p: 0.05 * jnp.asarray(rng.standard_normal(p.shape)), w)
    flat, unravel = jax.flatten_util.ravel_pytree(w)
    delta = jax.flatten_util.ravel_pytree(update)[0]
    hessian = jax.hessian(lambda v: loss(unravel(v)))(flat)
    terms = second_order_terms(loss, w, update)
    gradient = jax.grad(lambda v: loss(unravel(v)))(flat)
    assert float(terms.second) == pytest.approx(float(delta @ hessian @ delta) / 2, rel=1e-4)
    assert float(terms.first) == pytest.approx(float(gradient @ delta), rel=1e-4)
    assert float(terms.odd + terms.even) == pytest.approx(float(terms.change), abs=1e-6)
    assert float(terms.even) == pytest.approx(float(terms.second), rel=0.1)


def test_a_quadratic_has_no_further_terms():
    matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    loss = lambda x: 0.5 * x @ matrix @ x
    terms = second_order_terms(loss, jnp.array([1.0, -1.0]), jnp.array([0.5, 0.25]))
    assert float(terms.first) == pytest.approx(0.5 * 1 + 0.25 * -2)
    assert float(terms.second) == pytest.approx(0.5 * (0.5 * 1.25 + 0.25 * 1.25))
    assert float(terms.even) == pytest.approx(float(terms.second), rel=1e-5)
    assert float(terms.odd) == pytest.approx(float(terms.first), abs=1e-6)


def test_a_kink_is_in_the_even_term_alone_and_differences_need_no_derivatives():
    terms = second_order_terms(jnp.abs, 0.25, 1.0)
    assert float(terms.second) == 0.0
    assert float(terms.first) == 1.0
    assert float(terms.even) == pytest.approx((1.25 + 0.75) / 2 - 0.25)
    terms = second_order_terms(lambda x: x**2, 1.0, 0.5, derivatives=False)
    assert (float(terms.change), float(terms.odd), float(terms.even)) == (1.25, 1.0, 0.25)
    assert np.isnan(terms.first)
    assert np.isnan(terms.second)


def test_adder_layers_are_differentiated_exactly():
    layer = AdderLinear(6, 5, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer, nnx.Param)
    params = nnx.to_pure_dict(params)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((7, 6)), jnp.float32)
    loss = lambda params: jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x)))
    normal = lambda p: jnp.asarray(np.random.default_rng(1).standard_normal(p.shape))
    direction = jax.tree.map(normal, params)
    gradient = jax.jit(jax.grad(loss))
    slope = lambda: float(optax.tree.vdot(gradient(params), direction))
    with jax.enable_x64(True), ops.use_backend("reference"):
        double = lambda p: jnp.asarray(p, jnp.float64)
        wide, towards = jax.tree.map(double, (params, direction))
        moved = lambda h: jax.tree.map(lambda p, d: p + h * d, wide, towards)
        difference = float((loss(moved(1e-6)) - loss(moved(-1e-6))) / 2e-6)
    own = slope()
    with ops.exact_gradients():
        assert slope() == pytest.approx(difference, rel=1e-3)
    assert slope() == own != pytest.approx(difference, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["multiplicative", "adder"])
def test_steps_are_those_of_training(mechanism):
    config = common.deit(mechanism, "tiny")
    config.update_from_flattened_dict(TINY | {"batch_size": 16, "optimizer.learning_rate": 1e-4})
    run = build_run(config)
    state = run.init()
    steps = list(second_order_along(run, state, num_steps=3))
    assert int(state["step"]) == 0
    assert [step.step for step in steps] == [0, 1, 2]
    for step in steps:
        assert step.learning_rate == pytest.approx(float(run.parts.learning_rate(step.step)))
        assert step.change == pytest.approx(step.odd + step.even, abs=1e-5)
        # Small steps: the expansion gives the change of the loss.
        near = 0.03 * abs(step.odd) + 1e-5
        assert step.first == pytest.approx(step.odd, abs=near)
        assert step.first + step.second == pytest.approx(step.change, abs=near)
    assert steps[0].ratio() == abs(steps[0].even / steps[0].odd)
    assert steps[0].ratio(10 * steps[0].learning_rate) == pytest.approx(10 * steps[0].ratio())
