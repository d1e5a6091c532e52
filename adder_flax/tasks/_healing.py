"""A trained transformer whose parts were replaced learns to do again what it did."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from adder_flax import data, recorder
from adder_flax.recorder import Record
from adder_flax.settings import setting
from adder_flax.tasks._classification import Classification
from adder_flax.tasks._distillation import (
    Distillation,
    DistillationSettings,
    distance_to_teacher,
    logits_of_heads,
    weighted_outputs,
)
from adder_flax.tasks._swap import divergence, swap
from adder_flax.tasks._task import Batch, Outcome, register_task

_FITTED_ON = 64
_WANTED = {"attention": ["weights"], "block": ["output"]}


@dataclasses.dataclass(frozen=True)
class HealingSettings(DistillationSettings):
    """What a swapped transformer learns from the one that it was.

    When its distances change is said by the model.
    """

    name: str = setting(
        "healing", "the task, whose own fields follow", expected="the name of a task"
    )
    begin: Literal["teacher", "random"] = setting(
        "teacher", "from the teacher with its parts swapped, or at random, as a control"
    )
    map_weight: float = setting(
        1.0,
        "of the divergence of each block's maps from the teacher's",
        data=True,
        ge=0,
        le=1e6,
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
    gives. When the layers leave the squared distance (p = 2) for the L1 distance (p = 1), block by
    block or together, is said by ``config.model.anneal_start``, ``anneal_end`` and
    ``anneal_blocks``.
    """

    def initial(self, model: nnx.Module, source: data.Source) -> nnx.Module:
        if self.settings.begin == "random":
            return model
        return swap(self.teacher, model, *self.inputs(source.first(min(_FITTED_ON, len(source)))))

    def examples(self, key: Array, batch: Batch) -> tuple[Any, ...]:
        """Returns float images, class probabilities, and what the teacher says of them.

        It is logits, maps, what blocks give, and, for each image alike, the variance of the latter.
        """
        images, targets = Classification.examples(self, key, batch)
        logits, records = recorder.record(_WANTED, self.teacher, images)
        outputs = _outputs(records)
        # Of the whole batch, whatever parts of it the loss is taken of.
        variance = jnp.broadcast_to(outputs.var((0, 2, 3)), outputs.shape[:2])
        return images, targets, logits.astype(jnp.float32), _maps(records), outputs, variance

    def loss(self, model: nnx.Module, examples: tuple[Any, ...], *, rngs: nnx.Rngs) -> Outcome:
        images, targets, taught, maps, outputs, variance = examples
        call = lambda model, images, key: logits_of_heads(model, images, nnx.Rngs(dropout=key))
        heads, records = recorder.record(_WANTED, call, model, images, rngs.dropout())
        settings = self.settings
        by_labels = optax.softmax_cross_entropy(heads[:, 0], targets).mean()
        by_teacher = distance_to_teacher(
            heads[:, -1], taught, settings.distillation, settings.distillation_temperature
        )
        by_maps = divergence(maps, jnp.log(jnp.maximum(_maps(records), 1e-9))).mean()
        lacking = jnp.square(_outputs(records) - outputs).mean((2, 3)) / variance
        layers = settings.map_weight * by_maps + settings.output_weight * lacking.mean()
        share = settings.distillation_share
        loss = (1 - share) * by_labels + share * by_teacher
        loss = loss + jnp.where(self.progress < settings.layers_until, layers, 0.0)
        metrics = {
            "accuracy": (heads.mean(1).argmax(-1) == targets.argmax(-1)).mean(),
            "teacher_agreement": (heads.mean(1).argmax(-1) == taught.argmax(-1)).mean(),
            "teacher_loss": by_teacher,
            "map_divergence": by_maps,
            "output_error": lacking.mean(),
        }
        outputs, weights = weighted_outputs(heads, settings)
        return Outcome(loss, outputs, metrics, weights)


def _maps(records: tuple[Record, ...]) -> Float[Array, "batch block head query key"]:
    return jnp.stack(
        [r.arrays["weights"] for r in records if r.kind == "attention"], axis=1
    ).astype(jnp.float32)


def _outputs(records: tuple[Record, ...]) -> Float[Array, "batch block token width"]:
    return jnp.stack([r.arrays["output"] for r in records if r.kind == "block"], axis=1).astype(
        jnp.float32
    )
