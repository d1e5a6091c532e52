"""What a task is."""

import abc
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from flax import nnx
from flax.core import DenyList
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
      loss: mean over the batch, or over the real positions that ``weights`` tells.
      outputs: of the model, (batch, *positions, classes) in float32: what ``Task.likelihood`` is a
        function of.
      metrics: further means over the batch, logged as ``train/<name>``.
      weights: (batch, *positions), what each output counts for in these means, 0 where it fills up;
        parts of a batch are averaged by their sums. None: all count alike; a pair: with what their
        sum is divided by, see ``kfac.value_grad_and_curvature``.
      model_state: what the model carries beside its parameters; the training step fills it in.
    """

    loss: Float[Array, ""]
    outputs: Array
    metrics: Mapping[str, Float[Array, ""]]
    weights: Array | tuple[Array, Any] | None = None
    model_state: Any = None


# What Flax models call the mode that they are in, and its value in training.
_MODES = {"deterministic": False, "use_running_average": False}
_MODES |= dict.fromkeys(("train", "training", "is_training"), True)


def call_to_train(call: Callable[..., Any], *inputs: Any, rngs: nnx.Rngs) -> Any:
    """Calls a model, or its method, in training mode and with ``rngs``, as far as it takes these.

    The mode is ``deterministic=False``, ``use_running_average=False``, ``train=True``,
    ``training=True`` or ``is_training=True``. Layers of Flax that a model does not tell, as
    ``nnx.BatchNorm``, are in training mode already.

    Raises:
      ValueError: the model is in training mode when it is not told, as it would be evaluated.
    """
    told: dict[str, Any] = {}
    if isinstance(call, nnx.bridge.ToNNX):
        told = {"rngs": rngs, "mutable": DenyList(("params", "intermediates"))}
        known = inspect.signature(call.to_nnx__module.__call__).parameters
    else:
        known = inspect.signature(call).parameters
    # What hands any keyword on takes both; layers of nnx.Sequential, which names rngs, need not.
    if "rngs" not in known and any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return call(*inputs, **told | {"deterministic": False, "rngs": rngs})
    for name, value in _MODES.items():
        if name in known and known[name].default is value:
            raise ValueError(
                f"expected a model that is evaluated when it is not told, got {name}={value} by "
                f"default; give {name} the default {not value}"
            )
    told |= {name: value for name, value in (_MODES | {"rngs": rngs}).items() if name in known}
    return call(*inputs, **told)


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

    A task is made twice: from plain settings, and in the compiled step from settings whose numbers
    that are data are traced. All methods but ``facts`` and ``scores`` are traced. ``Task[MyFacts]``
    says what ``facts`` returns.

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
        self.settings, self.data_facts, self.progress = settings, facts, progress
        self.teacher: Any = teacher  # tasks that ask for one are given one

    @property
    def likelihood(self) -> str | kfac.Likelihood:
        """Whose negative logarithm the loss averages, see ``kfac.Likelihood``."""
        return "categorical"

    @classmethod
    @abc.abstractmethod
    def facts(cls, source: Source) -> Facts:
        """Returns what the task has to know of its data; by it runs share a program or not."""

    @classmethod
    def source_options(cls, settings: Any) -> dict[str, Any]:
        """Returns what ``adder_flax.data.load_source`` is told because of the task's settings."""
        return {}

    @classmethod
    def teacher_of(cls, settings: Any) -> str:
        """Returns where the weights of a frozen teacher lie, "" for none."""
        return ""

    def initial(self, model: nnx.Module, source: Source) -> nnx.Module:
        """Returns the model as it is to begin, by default the random one that is given.

        A teacher that is none to begin from is a ValueError.
        """
        return model

    @abc.abstractmethod
    def example(self) -> Example:
        """Returns what the model is built for."""

    @abc.abstractmethod
    def examples(self, key: PRNGKeyArray, batch: Batch) -> Any:
        """Makes a tree of training examples of the source's arrays, augmentation included.

        The batch axis is the first. All that is random follows from the key, which is of this step,
        and from an example's place in the batch.
        """

    @abc.abstractmethod
    def arguments(self, examples: Any) -> tuple[Array, ...]:
        """Returns what the model is called with on training examples."""

    @abc.abstractmethod
    def loss(self, model: nnx.Module, examples: Any, *, rngs: nnx.Rngs) -> Outcome:
        """Calls a model in training mode on what ``examples`` made, by `call_to_train`.

        ``rngs`` has the stream ``dropout``.
        """

    @abc.abstractmethod
    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        """Returns what the model is called with to evaluate a batch: no augmentation."""

    @abc.abstractmethod
    def sums(self, model: nnx.Module, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Scores a batch for evaluation, by a model without dropout.

        The batch has ``"mask"`` too, True where a row is a record and no filling. Returns sums over
        the records, among them ``"count"``, how many there are, and ``"loss"``.
        """

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the scores of a split, ``"loss"`` among them, from the sums over all of it.

        By default every sum over the number of records.
        """
        return {name: value / sums["count"] for name, value in sums.items() if name != "count"}

    def about(self) -> str:
        """Returns what one wants to know of the data before the first step, like "10 classes"."""
        return ""

    def pictures(
        self, model: nnx.Module, source: Source, title: str
    ) -> dict[str, Callable[[], Any]]:
        """Returns what is drawn when a run is complete: file → what makes its Matplotlib figure.

        The model is as trained, the source the evaluation split, the title the name of the run.
        """
        return {}


Registered = TypeVar("Registered", bound=Task)

TASKS: Registry[type[Task]] = Registry("task", "adder_flax.tasks.register_task")
"""Tasks by name: ``config.task.name`` is looked up here."""


def register_task(name: str, settings: type) -> Callable[[type[Registered]], type[Registered]]:
    """Makes ``config.task.name = <name>`` stand for the decorated task.

    Args:
      name: the name to find it by.
      settings: a frozen dataclass of ``config.task``'s fields, ``name`` among them, declared with
        ``adder_flax.settings.setting``.
    """

    def register(task: type[Registered]) -> type[Registered]:
        TASK_SETTINGS.register(name, settings)
        TASKS.register(name, task)
        return task

    return register
