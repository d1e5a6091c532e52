"""Figures: what is drawn is what was given, and nothing depends on pyplot's state."""

import numpy as np
import pytest
from flax import nnx

from adder_flax.attention import capture_attention
from adder_flax.models import VisionTransformer
from adder_flax.report import (
    SecondOrderStep,
    attention_figure,
    comparison_figure,
    curves_figure,
    save_figure,
    second_order_figure,
    tokens_in_front,
    xor_figure,
)
from tests.measures.test_maps import random_maps


def rows(count):
    of = lambda i: {"step": 10 * i, "train/loss": 2.0 / i, "train/accuracy": 1 - 1.0 / i}
    return list(map(of, range(1, count + 1)))


def lines(axis):
    return {line.get_label(): line.get_xydata() for line in axis.get_lines()}


def test_curves_show_every_value_and_the_best():
    metrics = rows(5) + [{"step": 30, "eval/accuracy": 0.9}, {"step": 50, "eval/accuracy": 0.8}]
    loss, accuracy = curves_figure(metrics).axes
    np.testing.assert_allclose(lines(loss)["training"], [(10 * i, 2.0 / i) for i in range(1, 6)])
    drawn = lines(accuracy)["test, last 80.00 %, best 90.00 %"]
    np.testing.assert_allclose(drawn, [(30, 90), (50, 80)])
    assert loss.get_ylabel() == "cross-entropy (nats)"
    assert accuracy.get_ylabel() == "accuracy (%)"


def test_curves_of_a_score_of_which_less_is_better():
    metrics = [{"step": 30, "eval/error_rate": 0.1}, {"step": 50, "eval/error_rate": 0.2}]
    metrics[1]["train/loss"] = 1.0
    loss, errors = curves_figure(metrics, loss="loss", score="error_rate", largest=False).axes
    assert (loss.get_ylabel(), errors.get_ylabel()) == ("loss", "error rate (%)")
    drawn = lines(errors)["test, last 20.00 %, best 10.00 %"]
    np.testing.assert_allclose(drawn, [(30, 10), (50, 20)])
    # One that is the loss has its panel.
    metrics = [{"step": 30, "eval/loss": 18.1}, {"step": 50, "eval/loss": 17.9}]
    (loss,) = curves_figure(metrics, loss="loss", score="loss", largest=False).axes
    assert (loss.get_ylabel(), *lines(loss)) == ("loss", "test, last 17.9000")
    assert len(curves_figure(metrics).axes) == 1


def test_long_training_is_smoothed_by_a_centred_mean():
    loss = curves_figure(rows(200)).axes[0]
    smooth = lines(loss)["training, mean of 5"]
    raw = 2.0 / np.arange(1, 201)
    assert len(smooth) == 200
    np.testing.assert_allclose(smooth[2:-2, 1], np.convolve(raw, np.ones(5) / 5, "valid"))
    np.testing.assert_allclose(smooth[0, 1], (3 * raw[0] + raw[1] + raw[2]) / 5)


def test_non_finite_values_leave_a_gap():
    metrics = [{"step": n, "train/loss": loss} for n, loss in enumerate((1.0, np.nan, 2.0))]
    drawn = lines(curves_figure(metrics).axes[0])["training"]
    np.testing.assert_array_equal(np.isnan(drawn[:, 1]), [False, True, False])
    # And do not lower the mean of those around them.
    losses = np.full(400, 2.0)
    losses[200:205] = np.inf
    figure = curves_figure([{"step": i, "train/loss": x} for i, x in enumerate(losses)])
    [mean] = [drawn for label, drawn in lines(figure.axes[0]).items() if "mean" in label]
    np.testing.assert_allclose(mean[:, 1], 2.0)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="expected rows with 'train/loss'"):
        curves_figure([{"step": 1, "train/grad_norm": 1.0}])
    with pytest.raises(ValueError, match="for 2 images; got shapes"):
        attention_figure(np.zeros((2, 8, 8, 1)), [random_maps(3, 1, 17, 17)])


def heat(figure, axis):
    return np.asarray(figure.axes[axis].get_images()[1].get_array())


def test_attention_is_the_same_with_and_without_the_identity_map():
    images = np.zeros((2, 8, 8, 1), np.uint8)
    maps = [random_maps(2, 3, 17, 17, seed=seed) for seed in range(4)]
    plain = attention_figure(images, maps)
    identity = attention_figure(images, [block + np.eye(17) for block in maps])
    np.testing.assert_allclose(heat(plain, 1), heat(identity, 1), atol=1e-5)
    titles = ["image", *(f"block {number}, mean of heads" for number in (1, 3, 4))]
    assert [axis.get_title() for axis in plain.axes[:4]] == titles


