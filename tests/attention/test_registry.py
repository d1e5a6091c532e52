"""A score registered once is available everywhere."""

import dataclasses

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from adder_flax import attention, counting, linen, measures, report
from adder_flax.data import load_source
from adder_flax.experiments import common
from adder_flax.settings import SCORE_OPTIONS, RunSettings, SettingsError, read, setting
from tests.modules import tiny_vit
from tests.training.pieces import vit


@pytest.fixture
def registered():
    """Registers a score until the end of the test."""
    with attention.SCORES.temporary(), SCORE_OPTIONS.temporary():
        yield attention.register_score


@dataclasses.dataclass(frozen=True)
class CosineOptions:
    power: int = setting(1, "cosine: of the cosines", ge=1, le=9)


def cosine_scores(query, key, *, gain, power=1):
    query, key = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    return gain[..., None, None] * jnp.einsum("...qd,...kd->...qk", query, key) ** power


def cosine_parameters(num_heads, query_dim, key_dim):
    return {"gain": attention.ScoreParameter((num_heads,), nnx.initializers.constant(10.0))}


def test_a_sixth_score_works_in_functions_modules_models_and_capture(registered):
    options = dict(options=CosineOptions, scale=lambda _: 1.0)
    registered(attention.Score("cosine", cosine_scores, cosine_parameters, **options))
    assert [*attention.SCORES][-1] == "cosine"
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
    options = dict(parameters={"gain": jnp.full(3, 10.0)}, score_options={"power": 2})
    _, weights = attention.attend(x, x, x, score="cosine", **options, return_weights=True)
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    logits = 10 * np.einsum("bqhd,bkhd->bhqk", unit, unit) ** 2
    np.testing.assert_allclose(weights, scipy.special.softmax(logits, axis=-1), rtol=1e-4)

    model = tiny_vit(score="cosine", score_options={"power": 2})
    assert model.blocks[1].attention.score["gain"].shape == (2,)
    maps = attention.capture_attention(model, jnp.ones((1, 4, 4, 1)))
    assert [m.shape for m in maps] == [(1, 2, 5, 5)] * 2


