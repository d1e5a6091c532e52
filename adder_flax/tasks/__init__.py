"""What is learned from a batch: examples, loss and scores, found by name."""

from adder_flax.tasks._classification import Classification, ImageFacts
from adder_flax.tasks._distillation import (
    Distillation,
    DistillationSettings,
    Healing,
    HealingSettings,
)
from adder_flax.tasks._reconstruction import Reconstruction, ReconstructionSettings
from adder_flax.tasks._swap import swap
from adder_flax.tasks._task import TASKS, Best, Outcome, Task, call_to_train, register_task
from adder_flax.tasks._transduction import (
    SequenceFacts,
    Transduction,
    TransductionSettings,
    closest,
    edit_distance,
)

__all__ = [
    "TASKS",
    "Best",
    "Classification",
    "Distillation",
    "DistillationSettings",
    "Healing",
    "HealingSettings",
    "ImageFacts",
    "Outcome",
    "Reconstruction",
    "ReconstructionSettings",
    "SequenceFacts",
    "Task",
    "Transduction",
    "TransductionSettings",
    "call_to_train",
    "closest",
    "edit_distance",
    "register_task",
    "swap",
]
