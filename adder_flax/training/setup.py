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
from adder_flax.attention import get_score
from adder_flax.errors import RunError, first_line, user_errors
from adder_flax.models import VisionTransformer
from adder_flax.parameters import parameter_facts
from adder_flax.settings import AttentionSettings, RunSettings, ScoreSettings, VitSettings, read
from adder_flax.training import optimizers, sharding
from adder_flax.training.curvature import CurvatureOptimizer, find_layers
from adder_flax.training.step import State, init_state, make_logits_loss_fn, make_train_step

_MAX_STEPS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked configuration and what was built from it. Nothing large is allocated yet.

    Attributes:
      config: the configuration.
      settings: what it says, checked and typed.
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
    settings: RunSettings
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


def make_model(settings: VitSettings, source: data.Source, *, seed: int) -> VisionTransformer:
    """Builds a vision transformer for the images and classes of a source.

    Raises:
      ValueError: sizes that do not fit together, or an unknown name.
    """
    height, width, channels = source.image_shape
    options = dict(vars(settings))
    del options["name"]
    attention = options.pop("attention")
    return VisionTransformer(
        **options
        | {
            "dtype": jnp.dtype(settings.dtype),
            "adder_options": vars(settings.adder_options),
            "score": attention.score if len(attention.score) > 1 else attention.score[0],
            "score_options": _score_options(attention),
        },
        identity=attention.identity,
        scale=attention.scale,
        temperature=attention.temperature,
        key_block=attention.key_block,
        attention_dropout_rate=attention.attention_dropout_rate,
        image_size=(height, width),
        channels=channels,
        num_classes=source.num_classes,
        rngs=nnx.Rngs(seed),
    )


def _score_options(attention: AttentionSettings) -> Any:
    """Returns the options that each score takes: one mapping, or one for each block."""
    contracts = [get_score(name) for name in attention.score]
    taken = [{*contract.function_options, *contract.parameter_options} for contract in contracts]
    given = vars(attention.score_options)
    unused = {name for name in given if given[name] != getattr(ScoreSettings(), name)}.difference(*taken)
    if unused:
        raise ValueError(
            f"expected config.model.score_options.{min(unused)} at its default unless a score has it, got "
            f"{given[min(unused)]!r} with {', '.join(attention.score)}; leave it, or set --config.model.score"
        )
    options = [{name: value for name, value in given.items() if name in names} for names in taken]
    return options if len(options) > 1 else options[0]


def build_run(config: Any, *, devices: Sequence[jax.Device] | None = None, data_needed: bool = True) -> Run:
    """Checks a configuration and builds what the run needs.

    Args:
      config: as the experiment files make it.
      devices: of the mesh; all of JAX's unless given. Those of a topology serve for compilation alone.
      data_needed: False lets random images of the same shape stand in for a data set that is not here.

    Raises:
      RunError: anything in the configuration or data that its user must mend.
    """
    settings = read(RunSettings, config)
    mesh = sharding.make_mesh(vars(settings.mesh), devices)
    _check_batches(settings, mesh)
    with user_errors():
        load = data.load_source if data_needed else data.load_or_imitate
        train_source, eval_source = (_load_source(load, settings, split) for split in ("train", "eval"))
        make = lambda: make_model(settings.model, train_source, seed=settings.seed)
        abstract_model = nnx.eval_shape(make)
        augmentation = data.Augment.for_source(train_source, **vars(settings.augment))
    steps_per_epoch, num_steps = _count_steps(settings, train_source)
    learning_rate = optimizers.learning_rate_schedule(settings.optimizer, steps_per_epoch, num_steps)
    graphdef, abstract_params = nnx.split(abstract_model, nnx.Param)
    abstract_params = nnx.to_pure_dict(abstract_params)
    layers = functools.partial(
        find_layers,
        make_logits_loss_fn(graphdef),
        abstract_params,
        batch_size=settings.batch_size // settings.accumulation_steps,
        image_shape=train_source.image_shape,
        num_classes=train_source.num_classes,
    )
    facts = parameter_facts(abstract_model)
    optimizer = optimizers.make_optimizer(settings.optimizer, learning_rate, facts, layers)
    initial_state = functools.partial(init_state, optimizer=optimizer, ema=settings.ema_decay > 0)
    shapes = jax.eval_shape(initial_state, abstract_params)
    shardings = sharding.state_sharding(shapes, mesh, facts)

    def init() -> State:
        # Eager: one jitted initialisation of all parameters compiles for longer than it saves.
        params = nnx.to_pure_dict(nnx.state(make(), nnx.Param))
        params = jax.device_put(params, shardings["params"])
        return jax.jit(initial_state, out_shardings=shardings)(params)

    augment = functools.partial(data.augment, settings=augmentation)
    return Run(
        config=config,
        settings=settings,
        mesh=mesh,
        train_source=train_source,
        eval_source=eval_source,
        graphdef=graphdef,
        abstract_state=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
        init=init,
        train_step=jax.jit(
            _train_step(settings, graphdef, optimizer, augment),
            donate_argnums=0,
            out_shardings=(shardings, sharding.replicated(mesh)),
        ),
        optimizer=optimizer,
        learning_rate=learning_rate,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        augment=augment,
        normalize=functools.partial(data.normalize, mean=augmentation.mean, std=augmentation.std),
    )


