"""Images and their classes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float

from adder_flax import data, recorder
from adder_flax.arrays import AnyArray
from adder_flax.data.augmentation import augment, normalize
from adder_flax.models import Example
from adder_flax.registry import load
from adder_flax.settings import AugmentSettings, ClassificationSettings
from adder_flax.tasks._task import Batch, Best, Outcome, Task, call_to_train, register_task


class ImageFacts(NamedTuple):
    """What classification must know of a source; see ``adder_flax.data.ImageSource``."""

    image_shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crops_on_host: bool


@register_task("classification", ClassificationSettings)
class Classification(Task[ImageFacts]):
    """Cross-entropy of images, augmented on the device: softmax, or every class's own (sigmoid).

    The second is DeiT III's (Touvron et al., 2022, https://arxiv.org/abs/2204.07118, section 3),
    where a class is there if it has any share of a mixed image. Evaluations report softmax
    cross-entropy after both.

    A source gives ``"image"``, uint8 (batch, height, width, channels), and ``"label"``, int32
    (batch,). Where it gives ``"labels"`` too, bool (batch, classes), evaluations report the share
    of images with any, ``"labelled"``, and the accuracy over these, ``"any_label_accuracy"``.
    """

    unit: ClassVar[str] = "images"
    best: ClassVar[Best] = Best("accuracy", largest=True)

    @classmethod
    def facts(cls, source: data.Source) -> ImageFacts:
        images = data.require_kind(data.ImageSource, source, "config.task.name=classification")
        mean, std = data.channel_statistics(images)
        return ImageFacts(images.image_shape, images.num_classes, mean, std, images.crops_on_host)

    @classmethod
    def source_options(cls, settings: ClassificationSettings) -> dict[str, Any]:
        scale, ratio = settings.resized_crop_scale, settings.resized_crop_ratio
        return {"crop_scale": scale, "crop_ratio": ratio}

    @property
    def likelihood(self) -> str:
        return "categorical" if self.settings.loss == "softmax" else "bernoulli"

    def example(self) -> Example:
        image = jax.ShapeDtypeStruct((1, *self.data_facts.image_shape), jnp.float32)
        return Example((image,), {"classes": self.data_facts.num_classes})

    @property
    def augmentation(self) -> AugmentSettings:
        """What is done to training images: settings, without a second crop if the source crops."""
        if not self.data_facts.crops_on_host:
            return self.settings
        padding = 0 if self.settings.resized_crop_scale else self.settings.crop_padding
        return dataclasses.replace(self.settings, crop_padding=padding, resized_crop_scale=None)

    def examples(self, key: Array, batch: Batch) -> tuple[Array, Array]:
        """Returns float images and class probabilities."""
        facts, given = self.data_facts, (key, batch["image"], batch["label"], self.augmentation)
        return augment(*given, num_classes=facts.num_classes, mean=facts.mean, std=facts.std)

    def arguments(self, examples: tuple[AnyArray, AnyArray]) -> tuple[AnyArray]:
        return examples[:1]

    def loss(
        self, model: nnx.Module, examples: tuple[AnyArray, AnyArray], *, rngs: nnx.Rngs
    ) -> Outcome:
        _, targets = examples
        logits = call_to_train(model, *self.arguments(examples), rngs=rngs).astype(jnp.float32)
        hits = {"accuracy": (logits.argmax(-1) == targets.argmax(-1)).mean()}
        if self.settings.loss == "softmax":
            return Outcome(optax.softmax_cross_entropy(logits, targets).mean(), logits, hits)
        losses = optax.sigmoid_binary_cross_entropy(logits, (targets > 0).astype(jnp.float32))
        # A position of its own for each class, over which curvature takes the mean as the loss
        # does.
        return Outcome(losses.mean(), logits[..., None], hits)

    def inputs(self, batch: Batch) -> tuple[Array]:
        return (normalize(batch["image"], self.data_facts.mean, self.data_facts.std),)

    def sums(self, model: nnx.Module, batch: Batch) -> dict[str, Float[Array, ""]]:
        logits: Float[Array, "batch classes"] = model(*self.inputs(batch)).astype(jnp.float32)
        labels = batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        # Rank of the true class among the logits. Ties and NaN count against the model.
        own = jnp.take_along_axis(logits, labels[:, None], axis=1)
        rank = (~(logits < own)).sum(-1) - 1
        mask = batch["mask"].astype(jnp.float32)
        by_image = {"loss": losses, "accuracy": rank < 1, "count": mask}
        if logits.shape[-1] > 5:  # else every answer is among five
            by_image["top5_accuracy"] = rank < 5
        if "labels" in batch:
            by_image["labelled"] = batch["labels"].any(-1)
            by_image["any_label_accuracy"] = is_any_label(logits, batch["labels"])
        return {name: (values * mask).sum() for name, values in by_image.items()}

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        found = super().scores(sums)
        if "labelled" in sums:
            # Images of no class of the set say nothing of the model.
            found["any_label_accuracy"] = sums["any_label_accuracy"] / max(sums["labelled"], 1.0)
        return found

    def about(self) -> str:
        return f"{self.data_facts.num_classes} classes"

    def pictures(
        self, model: nnx.Module, source: data.ImageSource, title: str
    ) -> dict[str, Callable[[], Any]]:
        if not recorder.describe({"attention": []}, model, *self.inputs(source.first(1))):
            return {}
        draw = load("adder_flax.report.figures:attention_of_images")
        return {"attention.png": lambda: draw(self, model, source, title)}


def is_any_label(
    logits: Float[Array, "batch classes"], labels: Bool[AnyArray, "batch classes"]
) -> Bool[Array, " batch"]:
    """Returns whether the likeliest class is one of those that are right.

    The hits of ImageNet ReaL (Beyer et al., 2020, https://arxiv.org/abs/2006.07159, section 4). An
    image without a right class has none; ties with a wrong class and NaN count against the model.
    """
    likeliest = lambda among: jnp.where(among, logits, -jnp.inf).max(-1)
    return likeliest(labels) > likeliest(~labels)
