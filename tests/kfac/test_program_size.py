"""How large the program of K-FAC becomes."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import kfac

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="other compilers copy other things"
)


def program(*widths, **options):
    """The compiled step of a chain of dense layers between these widths."""
    params = {
        f"fc{i}": {"kernel": jnp.eye(*sizes), "bias": jnp.zeros(sizes[1])}
        for i, sizes in enumerate(itertools.pairwise(widths))
    }

    def loss_fn(params, x):
        for name in params:
            x = jnp.tanh(kfac.tap(kfac.Dense(), params[name], x, path=name))
        return (x**2).sum(-1).mean(), x

    x = jnp.ones((8, widths[0]))
    optimizer = kfac.kfac(0.1, kfac.find_layers(loss_fn, params, x), **options)
    function = kfac.value_grad_and_curvature(loss_fn, has_aux=True)

    def step(params, state, key):
        _, grads, curvature = function(params, x, key=key)
        return optimizer.update(grads, state, params, curvature=curvature)

    lowered = jax.jit(step).lower(params, optimizer.init(params), jax.random.key(0))
    return lowered.compile().as_text()


def instructions(depth):
    return program(*[4] * (depth + 1)).count(" = ")


@pytest.mark.slow
def test_it_grows_with_the_layers_and_not_with_their_square():
    # Four times as many layers: four times as many, where whether all gradients are finite is asked
    # once; sixteen times, where each of their loops asks it again.
    assert instructions(12) < 4 * instructions(3)


@pytest.mark.slow
def test_inverses_alone_stack_no_matrices_of_all_layers_but_to_invert_them():
    compiled = program(20, 20, 20, 20, iterations=0)
    branches, _, every_step = compiled.partition("ENTRY")
    for rows in (21, 20):
        assert f"f32[3,{rows},{rows}]" in branches
        assert f"f32[3,{rows},{rows}]" not in every_step


@pytest.mark.slow
def test_few_iterations_of_cg_are_written_out():
    few, many = (
        program(20, 20, 20, 20, iterations=count).partition("ENTRY")[2].count(" while(")
        for count in (2, 10)
    )
    assert many == few + 1


@pytest.mark.slow
def test_factors_of_one_size_are_inverted_side_by_side_whatever_their_layers():
    branches = program(20, 20, 30, 40, iterations=0).partition("ENTRY")[0]
    for lanes, rows in ((2, 21), (1, 31 + 1), (1, 20), (1, 30), (1, 40)):  # one of zeros
        assert f"f32[{lanes},{rows},{rows}]" in branches
