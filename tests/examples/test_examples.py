"""The examples for borrowers learn what they say they learn."""

import runpy

import flax.nnx as nnx
import pytest

from tests.processes import ROOT


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("plain_jax", True),
        pytest.param("nnx_hook", True, marks=pytest.mark.slow),
        ("nnx_hook", False),
        ("linen_hook", True),
    ],
)
def test_examples_train(name, graph):
    main = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        assert main() > 0.93  # ten classes; logistic regression on the pixels gives 0.95
