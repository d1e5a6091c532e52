"""A frozen model that a task asks for.

Its structure shapes the program, its parameters are arguments of the step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from adder_flax.training.skeleton import Skeleton, take_apart


class Teacher(NamedTuple):
    """A frozen model.

    Attributes:
      skeleton: without its arrays.
      variables: a nested dict of them.
    """

    skeleton: Skeleton
    variables: Any

    @classmethod
    def of(cls, model: nnx.Module) -> "Teacher":
        """Returns a model as a teacher."""
        return cls(*take_apart(model))


class Renormalized(nnx.Module):
    """A model whose images are normalised by other numbers than those it is called with.

    Args:
      model: a classifier of images.
      given: mean and standard deviation of each channel by which images are normalised.
      wanted: those by which the model wants them.

    >>> from adder_flax.models import ConvNet
    >>> model = ConvNet((4, 8), num_classes=2, rngs=nnx.Rngs(0))
    >>> same = Renormalized(model, ((0.5,) * 3, (0.25,) * 3), ((0.0,) * 3, (1.0,) * 3))
    >>> bool(
    ...     jnp.allclose(
    ...         same(jnp.ones((1, 4, 4, 3))), model(jnp.full((1, 4, 4, 3), 0.75)), atol=1e-6
    ...     )
    ... )
    True
    """

    def __init__(
        self, model: nnx.Module, given: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]
    ):
        self.model = model
        self.given, self.wanted = (tuple(map(tuple, numbers)) for numbers in (given, wanted))

    def __call__(
        self, images: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch classes"]:
        """Normalises images anew and classifies them."""
        (mean, std), (wanted_mean, wanted_std) = (
            (jnp.array(x) for x in pair) for pair in (self.given, self.wanted)
        )
        return self.model((images * std + mean - wanted_mean) / wanted_std)


def frozen(skeleton: Skeleton, variables: Any) -> nnx.Module:
    """Returns the model, through which no derivative flows."""
    return skeleton.merge(jax.tree.map(jax.lax.stop_gradient, variables))
