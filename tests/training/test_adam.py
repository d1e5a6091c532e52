"""Adam whose moments change in place, against optax's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from adder_flax import training
from adder_flax.training import build_run
from adder_flax.training.optimizers import scale_by_adam
from tests.training.pieces import take_steps


def gradients(seed):
    keys = jax.random.split(jax.random.key(seed))
    return {"w": jax.random.normal(keys[0], (3, 5)), "b": jax.random.normal(keys[1], (5,))}


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_optax_adam(nesterov):
    numbers = [jnp.float32(x) for x in (0.9, 0.99, 1e-3)]
    ours = scale_by_adam(*numbers, nesterov=nesterov)
    theirs = optax.scale_by_adam(*numbers, nesterov=nesterov)
    state, expected_state = (optimizer.init(gradients(0)) for optimizer in (ours, theirs))
    for seed in range(4):
        update, state = ours.update(gradients(seed), state, sound=jnp.asarray(True))
        expected, expected_state = theirs.update(gradients(seed), expected_state)
        jax.tree.map(np.testing.assert_array_equal, update, expected)
        jax.tree.map(np.testing.assert_array_equal, tuple(state), tuple(expected_state))


@pytest.mark.parametrize("value", [jnp.nan, 1.0])
def test_a_step_that_is_not_sound_changes_no_moment(value):
    adam = scale_by_adam(0.9, 0.99, 1e-3)
    _, before = adam.update(gradients(0), adam.init(gradients(0)), sound=jnp.asarray(True))
    lost = jax.tree.map(lambda g: g.at[0].set(value), gradients(1))
    _, after = adam.update(lost, before, sound=jnp.asarray(False))
    jax.tree.map(np.testing.assert_array_equal, after, before)


# As it is built, in a share of the parameters, and behind another stage.
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["adamw", "muon", "lamb"])
def test_a_training_step_that_does_not_count_changes_nothing(name, tiny_config):
    run = build_run(tiny_config("multiplicative", **{"optimizer.name": name}))
    state, _ = take_steps(run, run.init(), 0, 1)
    lost = jax.device_get(state) | {"skipped": np.int32(1)}
    after, _ = take_steps(run, jax.tree.map(jnp.asarray, lost), 1, 2)
    for part in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, after[part], lost[part])


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other compilers copy other things")
def test_a_training_step_copies_no_moments(tiny_config):
    run = build_run(tiny_config("multiplicative"))
    program = training.trace(run).lower().compile().as_text()
    moments = r"%state__opt_state\w*?(mu|nu)__"
    assert re.search(moments, program)
    assert not re.search(rf" copy\({moments}", program)
