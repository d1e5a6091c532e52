"""The sequence model: padding, causality, teacher forcing against steps, every score."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from adder_flax.models._seq2seq import Seq2Seq

SCORES = ["adder", "additive", "bilinear", "dot", "gaussian"]


def make(score="additive", **options):
    sizes = dict(source_symbols=9, target_symbols=7, width=12, embedding_features=5)
    return Seq2Seq(**sizes, score=score, rngs=nnx.Rngs(0), **options)


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, 9, (3, 6)), rng.integers(1, 7, (3, 5))
    source[1, 4:] = source[2, 1:] = 0
    return jnp.asarray(source), jnp.asarray(target)


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_filling_rows_up_changes_nothing(score, batch):
    model, (source, target) = make(score), batch
    longer = jnp.pad(source, ((0, 0), (0, 3)))
    np.testing.assert_allclose(model(source, target), model(longer, target), rtol=1e-5, atol=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize("score", SCORES)
def test_steps_give_what_teacher_forcing_gives(score, batch):
    model, (source, target) = make(score), batch
    memory = model.encode(source)
    state, symbol, logits = memory.start, jnp.ones(len(source), int), []
    for place in range(target.shape[1]):
        state, now = model.step(memory, state, symbol)
        logits.append(now)
        symbol = target[:, place]
    np.testing.assert_allclose(model(source, target), jnp.stack(logits, 1), rtol=1e-5, atol=1e-5)


def test_no_logit_depends_on_its_own_or_a_later_target(batch):
    model, (source, target) = make(), batch
    changed = target.at[:, 2:].set(target[:, 2:] % 6 + 1)
    a, b = model(source, target), model(source, changed)
    np.testing.assert_array_equal(a[:, :3], b[:, :3])
    assert (a[:, 3] != b[:, 3]).any()


def test_states_are_those_of_flax_cells_run_by_hand(batch):
    model, (source, _) = make(), batch
    memory, close = model.encode(source), dict(rtol=1e-5, atol=1e-6)
    for row, length in enumerate((6, 4, 1)):
        states = []
        for cell, places in ((model.forward, range(length)), (model.backward, range(length)[::-1])):
            state = jnp.zeros((1, 6))
            for place in places:
                state, _ = cell(state, model.source_embedding(source[row : row + 1, place]))
            states.append(state[0])
        np.testing.assert_allclose(memory.states[row, length - 1, :6], states[0], **close)
        np.testing.assert_allclose(memory.states[row, 0, 6:], states[1], **close)


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_every_parameter_has_a_gradient(score, batch):
    graphdef, params = nnx.split(make(score, temperature="learned"), nnx.Param)
    loss = lambda params: jnp.sin(nnx.merge(graphdef, params)(*batch)).sum()
    gradient = nnx.to_pure_dict(jax.grad(loss)(params))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert jnp.isfinite(leaf).all()
        assert jnp.abs(leaf).max() > 0, path


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="expected an even width"):
        Seq2Seq(source_symbols=3, target_symbols=3, width=7, rngs=nnx.Rngs(0))
