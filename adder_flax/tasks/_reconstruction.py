"""Images that are to be told again from what a model keeps of them."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Shaped

from adder_flax import data
from adder_flax.arrays import AnyArray
from adder_flax.models import Example
from adder_flax.settings import setting
from adder_flax.tasks._task import Batch, Best, Outcome, Task, call_to_train, register_task

ImageShape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class ReconstructionSettings:
    """Images told again."""

    name: str = setting(
        "reconstruction", "the task, whose own fields follow", expected="the name of a task"
    )


@register_task("reconstruction", ReconstructionSettings)
class Reconstruction(Task[ImageShape]):
    """Sigmoid cross-entropy of an image's values in nats an image.

    With x in [0, 1] the values of an image, which is not augmented, and z the model's logits for
    them, the loss is the mean over images of

        Σ −x ln σ(z) − (1 − x) ln(1 − σ(z)),

    a sum over pixels and channels. Where an x is neither 0 nor 1, no model reaches 0.
    ``"squared_error"`` is the mean over an image's values of (σ(z) − x)².

    A source gives ``"image"``, uint8 (batch, height, width, channels). The model returns logits of
    the shape of its images.
    """

    unit: ClassVar[str] = "images"
    best: ClassVar[Best] = Best("loss", largest=False)

    @classmethod
    def facts(cls, source: data.Source) -> ImageShape:
        images = data.require_kind(data.ImageSource, source, "config.task.name=reconstruction")
        return images.image_shape

    @classmethod
    def source_options(cls, settings: ReconstructionSettings) -> dict[str, Any]:
        return {"crop_scale": None}

    @property
    def likelihood(self) -> str:
        return "bernoulli"

    def example(self) -> Example:
        image = jax.ShapeDtypeStruct((1, *self.data_facts), jnp.float32)
        return Example((image,), {"logits": math.prod(self.data_facts)})

    def examples(self, key: Array, batch: Batch) -> tuple[Array]:
        """Returns images in [0, 1]."""
        del key
        return self.inputs(batch)

    def arguments(self, examples: tuple[AnyArray]) -> tuple[AnyArray]:
        return examples

    def loss(self, model: nnx.Module, examples: tuple[AnyArray], *, rngs: nnx.Rngs) -> Outcome:
        (images,) = examples
        logits = _rows(call_to_train(model, images, rngs=rngs))
        losses, errors = _by_image(logits, _rows(images))
        # All values of an image on the last axis: curvature takes the sum over it, as the loss.
        return Outcome(losses.mean(), logits, {"squared_error": errors.mean()})

    def inputs(self, batch: Batch) -> tuple[Array]:
        return (jnp.asarray(batch["image"]).astype(jnp.float32) / 255,)

    def sums(self, model: nnx.Module, batch: Batch) -> dict[str, Float[Array, ""]]:
        (images,) = self.inputs(batch)
        losses, errors = _by_image(_rows(model(images)), _rows(images))
        mask = batch["mask"].astype(jnp.float32)
        by_image = {"loss": losses * mask, "squared_error": errors * mask, "count": mask}
        return {name: values.sum() for name, values in by_image.items()}


def _rows(images: Shaped[AnyArray, "batch ..."]) -> Float[Array, "batch values"]:
    return jnp.asarray(images, jnp.float32).reshape(images.shape[0], -1)


def _by_image(
    logits: Float[Array, "batch values"], values: Float[Array, "batch values"]
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """Returns cross-entropy, summed over an image, and squared error, its mean over an image."""
    losses = optax.sigmoid_binary_cross_entropy(logits, values).sum(-1)
    return losses, jnp.square(jax.nn.sigmoid(logits) - values).mean(-1)
