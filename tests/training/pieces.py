"""A step's parts, put together by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from adder_flax.models import VisionTransformer, build_vit
from adder_flax.settings import ClassificationSettings
from adder_flax.tasks import Classification, ImageFacts
from adder_flax.training import make_train_step
from adder_flax.training.optimizers import OPTIMIZERS, OptimizerSpec
from adder_flax.training.sharding import put_batch
from adder_flax.training.step import Parts, init_state, make_loss_fn, take_apart

_RNG = np.random.default_rng(0)
BATCH = {
    "image": _RNG.integers(0, 256, (8, 2, 3, 1), dtype=np.uint8),
    "label": _RNG.integers(0, 4, 8).astype(np.int32),
}
FACTS = ImageFacts((2, 3, 1), 4, mean=(0.0,), std=(1.0,), crops_on_host=False)


class Net(nnx.Module):
    """What Flax's first page shows: layers that hold their own statistics and random streams, and a
    call that is told nothing."""

    def __init__(self, rngs, rate=0.0):
        self.first = nnx.Linear(6, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.again = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(5, 4, rngs=rngs)

    def __call__(self, images):
        hidden = self.norm(self.first(images.reshape(len(images), -1)))
        return self.head(self.again(self.dropout(hidden)))


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


def make_step(
    optimizer,
    model=None,
    *,
    images=lambda images: images,
    learning_rate=lambda step: 0.0,
    ema_decay=0.0,
    **options,
):
    """``skeleton, step(state, batch), state`` of a classifier of `BATCH`, by default a `Net`, whose
    images are changed as told."""
    skeleton, variables = take_apart(model or Net(nnx.Rngs(1)))
    params, carried = skeleton.separate(variables)
    parts = Parts(
        seed=3,
        examples=lambda key, batch: (
            images(batch["image"].astype(jnp.float32) / 255),
            jax.nn.one_hot(batch["label"], 4),
        ),
        loss=make_loss_fn(skeleton, Classification(ClassificationSettings(), None)),
        optimizer=optimizer,
        learning_rate=learning_rate,
        ema_decay=ema_decay,
    )
    state = init_state(params, optimizer=optimizer, ema=ema_decay > 0, model_state=carried)
    step = jax.jit(make_train_step(lambda hyper: parts, **options))
    return skeleton, lambda state, batch: step(state, batch, {}), state


def take_steps(run, state, first, last):
    """Steps first … last - 1 of a run: the state after them, and their metrics."""
    batches, rows = run.batches(), []
    with jax.set_mesh(run.mesh):
        for i in range(first, last):
            state, metrics = run.train_step(state, put_batch(batches[i], run.mesh), run.hyper)
            rows.append(jax.device_get(metrics))
    return state, rows
