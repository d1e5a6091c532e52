"""Models by name."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx

from adder_flax.registry import Registry


class Example(NamedTuple):
    """What a model is built for.

    Attributes:
      inputs: shapes and dtypes of what the model is called with, for a batch of one.
      sizes: the numbers that shapes do not tell, such as ``{"classes": 10}``.
    """

    inputs: tuple[jax.ShapeDtypeStruct, ...]
    sizes: Mapping[str, int]


class Builder(Protocol):
    """Makes a model."""

    def __call__(self, settings: Any, example: Example, *, rngs: nnx.Rngs) -> nnx.Module:
        """Makes a model.

        Args:
          settings: ``config.model``, read.
          example: what the model is built for, see ``adder_flax.tasks.Task.example``.
          rngs: initialisation keys.

        Returns:
          A module that is called as ``model(*inputs)`` to evaluate, and as ``model(*inputs, deterministic=False,
          rngs=rngs)`` to train. Where some numbers of the settings are data, such as rates of dropout, it has a method
          ``set_data(settings)`` that takes them anew: they are traced inside of the training step.
        """


MODELS: Registry[Builder] = Registry("model", "adder_flax.models.MODELS.register")
"""Builders of models by name: ``config.model.name`` is looked up here."""
