"""The name of JAX's event for a compilation is not part of its public interface: a new version may
change it."""

import time

import jax

from adder_flax.training.progress import StartUp


def test_compilations_between_parameters_and_first_step_are_counted():
    start_up = StartUp(time.monotonic())
    start_up.parameters_ready()
    start_up.kernels_ready()
    jax.jit(lambda x: x * 3.25 - 1.5)(jax.numpy.float32(time.monotonic()))
    counted = start_up._compiling
    assert counted > 0
    assert start_up.report().startswith("first step done ")
    jax.jit(lambda x: x * 4.25 - 2.5)(jax.numpy.float32(time.monotonic()))
    assert start_up._compiling == counted
