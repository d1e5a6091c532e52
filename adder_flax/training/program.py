"""A run, and what runs that differ in numbers alone share: shapes, and compiled functions."""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.extend import core
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, PRNGKeyArray

import kfac
from adder_flax import data, registry
from adder_flax.errors import RunError, first_line
from adder_flax.models import MODELS, Builder
from adder_flax.parameters import parameter_facts
from adder_flax.settings import OptimizerSettings, RunSettings, put_numbers, take_numbers
from adder_flax.tasks import TASKS, Task
from adder_flax.training import optimizers, sharding, step


class Shape(NamedTuple):
    """All that shapes the compiled functions of a run; two runs with the same share them."""

    task: type[Task]
    task_facts: Any
    teacher: step.Skeleton | None
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
    teacher: tuple[step.Skeleton, Any] | None = None,
) -> tuple[Shape, step.Hyper]:
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

    def __init__(self, shape: Shape, numbers: step.Hyper):
        self.shape = shape
        # One key for all: flax looks at its count of keys each time, which takes the longer the
        # more has been traced.
        keys = itertools.repeat(jax.random.key(0))
        build = functools.partial(self.build_model, numbers)
        model = jax.eval_shape(lambda: nnx.split(_built_from(build, keys)))
        merged = nnx.merge(*model)
        if numbers["model"] and not step.method_of(merged, "set_data"):
            raise RunError(
                f"expected a method set_data of {type(merged).__name__}, whose settings declare "
                f"{', '.join(sorted(numbers['model']))} with data=, got none: runs would share the "
                "first one's numbers; add it, or declare them without data="
            )
        self.facts = parameter_facts(merged)
        self.skeleton, variables = step.take_apart(model)
        # Once, and only for those who ask: finding layers traces the loss.
        self._find_layers = functools.cache(functools.partial(self._layers, numbers, variables))
        # At plain numbers: what does not fit is told before any trace.
        optimizer = self.parts(numbers).optimizer
        self.layers: kfac.Layers | None = (
            optimizer.layers if isinstance(optimizer, optimizers.CurvatureOptimizer) else None
        )
        shapes = jax.eval_shape(self._initial_state, variables, numbers)
        shardings = sharding.state_sharding(shapes, shape.mesh, self.facts)
        self.abstract_state: step.State = jax.tree.map(sharding.placed_shape, shapes, shardings)
        whole = sharding.replicated(shape.mesh)
        train_step = step.make_train_step(
            self.parts,
            accumulation_steps=shape.accumulation_steps,
            skip_non_finite=shape.skip_non_finite,
        )
        self.initial_state = jax.jit(self._initial_state, out_shardings=shardings)
        self.train_step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, whole))
        self.eval_step = jax.jit(step.make_eval_step(self.skeleton, self.task), out_shardings=whole)

    def task(self, numbers: step.Hyper) -> Task:
        """The task, at given numbers."""
        shape, teacher = self.shape, None
        if shape.teacher is not None:  # no derivative flows through it
            teacher = shape.teacher.merge(jax.lax.stop_gradient(numbers["teacher"]))
        settings = put_numbers(shape.task_settings, numbers["task"])
        return shape.task(settings, shape.task_facts, teacher=teacher, progress=_progress(numbers))

    def build_model(self, numbers: step.Hyper, rngs: nnx.Rngs | None = None) -> nnx.Module:
        """Builds the model, by default with the parameters that the seed, a plain number, gives."""
        rngs = rngs or nnx.Rngs(int(numbers["seed"]))
        return self.shape.build(
            self._model_settings(numbers), self.task(numbers).example(), rngs=rngs
        )

    def parts(self, numbers: step.Hyper, graphdef: nnx.GraphDef | None = None) -> step.Parts:
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
        return step.Parts(
            seed=numbers["seed"],
            examples=task.examples,
            loss=step.make_loss_fn(
                skeleton, task, self._model_settings(numbers), _progress(numbers)
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

    def _model_settings(self, numbers: step.Hyper) -> Any:
        return put_numbers(self.shape.model_settings, numbers["model"])

    def _initial_state(self, variables: Any, numbers: step.Hyper) -> step.State:
        params, carried = self.skeleton.separate(variables)
        optimizer = self.parts(numbers).optimizer
        return step.init_state(params, optimizer=optimizer, ema=self.shape.ema, model_state=carried)

    def _layers(
        self, numbers: step.Hyper, variables: Any, stride: int | None, interval: int
    ) -> tuple[kfac.Layers, int]:
        params, carried = self.skeleton.separate(variables)
        task, key = self.task(numbers), jax.eval_shape(lambda: jax.random.key(0))
        loss = step.make_loss_fn(self.skeleton, task, self._model_settings(numbers))

        def layers_of(size: int) -> kfac.Layers:
            examples = jax.eval_shape(task.examples, key, self.batch(size))
            return optimizers.find_layers(loss, params, examples, carried)

        size = self.shape.batch_size // self.shape.accumulation_steps
        if stride is not None:
            return layers_of(size // stride), stride
        layers = layers_of(size)
        # Each device has examples of its own, of which it gives some.
        shards = sharding.num_batch_shards(self.shape.mesh)
        found = kfac.curvature_stride(layers, size // shards, interval)
        return layers if found == 1 else layers_of(size // found), found


def _progress(numbers: step.Hyper) -> float | Array:
    """Returns the share of the steps that are done, 1 where the step is not said."""
    return numbers["step"] / numbers["num_steps"] if "step" in numbers else 1.0


_PROGRAMS: dict[Shape, Program] = {}
_MOST_PROGRAMS = 8  # their executables take memory


def program_of(shape: Shape, numbers: step.Hyper) -> Program:
    """Returns the program of a run: one for all of a shape, while it is among the newest."""
    program = _PROGRAMS.pop(shape, None) or Program(shape, numbers)
    _PROGRAMS[shape] = program  # the newest is last
    while len(_PROGRAMS) > _MOST_PROGRAMS:
        del _PROGRAMS[next(iter(_PROGRAMS))]
    return program


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked configuration and what was built from it. Nothing large is allocated yet.

    Attributes:
      config: the configuration.
      settings: what it says, checked and typed.
      train_source, eval_source: the two splits of the data.
      program: compiled functions, shared by all runs that differ in numbers alone.
      numbers: in which this run differs from the others of its program, as the host knows them.
      init: makes the train state before the first step, on the mesh.
      train_step: of the program; it gives the memory of the old state away.
      steps_per_epoch, num_steps: of training.
    """

    config: Any
    settings: RunSettings
    train_source: data.Source
    eval_source: data.Source
    program: Program
    numbers: step.Hyper
    init: Callable[[], step.State]
    train_step: Callable
    steps_per_epoch: int
    num_steps: int

    @property
    def mesh(self) -> Mesh:
        """Devices of the run."""
        return self.program.shape.mesh

    @property
    def abstract_state(self) -> step.State:
        """Shapes and shardings of the train state."""
        return self.program.abstract_state

    @functools.cached_property
    def hyper(self) -> step.Hyper:
        """The numbers of the run on its devices: the third argument of the training step."""
        return sharding.replicate(self.numbers, self.mesh)

    @property
    def abstract_hyper(self) -> step.Hyper:
        """Shapes and shardings of ``hyper``, for devices that need not be there."""
        placed = sharding.replicated(self.mesh)

        def shape(number: ArrayLike) -> jax.ShapeDtypeStruct:
            aval = jax.typeof(number)
            return jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=placed
            )

        return jax.tree.map(shape, self.numbers)

    @functools.cached_property
    def task(self) -> Task:
        """What is learned, at the run's own numbers."""
        return self.program.task(self.numbers)

    @functools.cached_property
    def parts(self) -> step.Parts:
        """What its training step is made of, at the run's own numbers."""
        return self.program.parts(self.numbers)

    def batches(self, rows: Sequence[int] | np.ndarray | None = None) -> data.TrainPipeline:
        """Returns what the run trains on: given rows of each global batch, or all of them."""
        return data.TrainPipeline(
            self.train_source,
            self.config.batch_size,
            self.config.seed,
            rows=rows,
            repeats=self.settings.data.repeats,
        )

    def model(self, params: Any) -> nnx.Module:
        """Returns the model, as evaluation has it, with what :func:`evaluation_params` returns."""
        return self.program.skeleton.merge(params)


def abstract_batch(run: Run) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and shardings of a training batch."""
    place = functools.partial(sharding.placed_shape, placed=sharding.batch_sharding(run.mesh))
    return jax.tree.map(place, run.program.batch(run.settings.batch_size))


def trace(run: Run) -> jax.stages.Traced:
    """Traces the training step as its first call would, which finds what was traced."""
    try:
        with jax.set_mesh(run.mesh):
            return run.train_step.trace(run.abstract_state, abstract_batch(run), run.abstract_hyper)
    except RunError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("expected"):
            raise RunError(str(error)) from error
        raise RunError(
            f"expected a training step that can be traced, got {type(error).__name__}: "
            f"{first_line(error)}; correct --config.model.* and --config.optimizer.*, or see the "
            "traceback with --verbosity=1"
        ) from error


def params_by_path(build: Callable[[nnx.Rngs], nnx.Module], seed: int) -> Any:
    """Returns a nested dict of what a model carries, each drawn by the seed and its path alone.

    Two models then begin alike wherever they have parameters of one path, shape and initial
    distribution, whatever else they are made of. What is drawn for which parameter is read from the
    traced program.

    Example:
      >>> def build(rngs, first=3):
      ...     return nnx.Sequential(nnx.Linear(2, first, rngs=rngs), nnx.Linear(3, 2, rngs=rngs))
      >>> one, other = params_by_path(build, 0), params_by_path(lambda rngs: build(rngs, 4), 0)
      >>> bool((one["layers"][1]["kernel"] == other["layers"][1]["kernel"]).all())
      True
    """

    def make(keys: Iterator[PRNGKeyArray]) -> Any:
        return step.take_apart(_built_from(build, keys))[1]

    used = itertools.count()
    key = jax.random.key(seed)
    shapes = jax.eval_shape(lambda: make(key for _ in iter(lambda: next(used), None)))
    keys = [key] * next(used)
    closed = jax.make_jaxpr(lambda *keys: make(iter(keys)))(*keys)
    paths = sharding.leaves_by_path(shapes)
    for path, drawn in zip(paths, _inputs_of_outputs(closed.jaxpr), strict=True):
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        for i, index in enumerate(sorted(drawn)):
            keys[index] = jax.random.fold_in(own, i)
    # Eager: one program of all parameters compiles for longer than it saves.
    return jax.tree.unflatten(jax.tree.structure(shapes), core.jaxpr_as_fun(closed)(*keys))


def _built_from(
    build: Callable[[nnx.Rngs], nnx.Module], keys: Iterator[PRNGKeyArray]
) -> nnx.Module:
    """Returns the model that is made from given keys; streams that it keeps are Flax's own."""
    rngs = nnx.Rngs(0)
    setattr(rngs, "default", _Given(keys))  # noqa: B010  streams are no declared attributes
    model, stream = build(rngs), rngs["default"]
    del stream._take
    stream.__class__ = nnx.RngStream
    return model


class _Given(nnx.RngStream):
    """A stream of given keys; what is made from it is a stream of Flax's own."""

    def __init__(self, keys: Iterator[PRNGKeyArray]):
        super().__init__(0, tag="default")
        self._take = keys.__next__

    def __call__(self) -> PRNGKeyArray:
        return self._take()

    def fork(self, **options: Any) -> nnx.RngStream:
        """A stream, as ``nnx.Dropout`` keeps one."""
        return nnx.RngStream(self(), tag=self.tag).fork(**options)

    def split(self, k: int | tuple[int, ...]) -> nnx.RngStream:
        """Returns a stack of streams."""
        return nnx.RngStream(self(), tag=self.tag).split(k)


def _inputs_of_outputs(program: core.Jaxpr) -> list[set[int]]:
    """For each result of a program the numbers of the arguments that it depends on."""
    known = {variable: {i} for i, variable in enumerate(program.invars)}
    of = lambda atom: set() if isinstance(atom, core.Literal) else known.get(atom, set())
    for equation in program.eqns:
        needed = set().union(*map(of, equation.invars))
        known |= dict.fromkeys(equation.outvars, needed)
    return [of(atom) for atom in program.outvars]
