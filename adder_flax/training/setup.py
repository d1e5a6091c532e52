"""From a configuration to everything a run needs; all mistakes of its user are found here, before any compute."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from adder_flax import data
from adder_flax.errors import RunError, user_errors
from adder_flax.models import VisionTransformer
from adder_flax.parameters import parameter_facts
from adder_flax.training import optimizers, sharding
from adder_flax.training.curvature import CurvatureOptimizer, find_layers
from adder_flax.training.step import State, init_state, make_logits_loss_fn, make_train_step

_IDENTITY = {"auto": None, "on": True, "off": False}


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked configuration and what was built from it. Nothing large is allocated yet.

    Attributes:
      config: the configuration.
      mesh: devices of the run.
      train_source, eval_source: the two splits of the data.
      graphdef: the model without its parameters.
      abstract_state: shapes and shardings of the train state.
      init: makes the train state before the first step, on the mesh.
      train_step: ``(state, batch) → (state, metrics)``, jitted for the mesh; it gives the memory of the old state away.
      optimizer: the optax transformation, learning rate included.
      learning_rate: the schedule, a function of the step.
      steps_per_epoch, num_steps: of training.
      augment: ``(key, images, labels) → (float images, class probabilities)``.
      normalize: ``uint8 images → float images``.
    """

    config: Any
    mesh: Mesh
    train_source: data.Source
    eval_source: data.Source
    graphdef: nnx.GraphDef
    abstract_state: State
    init: Callable[[], State]
    train_step: jax.stages.Wrapped
    optimizer: optax.GradientTransformation | CurvatureOptimizer
    learning_rate: optax.Schedule
    steps_per_epoch: int
    num_steps: int
    augment: Callable
    normalize: Callable

    def model(self, params: Any) -> nnx.Module:
        """Returns the model with these parameters."""
        return nnx.merge(self.graphdef, params)


def make_model(config: Any, source: data.Source, *, seed: int) -> VisionTransformer:
    """Builds the vision transformer of a configuration for the images and classes of a source.

    Raises:
      ValueError: sizes that do not fit together, or an unknown name.
    """
    options = config.model.to_dict()
    if options["identity"] not in _IDENTITY:
        raise ValueError(
            f"expected config.model.identity to be one of {sorted(_IDENTITY)}, got {options['identity']!r}; "
            "set --config.model.identity"
        )
    options["identity"] = _IDENTITY[options["identity"]]
    if options["scale"] == "auto":
        options["scale"] = None
    options["key_block"] = _key_block(options["key_block"])
    scores = options.pop("score").split(",")
    if options["adder_options"]["norm"] == "none":
        options["adder_options"]["norm"] = None
    height, width, channels = source.image_shape
    return VisionTransformer(
        **options | {"dtype": jnp.dtype(options["dtype"])},
        score=scores if len(scores) > 1 else scores[0],
        image_size=(height, width),
        channels=channels,
        num_classes=source.num_classes,
        rngs=nnx.Rngs(seed),
    )


def _key_block(setting: str) -> int | str | None:
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    if setting not in ("auto", "off"):
        raise ValueError(
            f"expected config.model.key_block to be auto, off or a number of keys of at least 1, got {setting!r}; "
            "set --config.model.key_block"
        )
    return None if setting == "off" else setting


