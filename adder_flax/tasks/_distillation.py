"""Images, their classes, and what a teacher says of them."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from adder_flax.arrays import AnyArray
from adder_flax.settings import ClassificationSettings, setting
from adder_flax.tasks._classification import Classification
from adder_flax.tasks._task import Batch, Outcome, call_to_train, register_task

_EXPLAINED = (
    "a run directory of this project, or a safetensors file of timm or Hugging Face with its "
    "config.json beside it"
)


@dataclasses.dataclass(frozen=True)
class DistillationSettings(ClassificationSettings):
    """Classification of images with a teacher."""

    name: str = setting(
        "distillation", "the task, whose own fields follow", expected="the name of a task"
    )
    teacher: str = setting("", "whose answers are learned", expected=_EXPLAINED, max_length=4096)
    distillation: Literal["hard", "soft"] = setting(
        "hard", "the teacher's likeliest class as a label, or its probabilities"
    )
    distillation_share: float = setting(
        0.5, "of the teacher in the loss; labels have the rest", data=True, ge=0, le=1
    )
    distillation_temperature: float = setting(
        3.0, "divides both logits where probabilities are learned", data=True, ge=0.01, le=1000
    )

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if self.loss != "softmax":
            yield (
                f"{where}.loss: expected 'softmax', as a teacher gives probabilities of classes, "
                f"got {self.loss!r}"
            )
        if not self.teacher:
            yield f"{where}.teacher: expected {_EXPLAINED}, got nothing"


@register_task("distillation", DistillationSettings)
class Distillation(Classification):
    """Learning from labels and from what a frozen teacher says of the same augmented images.

    (1 − a) H(y, s) + a D, where s are the student's logits for the labels and D, of its logits s'
    for the teacher, is H(argmax t, s') ("hard") or T² KL(softmax(t / T) ‖ softmax(s' / T))
    ("soft"), with t the teacher's logits (Touvron et al., 2021, https://arxiv.org/abs/2012.12877,
    eq. 2 and 3; Hinton et al., 2015). A model with a distillation token
    (``config.model.distilled``) has a head for each; of any other, s' = s.
    """

    @classmethod
    def teacher_of(cls, settings: DistillationSettings) -> str:
        return settings.teacher

    def examples(self, key: Array, batch: Batch) -> tuple[Array, ...]:
        """Returns float images, class probabilities, and the teacher's logits."""
        images, targets = super().examples(key, batch)
        return images, targets, self.teacher(images).astype(jnp.float32)

    def loss(self, model: nnx.Module, examples: tuple[AnyArray, ...], *, rngs: nnx.Rngs) -> Outcome:
        images, targets, taught = examples
        heads = logits_of_heads(model, images, rngs)
        by_labels = optax.softmax_cross_entropy(heads[:, 0], targets).mean()
        by_teacher = distance_to_teacher(
            heads[:, -1], taught, self.settings.distillation, self.settings.distillation_temperature
        )
        share = self.settings.distillation_share
        metrics = {
            "accuracy": (heads.mean(1).argmax(-1) == targets.argmax(-1)).mean(),
            "teacher_agreement": (heads[:, -1].argmax(-1) == taught.argmax(-1)).mean(),
            "teacher_loss": by_teacher,
        }
        outputs, weights = weighted_outputs(heads, self.settings)
        return Outcome((1 - share) * by_labels + share * by_teacher, outputs, metrics, weights)


def logits_of_heads(
    model: nnx.Module, images: AnyArray, rngs: nnx.Rngs
) -> Float[Array, "batch heads classes"]:
    """Returns the logits of every head of a classifier, called to train, in float32.

    They are those of its ``heads``, or of the only one that it has.
    """
    heads = getattr(model, "heads", None)
    if heads is None:
        return call_to_train(model, images, rngs=rngs)[:, None].astype(jnp.float32)
    return call_to_train(heads, images, rngs=rngs).astype(jnp.float32)


def weighted_outputs(
    heads: Float[Array, "batch heads classes"], settings: DistillationSettings
) -> tuple[Float[Array, "batch 2 classes"], tuple[Float[Array, "batch 2"], int]]:
    """Returns the logits of both terms of the loss, and their weights with the number of images.

    T² KL(softmax(t / T) ‖ softmax(s' / T)) has the curvature of T² cross-entropies of s' / T.
    """
    temperature = settings.distillation_temperature if settings.distillation == "soft" else 1.0
    share = jnp.asarray(settings.distillation_share, heads.dtype)
    outputs = jnp.stack([heads[:, 0], heads[:, -1] / temperature], axis=1)
    weights = jnp.stack([1 - share, share * temperature**2])
    return outputs, (jnp.broadcast_to(weights, outputs.shape[:2]), len(outputs))


def distance_to_teacher(
    logits: Float[Array, "batch classes"],
    taught: Float[AnyArray, "batch classes"],
    kind: str,
    temperature: float | Array,
) -> Float[Array, ""]:
    """Returns how far a student is from its teacher, mean over the batch.

    Args:
      logits: of the student.
      taught: logits of the teacher.
      kind: ``"hard"``, the cross-entropy to the teacher's likeliest class, or ``"soft"``, the
        Kullback-Leibler divergence of the student's probabilities from the teacher's, times the
        square of the temperature.
      temperature: divides both logits, if soft.

    Example:
      >>> far = distance_to_teacher(jnp.zeros((1, 2)), jnp.array([[50.0, 0.0]]), "soft", 1.0)
      >>> round(float(far), 4)  # ln 2
      0.6931
    """
    if kind == "hard":
        return optax.softmax_cross_entropy_with_integer_labels(logits, taught.argmax(-1)).mean()
    expected, found = (jax.nn.log_softmax(x / temperature) for x in (taught, logits))
    return temperature**2 * (jnp.exp(expected) * (expected - found)).sum(-1).mean()
