"""The models that come with the library, from their settings."""

from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp

from adder_flax.attention import get_score
from adder_flax.models._registry import Example, register_model
from adder_flax.models._vit import VisionTransformer
from adder_flax.settings import AttentionSettings, ScoreSettings, VitSettings


@register_model("vit", VitSettings)
def build_vit(settings: VitSettings, example: Example, *, rngs: nnx.Rngs) -> VisionTransformer:
    """Builds a vision transformer for images and ``classes``.

    Raises:
      ValueError: sizes that do not fit together, or an unknown name.
    """
    if len(example.inputs) != 1 or len(example.inputs[0].shape) != 4 or "classes" not in example.sizes:
        raise ValueError(
            f"expected images and a number of classes for config.model.name=vit, got {example}; "
            "set --config.model.name or --config.task.name"
        )
    _, height, width, channels = example.inputs[0].shape
    options = dict(vars(settings))
    del options["name"]
    attention = options.pop("attention")
    return VisionTransformer(
        **options
        | {
            "dtype": jnp.dtype(settings.dtype),
            "adder_options": vars(settings.adder_options),
            "score": attention.score if len(attention.score) > 1 else attention.score[0],
            "score_options": score_options(attention),
        },
        identity=attention.identity,
        scale=attention.scale,
        temperature=attention.temperature,
        key_block=attention.key_block,
        attention_dropout_rate=attention.attention_dropout_rate,
        image_size=(height, width),
        channels=channels,
        num_classes=example.sizes["classes"],
        rngs=rngs,
    )


def score_options(attention: AttentionSettings) -> Any:
    """Returns the options that each score takes: one mapping, or one for each block."""
    contracts = [get_score(name) for name in attention.score]
    taken = [{*contract.function_options, *contract.parameter_options} for contract in contracts]
    given = vars(attention.score_options)
    unused = {name for name in given if given[name] != getattr(ScoreSettings(), name)}.difference(*taken)
    if unused:
        raise ValueError(
            f"expected config.model.score_options.{min(unused)} at its default unless a score has it, got "
            f"{given[min(unused)]!r} with {', '.join(attention.score)}; leave it, or set --config.model.score"
        )
    options = [{name: value for name, value in given.items() if name in names} for names in taken]
    return options if len(options) > 1 else options[0]
