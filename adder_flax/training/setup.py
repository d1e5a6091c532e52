"""From a configuration to everything a run needs: its user's mistakes are found before compute."""

import copy
import functools
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from adder_flax import data, interop
from adder_flax.errors import RunError, user_errors
from adder_flax.experiment import as_config
from adder_flax.settings import ClassificationSettings, DataSettings, RunSettings, defaults, read
from adder_flax.tasks import TASKS, Task
from adder_flax.training import sharding
from adder_flax.training.checkpoints import SavedCheckpoints
from adder_flax.training.program import Run, params_by_path, program_of, shape_and_numbers
from adder_flax.training.step import Skeleton, evaluation_params, joined, take_apart
from adder_flax.training.workdir import fingerprint, read_config, saved_steps

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
Teacher = tuple[Skeleton, Any]


def build_run(
    config: Any,
    *,
    devices: Sequence[jax.Device] | None = None,
    load: Callable[..., data.Source] = data.load_source,
    eval_split: str = "eval",
    eval_data: str = "",
    eval_labels: str = "",
    teach: bool = True,
) -> Run:
    """Checks a configuration and builds what the run needs.

    Args:
      config: as the experiment files make it.
      devices: of the mesh; all of JAX's unless given. Those of a topology serve for compilation
        alone.
      load: of a split of the data; ``data.load_or_imitate`` lets random images of the same shape
        stand in for a set that is not here.
      eval_split: what is evaluated on: a split's own name, or ``eval`` for the configuration's.
      eval_data: name of another data set to evaluate on, with the same classes.
      eval_labels: file with all right labels of each image that is evaluated on, see
        `adder_flax.data.with_label_sets`.
      teach: whether a task that learns from a teacher is given it; nothing but training needs it.

    Raises:
      RunError: anything in the configuration or data that its user must mend.
    """
    settings = read(RunSettings, config)
    mesh = sharding.make_mesh(vars(settings.mesh), devices)
    _check_batches(settings, mesh)
    with user_errors():
        own_source = load_split(load, settings, settings.data.name, settings.data.train_split)
        train_source = _normalized(own_source, settings.data)
        chosen = settings.data.eval_split if eval_split == "eval" and not eval_data else eval_split
        eval_source = load_split(load, settings, eval_data or settings.data.name, chosen)
        if eval_data:
            _check_classes(train_source, eval_source)
        if eval_labels:
            images = data.require_kind(data.ImageSource, eval_source, "--labels")
            eval_source = data.with_label_sets(images, eval_labels)
    if eval_split == "eval" and (shared := data.shared_records(train_source, eval_source)):
        logging.warning(
            "%d of the %d records of %s, which scores are of, are trained on, too: they are in %s",
            *(shared, len(eval_source), eval_source.split, train_source.split),
        )
    steps_per_epoch, num_steps = _count_steps(settings, train_source)
    with user_errors():
        teacher = _load_teacher(settings, own_source) if teach else None
        shape, numbers = shape_and_numbers(settings, train_source, mesh, num_steps, teacher)
        program = program_of(shape, numbers)
    run = Run(
        config=config,
        settings=settings,
        train_source=train_source,
        eval_source=eval_source,
        program=program,
        numbers=numbers,
        init=lambda: program.initial_state(_initial_variables(run), run.hyper),
        train_step=program.train_step,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
    )
    return run


def load_split(
    load: Callable[..., data.Source], settings: RunSettings, name: str, split: str
) -> data.Source:
    """Loads a split of a data set as a run sees it."""
    return load(
        name,
        split,
        data_dir=settings.data.data_dir or None,
        image_size=settings.data.image_size,
        eval_crop_ratio=settings.data.eval_crop_ratio,
        on_unreadable=settings.data.on_unreadable,
        **TASKS.get(settings.task.name).source_options(settings.task),
    )


