"""The models that come with the library, from their settings."""

import flax.nnx as nnx
import jax.numpy as jnp

from adder_flax.attention import get_score
from adder_flax.models._registry import Example, register_model
from adder_flax.models._vit import VisionTransformer
from adder_flax.settings import AttentionSettings, VitSettings


@register_model("vit", VitSettings)
def build_vit(settings: VitSettings, example: Example, *, rngs: nnx.Rngs) -> VisionTransformer:
    """Builds a vision transformer for images and ``classes``.

    Raises:
      ValueError: sizes that do not fit together, or an unknown name.
    """
    if (
        len(example.inputs) != 1
        or len(example.inputs[0].shape) != 4
        or "classes" not in example.sizes
    ):
        raise ValueError(
            f"expected images and a number of classes for config.model.name=vit, got {example}; "
            "set --config.model.name or --config.task.name"
        )
    _, height, width, channels = example.inputs[0].shape
    check_score_options(settings.attention)
    return VisionTransformer(
        settings=settings,
        image_size=(height, width),
        channels=channels,
        num_classes=example.sizes["classes"],
        dtype=jnp.dtype(settings.dtype),
        rngs=rngs,
    )


def check_score_options(settings: AttentionSettings) -> None:
    """Raises ValueError for an option that is set and that none of the scores has."""
    names = (settings.score,) if isinstance(settings.score, str) else settings.score
    given, defaults = vars(settings.score_options), type(settings.score_options)()
    taken = {
        name for score in names for name in get_score(score).own_options(settings.score_options)
    }
    unused = {name for name in given if given[name] != getattr(defaults, name)} - taken
    if unused:
        raise ValueError(
            f"expected config.model.score_options.{min(unused)} at its default unless a score has "
            f"it, got {given[min(unused)]!r} with {', '.join(names)}; leave it, or set "
            "--config.model.score"
        )
