"""Images, their classes, and what a teacher says of them; healing what replaces its parts."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from adder_flax import data, recorder
from adder_flax.arrays import AnyArray
from adder_flax.recorder import Record
from adder_flax.settings import ClassificationSettings, setting
from adder_flax.tasks._classification import Classification
from adder_flax.tasks._swap import divergence, swap
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
            expected = "'softmax', as a teacher gives probabilities of classes"
            yield f"{where}.loss: expected {expected}, got {self.loss!r}"
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
        found = self._taught(heads, targets, taught)
        agreement = (heads[:, -1].argmax(-1) == taught.argmax(-1)).mean()
        return found._replace(metrics={**found.metrics, "teacher_agreement": agreement})

    def _taught(self, heads: Array, targets: AnyArray, taught: AnyArray) -> Outcome:
        by_labels = optax.softmax_cross_entropy(heads[:, 0], targets).mean()
        by_teacher = distance_to_teacher(heads[:, -1], taught, self.settings)
        share = self.settings.distillation_share
        accuracy = (heads.mean(1).argmax(-1) == targets.argmax(-1)).mean()
        outputs, weights = weighted_outputs(heads, self.settings)
        metrics = {"accuracy": accuracy, "teacher_loss": by_teacher}
        return Outcome((1 - share) * by_labels + share * by_teacher, outputs, metrics, weights)


def logits_of_heads(
    model: nnx.Module, images: AnyArray, rngs: nnx.Rngs
) -> Float[Array, "batch heads classes"]:
    """Returns the logits of a classifier's ``heads``, or of its only one, called to train."""
    heads = getattr(model, "heads", None)
    logits = call_to_train(heads or model, images, rngs=rngs).astype(jnp.float32)
    return logits if heads else logits[:, None]


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
    settings: DistillationSettings,
) -> Float[Array, ""]:
    """Returns how far a student is from its teacher, mean over the batch; see `Distillation`."""
    if settings.distillation == "hard":
        return optax.softmax_cross_entropy_with_integer_labels(logits, taught.argmax(-1)).mean()
    temperature = settings.distillation_temperature
    expected, found = (jax.nn.log_softmax(x / temperature) for x in (taught, logits))
    return temperature**2 * (jnp.exp(expected) * (expected - found)).sum(-1).mean()


_FITTED_ON = 64
_WANTED = {"attention": ["weights"], "block": ["output"]}


@dataclasses.dataclass(frozen=True)
class HealingSettings(DistillationSettings):
    """What a swapped transformer learns from the one that it was."""

    name: str = setting(
        "healing", "the task, whose own fields follow", expected="the name of a task"
    )
    begin: Literal["teacher", "random"] = setting(
        "teacher", "from the teacher with its parts swapped, or at random, as a control"
    )
    map_weight: float = setting(
        1.0, "of the divergence of each block's maps from the teacher's", data=True, ge=0, le=1e6
    )
    output_weight: float = setting(
        1.0,
        "of the square of what each block's output lacks, over the variance of the teacher's",
        data=True,
        ge=0,
        le=1e6,
    )
    layers_until: float = setting(
        0.5,
        "share of the training until which these two are learned; logits are to the end",
        data=True,
        ge=0,
        le=1,
    )


@register_task("healing", HealingSettings)
class Healing(Distillation):
    """From a multiplicative transformer to one with adder attention and adder layers in its place.

    The model begins as the teacher with its parts swapped, see ``adder_flax.tasks.swap``. It learns
    the teacher's logits (and the labels) as in ``distillation`` and, while ``progress <
    layers_until``, in every block

        map_weight · KL(A_teacher ‖ A) + output_weight · |h − h_teacher|² / var(h_teacher),

    means over batch, heads, tokens and blocks; A are the maps without the identity, h what a block
    gives. When layers leave the squared distance for the L1 distance is said by
    ``config.model.anneal_start``, ``anneal_end`` and ``anneal_blocks``.
    """

    def initial(self, model: nnx.Module, source: data.Source) -> nnx.Module:
        if self.settings.begin == "random":
            return model
        return swap(self.teacher, model, *self.inputs(source.first(min(_FITTED_ON, len(source)))))

    def examples(self, key: Array, batch: Batch) -> tuple[Any, ...]:
        """Returns images, class probabilities, and the teacher's logits, maps, blocks, variance."""
        images, targets = Classification.examples(self, key, batch)
        logits, records = recorder.record(_WANTED, self.teacher, images)
        maps, outputs = _seen(records)
        # Of the whole batch, whatever parts of it the loss is taken of.
        variance = jnp.broadcast_to(outputs.var((0, 2, 3)), outputs.shape[:2])
        return images, targets, logits.astype(jnp.float32), maps, outputs, variance

    def loss(self, model: nnx.Module, examples: tuple[Any, ...], *, rngs: nnx.Rngs) -> Outcome:
        images, targets, taught, maps, outputs, variance = examples
        call = lambda model, images, key: logits_of_heads(model, images, nnx.Rngs(dropout=key))
        heads, records = recorder.record(_WANTED, call, model, images, rngs.dropout())
        found, settings = self._taught(heads, targets, taught), self.settings
        own_maps, own_outputs = _seen(records)
        by_maps = divergence(maps, jnp.log(jnp.maximum(own_maps, 1e-9))).mean()
        lacking = jnp.square(own_outputs - outputs).mean((2, 3)) / variance
        layers = settings.map_weight * by_maps + settings.output_weight * lacking.mean()
        metrics = {
            "teacher_agreement": (heads.mean(1).argmax(-1) == taught.argmax(-1)).mean(),
            "map_divergence": by_maps,
            "output_error": lacking.mean(),
        }
        loss = found.loss + jnp.where(self.progress < settings.layers_until, layers, 0.0)
        return found._replace(loss=loss, metrics={**found.metrics, **metrics})


def _seen(records: tuple[Record, ...]) -> Iterator[Float[Array, "batch block ..."]]:
    """Yields maps and what blocks give."""
    for kind, (name,) in _WANTED.items():
        found = [r.arrays[name] for r in records if r.kind == kind]
        yield jnp.stack(found, axis=1).astype(jnp.float32)
