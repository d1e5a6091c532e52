"""A step's parts, put together by hand."""

from flax import nnx

from adder_flax.models import VisionTransformer, build_vit
from adder_flax.settings import ClassificationSettings
from adder_flax.tasks import Classification
from adder_flax.training.optimizers import OPTIMIZERS, OptimizerSpec
from adder_flax.training.step import Parts, Skeleton, make_loss_fn

SEED = 3


def vit(settings, source) -> VisionTransformer:
    """The model of these settings for a source."""
    return build_vit(
        settings, Classification(None, Classification.facts(source)).example(), rngs=nnx.Rngs(0)
    )


def _no_layers(stride):
    raise AssertionError("an optimizer of the first order asked for layers with curvature")


def optimizer_of(settings, learning_rate, facts):
    """The optimizer of these settings."""
    return OPTIMIZERS.get(settings.name)(OptimizerSpec(settings, learning_rate, facts, _no_layers))


def make_parts(graphdef, augment, optimizer=None, ema_decay=0.0):
    """``hyper → Parts`` of a classifier with an augmentation ``(key, images, labels) → examples``,
    at fixed numbers."""
    parts = Parts(
        seed=SEED,
        examples=lambda key, batch: augment(key, batch["image"], batch["label"]),
        loss=make_loss_fn(Skeleton(graphdef), Classification(ClassificationSettings(), None)),
        optimizer=optimizer,
        learning_rate=lambda step: 0.0,
        ema_decay=ema_decay,
    )
    return lambda hyper: parts
