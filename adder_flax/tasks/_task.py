"""What a task is."""

import abc
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

import kfac
from adder_flax.arrays import AnyArray
from adder_flax.data import Source
from adder_flax.models import Example
from adder_flax.registry import Registry
from adder_flax.settings import TASK_SETTINGS

Batch = Mapping[str, AnyArray]
Facts = TypeVar("Facts", bound=Hashable)


class Outcome(NamedTuple):
    """What a training step learns of a batch.

    Attributes:
      loss: mean over the batch, differentiated by the parameters. One that is over the real
        positions alone says so by ``weights``.
      outputs: of the model, (batch, *positions, classes) in float32: what ``Task.likelihood`` is a
        function of.
      metrics: further means over the batch, logged as ``train/<name>``.
      weights: (batch, *positions), what each output counts for in these means: 1 where it is real,
        0 where it fills up. By their sums parts of a batch are averaged. None: all count alike;
        a pair: with what their sum is divided by, see ``kfac.value_grad_and_curvature``.
      model_state: what the model carries beside its parameters after the call; the training step
        fills it in.
    """

    loss: Float[Array, ""]
    outputs: Array
    metrics: Mapping[str, Float[Array, ""]]
    weights: Array | tuple[Array, Any] | None = None
    model_state: Any = None


def call_to_train(call: Callable[..., Any], *inputs: Any, rngs: nnx.Rngs) -> Any:
    """Calls a model, or a method of one, as training does.

    It is told so by ``deterministic=False`` and by ``rngs``, if it takes them by name. Layers of
    Flax that a model does not tell, such as ``nnx.BatchNorm``, are in training mode already.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> call_to_train(model, jnp.ones((1, 2)), rngs=nnx.Rngs(dropout=0)).shape
      (1, 3)
    """
    known = inspect.signature(call).parameters
    told = {"deterministic": False, "rngs": rngs}
    return call(*inputs, **{name: value for name, value in told.items() if name in known})


class Best(NamedTuple):
    """Which score of an evaluation says which checkpoint is the best.

    Attributes:
      name: of the score, one of those that ``Task.scores`` returns: ``"loss"``, or a share, which
        figures show in per cent.
      largest: whether more is better.
    """

    name: str
    largest: bool


class Task(abc.ABC, Generic[Facts]):
    """What is learned from a batch.

    A task is made twice: once from plain settings, and inside of the compiled step from settings
    whose numbers that are data are traced, so that runs that differ in them share a program. All
    methods but ``facts`` and ``scores`` are traced. ``Task[MyFacts]`` says what ``facts`` returns.

    Args:
      settings: ``config.task``, read.
      facts: what ``facts`` returned for the training source.
      teacher: what ``teacher_of`` asked for, called on what the model is called with; None where it
        asks for none.
      progress: share of the steps that are done.
    """

    unit: ClassVar[str] = "examples"
    """What examples are called: "images", "words"."""

    best: ClassVar[Best]
    """Which score chooses the best checkpoint."""

    def __init__(
        self,
        settings: Any,
        facts: Facts,
        *,
        teacher: Callable[..., Array] | None = None,
        progress: float | Array = 1.0,
    ):
        self.settings = settings
        self.data_facts = facts
        self.teacher: Any = teacher  # tasks that ask for one are given one
        self.progress = progress

    @property
    def likelihood(self) -> str | kfac.Likelihood:
        """Whose negative logarithm the loss averages, for second-order optimizers.

        See ``kfac.Likelihood``.
        """
        return "categorical"

    @classmethod
    @abc.abstractmethod
    def facts(cls, source: Source) -> Facts:
        """Returns what the task has to know of its data.

        Runs whose data differ in it do not share a program.
        """

    @classmethod
    def source_options(cls, settings: Any) -> dict[str, Any]:
        """Returns what ``adder_flax.data.load_source`` is told because of the task's settings."""
        return {}

    @classmethod
    def teacher_of(cls, settings: Any) -> str:
        """Returns where the weights of a frozen model lie that examples are made with, "" for none.

        They are no constants of the compiled step but arguments of it.
        """
        return ""

    def initial(self, model: nnx.Module, source: Source) -> nnx.Module:
        """Returns the model as it is to begin: by default as it is, at random.

        Args:
          model: with random parameters.
          source: of the training split.

        Raises:
          ValueError: the teacher, if it is asked, is none to begin from.
        """
        return model

    @abc.abstractmethod
    def example(self) -> Example:
        """Returns what the model is built for."""

    @abc.abstractmethod
    def examples(self, key: PRNGKeyArray, batch: Batch) -> Any:
        """Makes training examples of the source's arrays, augmentation included.

        Args:
          key: of this step; all that is random follows from it and from an example's place in the
            batch.
          batch: arrays of the source by name, the batch axis first.

        Returns:
          A tree of arrays with the batch axis first.
        """

    @abc.abstractmethod
    def arguments(self, examples: Any) -> tuple[Array, ...]:
        """Returns what the model is called with on training examples."""

    @abc.abstractmethod
    def loss(self, model: nnx.Module, examples: Any, *, rngs: nnx.Rngs) -> Outcome:
        """Calls the model on training examples.

        Args:
          model: in training mode; called by `adder_flax.tasks.call_to_train`.
          examples: from ``examples``.
          rngs: with the stream ``dropout``.
        """

    @abc.abstractmethod
    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        """Returns what the model is called with to evaluate a batch.

        These are the same arrays without augmentation.
        """

    @abc.abstractmethod
    def sums(self, model: nnx.Module, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Scores a batch for evaluation.

        Args:
          model: without dropout.
          batch: as of ``examples``, and ``"mask"``, True where a row is a record and no filling.

        Returns:
          Sums over the records, among them ``"count"``, how many there are, and ``"loss"``.
        """

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the scores of a split from the sums over all of it, logged as ``eval/<name>``.

        ``"loss"`` is among them. By default every sum over the number of records.
        """
        return {name: value / sums["count"] for name, value in sums.items() if name != "count"}

    def about(self) -> str:
        """Returns what one wants to know of the data before the first step, like "10 classes"."""
        return ""

    def pictures(
        self, model: nnx.Module, source: Source, title: str
    ) -> dict[str, Callable[[], Any]]:
        """Returns what is drawn when a run is complete.

        It is name of the file → what makes its Matplotlib figure.

        Args:
          model: as trained.
          source: of the evaluation split.
          title: name of the run.
        """
        return {}


Registered = TypeVar("Registered", bound=Task)

TASKS: Registry[type[Task]] = Registry("task", "adder_flax.tasks.register_task")
"""Tasks by name: ``config.task.name`` is looked up here."""


def register_task(name: str, settings: type) -> Callable[[type[Registered]], type[Registered]]:
    """Makes ``config.task.name = <name>`` stand for the decorated task.

    Args:
      name: the name to find it by.
      settings: a frozen dataclass whose fields are declared with ``adder_flax.settings.setting``:
        those of ``config.task``, ``name`` among them.
    """

    def register(task: type[Registered]) -> type[Registered]:
        TASK_SETTINGS.register(name, settings)
        TASKS.register(name, task)
        return task

    return register
