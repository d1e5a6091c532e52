"""What is wrong with the step comes up before anything is written, and tracing it costs nothing."""

import collections
import pathlib
import sys

import optax
import pytest

import adder_flax
import kfac
from adder_flax import training
from adder_flax.errors import RunError
from adder_flax.training import optimizers, program


def test_the_step_is_traced_once_by_a_short_trace(tiny_config, tmp_path, monkeypatch):
    traces, calls = [], collections.Counter()
    make = program.step.make_train_step
    ours = tuple(str(pathlib.Path(package.__file__).parent) for package in (adder_flax, kfac))

    def counted(*args, **options):
        step = make(*args, **options)
        return lambda state, batch, hyper: traces.append(1) or step(state, batch, hyper)

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            calls[frame.f_code.co_filename] += 1

    monkeypatch.setattr(program.step, "make_train_step", counted)
    monkeypatch.setattr(program, "_PROGRAMS", {})
    run = training.build_run(tiny_config(num_epochs=0.1))
    assert not traces
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        training.trace(run)
    finally:
        sys.setprofile(before)
    training.Trainer(run, tmp_path).fit()
    assert len(traces) == 1
    # It took 2,203 once, 1,070 now; what every parameter or equation calls is what makes it long.
    assert calls[training.step.__file__] > 0
    assert calls.total() < 1100


def test_whatever_fails_in_the_optimizer_is_one_message(tiny_config):
    def update(*args, **options):
        raise ValueError("odd")

    broken = optax.GradientTransformation(lambda params: (), update)
    with optimizers.OPTIMIZERS.temporary():
        optimizers.register_optimizer("broken")(lambda spec: broken)
        run = training.build_run(tiny_config(**{"optimizer.name": "broken"}))
    said = "expected a training step that can be traced, got .*odd.*config.optimizer"
    with pytest.raises(RunError, match=said):
        training.trace(run)
