"""Transduction: loss and scores against NumPy and the textbook recursion, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from adder_flax import data, tasks
from adder_flax.data._sequences import pad
from adder_flax.models import Seq2Seq
from adder_flax.tasks._transduction import edit_distance, length_to
from kfac.curvature._fisher import get_likelihood, read_weights

SYMBOLS = {"source": ("", "a", "b", "c"), "target": ("", "", "A", "B", "C")}


@pytest.fixture
def source():
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 4, rng.integers(1, 6)).tolist() for _ in range(40)]
    targets = [[*(n + 1 for n in row), 1] for row in rows]
    arrays = {"source": pad(rows, 5), "target": pad(targets, 6)}
    return data.SequenceSource("upper", "train", ["train"], arrays, SYMBOLS, longest=6)


def make_task(source, **settings):
    settings = tasks.TransductionSettings(**settings)
    return tasks.Transduction(settings, tasks.Transduction.facts(source))


def make_model(task, seed=0):
    sizes = task.example().sizes
    return Seq2Seq(**sizes, width=16, embedding_features=8, dropout_rate=0.0, rngs=nnx.Rngs(seed))


@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_the_loss_is_the_mean_over_real_symbols(source, smoothing):
    task = make_task(source, label_smoothing=smoothing)
    model, batch = make_model(task), source.first(12)
    examples = task.examples(jax.random.key(0), batch)
    outcome = task.loss(model, examples, rngs=nnx.Rngs(0))
    logits, real = np.asarray(model(*examples), np.float64), batch["target"] != 0
    log_p = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[real]
    wanted = smoothing / 5 + (1 - smoothing) * np.eye(5)[batch["target"][real]]
    np.testing.assert_allclose(outcome.loss, -(wanted * log_p).sum(-1).mean(), rtol=1e-5)
    hits = log_p.argmax(-1) == batch["target"][real]
    np.testing.assert_allclose(outcome.metrics["symbol_accuracy"], hits.mean(), rtol=1e-6)


def test_curvature_is_over_the_real_symbols(source):
    """Of one word, that of the same word without what fills it up."""
    task, batch = make_task(source), source.first(40)
    lengths = (batch["target"] != 0).sum(-1)
    row = np.flatnonzero(lengths < 6)[0]
    word, target = batch["source"][row : row + 1], batch["target"][row : row + 1]
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 5)), jnp.float32)

    def columns(length):
        model, examples = lambda *_, **__: logits[:, :length], (word, target[:, :length])
        outcome = task.loss(model, examples, rngs=nnx.Rngs(0))
        weights = read_weights(outcome.weights, 1)
        root = get_likelihood(task.likelihood).root(outcome.outputs, jnp.ones((1, length, 5)))
        return root * jnp.sqrt(weights.shares())[..., None], weights.total

    (filled, total), (alone, _) = columns(6), columns(lengths[row])
    assert total == lengths[row]
    np.testing.assert_allclose(filled[:, : lengths[row]], alone, rtol=1e-6)
    np.testing.assert_array_equal(filled[:, lengths[row] :], 0)


def test_edits_go_to_the_closest_reference():
    references = pad([[2, 3, 1], [4, 1]], 6)[None].repeat(3, 0)
    references[2, 1] = 0  # the third word has one pronunciation
    written = pad([[2, 3, 1], [4, 4, 1], [4, 1]], 6)
    written[written == 0] = 1
    edits, lengths = tasks.closest(jnp.asarray(written), jnp.asarray(references))
    assert edits.tolist() == [0, 1, 2]
    assert lengths.tolist() == [2, 1, 2]


@pytest.mark.parametrize("num_beams", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_scores_are_those_of_the_recursion(source, num_beams):
    """Of 33 words, some of which are written as they should be, and 7 that fill up."""
    task = make_task(source, num_beams=num_beams)
    model, batch, mask = make_model(task, seed=4), source.first(40), np.arange(40) < 33
    written = np.asarray(task.write(model, batch["source"]))
    is_right = (np.arange(40) % 2 == 0) & (written[:, 0] != 1) & (written == 1).any(-1)
    right = np.where(is_right[:, None], written, batch["target"])
    held = {"references": right[:, None], "mask": mask, "source": batch["source"]}
    scores = task.scores({name: float(value) for name, value in task.sums(model, held).items()})
    pairs = [[source.text("target", row) for row in rows] for rows in (written, right)]
    edits = np.array([by_recursion(w, r) for w, r in zip(*pairs, strict=True)])[mask]
    rate = edits.sum() / sum(map(len, pairs[1][:33]))
    np.testing.assert_allclose(scores["phoneme_error_rate"], rate, rtol=1e-6)
    np.testing.assert_allclose(scores["word_error_rate"], (edits > 0).mean(), rtol=1e-6)
    assert 0 < scores["word_error_rate"] < 1


def test_images_are_refused():
    with pytest.raises(data.DataError, match="pairs of sequences"):
        tasks.Transduction.facts(data.load_source("digits", "train"))


def by_recursion(a, b):
    @functools.cache
    def distance(i, j):
        if i == 0 or j == 0:
            return i + j
        substituted = distance(i - 1, j - 1) + (a[i - 1] != b[j - 1])
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, substituted)

    return distance(len(a), len(b))


def test_it_equals_the_recursion_on_sequences_of_all_lengths():
    rng = np.random.default_rng(0)
    guess, truth = rng.integers(0, 4, (200, 9)), rng.integers(0, 4, (200, 7))
    lengths = rng.integers(0, 10, 200), rng.integers(0, 8, 200)
    got = jax.jit(edit_distance)(*map(jnp.asarray, (guess, truth, *lengths)))
    rows = zip(guess, truth, *lengths, strict=True)
    expected = [by_recursion(tuple(g[:n]), tuple(t[:m])) for g, t, n, m in rows]
    assert got.tolist() == expected
    assert len(set(expected)) > 5
    # What stands behind the end does not count.
    symbols = jnp.array([[4, 5, 1, 9], [1, 4, 1, 1], [4, 4, 4, 4]])
    assert length_to(symbols, end=1).tolist() == [2, 0, 4]