def abstract_batch(run: Run) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and shardings of a training batch."""
    size, placed = run.config.batch_size, sharding.batch_sharding(run.mesh)
    image = jax.ShapeDtypeStruct((size, *run.train_source.image_shape), jnp.uint8, sharding=placed)
    return {"image": image, "label": jax.ShapeDtypeStruct((size,), jnp.int32, sharding=placed)}


def trace(run: Run) -> jax.stages.Traced:
    """Traces the training step, as its first call would: what is wrong in model or optimizer comes up here.

    That call finds what was traced, so that nothing is done twice.

    Raises:
      RunError: the step cannot be traced.
    """
    try:
        with jax.set_mesh(run.mesh):
            return run.train_step.trace(run.abstract_state, abstract_batch(run))
    except RunError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
        if not text.startswith("expected"):
            text = (
                f"expected a training step that can be traced, got {text}; correct --config.model.* and "
                "--config.optimizer.*, or see the traceback with --verbosity=1"
            )
        raise RunError(text) from error


def _count_steps(settings: RunSettings, source: data.Source) -> tuple[int, int]:
    """Returns the steps of an epoch and of the run."""
    if len(source) < settings.batch_size:
        raise RunError(
            f"expected config.batch_size of at most {len(source)} training images, got {settings.batch_size}; "
            "set --config.batch_size"
        )
    steps_per_epoch = len(source) // settings.batch_size
    num_steps = math.ceil(settings.num_epochs * steps_per_epoch)
    if num_steps > _MAX_STEPS:
        raise RunError(
            f"expected at most {_MAX_STEPS} steps, which 32 bits count, got {settings.num_epochs} epochs of "
            f"{steps_per_epoch}; set --config.num_epochs"
        )
    return steps_per_epoch, num_steps


def _train_step(settings: RunSettings, graphdef: nnx.GraphDef, optimizer: Any, augment: Callable) -> Callable:
    return make_train_step(
        graphdef,
        optimizer,
        augment,
        seed=settings.seed,
        accumulation_steps=settings.accumulation_steps,
        ema_decay=settings.ema_decay,
        skip_non_finite=settings.non_finite == "skip",
    )


def _load_source(load: Callable[..., data.Source], settings: RunSettings, split: str) -> data.Source:
    return load(
        settings.data.name,
        split,
        data_dir=settings.data.data_dir or None,
        image_size=settings.data.image_size,
        crop_scale=settings.augment.resized_crop_scale,
        on_unreadable=settings.data.on_unreadable,
    )


def _check_batches(settings: RunSettings, mesh: Mesh) -> None:
    shards = sharding.num_batch_shards(mesh)
    parts = shards * settings.accumulation_steps
    if settings.batch_size % parts:
        raise RunError(
            f"expected config.batch_size divisible by {shards} batch shards × {settings.accumulation_steps} "
            f"accumulation steps = {parts}, got {settings.batch_size}; set --config.batch_size"
        )
