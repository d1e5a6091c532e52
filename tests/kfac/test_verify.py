"""The report of ``kfac.verify``, and how many examples give the curvature."""

import jax.numpy as jnp
import pytest

import kfac
from tests.kfac.reference import DENSE_SHAPES, dense_loss, normal, random, tap

pytestmark = pytest.mark.usefixtures("x64")


def with_a_hidden_use(params, x, labels):
    loss, logits = dense_loss(params, x, labels)
    return loss + (params["b"]["kernel"] ** 2).sum(), logits


def test_a_sound_model_passes_and_a_missed_use_shows():
    args = random(DENSE_SHAPES), normal(3, 5, 2, 3), jnp.arange(5) % 3
    report = kfac.verify(dense_loss, *args, has_aux=True)
    missed = kfac.verify(with_a_hidden_use, *args, has_aux=True)
    for row in report.rows:
        assert max(row.capture_error, row.product_error) < 1e-12
        assert row.cg_error < 1e-6
        assert 0 < row.kron_cosine <= 1
        assert row.rank == 5  # of five examples
        assert row.condition > 1
    errors = {row.name: row.capture_error for row in missed.rows}
    assert errors["a"] < 1e-12
    assert errors["b"] > 0.1
    assert "100.0 % of the parameters covered" in str(report)
    assert len(str(report).splitlines()) == 4


@pytest.mark.parametrize(
    ("tokens", "interval", "num_examples", "expected"),
    [
        (32, 5, 64, 32),  # 2048 rows, 2 · 32 of them wanted for the wider of two layers
        (32, 100, 64, 32),
        (31, 5, 64, 16),
        (8, 2, 64, 1),  # half a row at every second step: 50 of the head, which has 64
        (8, 1, 64, 4),  # an eighth at every step: 12.5 of the head's 64
        (32, 5, 24, 8),  # what divides the examples of a device
        (1, 5, 64, 1),
        (0, 5, 64, 1),
    ],
)
def test_examples_that_the_factors_can_spare(tokens, interval, num_examples, expected):
    """A readout of one token of each example is not asked; without tokens there is nothing else."""
    params = {"fc": {"kernel": jnp.ones((8, 32))}, "head": {"kernel": jnp.ones((32, 100))}}

    def loss_fn(p, x):
        hidden = tap(p, x, "fc") if tokens else x[:, None] @ p["fc"]["kernel"]
        return (tap(p, hidden.mean(1), "head") ** 2).mean()

    layers = kfac.find_layers(loss_fn, params, jnp.ones((64, tokens, 8) if tokens else (64, 8)))
    assert kfac.curvature_stride(layers, num_examples, interval) == expected
