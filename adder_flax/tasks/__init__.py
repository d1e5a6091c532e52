"""What is learned from a batch: examples, loss and scores, found by name."""

from adder_flax.registry import Registry
from adder_flax.tasks._classification import Classification, ImageFacts
from adder_flax.tasks._task import Best, Outcome, Task

TASKS: Registry[type[Task]] = Registry("task", "adder_flax.tasks.TASKS.register")
"""Tasks by name: ``config.task.name`` is looked up here."""

TASKS.register("classification", Classification)

__all__ = ["TASKS", "Best", "Classification", "ImageFacts", "Outcome", "Task"]