def test_attention_is_drawn_where_the_patch_is():
    maps = np.full((1, 1, 5, 5), 0.01)
    maps[..., 0, 2] = 0.96  # patch 1 of a 2×2 grid: top right
    maps /= maps.sum(-1, keepdims=True)
    figure = attention_figure(np.zeros((1, 4, 4, 3)), [maps])
    drawn = heat(figure, 1)
    (top, bottom), half = np.vsplit(drawn, 2), drawn.shape[1] // 2
    assert drawn[0, -1] == pytest.approx(drawn.max(), rel=0.1)
    assert max(bottom.max(), drawn[:, :half].max()) < top[:, half:].max()


def test_where_a_model_with_registers_looks_is_drawn_from_its_patches():
    """The model says which tokens are no patches, and whether one of them is read."""
    options = dict(image_size=4, patch_size=2, channels=1, width=8, depth=1, num_heads=2)
    for pooling, first in (("cls", slice(1)), ("mean", slice(3, None))):
        model = VisionTransformer(**options, pooling=pooling, registers=3, rngs=nnx.Rngs(0))
        in_front = tokens_in_front(model)
        assert in_front["prefix_tokens"] == 3 + (pooling == "cls")
        (block,) = capture_attention(model, np.ones((1, 4, 4, 1), np.float32))
        drawn = heat(attention_figure(np.zeros((1, 4, 4, 1)), [block], **in_front), 1)
        weights = np.float64(block)[..., first, in_front["prefix_tokens"] :].mean(-2)
        weights = (weights / weights.sum(-1, keepdims=True)).mean(1)
        # Cubic interpolation has its extremes in the patches with the most and the least.
        corners = drawn[[0, 0, -1, -1], [0, -1, 0, -1]]
        assert corners.argsort().tolist() == weights[0].argsort().tolist()


def test_models_are_side_by_side_and_share_an_image():
    images = np.stack([np.zeros((8, 8, 1)), np.ones((8, 8, 1))])
    maps = {
        name: [random_maps(2, 3, 17, 17, seed=seed)] for seed, name in enumerate(("dot", "adder"))
    }
    figure = comparison_figure(images, maps, captions=["a 0", "a 1"])
    labels = [f"{name}\na {number}" for number in (0, 1) for name in maps]
    assert [axis.get_xlabel() for axis in figure.axes[::2]] == labels
    alone = attention_figure(images, maps["adder"])
    np.testing.assert_allclose(heat(figure, 7), heat(alone, 3))
    assert np.asarray(figure.axes[6].get_images()[0].get_array()).max() == 1


def test_every_start_on_the_xor_task_is_a_mark_under_the_proven_limit():
    accuracies = {"bilinear": np.array([0.5, 0.75]), "additive": np.array([1.0, 0.9375])}
    axis = xor_figure(accuracies).axes[0]
    *marks, limit = axis.get_lines()
    for line, values in zip(marks, accuracies.values(), strict=True):
        np.testing.assert_allclose(line.get_ydata(), 100 * values)
    assert set(limit.get_ydata()) == {75.0}


def test_terms_that_were_not_computed_are_not_drawn():
    terms = dict(learning_rate=0.1, loss=1.0, change=-0.15, odd=-0.2, even=0.05, first=-0.2)
    smooth = [SecondOrderStep(step=step, second=0.04, **terms) for step in (4, 9)]
    kinked = [SecondOrderStep(step=step, second=float("nan"), **terms) for step in (4, 9)]
    first, second = second_order_figure({"dot": smooth, "adder": kinked}).axes
    np.testing.assert_allclose(lines(first)["½ δᵀHδ"], [(5, 0.04), (10, 0.04)])
    np.testing.assert_allclose(lines(second)["even part"], [(5, 0.05), (10, 0.05)])
    assert "½ δᵀHδ" not in lines(second)


def test_saved_files_are_reproducible(tmp_path):
    first = save_figure(curves_figure(rows(3)), tmp_path / "new" / "a.png", ("png", "svg"))
    second = save_figure(curves_figure(rows(3)), tmp_path / "b", ("png", "svg"))
    assert [path.name for path in first] == ["a.png", "a.svg"]
    assert first[0].read_bytes().startswith(b"\x89PNG")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
