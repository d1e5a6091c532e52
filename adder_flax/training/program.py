"""What runs that differ in numbers alone share: shapes, and compiled functions."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

import kfac
from adder_flax import data, registry
from adder_flax.models import MODELS, Builder
from adder_flax.parameters import parameter_facts
from adder_flax.settings import OptimizerSettings, RunSettings, put_numbers, take_numbers
from adder_flax.tasks import TASKS, Task
from adder_flax.training import optimizers, sharding
from adder_flax.training.initialization import built_from
from adder_flax.training.skeleton import Skeleton, take_apart
from adder_flax.training.step import (
    Hyper,
    Parts,
    State,
    init_state,
    make_eval_step,
    make_loss_fn,
    make_train_step,
)


class Shape(NamedTuple):
    """All that shapes the compiled functions of a run; two runs with the same share them."""

    task: type[Task]
    task_facts: Any
    teacher: Skeleton | None
    build: Builder
    make_optimizer: Callable
    task_settings: Any
    model_settings: Any
    optimizer_settings: OptimizerSettings
    batch_size: int
    accumulation_steps: int
    ema: bool
    skip_non_finite: bool
    mesh: Mesh
    records: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
    changes: int  # of what names stand for: a score, say, may have been registered anew


def shape_and_numbers(
    settings: RunSettings,
    source: data.Source,
    mesh: Mesh,
    num_steps: int,
    teacher: tuple[Skeleton, Any] | None = None,
) -> tuple[Shape, Hyper]:
    """Separates what shapes the program of a run from its numbers; a teacher is taken apart."""
    task = TASKS.get(settings.task.name)
    warmup_steps = round(settings.optimizer.warmup_epochs * (len(source) // settings.batch_size))
    numbers: dict[str, Any] = {
        "seed": np.uint32(settings.seed),
        "warmup_steps": float(min(warmup_steps, num_steps - 1)),
        "num_steps": float(num_steps),
    }
    if settings.ema_decay:
        numbers["ema_decay"] = settings.ema_decay
    skeleton = None
    if teacher is not None:
        skeleton, numbers["teacher"] = teacher
    task_settings, numbers["task"] = take_numbers(settings.task)
    model_settings, numbers["model"] = take_numbers(settings.model)
    optimizer_settings, numbers["optimizer"] = take_numbers(settings.optimizer)
    shape = Shape(
        task=task,
        task_facts=task.facts(source),
        teacher=skeleton,
        build=MODELS.get(settings.model.name),
        make_optimizer=optimizers.OPTIMIZERS.get(settings.optimizer.name),
        task_settings=task_settings,
        model_settings=model_settings,
        optimizer_settings=optimizer_settings,
        batch_size=settings.batch_size,
        accumulation_steps=settings.accumulation_steps,
        ema=settings.ema_decay > 0,
        skip_non_finite=settings.non_finite == "skip",
        mesh=mesh,
        records=tuple(sorted(source.record_shapes.items())),
        changes=registry.count_changes(),
    )
    return shape, numbers


class Program:
    """The model and the compiled functions of all runs of one shape; :func:`program_of` makes it.

    Its methods take the numbers of a run, plain or traced; it is made with those of one.

    Attributes:
      shape: of the runs.
      skeleton: the model without its arrays; of its rates, those of the first run.
      facts: of the parameters.
      layers: those that have curvature, with a second-order optimizer; else None.
      abstract_state: shapes and shardings of the train state.
      initial_state: ``(variables, hyper) → state`` before the first step, of parameters and what
        the model carries beside them.
      train_step: ``(state, batch, hyper) → (state, metrics)``; it gives the memory of the old state
        away.
      eval_step: ``(params, batch, hyper) → sums``.
    """

    def __init__(self, shape: Shape, numbers: Hyper):
        self.shape = shape
        # One key for all: flax looks at its count of keys each time, which takes the longer the
        # more has been traced.
        keys = itertools.repeat(jax.random.key(0))
        build = functools.partial(self.build_model, numbers)
        model = jax.eval_shape(lambda: nnx.split(built_from(build, keys)))
        self.facts = parameter_facts(nnx.merge(*model))
        self.skeleton, variables = take_apart(model)
        # Once, and only for those who ask: finding layers traces the loss.
        self._find_layers = functools.cache(functools.partial(self._layers, numbers, variables))
        # At plain numbers: what does not fit is told before any trace.
        optimizer = self.parts(numbers).optimizer
        self.layers: kfac.Layers | None = (
            optimizer.layers if isinstance(optimizer, optimizers.CurvatureOptimizer) else None
        )
        shapes = jax.eval_shape(self._initial_state, variables, numbers)
        shardings = sharding.state_sharding(shapes, shape.mesh, self.facts)
        self.abstract_state: State = jax.tree.map(sharding.placed_shape, shapes, shardings)
        whole = sharding.replicated(shape.mesh)
        train_step = make_train_step(
            self.parts,
            accumulation_steps=shape.accumulation_steps,
            skip_non_finite=shape.skip_non_finite,
        )
        self.initial_state = jax.jit(self._initial_state, out_shardings=shardings)
        self.train_step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, whole))
        self.eval_step = jax.jit(make_eval_step(self.skeleton, self.task), out_shardings=whole)

    def task(self, numbers: Hyper) -> Task:
        """The task, at given numbers."""
        shape, teacher = self.shape, None
        if shape.teacher is not None:  # no derivative flows through it
            teacher = shape.teacher.merge(jax.lax.stop_gradient(numbers["teacher"]))
        settings = put_numbers(shape.task_settings, numbers["task"])
        return shape.task(settings, shape.task_facts, teacher=teacher, progress=_progress(numbers))

    def build_model(self, numbers: Hyper, rngs: nnx.Rngs | None = None) -> nnx.Module:
        """Builds the model, by default with the parameters that the seed, a plain number, gives."""
        settings = put_numbers(self.shape.model_settings, numbers["model"])
        return self.shape.build(
            settings, self.task(numbers).example(), rngs=rngs or nnx.Rngs(int(numbers["seed"]))
        )

    def parts(self, numbers: Hyper, graphdef: nnx.GraphDef | None = None) -> Parts:
        """What a training step is made of; inside of the compiled step the numbers are traced."""
        skeleton = self.skeleton if graphdef is None else self.skeleton._replace(graphdef=graphdef)
        task = self.task(numbers)
        settings = put_numbers(self.shape.optimizer_settings, numbers["optimizer"])
        learning_rate = functools.partial(
            optimizers.learning_rate,
            settings,
            warmup_steps=numbers["warmup_steps"],
            num_steps=numbers["num_steps"],
        )
        spec = optimizers.OptimizerSpec(settings, learning_rate, self.facts, self._find_layers)
        return Parts(
            seed=numbers["seed"],
            examples=task.examples,
            loss=make_loss_fn(
                skeleton,
                task,
                put_numbers(self.shape.model_settings, numbers["model"]),
                _progress(numbers),
            ),
            optimizer=optimizers.with_rate_factors(
                self.shape.make_optimizer(spec), self.facts, settings
            ),
            learning_rate=learning_rate,
            likelihood=task.likelihood,
            ema_decay=numbers.get("ema_decay", 0.0),
        )

    def batch(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of a batch of so many records."""
        return {
            name: jax.ShapeDtypeStruct((size, *record.shape), record.dtype)
            for name, record in self.shape.records
        }

    def _initial_state(self, variables: Any, numbers: Hyper) -> State:
        params, carried = self.skeleton.separate(variables)
        optimizer = self.parts(numbers).optimizer
        return init_state(params, optimizer=optimizer, ema=self.shape.ema, model_state=carried)

    def _layers(
        self, numbers: Hyper, variables: Any, stride: int | None, interval: int
    ) -> tuple[kfac.Layers, int]:
        params, carried = self.skeleton.separate(variables)
        task, key = self.task(numbers), jax.eval_shape(lambda: jax.random.key(0))
        loss = make_loss_fn(
            self.skeleton, task, put_numbers(self.shape.model_settings, numbers["model"])
        )
        size = self.shape.batch_size // self.shape.accumulation_steps

        def layers_of(size: int) -> kfac.Layers:
            examples = jax.eval_shape(task.examples, key, self.batch(size))
            return optimizers.find_layers(loss, params, examples, carried)

        if stride is not None:
            return layers_of(size // stride), stride
        layers = layers_of(size)
        # Each device has examples of its own, of which it gives some.
        shards = sharding.num_batch_shards(self.shape.mesh)
        found = kfac.curvature_stride(layers, size // shards, interval)
        return layers if found == 1 else layers_of(size // found), found


def _progress(numbers: Hyper) -> float | Array:
    """Returns the share of the steps that are done, 1 where the step is not said."""
    return numbers["step"] / numbers["num_steps"] if "step" in numbers else 1.0


_PROGRAMS: dict[Shape, Program] = {}
_MOST_PROGRAMS = 8  # their executables take memory


def program_of(shape: Shape, numbers: Hyper) -> Program:
    """Returns the program of a run: one for all of a shape, while it is among the newest."""
    program = _PROGRAMS.pop(shape, None) or Program(shape, numbers)
    _PROGRAMS[shape] = program  # the newest is last
    while len(_PROGRAMS) > _MOST_PROGRAMS:
        del _PROGRAMS[next(iter(_PROGRAMS))]
    return program
