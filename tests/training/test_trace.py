"""What is wrong with the step comes up before anything is written, and tracing it costs nothing."""

import optax
import pytest

from adder_flax import training
from adder_flax.errors import RunError
from adder_flax.training import optimizers, program


def test_the_step_is_traced_once(tiny_config, tmp_path, monkeypatch):
    calls = []
    make = program.make_train_step

    def counted(*args, **options):
        step = make(*args, **options)

        def train_step(state, batch, hyper):
            calls.append(1)
            return step(state, batch, hyper)

        return train_step

    monkeypatch.setattr(program, "make_train_step", counted)
    monkeypatch.setattr(program, "_PROGRAMS", {})
    run = training.build_run(tiny_config(num_epochs=0.1))
    assert not calls
    training.trace(run)
    training.Trainer(run, training.open_workdir(tmp_path, run.config)).fit()
    assert len(calls) == 1


@pytest.mark.parametrize("error", [TypeError("odd"), ValueError("odd"), AssertionError("odd")])
def test_whatever_fails_in_the_optimizer_is_one_message(error, tiny_config):
    def update(*args, **options):
        raise error

    broken = optax.GradientTransformation(lambda params: (), update)
    with optimizers.OPTIMIZERS.temporary():
        optimizers.register_optimizer("broken")(lambda spec: broken)
        run = training.build_run(tiny_config(**{"optimizer.name": "broken"}))
    with pytest.raises(
        RunError, match="expected a training step that can be traced, got .*odd.*config.optimizer"
    ):
        training.trace(run)
