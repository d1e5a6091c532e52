"""Beam search against the enumeration of all sequences of a small model."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adder_flax.models._decode import beam_search

SYMBOLS, END, LENGTH = 4, 1, 4
OPTIONS = dict(end_symbol=END, max_length=LENGTH)


@pytest.fixture
def tables():
    """Log-probabilities of the next symbol behind the last two, per row of the batch."""
    logits = 1.5 * np.random.default_rng(0).normal(size=(5, SYMBOLS, SYMBOLS, SYMBOLS))
    return jax.nn.log_softmax(jnp.asarray(logits))


def search(tables, num_beams):
    """Of a model whose state is the symbol before the last."""
    rows = len(tables)
    step = lambda state, last: ((state[0], last), tables[state[0], state[1], last])
    state = jnp.arange(rows), jnp.full(rows, END)
    return beam_search(step, state, rows, num_beams=num_beams, **OPTIONS)


def log_probability(table, sequence):
    total, before, last = 0.0, END, END
    for symbol in sequence:
        total += float(table[before, last, symbol])
        before, last = last, symbol
        if symbol == END:
            break
    return total


def all_sequences():
    """Every sequence of up to LENGTH symbols that ends at END, or is cut."""
    for sequence in itertools.product(range(SYMBOLS), repeat=LENGTH):
        ended = sequence.index(END) if END in sequence else LENGTH
        if all(symbol == END for symbol in sequence[ended:]):
            yield sequence


def test_a_beam_wide_enough_finds_the_likeliest_sequences(tables):
    sequences, log_probabilities = search(tables, SYMBOLS**LENGTH)
    for table, found, values in zip(tables, sequences, log_probabilities, strict=True):
        ranked = sorted(all_sequences(), key=lambda s: -log_probability(table, s))
        assert found[:10].tolist() == [list(s) for s in ranked[:10]]
        expected = [log_probability(table, s) for s in ranked[:10]]
        np.testing.assert_allclose(values[:10], expected, rtol=1e-5)


def test_chances_of_narrow_logits_are_summed_in_float32():
    logits = np.array([0.0, 1.0, 2.0, 3.3])
    step = lambda state, last: (state, jnp.tile(jnp.asarray(logits, jnp.bfloat16), (len(last), 1)))
    _, found = beam_search(step, None, 1, num_beams=1, end_symbol=END, max_length=50)
    rounded = logits.astype(jnp.bfloat16).astype(np.float64)
    expected = 50 * (rounded.max() - np.log(np.exp(rounded).sum()))
    np.testing.assert_allclose(found, [[expected]], rtol=1e-5)


def test_one_beam_takes_the_largest_logit_until_the_end(tables):
    found, _ = search(tables, 1)
    for table, sequence in zip(np.asarray(tables), found[:, 0].tolist(), strict=True):
        before, last, ended = END, END, False
        for symbol in sequence:
            assert symbol == (END if ended else table[before, last].argmax())
            before, last, ended = last, symbol, symbol == END
