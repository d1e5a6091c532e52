"""Edit distance against the textbook recursion."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from adder_flax.tasks._edit_distance import edit_distance, length_to


def by_recursion(a, b):
    @functools.cache
    def distance(i, j):
        if i == 0 or j == 0:
            return i + j
        return min(
            distance(i - 1, j) + 1,
            distance(i, j - 1) + 1,
            distance(i - 1, j - 1) + (a[i - 1] != b[j - 1]),
        )

    return distance(len(a), len(b))


def test_it_equals_the_recursion_on_sequences_of_all_lengths():
    rng = np.random.default_rng(0)
    guess, truth = rng.integers(0, 4, (200, 9)), rng.integers(0, 4, (200, 7))
    lengths = rng.integers(0, 10, 200), rng.integers(0, 8, 200)
    got = jax.jit(edit_distance)(*map(jnp.asarray, (guess, truth, *lengths)))
    expected = [
        by_recursion(tuple(g[:n]), tuple(t[:m]))
        for g, t, n, m in zip(guess, truth, *lengths, strict=True)
    ]
    assert got.tolist() == expected
    assert len(set(expected)) > 5


def test_what_stands_behind_the_end_does_not_count():
    symbols = jnp.array([[4, 5, 1, 9], [1, 4, 1, 1], [4, 4, 4, 4]])
    assert length_to(symbols, end=1).tolist() == [2, 0, 4]
