"""How large the program of CG-FAC becomes."""

import jax
import jax.numpy as jnp
import pytest

import kfac


def instructions(depth):
    """How many instructions the compiled step of a chain of dense layers has."""
    params = {f"fc{i}": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)} for i in range(depth)}

    def loss_fn(params, x):
        for name in params:
            x = jnp.tanh(kfac.tap(kfac.Dense(), params[name], x, path=name))
        return (x**2).sum(-1).mean(), x

    x = jnp.ones((8, 4))
    optimizer = kfac.cg_fac(0.1, kfac.find_layers(loss_fn, params, x), step="rms")
    function = kfac.value_grad_and_curvature(loss_fn, has_aux=True)

    def step(params, state, key):
        _, grads, curvature = function(params, x, key=key)
        return optimizer.update(grads, state, params, curvature=curvature)

    program = jax.jit(step).lower(params, optimizer.init(params), jax.random.key(0)).compile()
    return program.as_text().count(" = ")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other compilers copy other things")
def test_it_grows_with_the_layers_and_not_with_their_square():
    # Four times as many layers: four times as many, where whether all gradients are finite is asked
    # once; sixteen times, where each of their loops asks it again.
    assert instructions(12) < 4 * instructions(3)
