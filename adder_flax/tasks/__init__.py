"""What is learned from a batch: examples, loss and scores, found by name."""

from adder_flax.tasks._classification import Classification, ImageFacts
from adder_flax.tasks._task import TASKS, Best, Outcome, Task, register_task

__all__ = ["TASKS", "Best", "Classification", "ImageFacts", "Outcome", "Task", "register_task"]
