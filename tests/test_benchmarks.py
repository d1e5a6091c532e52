"""Every benchmark can be started, and times whole windows of steps."""

import argparse
import importlib
from pathlib import Path

import numpy as np
import pytest

from adder_flax.experiments import common
from benchmarks import verify
from benchmarks.optimizer_step import make_config, window_of, with_fields
from benchmarks.oracle import best_length

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("[a-z]*.py")))
def test_a_benchmark_can_be_imported(name):
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize(
    ("name", "variant", "steps"),
    [
        *(("adamw", "", 2), ("soap", "", 10), ("cg_fac", "", 1), ("kfac", "", 5)),
        *(("kfac", "step=share", 10), ("kfac", "curvature_interval=3", 15)),
    ],
)
def test_a_window_is_of_the_steps_until_all_is_renewed(name, variant, steps):
    config = common.deit("multiplicative", "tiny")
    config.optimizer.name = name
    assert window_of(with_fields(config, variant.split())) == steps


def test_the_step_of_any_experiment_can_be_timed():
    path = FOLDER.parent / "experiments" / "autoencoder.py"
    config = make_config(argparse.Namespace(config=str(path)), "muon")
    assert (config.model.name, config.optimizer.name) == ("autoencoder", "muon")
    assert window_of(config) == 2


@pytest.mark.slow
def test_every_block_of_an_experiment_is_verified_in_float64():
    report = verify.report_of(verify.make_run("autoencoder", examples=3, depth=1))
    assert report.layers.coverage == 1
    assert max(row.product_error for row in report.rows) < 1e-12
    (line,) = verify.lines(report)
    assert line.startswith(f"dense (factors) | {len(report.rows)} | ")


def test_the_best_length_is_the_one_of_the_lowest_loss():
    params, update = {"a": np.array([3.0])}, {"a": np.array([-1.0])}
    loss_of = lambda moved: float((moved["a"] ** 2).sum())
    assert best_length(loss_of, params, update, (1.0, 2.0, 4.0)) == (2.0, 1.0)
