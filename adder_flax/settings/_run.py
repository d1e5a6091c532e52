"""Settings of a run: its sections, and what holds them together."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from adder_flax.settings._data import DataSettings
from adder_flax.settings._fields import section, setting
from adder_flax.settings._model import MODEL_SETTINGS, VitSettings
from adder_flax.settings._optimizer import OptimizerSettings
from adder_flax.settings._rules import Choice, Flag, Integer, Number, Or, Span, Text
from adder_flax.settings._task import TASK_SETTINGS, ClassificationSettings

_BATCH = Integer(1, 2**20)
_INTERVAL = Integer(0, 2**31 - 1)
_AXIS = Or({-1: -1}, Integer(1, 2**20))


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices along each axis of the mesh; one may be -1 and takes what the others leave."""

    data: int = setting(-1, _AXIS, "devices that share the batch")
    fsdp: int = setting(1, _AXIS, "devices that share the batch and the parameters")
    tensor: int = setting(1, _AXIS, "devices that share each product")

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        sizes = dataclasses.asdict(self)
        if list(sizes.values()).count(-1) > 1:
            yield f"{where}: expected at most one axis of -1 devices, got {sizes}"


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """All that a run is made from."""

    # Fields of earlier versions that nothing depends on any more.
    retired: ClassVar[tuple[str, ...]] = ("init_from_network", "init_from_positions")

    # Keys of JAX keep 32 bits: a larger seed would silently be another one.
    seed: int = setting(
        0, Integer(0, 2**32 - 1), "of initialisation, shuffling, augmentation, dropout", data=True
    )
    init: str = setting(
        "sequence",
        Choice("sequence", "path"),
        "what the seed gives each parameter: the next random numbers, or those of its own path, so "
        "that models that agree in part begin alike there",
    )
    init_from: str = setting(
        "",
        Text("a file or a folder, or nothing", longest=4096, empty=True),
        "weights to start from, in safetensors: a file or folder of timm, of Hugging Face or of "
        "--mode=export; what arrays do not tell is read from the config.json beside them",
    )
    batch_size: int = setting(1024, _BATCH, "images of a step, of all devices together")
    accumulation_steps: int = setting(
        1, _BATCH, "parts of a batch, one after the other: less memory, the same result"
    )
    num_epochs: float = setting(300.0, Number(0, 1e6, "(]"), "length of the training", data=True)
    ema_decay: float = setting(
        0.0,
        Number(0, 1, "[)"),
        "of the mean of the weights that is evaluated; 0 is off",
        data="if on",
    )
    non_finite: str = setting(
        "stop",
        Choice("stop", "skip"),
        "what to do with a batch whose loss or gradient is not finite",
    )
    eval_batch_size: int = setting(
        512, _BATCH, "images evaluated at a time, of all devices together"
    )
    eval_every_steps: int = setting(0, _INTERVAL, "0 is once an epoch")
    checkpoint_every_steps: int = setting(0, _INTERVAL, "0 is once an epoch")
    log_every_steps: int = setting(10, Integer(1, 2**31 - 1), "of metrics")
    profile_steps: tuple[int, int] | None = setting(
        (),
        Span(Integer(1, 2**31 - 1), optional=True),
        "steps whose timeline is recorded under <workdir>/profile",
    )
    topology: str = setting(
        "",
        Text("v5e:4x4, h100:8, cpu:8 or empty", empty=True),
        "of --mode=compile; empty for the devices at hand",
    )
    attention_diagnostics: bool = setting(
        False, Flag(), "numbers of each block at logging steps, which then cost twice as much"
    )
    mesh: MeshSettings = section(MeshSettings)
    # Of the class that its name stands for, as the task's.
    model: Any = section(VitSettings, among=MODEL_SETTINGS)
    optimizer: OptimizerSettings = section(OptimizerSettings)
    data: DataSettings = section(DataSettings)
    task: Any = section(ClassificationSettings, among=TASK_SETTINGS)

    def faults(self, where: str) -> Iterator[str]:
        """Yields what does not go together."""
        if self.batch_size % self.accumulation_steps:
            yield (
                f"{where}.accumulation_steps: expected a number that divides {where}.batch_size = "
                f"{self.batch_size}, got {self.accumulation_steps}"
            )
        if self.optimizer.warmup_epochs > self.num_epochs:
            yield (
                f"{where}.optimizer.warmup_epochs: expected at most {where}.num_epochs = "
                f"{self.num_epochs}, got {self.optimizer.warmup_epochs}"
            )
        size, padding = self.data.image_size, getattr(self.task, "crop_padding", 0)
        if size and padding > size:
            yield (
                f"{where}.task.crop_padding: expected at most {where}.data.image_size = {size}, "
                f"got {padding}"
            )
