"""Transduction: loss and scores against NumPy and the textbook recursion, padding, training that
learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def make_model(task):
    sizes = task.example().sizes
    return Seq2Seq(**sizes, width=16, embedding_features=8, dropout_rate=0.0, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_the_loss_is_the_mean_over_real_symbols(source, smoothing):
    task = make_task(source, label_smoothing=smoothing)
    model, batch = make_model(task), source.first(12)
    examples = task.examples(jax.random.key(0), batch)
    outcome = task.loss(model, examples, rngs=nnx.Rngs(0))
    logits = np.asarray(model(*examples), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    total, hits, count = 0.0, 0, 0
    for row, target in zip(log_p, batch["target"], strict=True):
        for place, symbol in enumerate(target):
            if symbol:
                wanted = np.full(5, smoothing / 5)
                wanted[symbol] += 1 - smoothing
                total -= (wanted * row[place]).sum()
                hits += row[place].argmax() == symbol
                count += 1
    np.testing.assert_allclose(outcome.loss, total / count, rtol=1e-5)
    np.testing.assert_allclose(outcome.metrics["symbol_accuracy"], hits / count, rtol=1e-6)


def test_curvature_is_over_the_real_symbols(source):
    """Of one word, that of the same word without what fills it up."""
    task = make_task(source)
    batch = source.first(40)
    row = next(i for i, target in enumerate(batch["target"]) if 0 < (target != 0).sum() < 6)
    length = int((batch["target"][row] != 0).sum())
    word, target = batch["source"][row : row + 1], batch["target"][row : row + 1]
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 5)), jnp.float32)

    def columns(length):
        examples = (word, target[:, :length])
        outcome = task.loss(_Fixed(logits[:, :length]), examples, rngs=nnx.Rngs(0))
        weights = read_weights(outcome.weights, 1)
        root = get_likelihood(task.likelihood).root(outcome.outputs, jnp.ones((1, length, 5)))
        return root * jnp.sqrt(weights.shares())[..., None], weights.total

    (filled, total), (alone, _) = columns(6), columns(length)
    assert total == length
    np.testing.assert_allclose(filled[:, :length], alone, rtol=1e-6)
    np.testing.assert_array_equal(filled[:, length:], 0)


class _Fixed(nnx.Module):
    """A model that says the same of every word."""

    def __init__(self, logits):
        self._logits = nnx.data(logits)

    def __call__(self, *_, **__):
        return self._logits


def test_edits_go_to_the_closest_reference():
    references = pad([[2, 3, 1], [4, 1]], 6)[None].repeat(3, 0)
    references[2, 1] = 0  # the third word has one pronunciation
    written = pad([[2, 3, 1], [4, 4, 1], [4, 1]], 6)
    written[written == 0] = 1
    edits, lengths = tasks.closest(jnp.asarray(written), jnp.asarray(references))
    rows = [(2, 3), (4, 4), (4,)]
    right = [[(2, 3), (4,)], [(2, 3), (4,)], [(2, 3)]]
    nearest = lambda row, refs: min((by_recursion(row, r), i) for i, r in enumerate(refs))
    expected = list(map(nearest, rows, right))
    assert edits.tolist() == [e for e, _ in expected]
    assert lengths.tolist() == [len(refs[i]) for (_, i), refs in zip(expected, right, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 3])
def test_it_learns_to_copy_and_its_scores_are_those_of_the_recursion(source, num_beams):
    task = make_task(source, num_beams=num_beams)
    graphdef, params = nnx.split(make_model(task), nnx.Param)
    optimizer = optax.adam(3e-2)
    batch = source.first(40)

    @jax.jit
    def step(params, state, key):
        def loss(params):
            model = nnx.merge(graphdef, params)
            return task.loss(model, task.examples(key, batch), rngs=nnx.Rngs(0)).loss

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for i in range(60):
        params, state, value = step(params, state, jax.random.key(i))
    assert value < 0.2
    model = nnx.merge(graphdef, params)
    held = {"references": batch["target"][:, None], "mask": np.arange(40) < 33}
    held["source"] = batch["source"]
    scores = task.scores({name: float(value) for name, value in task.sums(model, held).items()})
    written = [source.text("target", row) for row in np.asarray(task.write(model, batch["source"]))]
    right = [source.text("target", row) for row in batch["target"]]
    edits = [by_recursion(w, r) for w, r in zip(written, right, strict=True)][:33]
    rate = sum(edits) / sum(map(len, right[:33]))
    np.testing.assert_allclose(scores["phoneme_error_rate"], rate, rtol=1e-6)
    np.testing.assert_allclose(scores["word_error_rate"], np.mean(np.array(edits) > 0), rtol=1e-6)
    assert scores["phoneme_error_rate"] < 0.2


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


def test_what_stands_behind_the_end_does_not_count():
    symbols = jnp.array([[4, 5, 1, 9], [1, 4, 1, 1], [4, 4, 4, 4]])
    assert length_to(symbols, end=1).tolist() == [2, 0, 4]
