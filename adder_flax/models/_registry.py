"""Models by name."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from flax import nnx

from adder_flax.attention import get_score
from adder_flax.registry import Registry
from adder_flax.settings import MODEL_SETTINGS, AttentionSettings


class Example(NamedTuple):
    """What a model is built for.

    Attributes:
      inputs: shapes and dtypes of what the model is called with, for a batch of one.
      sizes: the numbers that shapes do not tell, such as ``{"classes": 10}``.
    """

    inputs: tuple[jax.ShapeDtypeStruct, ...]
    sizes: Mapping[str, int]


@runtime_checkable
class Builder(Protocol):
    """Makes a model."""

    def __call__(self, settings: Any, example: Example, *, rngs: nnx.Rngs) -> nnx.Module:
        """Makes a model of ``config.model``, read, for an example (see
        ``adder_flax.tasks.Task.example``).

        Returns:
          A module that is called as ``model(*inputs)`` to evaluate, and as ``model(*inputs,
          deterministic=False, rngs=rngs)`` to train, without what its call does not take. Where
          some numbers of the settings are data, such as rates of dropout, it has a method
          ``set_data(settings)`` that takes them anew: they are traced inside of the training step.
          Where the model itself changes along the training, as with a distance that is annealed, it
          has a method ``anneal(progress)``, given the share of the steps that are done, traced,
          and, where it computes more at some times than at others, ``stages()``: the shares at
          which that changes.
        """
        ...


MODELS: Registry[Builder] = Registry("model", "adder_flax.models.register_model")
"""Builders of models by name: ``config.model.name`` is looked up here."""


def register_model(name: str, settings: type) -> Callable[[Builder], Builder]:
    """Makes ``config.model.name = <name>`` stand for the model that the decorated function builds.

    ``settings`` is a frozen dataclass whose fields are declared with
    ``adder_flax.settings.setting``: those of ``config.model``, ``name`` among them.

    >>> import dataclasses
    >>> from adder_flax.settings import setting
    >>> @dataclasses.dataclass(frozen=True)
    ... class LinearSettings:
    ...     name: str = setting("linear", "the model")
    >>> with MODELS.temporary(), MODEL_SETTINGS.temporary():
    ...
    ...     @register_model("linear", LinearSettings)
    ...     def build(settings, example, *, rngs):
    ...         width = example.inputs[0].shape[-1]
    ...         return nnx.Linear(width, example.sizes["classes"], rngs=rngs)
    """

    def register(build: Builder) -> Builder:
        MODEL_SETTINGS.register(name, settings)
        return MODELS.register(name, build)

    return register


def image_shape(example: Example, name: str) -> tuple[int, int, int]:
    """Height, width and channels of the images that a model of this name is to classify."""
    shapes = [batch.shape for batch in example.inputs]
    if [len(shape) for shape in shapes] != [4] or "classes" not in example.sizes:
        raise ValueError(
            f"expected images and a number of classes for config.model.name={name}, got {example}; "
            "set --config.model.name or --config.task.name"
        )
    _, height, width, channels = shapes[0]
    return height, width, channels


def check_score_options(settings: AttentionSettings) -> None:
    """Raises ValueError for an option that is set and that none of the scores has."""
    names = (settings.score,) if isinstance(settings.score, str) else settings.score
    given, defaults = vars(settings.score_options), type(settings.score_options)()
    own = [get_score(score).own_options(settings.score_options) for score in names]
    taken = {name for options in own for name in options}
    unused = {name for name in given if given[name] != getattr(defaults, name)} - taken
    if unused:
        raise ValueError(
            f"expected config.model.score_options.{min(unused)} at its default unless a score has "
            f"it, got {given[min(unused)]!r} with {', '.join(names)}; leave it, or set "
            "--config.model.score"
        )
