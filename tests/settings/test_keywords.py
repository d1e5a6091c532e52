"""Settings are passed whole; who calls gives their fields as keywords."""

import dataclasses
import inspect

import flax.nnx as nnx
import pytest

from adder_flax import attention, layers, linen, models
from adder_flax.settings import AttentionSettings, BlockSettings, VitSettings

OPTIONS = {field.name for field in dataclasses.fields(AttentionSettings)}


def test_every_option_of_attention_is_one_of_the_function():
    """`MultiHeadAttention` hands all of them on."""
    assert inspect.signature(attention.attend).parameters.keys() >= OPTIONS


WHOLE = [attention.MultiHeadAttention, attention.SequenceAttention, layers.Block]
WHOLE += [models.VisionTransformer, models.Seq2Seq]
WHOLE += [linen.MultiHeadAttention, linen.Block, linen.VisionTransformer]
OF_ONE_SCORE = [attention.AdditiveAttention, attention.BilinearAttention]
OF_ONE_SCORE += [linen.AdditiveAttention, linen.BilinearAttention]


@pytest.mark.parametrize("module", WHOLE + OF_ONE_SCORE)
def test_every_option_of_attention_is_a_keyword_of_every_module(module):
    own = OPTIONS - {"score", "score_options"} if module in OF_ONE_SCORE else OPTIONS | {"settings"}
    assert inspect.signature(module.__init__).parameters.keys() >= own


@pytest.mark.slow
def test_fields_and_settings_make_the_same_model():
    size = dict(image_size=4, channels=1, num_classes=2)
    fields = dict(width=8, depth=2, num_heads=2, patch_size=2, adder_options={"norm": None})
    settings = VitSettings(**fields, temperature=2.0)

    def structure(**options):
        make = lambda: models.VisionTransformer(**options, **size, rngs=nnx.Rngs(0))
        return nnx.split(nnx.eval_shape(make))[0]

    by_field = structure(**fields, temperature=2.0)
    assert structure(settings=settings) == by_field != structure(**fields)
    assert hash(structure(settings=settings)) == hash(by_field)


def test_a_keyword_changes_one_field_of_settings_that_are_given_too():
    given = BlockSettings(mlp_ratio=2.0)
    block = layers.Block(8, 2, settings=given, score="gaussian", rngs=nnx.Rngs(0))
    assert (block.mlp.fc1.out_features, block.attention.settings.score) == (16, "gaussian")


def test_a_keyword_that_is_no_field_is_refused():
    with pytest.raises(TypeError, match="scoer"):
        layers.Block(8, 2, scoer="dot", rngs=nnx.Rngs(0))