def with_statistics(config: Any, workdir: str | Path) -> Any:
    """Returns a configuration that says how images are normalised for the weights it begins with.

    By what the file of ``config.init_from`` or its neighbours say, unless ``config.data.mean`` says
    it already; once there is a checkpoint, by what the run began with.
    """
    if not config.init_from or config.data.mean:
        return config
    if saved_steps(Path(workdir) / "checkpoints"):
        begun = read_config(workdir).data
        mean, std = begun.mean, begun.std
    else:
        with user_errors():
            statistics = interop.read_statistics(config.init_from) or ((), ())
        mean, std = (",".join(map(repr, numbers)) for numbers in statistics)
    fields = config.to_dict()
    fields["data"] |= {"mean": mean, "std": std}
    return as_config(fields)


def _initial_variables(run: Run) -> Any:
    program, numbers = run.program, run.numbers
    if run.settings.init == "path":
        build = functools.partial(program.build_model, numbers)
        variables = params_by_path(build, int(numbers["seed"]))
    else:  # eager: one jitted initialisation of all parameters compiles for longer than it saves
        _, variables = take_apart(program.build_model(numbers))
    state = program.abstract_state
    abstract = joined(state["params"], state.get("model_state"))
    placed = jax.tree.map(operator.attrgetter("sharding"), abstract)
    variables = jax.device_put(variables, placed)
    if type(run.task).initial is Task.initial:
        return variables
    with user_errors():
        model = run.task.initial(run.model(sharding.fetch(variables, run.mesh)), run.train_source)
    return jax.device_put(take_apart(model)[1], placed)


def _count_steps(settings: RunSettings, source: data.Source) -> tuple[int, int]:
    if len(source) < settings.batch_size:
        raise RunError(
            f"expected config.batch_size of at most {len(source)} training "
            f"{TASKS.get(settings.task.name).unit}, got {settings.batch_size}; set "
            "--config.batch_size"
        )
    steps_per_epoch = len(source) // settings.batch_size
    # 1.1 epochs of 10 steps are 11 steps, though 1.1 × 10 is a little more in floating point.
    return steps_per_epoch, max(1, math.ceil(round(settings.num_epochs * steps_per_epoch, 6)))


def _check_classes(trained: data.Source, other: data.Source) -> None:
    """Refuses images of other classes than the model learned, or in another order."""
    images = [source for source in (trained, other) if isinstance(source, data.ImageSource)]
    if len(images) < 2 or len({(s.image_shape, s.label_names) for s in images}) > 1:
        raise RunError(
            f"expected images like those of {trained.name}, of the same size with the same classes "
            f"in the same order, got {other.name}; set --data to another set"
        )


def _check_batches(settings: RunSettings, mesh: Mesh) -> None:
    shards = sharding.num_batch_shards(mesh)
    parts = shards * settings.accumulation_steps
    if settings.batch_size % parts:
        raise RunError(
            f"expected config.batch_size divisible by {shards} batch shards × "
            f"{settings.accumulation_steps} accumulation steps = {parts}, got "
            f"{settings.batch_size}; set --config.batch_size"
        )
    section = settings.optimizer.second_order
    stride = section.curvature_stride or 1 if section else 1
    if settings.batch_size % (parts * stride):
        field = f"config.optimizer.{settings.optimizer.name}.curvature_stride"
        raise RunError(
            f"expected config.batch_size = {settings.batch_size} divisible by {parts} parts × "
            f"{field}, got {stride}; set --{field}"
        )


def _load_teacher(settings: RunSettings, source: data.Source) -> Teacher | None:
    """The frozen model that the task asks for, taken apart."""
    place = TASKS.get(settings.task.name).teacher_of(settings.task)
    if not place:
        return None
    place = place.replace("{seed}", str(settings.seed))
    if not Path(place).exists():
        raise RunError(
            "expected the directory of a run or a file of weights for config.task.teacher, got "
            f"nothing at {place}; train it first, or set --config.task.teacher"
        )
    if Path(place).is_dir():
        model, wanted = _model_of_run(settings, place, source)
    else:
        images = data.require_kind(data.ImageSource, source, "config.task.teacher")
        model, wanted = interop.read_model(
            place, image_shape=images.image_shape, num_classes=images.num_classes
        )
    given = _statistics(_normalized(source, settings.data))
    if wanted is None or given is None or np.allclose(wanted, given, atol=1e-3):
        return take_apart(model)
    return take_apart(Renormalized(model, given, wanted))