def build_run(config: Any, *, devices: Sequence[jax.Device] | None = None, data_needed: bool = True) -> Run:
    """Checks a configuration and builds what the run needs.

    Args:
      config: as the experiment files make it.
      devices: of the mesh; all of JAX's unless given. Those of a topology serve for compilation alone.
      data_needed: False lets random images of the same shape stand in for a data set that is not here.

    Raises:
      RunError: anything in the configuration or data that its user must mend.
    """
    if config.non_finite not in ("stop", "skip"):
        raise RunError(f"expected config.non_finite to be stop or skip, got {config.non_finite!r}")
    mesh = sharding.make_mesh(config.mesh, devices)
    _check_batches(config, mesh)
    with user_errors():
        load = data.load_source if data_needed else data.load_or_imitate
        train_source, eval_source = (_load_source(load, config, split) for split in ("train", "eval"))
        make = lambda: make_model(config, train_source, seed=config.seed)
        abstract_model = nnx.eval_shape(make)
        settings = data.Augment.for_source(train_source, **_augmentation(config))
    steps_per_epoch = _steps_per_epoch(config, train_source)
    num_steps = math.ceil(config.num_epochs * steps_per_epoch)
    learning_rate = optimizers.learning_rate_schedule(config.optimizer, steps_per_epoch, num_steps)
    graphdef, abstract_params = nnx.split(abstract_model, nnx.Param)
    abstract_params = nnx.to_pure_dict(abstract_params)
    layers = functools.partial(
        find_layers,
        make_logits_loss_fn(graphdef),
        abstract_params,
        batch_size=config.batch_size // config.accumulation_steps,
        image_shape=train_source.image_shape,
        num_classes=train_source.num_classes,
    )
    facts = parameter_facts(abstract_model)
    optimizer = optimizers.make_optimizer(config.optimizer, learning_rate, facts, layers)
    initial_state = functools.partial(init_state, optimizer=optimizer, ema=config.ema_decay > 0)
    shapes = jax.eval_shape(initial_state, abstract_params)
    shardings = sharding.state_sharding(shapes, mesh, facts)

    def init() -> State:
        # Eager: one jitted initialisation of all parameters compiles for longer than it saves.
        params = nnx.to_pure_dict(nnx.state(make(), nnx.Param))
        params = jax.device_put(params, shardings["params"])
        return jax.jit(initial_state, out_shardings=shardings)(params)

    augment = functools.partial(data.augment, settings=settings)
    return Run(
        config=config,
        mesh=mesh,
        train_source=train_source,
        eval_source=eval_source,
        graphdef=graphdef,
        abstract_state=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        init=init,
        train_step=jax.jit(
            _train_step(config, graphdef, optimizer, augment),
            donate_argnums=0,
            out_shardings=(shardings, sharding.replicated(mesh)),
        ),
        optimizer=optimizer,
        learning_rate=learning_rate,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        augment=augment,
        normalize=functools.partial(data.normalize, mean=settings.mean, std=settings.std),
    )


def _steps_per_epoch(config: Any, source: data.Source) -> int:
    if len(source) < config.batch_size:
        raise RunError(
            f"expected config.batch_size of at most {len(source)} training images, got {config.batch_size}; "
            "set --config.batch_size"
        )
    return len(source) // config.batch_size


def _train_step(config: Any, graphdef: nnx.GraphDef, optimizer: Any, augment: Callable) -> Callable:
    return make_train_step(
        graphdef,
        optimizer,
        augment,
        seed=config.seed,
        accumulation_steps=config.accumulation_steps,
        ema_decay=config.ema_decay,
        skip_non_finite=config.non_finite == "skip",
    )


def _augmentation(config: Any) -> dict[str, Any]:
    settings = config.augment.to_dict()
    # In a configuration, whose fields keep their type, an empty range stands for None.
    return settings | {"resized_crop_scale": settings["resized_crop_scale"] or None}


def _load_source(load: Callable[..., data.Source], config: Any, split: str) -> data.Source:
    return load(
        config.data.name,
        split,
        data_dir=config.data.data_dir or None,
        image_size=config.data.image_size or None,
        crop_scale=_augmentation(config)["resized_crop_scale"],
        on_unreadable=config.data.on_unreadable,
    )


def _check_batches(config: Any, mesh: Mesh) -> None:
    shards = sharding.num_batch_shards(mesh)
    for name in ("batch_size", "eval_batch_size", "accumulation_steps"):
        if config[name] < 1:
            raise RunError(f"expected config.{name} of at least 1, got {config[name]}; set --config.{name}")
    parts = shards * config.accumulation_steps
    if config.batch_size % parts:
        raise RunError(
            f"expected config.batch_size divisible by {shards} batch shards × {config.accumulation_steps} "
            f"accumulation steps = {parts}, got {config.batch_size}; set --config.batch_size"
        )
