"""Flax's modules as trees, which are to become its default: a run is the same."""

import pytest

from tests.processes import run_code

_STEPS = """
import dataclasses, sys
from adder_flax import recorder, training
from tests.training.tiny import make_config

config = make_config(**{"model.dropout_rate": 0.1})
run = dataclasses.replace(training.build_run(config), num_steps=2)
result = training.Trainer(run, sys.argv[1]).fit()
model = run.model(training.evaluation_params(result.state))
images = run.task.inputs(run.eval_source.first(1))
_, records = recorder.record({"attention": ["weights"]}, model, *images)
print(records[0].path, [row["train/loss"] for row in training.read_metrics(sys.argv[1])[:2]])
"""


@pytest.mark.slow
@pytest.mark.unchecked
def test_two_steps_have_the_same_losses_in_tree_mode(tmp_path):
    said = []
    for graphs in ("true", "false"):
        flags = {"NNX_GRAPH_MODE": graphs, "NNX_GRAPH_UPDATES": graphs}
        said.append(run_code(_STEPS, tmp_path / graphs, **flags).splitlines()[-1])
    assert said[0] == said[1]
    assert said[0].startswith("blocks.0.attention [")