def _normalized(source: data.Source, settings: DataSettings) -> data.Source:
    if not settings.mean:
        return source
    source = copy.copy(data.require_kind(data.ImageSource, source, "config.data.mean"))
    channels = source.image_shape[2]
    most = channels if channels > 1 else 3  # grey images have the average of colours'
    if len(settings.mean) not in (1, most):
        raise RunError(
            f"expected 1 or {most} numbers in config.data.mean, of images of shape "
            f"{source.image_shape}, got {len(settings.mean)}; correct it"
        )
    source.statistics = settings.mean, settings.std
    return source


def _statistics(source: data.Source) -> Statistics | None:
    return data.channel_statistics(source) if isinstance(source, data.ImageSource) else None


class Renormalized(nnx.Module):
    """A model whose images are normalised by other numbers than those it is called with.

    >>> first_pixel = lambda images: images[:, 0, 0]
    >>> anew = Renormalized(first_pixel, ((0.5,), (0.25,)), ((0.0,), (1.0,)))
    >>> float(anew(jnp.ones((1, 1, 1, 1)))[0, 0])
    0.75
    """

    def __init__(self, model: Callable[[Array], Array], given: Statistics, wanted: Statistics):
        self.model = model
        self.given, self.wanted = (tuple(map(tuple, numbers)) for numbers in (given, wanted))

    def __call__(
        self, images: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch classes"]:
        """Normalises images anew and classifies them."""
        mean, std, wanted_mean, wanted_std = map(jnp.array, (*self.given, *self.wanted))
        return self.model((images * std + mean - wanted_mean) / wanted_std)


def _model_of_run(
    settings: RunSettings, workdir: str, source: data.Source
) -> tuple[nnx.Module, Statistics | None]:
    """The model of a run's last checkpoint, which saw images of the same size."""
    trained = read_config(workdir)
    fields = trained.to_dict()
    if fields["data"]["image_size"] != settings.data.image_size:
        raise RunError(
            f"expected a teacher for images of {settings.data.image_size} pixels, got the run in "
            f"{workdir}, which saw {fields['data']['image_size']}; set --config.task.teacher, or "
            "--config.data.image_size"
        )
    # Its state alone is wanted: what it learned from does not matter, nor how its batches
    # lay on devices.
    fields |= {
        "task": defaults(ClassificationSettings),
        "mesh": vars(settings.mesh),
        "accumulation_steps": 1,
        "batch_size": settings.batch_size,
    }
    seen = copy.copy(source)
    if isinstance(seen, data.ImageSource) and trained.data.name != settings.data.name:
        seen.statistics = _learned_statistics(trained)
    run = build_run(as_config(fields), load=lambda *_, **__: seen)
    saved = SavedCheckpoints(Path(workdir) / "checkpoints", of=fingerprint(trained))
    variables = sharding.fetch(evaluation_params(saved.restore(run.abstract_state)), run.mesh)
    return run.model(variables), _statistics(run.train_source)


def _learned_statistics(trained: Any) -> Statistics:
    """Of a set that does not say how its images are normalised, which is measured, that set."""
    declared = data.describe(trained.data.name).statistics
    if declared is not None:
        return declared
    settings = read(RunSettings, trained)
    with user_errors():
        own = load_split(data.load_source, settings, settings.data.name, settings.data.train_split)
    return data.channel_statistics(data.require_kind(data.ImageSource, own, "config.task.teacher"))