@pytest.mark.slow
def test_a_sixth_score_works_in_experiments_linen_and_reports(registered):
    registered(attention.Score("cosine", cosine_scores, cosine_parameters, scale=lambda _: 1.0))
    config = common.deit("multiplicative", "tiny")
    config.model.update(score="cosine,dot", depth=2, width=8, num_heads=2)
    model = vit(read(RunSettings, config).model, load_source("digits", "eval"))
    assert [block.attention.settings.score for block in model.blocks] == ["cosine", "dot"]

    images = np.ones((2, *model.image_shape), np.float32)
    size = dict(patch_size=2, num_classes=10, width=8, depth=2, num_heads=2)
    module = linen.VisionTransformer(**size, score=["cosine", "dot"])
    params = linen.from_nnx(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    np.testing.assert_allclose(
        module.apply({"params": params}, images), model(images), rtol=1e-4, atol=1e-5
    )

    captured = report.capture(model, images)
    np.testing.assert_allclose(measures.stochastic_part(captured.blocks[0].map).sum(-1), 1.0)
    counted = counting.count_operations(model, images).layers
    assert any(name.startswith("blocks.0.attention") for name in counted)


def test_options_of_a_sixth_score_are_fields_of_a_configuration(registered):
    before = common.deit("adder", "tiny")
    registered(attention.Score("cosine", cosine_scores, cosine_parameters, options=CosineOptions))
    config = common.deit("multiplicative", "tiny")
    config.model.update(score="adder,cosine", depth=2, width=8, num_heads=2)
    config.model.score_options.update(power=3, gradient="full")
    model = vit(read(RunSettings, config).model, load_source("digits", "eval"))
    options = [dict(block.attention.settings.score_options) for block in model.blocks]
    assert options == [{"gradient": "full", "bits": None}, {"power": 3}]
    # A configuration from before, such as that of a baseline, is read as ever.
    assert read(RunSettings, before).model.attention.score_options.power == 1

    config.model.score_options.power = 0
    message = r"score_options\.power: expected an integer from 1 to 9, got 0"
    with pytest.raises(SettingsError, match=message):
        read(RunSettings, config)
    fields = config.to_dict()
    fields["model"]["score_options"] = {"pwoer": 2}
    message = "score_options: expected no field 'pwoer'; did you mean 'power'"
    with pytest.raises(SettingsError, match=message):
        read(RunSettings, fields)
    config.model.update(score="dot")
    config.model.score_options.update(power=2, gradient="sign")
    message = "score_options.power at its default unless a score has it, got 2 with dot"
    with pytest.raises(ValueError, match=message):
        vit(read(RunSettings, config).model, load_source("digits", "eval"))


def test_options_that_a_score_cannot_have_are_refused_when_it_is_registered(registered):
    @dataclasses.dataclass(frozen=True)
    class Unlike:
        gradient: float = setting(1.0, "another meaning", ge=0, le=2)

    @dataclasses.dataclass(frozen=True)
    class Data:
        power: float = setting(1.0, "of the cosines", ge=0, le=2, data=True)

    for wrong, message in (
        (Unlike, "cosine score expects each of its options to be a keyword of its function"),
        (Data, "cosine score expects options that shape the program, got 'power'"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.Score("cosine", cosine_scores, cosine_parameters, options=wrong)
    adder = dataclasses.replace(attention.get_score("adder"), name="other", options=Unlike)
    message = "every score, got 'gradient' as 'sign', 'full' or 'hardtanh' by default 'sign' and"
    with pytest.raises(ValueError, match=message):
        registered(adder)
    assert "other" not in attention.SCORES


def test_a_score_may_bring_its_own_normaliser(registered, tmp_path):
    def sigmoid(scores, mask):
        return jnp.where(True if mask is None else mask, 1 / (1 + jnp.exp(-scores)), 0.0)

    options = dict(normalize=sigmoid, rows_are_probability=False)
    registered(attention.Score("sigmoid", attention.dot_scores, **options))
    query, key = jnp.zeros((1, 3, 1, 2)), jnp.ones((1, 3, 1, 2))
    out = attention.attend(query, key, key, score="sigmoid", is_causal=True)
    np.testing.assert_allclose(out[0, :, 0, 0], [0.5, 1.0, 1.5])
    message = "key_block expects a score that softmax normalises, got 'sigmoid'"
    with pytest.raises(ValueError, match=message):
        attention.attend(query, key, key, score="sigmoid", key_block=2)
    model = tiny_vit(score=["dot", "sigmoid"])
    images = np.ones((2, *model.image_shape), np.float32)
    with pytest.raises(ValueError, match="rows of weights are probabilities, got 'sigmoid'"):
        report.write_report(model, images, np.arange(2), tmp_path)


def test_names_are_unique(registered):
    registered(attention.get_score("dot"))
    with pytest.raises(ValueError, match="expected a new name for the score, got 'dot'"):
        registered(attention.Score("dot", cosine_scores))


def test_the_same_source_may_run_again(registered):
    """A notebook cell or an experiment file makes new functions each time it runs."""
    source = "def scores(query, key):\n    return {} * dot_scores(query, key)"
    for factor in (1.0, 2.0):
        cell = {"__name__": "cell", "dot_scores": attention.dot_scores}
        exec(source.format(factor), cell)
        registered(attention.Score("scaled", cell["scores"]))
    x = np.ones((1, 1, 3))
    np.testing.assert_allclose(attention.get_score("scaled").function(x, x), 6.0)


def test_unknown_names_and_scales():
    message = r"expected a score among adder, .*got 'addre'; did you mean 'adder'"
    with pytest.raises(ValueError, match=message):
        attention.get_score("addre")
    options = dict(score="additive", scale="variance_matched")
    with pytest.raises(ValueError, match="scale of the additive score from"):
        attention.MultiHeadAttention(2, 8, **options, rngs=nnx.Rngs(0))
